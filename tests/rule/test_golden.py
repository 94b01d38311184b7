"""The golden table: what the rule must say, row by row, written by hand with the reason."""

import csv
from pathlib import Path

import pytest

from packfp8.rule import RECIPES, Topology, align

ROWS = list(csv.DictReader((Path(__file__).parent / "golden.csv").read_text(encoding="utf-8").splitlines()))


def _rule(row):
    topology = Topology(cp=int(row["cp"]), tp=int(row["tp"]), sp=row["sp"] == "sp")
    trained, fast = row["weights"] == "trained", row["fast"] == "fast"
    return align(row["recipe"], topology, layout=row["layout"], trains_weights=trained, fast=fast)


@pytest.mark.parametrize("row", ROWS, ids=lambda r: "-".join(filter(None, list(r.values())[:8])))
def test_the_rule_says_what_the_golden_row_says(row):
    rule = _rule(row)
    assert rule.sequence == int(row["sequence"]), row["reason"]
    assert rule.total == int(row["total"]), row["reason"]
    if row["layout"] == "bshd":
        assert rule.row(int(row["batch"])) == int(row["row"]), row["reason"]


def test_the_golden_table_covers_every_recipe_in_both_layouts_and_repeats_no_row():
    keys = [tuple(list(row.values())[:8]) for row in ROWS]
    assert len(keys) == len(set(keys)) >= 60
    assert {(row["recipe"], row["layout"]) for row in ROWS} == {(r, x) for r in RECIPES for x in ("thd", "bshd")}
    assert all(row["reason"] for row in ROWS)


def test_the_short_table_of_the_readme_is_the_rule():
    readme = (Path(__file__).parents[2] / "README.md").read_text(encoding="utf-8")
    tensor_parallel = Topology(tp=4, sp=True)
    cases = [
        (Topology(), {}),
        (Topology(cp=2), {}),
        (tensor_parallel, {}),
        (Topology(cp=2, tp=4, sp=True), {}),
        (Topology(), {"trains_weights": False}),
        (tensor_parallel, {"fast": True}),
    ]
    seen = set()
    for line in readme.split("\n"):
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        names = [name.strip(" ,").split()[-1] for name in cells[0].split(",") if name.strip()]
        if len(cells) == 7 and set(names) <= set(RECIPES):
            for name in names:
                assert [align(name, t, **options).total for t, options in cases] == [int(cell) for cell in cells[1:]], name
            seen |= set(names)
    assert seen == set(RECIPES)
