"""What a PackedModel refuses, before anything runs: parts that do not fit together, batches that are not its own."""

from __future__ import annotations

from numbers import Integral
from typing import TYPE_CHECKING

from torch import Tensor, nn

from packfp8.data import PackedBatch
from packfp8.data.consumers import CONSUMERS
from packfp8.errors import ConfigError, StateError
from packfp8.model.tensor_split import TensorSplit
from packfp8.rule import Alignment, Topology, checked_rule

if TYPE_CHECKING:
    from packfp8.model.fp8 import Fp8


def check_parts(encoder: nn.Module | None, projector: nn.Module | None, llm: nn.Module) -> None:
    """Nothing, where the modules are all that the wrapper drives.

    Raises:
        ConfigError: an encoder without a projector or the reverse, a language model without embed, layouts or a plain head.
    """
    head = getattr(llm, "head", None)
    if (encoder is None) != (projector is None):
        given = {"encoder": encoder, "projector": projector}
        raise ConfigError(
            "the audio side of the model is incomplete",
            got=", ".join(f"{name} {'missing' if part is None else 'given'}" for name, part in given.items()),
            expected="encoder and projector, or none of them",
            because="audio is encoded, and projected to the language model's features",
            fix="pass both; nn.Identity() where the encoder's features are the language model's",
        )
    missing = [name for name in ("embed", "layouts", "head") if not hasattr(llm, name)]
    if missing or getattr(head, "weight", None) is None:
        raise ConfigError(
            "the language model does not have what the wrapper drives it by",
            got=f"{type(llm).__name__} without {', '.join(missing or ['head.weight'])}",
            expected="embed(ids), layouts, and head with a weight [vocab, hidden]",
            because="audio is placed among embeddings, and the loss makes its logits in chunks",
            fix="wrap it in a small module with these attributes; see help(packfp8.model.wrapper)",
        )
    if getattr(head, "bias", None) is not None:
        raise ConfigError(
            "the head of the language model has a bias",
            got=f"bias of shape {tuple(head.bias.shape)}",
            expected="a head without bias",
            because="the chunked loss makes logits of hidden states and a weight alone",
            fix="build the head with bias=False",
        )


def check_terms(rule: Alignment | None, consumer: str, llm: nn.Module, fp8: Fp8 | None) -> None:
    """Nothing, where rule, consumer and FP8 are what their names say, and the language model reads this consumer's spelling.

    Raises:
        RuleError, ConfigError: one of them is something else.
    """
    if rule is not None:
        checked_rule(rule)
    if fp8 is not None and not hasattr(fp8, "forward_context"):
        raise ConfigError(
            "what was given as fp8 is none",
            got=repr(fp8),
            expected="Fp8.te(...), Fp8.torchao(...), or None",
            because="a recipe's name does not say which library runs it",
            fix=f"fp8=Fp8.te({fp8!r})" if isinstance(fp8, str) else "fp8=Fp8.te('block')",
        )
    wanted = getattr(llm, "consumer", consumer)
    if consumer not in CONSUMERS or consumer != wanted:
        raise ConfigError(
            "the language model does not read what this consumer is told",
            got=f"consumer {consumer!r} for {type(llm).__name__}",
            expected=f"{wanted!r}" if wanted in CONSUMERS else f"one of {', '.join(CONSUMERS)}",
            because="each library spells offsets and lengths in its own way, and stumbles over or drops what it does not know",
            fix=f"PackedModel(..., consumer={wanted if wanted in CONSUMERS else 'plain'!r})",
        )


def check_rows(**counts: int | None) -> None:
    """Nothing, where each is a number of rows, or None.

    Raises:
        ConfigError: one is no whole number of at least 1.
    """
    for name, rows in counts.items():
        if rows is not None and (isinstance(rows, bool) or not isinstance(rows, Integral) or rows < 1):
            raise ConfigError(
                f"{name} is no number of rows",
                got=repr(rows),
                expected="a whole number of at least 1",
                because="the head works on so many rows: on none it would make a loss of zero, and nothing would be learned",
                fix=f"leave out {name}, or give a count of tokens",
            )


def check_is_batch(batch: object) -> None:
    """Nothing, where it is a PackedBatch.

    Raises:
        ConfigError: it is not.
    """
    if not isinstance(batch, PackedBatch):
        raise ConfigError(
            "what the model was given is not a batch",
            got=type(batch).__name__,
            expected="a PackedBatch",
            because="offsets, positions and the places of audio travel with the tokens",
            fix="let a Collator make it: DataLoader(..., collate_fn=Collator(measure=..., rule=...))",
        )


def check_recipe(batch: PackedBatch, fp8: Fp8 | None) -> None:
    """Nothing, where a model without a rule of its own may take that of its first batch.

    Raises:
        StateError: the batch was made for another recipe than the model runs.
    """
    if fp8 is not None and batch.rule.recipe != fp8.recipe:
        raise _another_rule(batch, f"recipe {batch.rule.recipe}", f"recipe {fp8.recipe}")


