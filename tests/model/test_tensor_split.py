"""The decoder under Transformer Engine over two processes, told by stand-ins for its layers (float64, angles float32)."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from packfp8 import ConfigError, Topology, align
from packfp8.model import PackedModel
from packfp8.model.plain_decoder import DecoderSizes, PlainDecoder
from packfp8.model.tensor_split import WHOLE, TensorSplit

HERE = Path(__file__).parent


@pytest.fixture(scope="module")
def ranks():
    sys.path.insert(0, str(HERE))
    spec = importlib.util.spec_from_file_location("packfp8_test_split_ranks", HERE / "split_ranks.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    sys.path.remove(str(HERE))
    return module


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """What the two processes saved, by rank."""
    folder, root = tmp_path_factory.mktemp("split"), str(HERE.parents[1])
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([root, *filter(None, [os.environ.get("PYTHONPATH")])])}
    commands = [[sys.executable, str(HERE / "split_ranks.py"), str(rank), str(folder)] for rank in range(2)]
    started = [subprocess.Popen(command, env=env, stderr=subprocess.PIPE, text=True) for command in commands]
    try:
        said = [process.communicate(timeout=120)[1] for process in started]
    finally:
        for process in started:
            process.kill()
    assert [process.returncode for process in started] == [0, 0], "\n".join(said)
    return [torch.load(folder / f"{rank}.pt") for rank in range(2)]


@pytest.fixture(scope="module")
def alone(ranks):
    """Loss sum, logits by sequence and gradients of the plain decoder, undivided, on the same sequences."""
    rule, llm = align("bf16"), PlainDecoder(ranks.SIZES).double()
    llm.load_state_dict(ranks.plain_state())
    model = PackedModel(encoder=None, projector=None, llm=llm, rule=rule, consumer="plain")
    batch = ranks.batch_of(rule)
    out = model(batch, global_supervised=batch.num_supervised, return_logits=True)
    out.loss.backward()
    grads = {name.removeprefix("llm."): p.grad for name, p in model.named_parameters()}
    return out.loss_sum.detach(), batch.unpack(out.logits.detach()), grads


def _batch(ranks, name):
    for how in HOWS:
        name = name.removesuffix(f", {how}")
    sizes, layout, _ = ranks.CASES[name]
    return ranks.batch_of(align("block", Topology(**sizes), layout=layout))


HOWS = ["sharded", "recomputed", "accumulated"]
TENSOR = ["tp 2", "tp 2, rows", "tp 2 with SP", "tp 2 with SP, rows as slots", "tp 2 with SP, sequence first"]


@pytest.mark.parametrize("name", [*TENSOR, *(f"tp 2 with SP, {how}" for how in HOWS)])
def test_tensor_parallel_peers_compute_what_one_rank_computes(ranks, results, alone, name):
    loss_sum, logits, grads = alone
    for rank, result in enumerate(results):
        found = result[name]
        torch.testing.assert_close(found["loss_sum"], loss_sum, rtol=0, atol=1e-6)
        for own, expected in zip(_batch(ranks, name).unpack(found["logits"]).values(), logits.values(), strict=True):
            torch.testing.assert_close(own, expected, rtol=0, atol=1e-7)
        assert found["grads"].keys() == grads.keys()
        for key, whole in grads.items():
            expected = _share(key, whole, ranks.SIZES, rank)
            assert expected.abs().max() > 1e-4
            torch.testing.assert_close(found["grads"][key], expected, rtol=0, atol=1e-7, msg=lambda m, key=key: f"{key}: {m}")


@pytest.mark.parametrize("name", ["cp 2", "cp 2, rows"])
def test_context_parallel_ranks_together_compute_what_one_computes(ranks, results, alone, name):
    loss_sum, logits, grads = alone
    found = [result[name] for result in results]
    torch.testing.assert_close(sum(one["loss_sum"] for one in found), loss_sum, rtol=0, atol=1e-6)
    parts = _batch(ranks, name).unpack([one["logits"] for one in found])
    for own, expected in zip(parts.values(), logits.values(), strict=True):
        torch.testing.assert_close(own, expected, rtol=0, atol=1e-7)
    for key, expected in grads.items():
        mean = sum(one["grads"][key] for one in found) / 2  # FSDP averages over dp * cp
        torch.testing.assert_close(mean, expected, rtol=0, atol=1e-7)


def test_rows_gathered_along_the_batch_are_attended_in_halves_and_sequence_first_is_right(results):
    """The fault that the decoder refuses: on the rank of the second halves, a change of the first token reaches no row."""
    second = results[1]["moved"]
    assert (second["bshd"] == 0).all()
    assert (second["sbhd"] > 1e-3).all()
    assert (results[0]["moved"]["bshd"] > 0).all()  # within its own half it does


@pytest.mark.parametrize("seeds", ["one seed", "a seed each"])
def test_fresh_peers_hold_the_same_wholes_and_shares_of_their_own(results, seeds):
    """Shares that began alike would stay alike: half of the heads and of the FFN would be there twice."""
    one, other = (result["drawn"][seeds] for result in results)
    for name, parameter in one.items():
        if name == "after":
            assert torch.equal(parameter, other[name]) == (seeds == "one seed")
        elif name.startswith("layers.") and "norm" not in name:
            assert (parameter == other[name]).double().mean() < 0.01, name
        else:
            assert torch.equal(parameter, other[name]), name


def test_a_slab_that_does_not_divide_is_refused(results):
    for result in results:
        assert (result["refused"] or "").splitlines() == [
            "a slab cannot be cut into equal shards",
            "  got:      5 rows for 2 TP peers with SP",
            "  expected: a multiple of 2",
            "  because:  the collectives of SP exchange equal shards, and others end in a hang or in another rank's numbers",
            "  fix:      make the batches by align(..., Topology(tp=2, sp=True)), which rounds for it",
        ]


def _share(key, whole, sizes, rank):
    """What a peer holds of a parameter, by literal rows and columns."""
    q, kv, ffn, last = sizes.hidden, sizes.kv_heads * sizes.head_dim, sizes.ffn, key.split(".")[-2]
    if last == "qkv":
        rows = [*range(q)][rank * q // 2 :][: q // 2]
        rows += [start + n for start in (q, q + kv) for n in range(rank * kv // 2, (rank + 1) * kv // 2)]
        return whole[rows]
    if last == "fc1":
        return whole[[start + n for start in (0, ffn) for n in range(rank * ffn // 2, (rank + 1) * ffn // 2)]]
    if last in ("proj", "fc2"):
        half = whole.shape[1] // 2
        return whole[:, rank * half : (rank + 1) * half]
    return whole


def test_a_decoder_that_is_whole_divides_nothing():
    x = torch.randn(6, 4, requires_grad=True)
    assert WHOLE.enter(x) is x
    assert WHOLE.leave(x) is x
    assert WHOLE.share("layers.0.qkv.weight", x, DecoderSizes(vocab=16)) is x
    assert WHOLE.options() == {"tp_group": None, "tp_size": 1, "sequence_parallel": False}
    weight = torch.nn.Parameter(torch.ones(3))
    WHOLE.sum_gradients([weight])
    assert not weight._backward_hooks


@pytest.mark.parametrize("changes", [{"heads": 3, "kv_heads": 3, "hidden": 12}, {"kv_heads": 1}, {"ffn": 25}])
def test_what_does_not_divide_among_the_peers_is_refused(monkeypatch, changes):
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda group: 2)
    with pytest.raises(ConfigError) as caught:
        TensorSplit(group=object(), sp=True).check(DecoderSizes(vocab=16, **changes))
    assert caught.value.what == "the decoder cannot be divided among the TP peers"
    assert caught.value.expected == "multiples of 2"
    assert len(str(caught.value).splitlines()) == 5
