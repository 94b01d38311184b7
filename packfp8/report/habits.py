"""Habits: the ways in which token counts are commonly rounded, and what becomes of packs that are rounded so.

Each was met in public training code. The verdicts come from the rule, need by need; none is written down here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import lcm

from packfp8.errors import ConfigError
from packfp8.rule import Alignment

FATES = {
    "slot": "wrong, silently",
    "row": "wrong, silently",
    "pack": "unequal shards",
    "shard": "dies in forward",
    "slab": "dies in backward",
}
"""Unit of the first need that a pack breaks -> what happens then; in the order in which training meets them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Habit:
    """One way of rounding.

    Args:
        name: what people call it.
        slot: the multiple of each sequence, from the rule of the job.
        total: the multiple of the pack, from the same.
    """

    name: str
    slot: Callable[[Alignment], int]
    total: Callable[[Alignment], int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """What became of the packs of one habit under one rule.

    Attributes:
        fates: fate -> packs that met it; packs that are right are in none.
        packs: all packs.
        padding: share of the tokens that hold nothing.
    """

    fates: dict[str, int]
    packs: int
    padding: float

    def __str__(self) -> str:
        if not self.fates:
            return f"right, {self.padding:.1%} padding"
        fate, count = max(self.fates.items(), key=lambda item: item[1])
        return f"{fate}, {count / self.packs:.0%}"


def _one(rule: Alignment) -> int:
    return 1


def _eight(rule: Alignment) -> int:
    return 8


def _sixteen(rule: Alignment) -> int:
    return 16


def _chunks(rule: Alignment) -> int:
    return 2 * rule.topology.cp if rule.topology.cp > 1 else 1


def _first_that_applies(rule: Alignment) -> int:
    topology = rule.topology
    return topology.cp * topology.tp if topology.gathers else _chunks(rule) if topology.cp > 1 else 16


def _splits(rule: Alignment) -> int:
    topology = rule.topology
    return lcm(_chunks(rule), topology.shards)


def _product(rule: Alignment) -> int:
    topology = rule.topology
    return 16 * _chunks(rule) * (topology.tp if topology.gathers else 1)


def _slot_of_rule(rule: Alignment) -> int:
    return rule.sequence


def _total_of_rule(rule: Alignment) -> int:
    return rule.total


HABITS = (
    Habit(name="pack to 8, what forward asks", slot=_chunks, total=_eight),
    Habit(name="pack to 16, whatever the ranks", slot=_chunks, total=_sixteen),
    Habit(name="pack to 16, slots left alone", slot=_one, total=_sixteen),
    Habit(name="if SP: ... elif CP: ... elif FP8: ...", slot=_chunks, total=_first_that_applies),
    Habit(name="pack to 2 * cp * tp", slot=_chunks, total=_splits),
    Habit(name="each sequence to the product", slot=_product, total=_product),
    Habit(name="packfp8", slot=_slot_of_rule, total=_total_of_rule),
)
"""From the most common one to ours."""


def judge(habit: Habit, rule: Alignment, packs: Sequence[Sequence[int]]) -> Verdict:
    """What becomes of packs of such lengths (real tokens) where they are rounded by habit.

    Raises:
        ConfigError: the rule's layout is not THD.
    """
    if rule.layout != "thd":
        raise ConfigError(
            "habits are judged on packed batches",
            got=f"layout {rule.layout!r}",
            expected="layout 'thd'",
            because="the rows of a padded batch are rounded by other habits",
            fix="align(..., layout='thd')",
        )
    met = [(sum(lengths), *_rounded(habit, rule, lengths)) for lengths in packs]
    fates = [fate for _, total, slots in met if (fate := fate_of(rule, total, slots))]
    kept = sum(total for _, total, _ in met)
    real = sum(tokens for tokens, _, _ in met)
    return Verdict(fates={fate: fates.count(fate) for fate in dict.fromkeys(fates)}, packs=len(met), padding=1 - real / kept)


def fate_of(rule: Alignment, total: int, slots: Sequence[int]) -> str:
    """What happens to a pack of `total` tokens with such slots, by the first need that it breaks; empty where it is right."""
    shares = {"pack": 1, "slab": rule.topology.cp, "shard": rule.topology.shards}
    broken = {need.unit for need in rule.needs if need.unit == "slot" and any(size % need.multiple for size in slots)}
    broken |= {n.unit for n in rule.needs if n.unit in shares and total % (shares[n.unit] * n.multiple)}
    return next((fate for unit, fate in FATES.items() if unit in broken), "")


def _rounded(habit: Habit, rule: Alignment, lengths: Sequence[int]) -> tuple[int, list[int]]:
    """The total of a pack and the sizes of its slots, filler included."""
    slot, total = habit.slot(rule), habit.total(rule)
    slots = [-(-length // slot) * slot for length in lengths]
    used = sum(slots)
    whole = -(-used // total) * total
    # Filler is a slot of its own: under CP it is cut in chunks as any other.
    return whole, [*slots, *([whole - used] if whole > used else [])]


def draw_habits(packs: Sequence[Sequence[int]], *rules: Alignment):
    """Every habit (rows) under every rule (columns) in one matplotlib figure: the commonest fate, and its share.

    Args:
        packs: the lengths (real tokens) of each pack.

    Raises:
        ConfigError: matplotlib is not installed, or a rule is not THD.
    """
    from packfp8.report.drawing import COLOURS, INK, painted

    verdicts = [[judge(habit, rule, packs) for rule in rules] for habit in HABITS]
    colours = {"": COLOURS[2], "dies in backward": COLOURS[1], "dies in forward": COLOURS[4]}
    with painted((9.2, 0.5 * len(HABITS) + 0.6)) as figure:
        axes = figure.subplots()
        for y, row in enumerate(verdicts):
            for x, verdict in enumerate(row):
                worst = max(verdict.fates, key=verdict.fates.get, default="")
                share = sum(verdict.fates.values()) / verdict.packs
                shade = 0.22 + 0.4 * share if worst else max(0.12, 0.4 - 1.2 * verdict.padding)
                axes.barh(y, 0.97, 0.9, x - 0.485, color=colours.get(worst, COLOURS[3]), alpha=shade, linewidth=0)
                weight = "bold" if HABITS[y].name == "packfp8" else "normal"
                text = "\n".join(str(verdict).rsplit(", ", 1))
                axes.text(x, y, text, ha="center", va="center", fontsize=9.5, color=INK, weight=weight, linespacing=1.15)
        axes.set_yticks(range(len(HABITS)), [habit.name for habit in HABITS], color=INK)
        axes.set_xticks(range(len(rules)), [_job(rule) for rule in rules], color=INK)
        axes.xaxis.tick_top()
        axes.set_ylim(len(HABITS) - 0.5, -0.5)
        axes.set_xlim(-0.5, len(rules) - 0.5)
        axes.grid(visible=False)
        axes.tick_params(length=0)
        for side in axes.spines.values():
            side.set_visible(False)
    return figure


def _job(rule: Alignment) -> str:
    topology = rule.topology
    split = [f"cp {topology.cp}"] if topology.cp > 1 else []
    split += [f"tp {topology.tp} with SP"] if topology.gathers else []
    return f"{rule.recipe}\n{', '.join(split) or 'one rank'}"