def check_batch(batch: PackedBatch, rule: Alignment, encoder: nn.Module | None) -> None:
    """Nothing, where the batch was made by this rule for this rank, and can be heard.

    Raises:
        StateError: another rule, or the slab of another rank.
        ConfigError: audio for a model that does not hear, or clips in one row for an encoder that cannot tell them apart.
    """
    if batch.fingerprint != rule.fingerprint:
        raise _another_rule(batch, batch.fingerprint, rule.fingerprint)
    made_for, here = batch.rule.topology.cp_rank, rule.topology.cp_rank
    if made_for != here:
        raise StateError(
            "the batch is the slab of another rank",
            got=f"cp_rank {made_for}",
            expected=f"cp_rank {here}",
            because="two ranks would train on one slab, and another would train nobody",
            fix="build both rules from this rank's mesh: Topology.from_mesh(mesh)",
        )
    if encoder is None and batch.audio.shape[0]:
        raise ConfigError(
            f"the batch of {', '.join(batch.ids[:4])} has audio, and the model has no encoder",
            got=f"{batch.audio.shape[0]} clips" if batch.audio_offsets is None else "a row of clips",
            expected="a batch of text",
            because="the places of the audio would keep the embedding of a stand-in token",
            fix="give PackedModel an encoder and a projector",
        )
    if batch.audio_offsets is not None and encoder is not None and not getattr(encoder, "packed", False):
        raise ConfigError(
            f"the clips of {', '.join(batch.ids[:4]) or 'the batch'} stand in one row, and the encoder takes one clip a row",
            got=f"{type(encoder).__name__} without packed=True",
            expected="encoder(audio [1, samples], audio_lens, audio_offsets), and packed = True on the module",
            because="an encoder that is not told where clips begin lets each of them hear the others",
            fix="mask at the offsets before every convolution, as PlainEncoder does; or Collator(static=False)",
        )


def check_split(llm: nn.Module, topology: Topology) -> None:
    """Nothing, where the language model is divided as the batches are, as far as it says how it is.

    Raises:
        ConfigError: it attends within this rank's slab alone, or over other TP peers.
    """
    if topology.cp > 1 and not getattr(llm, "spans_context", True):
        raise ConfigError(
            "the language model attends within the slab of this rank alone",
            got=f"{type(llm).__name__} without a CP group, cp {topology.cp}",
            expected="attention over the slabs of all CP ranks",
            because="nothing would fail: each rank would take its two chunks of a slot for the whole sequence",
            fix="TeDecoder.split_context(group), or PlainDecoder.gather = GatherOverRanks(group)",
        )
    split = getattr(llm, "split", None)
    is_divided = isinstance(split, TensorSplit) and split.tp > 1
    if is_divided and (split.tp, split.divides_tokens) != (topology.tp, topology.gathers):
        raise ConfigError(
            "the language model is divided over other TP peers than the batches are made for",
            got=f"tp {split.tp}{' with SP' if split.divides_tokens else ''}",
            expected=f"tp {topology.tp}{' with SP' if topology.gathers else ''}, as the rule has it",
            because="TP peers must hold the same pack, of tokens that divide among them; data-parallel ranks hold others",
            fix="build rule and decoder from one mesh: Topology.from_mesh(mesh, sp=...), TeDecoder(tp_group=..., sp=...)",
        )


def check_count(batch: PackedBatch, global_supervised: int | Tensor, loss_rows: int | None) -> None:
    """Nothing, where the count of supervised tokens can be that of the whole step. One on the device is not looked at.

    Raises:
        ConfigError: no whole number, or less than the batch has by itself; more supervised tokens than the head has rows for.
    """
    if loss_rows is not None and batch.num_supervised > loss_rows:
        raise ConfigError(
            f"the batch of {', '.join(batch.ids[:4])} has more supervised tokens than the head has rows for",
            got=f"{batch.num_supervised} supervised tokens",
            expected=f"at most loss_rows, {loss_rows}",
            because="the others would silently not be learned",
            fix="raise loss_rows of PackedModel to the most that a pack may have, or leave it out",
        )
    if isinstance(global_supervised, Tensor) and global_supervised.numel() == 1:
        return
    if not isinstance(global_supervised, Integral) or global_supervised < batch.num_supervised:
        raise ConfigError(
            "global_supervised is less than this batch has by itself",
            got=global_supervised,
            expected=f"at least {batch.num_supervised}",
            because="it counts the supervised tokens of all micro-batches and ranks of the step",
            fix="pass count_supervised(batches, group)",
        )


def _another_rule(batch: PackedBatch, got: str, expected: str) -> StateError:
    return StateError(
        f"the batch of {', '.join(batch.ids[:4]) or 'no sequence'} was made by another rule than the model's",
        got=got,
        expected=expected,
        because="its slots and total were rounded for another recipe, layout or split",
        fix="give collator and PackedModel the same align(...)",
    )
