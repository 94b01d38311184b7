"""Writes the guide `notebooks/guides/what_must_divide_what.md` from the recipe table and the golden table.

    python tests/make_guides.py

A test fails while the page and the tables disagree.
"""

from __future__ import annotations

import csv
from collections.abc import Iterator
from pathlib import Path

from packfp8.rule import RECIPES, Need, Topology, align

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "notebooks" / "guides" / "what_must_divide_what.md"
GOLDEN = Path(__file__).parent / "rule" / "golden.csv"

_HEAD = """\
# What must divide what, and why

<!-- Made by tests/make_guides.py from packfp8/rule/recipe.py and tests/rule/golden.csv. Do not edit. -->

Five things are counted, and each need belongs to one of them:

| counted | what it is | in a pack of T tokens |
|---|---|---|
| slot | the room kept for one sequence (THD); a **row** of S tokens in a padded batch (BSHD) | |
| pack | the slots of one data-parallel rank's micro-batch, filler included | T; BSHD: B * S |
| slab | what one context-parallel rank holds | T / cp |
| shard | what one sequence-parallel rank holds between linear layers; the slab where SP is off | T / (cp * tp) |
| features | inputs and outputs of a linear layer, as each tensor-parallel rank holds them | |

A need of the slab is one of the pack times `cp`, a need of the shard one of the pack times `cp * tp`. All are joined by their
least common multiple: the largest of 12 and 16 is no multiple of 12, and their product wastes tokens. The command that prints
this for a job:

```bash
packfp8 explain block --cp 2 --tp 4 --sp
```

The same in Python, and what a count becomes:

```python
from packfp8 import Topology, align

rule = align("block", Topology(cp=2, tp=4, sp=True))
assert (rule.sequence, rule.total) == (4, 64)
assert rule.slot(93) == 96 and rule.pack(1000) == 1024 and rule.floor(16_400) == 16_384
```

Pictures of all this are in the notebook [01_why_alignment](../01_why_alignment.ipynb).

## What the splits ask, whatever the recipe
"""

_RECIPES = """\
## What each recipe asks

Forward, each rank quantises the rows that it holds: the shard. Backward, the weight gradient multiplies over rows, so the slab
is its inner dimension, and cuBLAS asks for twice as much: whoever rounds by the forward number passes forward and dies in
backward half of the time. *Must* needs are refused or wrong otherwise; *fast* ones only buy speed and hold with
`align(..., fast=True)`.
"""

_GOLDEN = """\
## The golden table

Written by hand, with the reason; a test holds the rule to every row, and another simulates each rank literally and tries one
step below. Empty cells are the plain case: weights trained, no SP, no fast needs. *slot* is the multiple of every slot (BSHD:
of every row, whatever the batch), *pack* that of the total, *row* the least S for B rows.
"""


def page() -> str:
    """The text of the page."""
    parts = [_HEAD, *_needs_table(_splits()), "", _RECIPES]
    for recipe in RECIPES.values():
        runs = f"sm{recipe.capability[0]}{recipe.capability[1]} and newer"
        library = {"torch": "torch", "te": "Transformer Engine", "torchao": "torchao"}[recipe.library]
        parts += [f"### {recipe.name}", "", f"{library}; {runs}.", ""]
        conditions = [(need, "weights trained") for need in recipe.trained]
        conditions += [(need, "with SP") for need in recipe.fast_gathered]
        needs = [(need, "always") for need in recipe.always] + conditions + [(need, "always") for need in recipe.fast]
        parts += [*_needs_table(needs), ""] if needs else ["It asks for nothing: any number of tokens will do.", ""]
    parts.append(_GOLDEN)
    rows = list(csv.DictReader(GOLDEN.read_text(encoding="utf-8").splitlines()))
    for layout in ("thd", "bshd"):
        parts += [f"### {layout.upper()}", "", *_golden(row for row in rows if row["layout"] == layout), ""]
    return "\n".join(parts).rstrip() + "\n"


def _splits() -> Iterator[tuple[Need, str]]:
    """The needs of CP and SP, asked of the rule where nothing else asks; their multiples are given as formulas."""
    cp, sp = align("bf16", Topology(cp=2)).needs, align("bf16", Topology(tp=2, sp=True)).needs
    yield from ((need, "cp > 1; BSHD: of every row") for need in cp)
    yield from ((need, "SP; BSHD: of every row") for need in sp)


def _needs_table(needs) -> Iterator[str]:
    formulas = {"slot": "2 * cp", "row": "2 * cp", "pack": "cp * tp"}
    yield "| counted | multiple | kind | when | because | source |"
    yield "|---|---|---|---|---|---|"
    for need, when in needs:
        cells = (need.unit, str(formulas.get(need.unit, need.multiple)), need.kind, when, need.because, need.source)
        yield f"| {' | '.join(cells)} |"


def _golden(rows) -> Iterator[str]:
    yield "| recipe | cp | tp | B | weights | slot | pack | row | why |"
    yield "|---|---|---|---|---|---|---|---|---|"
    for row in rows:
        tp = f"{row['tp']} with SP" if row["sp"] else row["tp"]
        told = "" if row["weights"] == "trained" else row["weights"]
        told = ", ".join(filter(None, (told, row["fast"])))
        cells = (row["recipe"], row["cp"], tp, row["batch"], told, row["sequence"], row["total"], row["row"], row["reason"])
        yield f"| {' | '.join(cells)} |"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
