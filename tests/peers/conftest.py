"""Packs, and the same examples one by one, for the tests against the real libraries.

They run in an environment of their own (README.md here). Where it is missing nothing in this folder is collected; where it is
there, a library that cannot be imported is a failure and not a skip.
"""

import importlib.util

import numpy as np
import pytest
import torch

from packfp8.data import Clip, Collator, Example, Turn
from packfp8.lengths import AudioFrames, Measure
from packfp8.rule import Topology, align

if importlib.util.find_spec("nemo_automodel") is None:
    collect_ignore_glob = ["test_*.py"]

TEXTS = ("a", "good morning to you", "no", "what a long and winding road this is", "yes")
FRAMES = AudioFrames.fastconformer()


@pytest.fixture(autouse=True)
def _quiet_cpu():
    torch.manual_seed(0)
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def measure():
    return Measure(frames=FRAMES)


@pytest.fixture(scope="session")
def texts():
    """Five conversations of text; the fourth is long, so that a padded batch is mostly padding."""
    return [
        Example(id=f"s{n}", turns=(Turn("user", (text,)), Turn("assistant", (text[::-1],)))) for n, text in enumerate(TEXTS)
    ]


@pytest.fixture(scope="session")
def spoken():
    """Audio first, audio between words, two clips in one turn, and text alone."""

    def clip(samples):
        source = 0.1 * np.random.default_rng(samples).standard_normal(samples).astype(np.float32)
        return Clip(source=source, num_samples=samples, sample_rate=16_000)

    return [
        Example(id="first", turns=(Turn("user", (clip(9_000), "what is said?")), Turn("assistant", ("good morning",)))),
        Example(id="between", turns=(Turn("user", ("hear ", clip(5_000), " now")), Turn("assistant", ("yes",)))),
        Example(id="two", turns=(Turn("user", (clip(3_000), " or ", clip(20_000))), Turn("assistant", ("the longer",)))),
        Example(id="text", turns=(Turn("user", ("a colour?",)), Turn("assistant", ("blue",)))),
    ]


@pytest.fixture(scope="session")
def pack(measure):
    """pack(examples, layout="thd", cp=1, cp_rank=0, tp=1, sp=False, ...) -> PackedBatch of the block recipe."""

    def pack(examples, layout="thd", *, cp=1, cp_rank=0, tp=1, sp=False, **collator):
        rule = align("block", Topology(cp=cp, cp_rank=cp_rank, tp=tp, sp=sp), layout=layout)
        return Collator(measure=measure, rule=rule, **collator)(examples)

    return pack


@pytest.fixture(scope="session")
def alone(measure):
    """alone(example) -> ids `[n]` and shifted labels `[n]` of one example, without any padding."""

    def alone(example):
        encoded = measure.encode(example)
        ids = torch.from_numpy(encoded.ids.copy())
        wanted = torch.from_numpy(encoded.supervised.copy())
        labels = torch.full_like(ids, -100)
        labels[:-1] = torch.where(wanted[1:], ids[1:], -100)
        return ids, labels

    return alone


@pytest.fixture(scope="session")
def attention_by_offsets():
    """Causal attention of `[tokens, heads, dim]` by `cu_seqlens_q`, one segment after another: a stand-in for TE's kernel."""

    def attend(q, k, v, *, qkv_format, attn_mask_type, cu_seqlens_q, cu_seqlens_kv, max_seqlen_q, max_seqlen_kv, window_size):
        assert (qkv_format, attn_mask_type, tuple(window_size)) == ("thd", "padding_causal", (-1, 0))
        assert torch.equal(cu_seqlens_q, cu_seqlens_kv)
        assert max_seqlen_q == max_seqlen_kv
        out = torch.full_like(q, float("nan"))
        for a, b in zip(cu_seqlens_q.tolist(), cu_seqlens_q[1:].tolist(), strict=False):
            assert b - a <= max_seqlen_q
            if b > a:
                rows = [x[a:b].transpose(0, 1)[None] for x in (q, k, v)]
                each = torch.nn.functional.scaled_dot_product_attention(*rows, is_causal=True, enable_gqa=True)
                out[a:b] = each[0].transpose(0, 1)
        return out

    return attend
