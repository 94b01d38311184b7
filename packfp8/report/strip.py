"""Strip: a pack drawn token by token: whose each token is, and which rank holds it.

pack      | a a a . | b b b b b b . . | filler |
held by   | 0 1 1 0 | 0 0 1 1 1 1 0 0 | ...         with context parallelism
cp 0      | a . b b . . ... |                       its slab, in its own order, cut into shards under SP
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from itertools import pairwise

import numpy as np

from packfp8.data import as_examples
from packfp8.layout import Plan, make_plan
from packfp8.lengths import Measure
from packfp8.report.drawing import COLOURS, INK, MUTED, painted
from packfp8.rule import Alignment

TEXT, AUDIO, PADDING, FILLER = range(4)
"""What a token is."""

_SEQUENCE_COLOURS = COLOURS[:5]
_TINT = 0.55  # share of white in the colour of audio frames
_FILLER, _PAD = "#e4e4df", "#ffffff"
_RANKS = ("#3b3b39", "#a3a39e", "#666662", "#d0d0cb")  # greys of CP ranks, neighbours far apart
_INKS = ("white", INK, "white", INK)  # the number on each grey
_WIDTH_INCHES, _ROW_INCHES, _HEAD_INCHES = 9.2, 0.34, 0.62
_NARROW = 0.016  # share of the widest pack below which a run holds no name


def draw_packs(items: Iterable, measure: Measure, *rules: Alignment):
    """The same examples as one pack under each rule, in one matplotlib figure; one scale for all, so that widths compare.

    Args:
        items: examples, cuts or dicts, as the collator takes them; no audio is read.
        measure: how they become tokens.
        rules: one strip for each; with cp > 1 the slabs of all CP ranks stand under it.

    Raises:
        ConfigError: matplotlib is not installed.
        ExampleError, LengthError, BudgetError: as the collator does.
    """
    encoded = [measure.encode(example) for example in as_examples(items)]
    lengths = [len(one) for one in encoded]
    clips = [(n, clip.start, clip.encoder_frames) for n, one in enumerate(encoded) for clip in one.clips]
    plans = [_of_all_ranks(lengths, clips, rule) for rule in rules]
    rows = [_rows(rule) for rule in rules]
    height = sum(rows) * _ROW_INCHES + len(rules) * _HEAD_INCHES + 0.3
    with painted((_WIDTH_INCHES, height)) as figure:
        strips = figure.subplots(len(rules), squeeze=False, height_ratios=[n + _HEAD_INCHES / _ROW_INCHES for n in rows])
        widest = max(ranks[0].slots.total for ranks in plans)
        for axes, rule, ranks in zip(strips[:, 0], rules, plans, strict=True):
            _strip(axes, rule, ranks, token_kinds(ranks[0], clips), widest)
        _legend(figure)
    return figure


def token_kinds(plan: Plan, clips: Iterable[tuple[int, int, int]]) -> np.ndarray:
    """int8 `[T]`, what each token of the pack is: `TEXT`, `AUDIO`, `PADDING` or `FILLER`.

    Args:
        clips: (sequence, start within it, encoder frames), as `make_plan` takes them.
    """
    slots = plan.slots
    kinds = np.full(slots.total, PADDING, np.int8)
    kinds[slots.real()] = TEXT
    for sequence, start, frames in clips:
        first = int(slots.offsets[sequence]) + start
        kinds[first : first + frames] = AUDIO
    kinds[int(slots.offsets[slots.sequences]) :] = FILLER
    return kinds


def runs(*labels: np.ndarray) -> Iterator[tuple[int, int]]:
    """Begin and end of every stretch of tokens over which none of the arrays `[tokens]` changes, in order."""
    changes = np.zeros(len(labels[0]), bool)
    for label in labels:
        changes[1:] |= label[1:] != label[:-1]
    bounds = [0, *np.flatnonzero(changes).tolist(), len(labels[0])]
    yield from pairwise(bounds)


def _of_all_ranks(lengths: list[int], clips: list, rule: Alignment) -> list[Plan]:
    ranks = range(rule.topology.cp)
    return [make_plan(lengths, clips, replace(rule, topology=replace(rule.topology, cp_rank=rank))) for rank in ranks]


def _rows(rule: Alignment) -> int:
    return 1 if rule.topology.shards == 1 else 2 + rule.topology.cp


def _strip(axes, rule: Alignment, plans: list[Plan], kinds: np.ndarray, widest: int) -> None:
    topology, slots = rule.topology, plans[0].slots
    slot_of = np.repeat(np.arange(len(slots.lengths)), slots.sizes)
    names = ["pack"]
    _row(axes, 0, slot_of, kinds, widest)
    axes.vlines(slots.offsets, -0.4, 0.4, color=INK, linewidth=1)
    if topology.shards > 1:
        names += ["held by", *(f"cp {rank}" if topology.cp > 1 else "slab" for rank in range(topology.cp))]
        _holders(axes, plans, widest)
        for rank, plan in enumerate(plans):
            _row(axes, 2 + rank, slot_of[plan.index], kinds[plan.index], widest)
            _shards(axes, 2 + rank, len(plan.index), topology.tp if topology.gathers and not slots.rows else 1)
    axes.set_yticks(range(len(names)), names)
    axes.set_ylim(len(names) - 0.4, -0.6)
    axes.set_xlim(-0.002 * widest, 1.002 * widest)
    axes.set_xticks([0, slots.total] if slots.total < 0.97 * widest else [0, widest])
    axes.tick_params(length=0)
    axes.grid(visible=False)
    for side in axes.spines.values():
        side.set_visible(False)
    where = "row" if rule.layout == "bshd" else "slot"
    multiple = rule.row(slots.rows) if slots.rows else rule.sequence
    padding = 1 - int(slots.lengths.sum()) / slots.total
    split = "".join(f", {name} {size}" for name, size in (("cp", topology.cp), ("tp", topology.tp)) if size > 1)
    split += " with SP" if topology.gathers else ""
    title = f"{rule.recipe}, {rule.layout.upper()}{split}: each {where} a multiple of {multiple}, the pack of {rule.total}"
    axes.set_title(f"{title}; {padding:.1%} padding", loc="left", fontsize=10.5)


def _row(axes, y: int, slot_of: np.ndarray, kinds: np.ndarray, widest: int) -> None:
    """One bar of tokens, sequence by sequence."""
    for begin, end in runs(slot_of, kinds):
        slot, kind = int(slot_of[begin]), int(kinds[begin])
        axes.barh(y, end - begin, 0.8, begin, **_look(slot, kind))
    real = kinds < PADDING
    for begin, end in runs(slot_of, real):
        if real[begin] and end - begin > _NARROW * widest:
            _name(axes, (begin + end) / 2, y, _letter(int(slot_of[begin])), 8.5)


def _name(axes, x: float, y: float, text: str, size: float) -> None:
    box = {"boxstyle": "round,pad=0.12", "facecolor": "white", "edgecolor": "none", "alpha": 0.78}
    axes.text(x, y, text, bbox=box, ha="center", va="center", fontsize=size, color=INK)


def _look(slot: int, kind: int) -> dict:
    colour = _SEQUENCE_COLOURS[slot % len(_SEQUENCE_COLOURS)]
    return {
        TEXT: {"color": colour, "linewidth": 0},
        AUDIO: {"color": _tinted(colour), "linewidth": 0},
        PADDING: {"facecolor": _PAD, "edgecolor": colour, "hatch": "//////", "linewidth": 0},
        FILLER: {"color": _FILLER, "linewidth": 0},
    }[kind]


def _holders(axes, plans: list[Plan], widest: int) -> None:
    """Under the pack, which CP rank holds each token."""
    holder = np.empty(plans[0].slots.total, np.int64)
    for rank, plan in enumerate(plans):
        holder[plan.index] = rank
    for begin, end in runs(holder):
        rank = int(holder[begin])
        axes.barh(1, end - begin, 0.5, begin, color=_RANKS[rank % len(_RANKS)], linewidth=0)
        if end - begin > _NARROW * widest and len(plans) > 1:
            axes.text(
                (begin + end) / 2, 1, f"{rank}", ha="center", va="center_baseline", fontsize=7.5, color=_INKS[rank % len(_INKS)]
            )


def _shards(axes, y: int, slab_tokens: int, ranks: int) -> None:
    """The borders of a slab and of the shards in it."""
    bounds = np.linspace(0, slab_tokens, ranks + 1)
    axes.vlines(bounds, y - 0.48, y + 0.48, color=INK, linewidth=1.6)
    if ranks > 1:
        for rank, (begin, end) in enumerate(pairwise(bounds)):
            _name(axes, 0.88 * end + 0.12 * begin, y + 0.24, f"tp {rank}", 6.5)


def _legend(figure) -> None:
    from matplotlib.patches import Patch

    pad = {"facecolor": _PAD, "edgecolor": MUTED, "hatch": "//////", "linewidth": 0}
    looks = {
        "text": {"color": COLOURS[0]},
        "audio frames": {"color": _tinted(COLOURS[0])},
        "padding in a slot": pad,
        "filler": {"color": _FILLER},
    }
    figure.legend([Patch(**look) for look in looks.values()], list(looks), loc="outside lower center", ncols=len(looks))


def _tinted(colour: str) -> str:
    """The colour with white in it."""
    parts = (int(colour[at : at + 2], 16) for at in (1, 3, 5))
    return "#" + "".join(f"{round(part + (255 - part) * _TINT):02x}" for part in parts)


def _letter(sequence: int) -> str:
    return chr(ord("a") + sequence % 26)
