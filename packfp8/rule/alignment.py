"""Alignment: the needs of a recipe and a topology, joined into the multiples that slots and packs are rounded to.

    every slot   lcm of what is asked of a slot (THD) or of a row (BSHD)
    every pack   lcm of cp * slab need, shards * shard need, and the above

Needs are joined by lcm: the larger of 12 and 16 is no multiple of 12, and their product wastes tokens.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass
from math import gcd, lcm

from packfp8.errors import BudgetError, RuleError
from packfp8.rule.need import UNITS, Need
from packfp8.rule.recipe import RECIPES
from packfp8.rule.topology import Topology

LAYOUTS = ("thd", "bshd")
_ROUND = "round slots with rule.slot(n), packs with rule.pack(n), rows with rule.row(batch)"


@dataclass(frozen=True, slots=True, kw_only=True)
class Alignment:
    """The rule in force. One object is held by the sampler, the collator, the report and the model wrapper.

    Build it with `align()`. Counts are tokens throughout.
    """

    recipe: str
    topology: Topology
    layout: str
    trains_weights: bool
    fast: bool
    needs: tuple[Need, ...]

    @property
    def sequence(self) -> int:
        """Multiple of every slot (THD) or of every row, whatever the batch (BSHD)."""
        return self._joined("slot", "row")

    @property
    def total(self) -> int:
        """Multiple of every pack."""
        return lcm(self.sequence, self._joined("pack", "slab", "shard"))

    @property
    def features(self) -> int:
        """Multiple of the features of every linear layer, as each rank holds them."""
        return self._joined("features")

    def row(self, batch: int) -> int:
        """Least S for `batch` rows on one data-parallel rank (BSHD); the legal S are its multiples.

        The rows of a batch stand one after another in a GEMM, so B supplies factors of the pack's multiple: 16 rows of any S
        divide by 16.
        """
        _whole(batch, "the number of rows", least=1)
        total = self._joined("pack", "slab", "shard")
        return lcm(self._joined("row"), total // gcd(total, batch))

    def slot(self, tokens: int) -> int:
        """`tokens` rounded up to a whole slot."""
        return -(-_whole(tokens, "the length of a sequence") // self.sequence) * self.sequence

    def pack(self, tokens: int) -> int:
        """`tokens` rounded up to a whole pack."""
        return -(-_whole(tokens, "the tokens of a pack") // self.total) * self.total

    def floor(self, budget: int, batch: int | None = None) -> int:
        """The largest legal pack within `budget` tokens: the capacity. With `batch`, the largest B * S.

        Raises:
            BudgetError: not even the least pack fits.
        """
        step = self.total if batch is None else batch * self.row(batch)
        capacity = _whole(budget, "the budget") // step * step
        if capacity == 0:
            raise BudgetError(
                "the budget is below the least pack",
                got=f"{budget} tokens",
                expected=f"at least {step} tokens",
                because=f"{self._name()} makes packs of multiples of {step} tokens",
                fix=f"raise the budget to a multiple of {step}, or lower cp or tp",
            )
        return capacity

    def check(self, total: int, *, slots: Iterable[int] = (), batch: int | None = None) -> None:
        """Nothing, where a pack of `total` tokens with `slots` is legal.

        Args:
            total: tokens of the pack (BSHD: B * S).
            slots: the size of every slot in tokens (BSHD: of every row), filler included; left out, not looked at.
            batch: number of rows (BSHD).

        Raises:
            RuleError: a count that is not a multiple, and it names the need that is broken; slots that do not make the total.
        """
        _whole(total, "the tokens of a pack")
        unit, need = ("row", self.row(batch)) if batch is not None else ("slot", self.sequence)
        sizes = list(slots)
        for position, size in enumerate(sizes):
            if size % need:
                self._refuse(f"{unit} {position} of the pack", f"{size} tokens", need, self._needs("slot", "row"))
        if sizes and sum(sizes) != total:
            raise RuleError(
                f"the {unit}s of the pack do not make its total",
                got=f"{sum(sizes)} tokens in {len(sizes)} {unit}s",
                expected=f"{total} tokens",
                because="a token outside every segment is attended by nobody's offsets, or by its neighbour's",
                fix="give what is left a slot of its own: filler",
            )
        for need in self.needs:
            share = self._share(need.unit)
            if share and (total % share or total // share % need.multiple):
                got = f"{total} tokens in all, {total / share:g} in each of {share}" if share > 1 else f"{total} tokens"
                self._refuse(f"the {need.unit} of this pack", got, need.multiple, (need,))

    def check_features(self, name: str, in_features: int, out_features: int, *, split: str | None = None) -> None:
        """Nothing, where the linear layer `name` is legal as each TP rank holds it.

        Args:
            in_features, out_features: of the whole layer.
            split: the side that tensor parallelism divides: "out" (column parallel), "in" (row parallel) or None.

        Raises:
            RuleError: a size that tp does not divide or whose share is not a multiple.
        """
        for side, size in (("in", in_features), ("out", out_features)):
            ranks = self.topology.tp if side == split else 1
            if size % ranks or size // ranks % self.features:
                held = f"{size} {side}put features" + (f", {size / ranks:g} on each of {ranks} TP ranks" if ranks > 1 else "")
                fix = "choose sizes that are multiples after tp divides them, or leave the layer in BF16"
                self._refuse(f"linear layer {name!r}", held, self.features, self._needs("features"), fix)

    @property
    def fingerprint(self) -> str:
        """Short stable text, equal on every rank and machine; dp and the ranks' coordinates are left out."""
        t = self.topology
        parts = [self.recipe, self.layout, f"cp{t.cp}", f"tp{t.tp}{'sp' if t.gathers else ''}"]
        parts += ["train" if self.trains_weights else "frozen", *(["fast"] if self.fast else [])]
        numbers = ";".join(sorted(f"{need.unit}%{need.multiple}:{need.kind}" for need in self.needs))
        digest = hashlib.sha256("-".join([*parts, numbers]).encode()).hexdigest()[:8]
        return "-".join([*parts, digest])

    def __str__(self) -> str:
        t, where = self.topology, "row" if self.layout == "bshd" else "slot"
        shard = f", shard {self.total // t.shards}" if t.gathers else ""
        lines = [
            self._name(),
            f"  every {where:<5} a multiple of {self.sequence}",
            f"  every pack  a multiple of {self.total} tokens (slab {self.total // t.cp}{shard})",
            "  needs",
        ]
        for need in self.needs:
            lines += _told(need, need.kind)
        if not self.needs:
            lines.append("    none: any number of tokens will do")
        for need in _fast_needs(self.recipe, t) if not self.fast else ():
            lines += _told(need, "only with fast=True")
        return "\n".join([*lines, f"  fingerprint {self.fingerprint}"])

    def _name(self) -> str:
        weights = "weights trained" if self.trains_weights else "weights frozen"
        return f"{self.recipe}, {self.layout.upper()}, {self.topology}, {weights}{', fast' if self.fast else ''}"

    def _share(self, unit: str) -> int:
        """In how many equal shares a pack is counted by this unit; 0 where a pack's total does not decide."""
        return {"pack": 1, "slab": self.topology.cp, "shard": self.topology.shards}.get(unit, 0)

    def _needs(self, *units: str) -> tuple[Need, ...]:
        return tuple(need for need in self.needs if need.unit in units)

    def _joined(self, *units: str) -> int:
        return lcm(*(max(1, self._share(need.unit)) * need.multiple for need in self._needs(*units)))

    def _refuse(self, what: str, got: str, multiple: int, needs: tuple[Need, ...], fix: str = _ROUND) -> None:
        why = "; ".join(f"{UNITS[need.unit]}: {need.because} [{need.source}]" for need in needs)
        raise RuleError(
            f"{what} breaks the rule of {self._name()}",
            got=got,
            expected=f"a multiple of {multiple}",
            because=why or f"B rows of S tokens must make a multiple of {self.total}",
            fix=fix,
        )


