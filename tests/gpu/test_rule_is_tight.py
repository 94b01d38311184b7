"""The rule on a real GPU: every golden row that one GPU can hold passes forward and backward; nothing smaller does.

Context and sequence parallelism are simulated by local row counts: under SP a rank quantises the rows of its shard, and the
GEMMs of forward and backward see the gathered slab. torchao quantises after the gather, so that only the slab counts.
"""

import csv
from collections import Counter
from pathlib import Path

import pytest
import torch
from torch import nn

from packfp8 import ConfigError, Topology, align
from packfp8.model import te
from packfp8.model.fp8 import Fp8
from packfp8.rule import RECIPES

pytestmark = pytest.mark.gpu

GOLDEN = Path(__file__).parent.parent / "rule" / "golden.csv"
ROWS = [row for row in csv.DictReader(GOLDEN.read_text(encoding="utf-8").splitlines()) if row["recipe"] != "bf16"]
HOPPER = [row for row in ROWS if RECIPES[row["recipe"]].capability <= (9, 0)]
IN, OUT = 256, 128


def _name(row):
    return "-".join(filter(None, list(row.values())[:8]))


def _rule(row, recipe=None, layout=None):
    topology = Topology(cp=int(row["cp"]), tp=int(row["tp"]), sp=row["sp"] == "sp")
    trained = row["weights"] == "trained"
    return align(recipe or row["recipe"], topology, layout=layout or row["layout"], trains_weights=trained)


@pytest.fixture(scope="module")
def prepared():
    """prepared(recipe, trained) -> (how it runs in FP8, the layer)."""
    made = {}

    def prepared(recipe, trained):
        if (recipe, trained) not in made:
            fp8 = Fp8.te(recipe) if RECIPES[recipe].library == "te" else Fp8.torchao(recipe)
            layer = nn.Sequential(nn.Linear(IN, OUT, bias=False, dtype=torch.bfloat16, device="cuda"))
            layer = fp8.prepare(layer.requires_grad_(trained), align(recipe, trains_weights=trained))
            made[recipe, trained] = fp8, layer
        return made[recipe, trained]

    return prepared


def _fault(prepared, rule, tokens):
    """Where a rank fails on its share of a pack of `tokens`, and with what; None where it passes."""
    fp8, layer = prepared(rule.recipe, rule.trains_weights)
    topology = rule.topology
    slab, shard = tokens // topology.cp, tokens // topology.shards
    stage = "forward"
    try:
        if fp8.library == "te" and topology.gathers:
            with torch.no_grad(), fp8.forward_context():
                layer(torch.randn(shard, IN, dtype=torch.bfloat16, device="cuda"))
        x = torch.randn(slab, IN, dtype=torch.bfloat16, device="cuda", requires_grad=True)
        with fp8.forward_context():
            y = layer(x)
        stage = "backward"
        y.backward(torch.randn_like(y))
        torch.cuda.synchronize()
    except (ValueError, RuntimeError, AssertionError) as fault:
        return stage, type(fault).__name__
    finite = torch.isfinite(x.grad).all() and torch.isfinite(y).all()
    return None if finite else ("backward", "not finite")


def _sizes(row):
    """The golden row's least pack, and every smaller one that the splits alone would allow."""
    order = _rule(row, "bf16")
    if row["layout"] == "thd":
        least, step = int(row["total"]), order.total
    else:
        batch = int(row["batch"])
        least, step = batch * int(row["row"]), batch * order.row(batch)
    return least, list(range(step, least, step))


@pytest.mark.parametrize("row", HOPPER, ids=_name)
def test_the_golden_row_passes_and_nothing_smaller_does(prepared, row):
    rule = _rule(row)
    least, smaller = _sizes(row)
    assert _fault(prepared, rule, least) is None
    assert _fault(prepared, rule, 2 * least) is None
    faults = {tokens: _fault(prepared, rule, tokens) for tokens in smaller}
    if row["fast"]:  # a fast need buys speed: what is below it still passes, down to the rule without it
        faults = {tokens: fault for tokens, fault in faults.items() if tokens < rule.total or tokens % rule.total}
    passed = [tokens for tokens, fault in faults.items() if fault is None]
    told = ", ".join(f"{count} in {stage} ({name})" for (stage, name), count in Counter(filter(None, faults.values())).items())
    print(f"\n{_name(row):<38} {least:>5} passes; {len(smaller):>3} smaller tried: {told or 'none fails'}", end="")
    assert passed == []
    below = [tokens for tokens in faults if rule.recipe in te.RECIPE_CLASSES and not tokens // rule.topology.shards % 8]
    assert all(faults[tokens] == ("backward", "RuntimeError") for tokens in below), "8 rows pass forward, die in backward"


@pytest.mark.parametrize("recipe", ["mxfp8", "nvfp4"])
def test_a_recipe_of_a_newer_gpu_is_refused_before_any_kernel(recipe):
    if torch.cuda.get_device_capability() >= (10, 0):
        pytest.skip("this GPU runs it")
    layer = nn.Sequential(nn.Linear(IN, OUT, device="cuda"))
    with pytest.raises(ConfigError, match="cannot run on this device"):
        Fp8.te(recipe).prepare(layer, align(recipe))


def test_nearly_every_row_of_the_table_was_tried():
    assert len(HOPPER) >= 60
    assert len(ROWS) - len(HOPPER) == sum(row["recipe"] in ("mxfp8", "nvfp4") for row in ROWS)