def align(
    recipe: str,
    topology: Topology | None = None,
    *,
    layout: str = "thd",
    trains_weights: bool = True,
    fast: bool = False,
) -> Alignment:
    """The rule for a recipe on a topology.

    Args:
        recipe: a key of `RECIPES`. "auto" is refused: a host without the GPU would resolve it differently from the workers.
        topology: sizes of the job; one rank where it is left out.
        layout: "thd" (slots of their own sizes, one after another) or "bshd" (B rows of S).
        trains_weights: whether backward computes weight gradients of the FP8 layers.
        fast: whether needs that only buy speed are in force too.

    Raises:
        RuleError: an unknown recipe or layout, or an argument of another type.
    """
    topology = topology or Topology()
    if not isinstance(topology, Topology):
        raise RuleError(
            "the topology of the rule is something else",
            got=repr(topology),
            expected="a Topology",
            because="every token count is divided by its sizes",
            fix="pass Topology(dp=..., cp=..., tp=...), or Topology.from_mesh(mesh)",
        )
    for name, flag in (("trains_weights", trains_weights), ("fast", fast)):
        if not isinstance(flag, bool):
            raise RuleError(
                f"{name} is neither True nor False",
                got=repr(flag),
                expected="a bool",
                because="a text such as 'false' counts as true, and the multiples would follow from it silently",
                fix=f"pass {name}=True or {name}=False",
            )
    if not isinstance(recipe, str) or recipe not in RECIPES:
        raise RuleError(
            "the recipe is not one that the rule knows",
            got=repr(recipe),
            expected=f"one of {', '.join(RECIPES)}",
            because="the multiples follow from the recipe; a recipe left open resolves differently on a host without the GPU",
            fix="name the recipe that the GPUs run, on every rank alike",
        )
    if layout not in LAYOUTS:
        raise RuleError(
            "the layout is not one that the rule knows",
            got=repr(layout),
            expected="'thd' or 'bshd'",
            because="THD rounds slots, BSHD rounds rows",
            fix="pass layout='thd' for packed and layout='bshd' for padded batches",
        )
    table = RECIPES[recipe]
    needs = [*_order_needs(topology, layout), *table.always, *(table.trained if trains_weights else ())]
    needs += _fast_needs(recipe, topology) if fast else ()
    return Alignment(
        recipe=recipe,
        topology=topology,
        layout=layout,
        trains_weights=trains_weights,
        fast=fast,
        needs=tuple(needs),
    )


def checked_rule(rule: object) -> Alignment:
    """`rule`, where it is one.

    Raises:
        RuleError: it is something else, such as a recipe's name.
    """
    if not isinstance(rule, Alignment):
        raise RuleError(
            "what was given as the rule is none",
            got=repr(rule),
            expected="an Alignment, as align(...) gives it",
            because="sampler, collator, report and model hold one rule; a recipe's name alone says nothing of the ranks",
            fix=f"rule=align({rule!r}, Topology(...))" if isinstance(rule, str) else "rule=align('block', Topology(...))",
        )
    return rule


def _told(need: Need, kind: str) -> list[str]:
    """A need in two lines: the reason, then its kind and source."""
    head = f"    {need.unit} % {need.multiple}"
    return [f"{head:<20}{need.because}", f"{'':<20}{kind}; {need.source}"]


def _fast_needs(recipe: str, topology: Topology) -> tuple[Need, ...]:
    table = RECIPES[recipe]
    return table.fast + (table.fast_gathered if topology.gathers else ())


def _order_needs(topology: Topology, layout: str) -> list[Need]:
    """What the splits ask for, whatever the recipe."""
    unit, needs = ("row" if layout == "bshd" else "slot"), []
    if topology.cp > 1:
        needs.append(
            Need(
                unit=unit,
                multiple=2 * topology.cp,
                because="each CP rank takes one chunk from either end; otherwise TE's kernel drops or repeats tokens silently",
                source="measured: H200, thd_get_partitioned_indices of Transformer Engine 2.20.2",
            )
        )
    if topology.gathers:
        needs.append(
            Need(
                unit="row" if layout == "bshd" else "pack",
                multiple=topology.shards,
                because="SP gives every rank an equal share of the tokens",
                source="definition of sequence parallelism: reduce-scatter and all-gather of equal shards",
            )
        )
    return needs


def _whole(value: int, name: str, least: int = 0) -> int:
    # an index is what int() of a numpy integer is; a float budget such as 4096.0 would round silently elsewhere
    whole = hasattr(value, "__index__") and not isinstance(value, bool)
    if not whole or value.__index__() < least:
        raise RuleError(
            f"{name} is not a count",
            got=repr(value),
            expected=f"a whole number of at least {least}",
            because="tokens are counted in integers, so that every rank comes to the same number",
            fix="pass an int",
        )
    return value.__index__()
