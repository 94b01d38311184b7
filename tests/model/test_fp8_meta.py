"""torchao's shape checks on `device="meta"`: the rule is the least that they accept, for every golden row of torchao."""

import csv
from pathlib import Path

import pytest
import torch
from torch import nn

from packfp8 import RuleError, Topology, align
from packfp8.model.fp8 import Fp8

GOLDEN = Path(__file__).parent.parent / "rule" / "golden.csv"
TORCHAO = ("tensorwise", "rowwise", "rowwise_with_gw_hp")
ROWS = [row for row in csv.DictReader(GOLDEN.read_text(encoding="utf-8").splitlines()) if row["recipe"] in TORCHAO]


def _rule(row):
    topology = Topology(cp=int(row["cp"]), tp=int(row["tp"]), sp=row["sp"] == "sp")
    return align(row["recipe"], topology, layout=row["layout"], trains_weights=row["weights"] == "trained")


def _fault(rule, tokens):
    """Where a pack of `tokens` fails on one rank, "forward" or "backward", and with what; None where it passes."""
    with torch.device("meta"):
        layer = nn.Sequential(nn.Linear(64, 32, bias=False, dtype=torch.bfloat16).requires_grad_(rule.trains_weights))
    layer = Fp8.torchao(rule.recipe).prepare(layer, rule)
    slab = tokens // rule.topology.cp  # under SP the shards are gathered in BF16 before torchao quantises
    x = torch.empty(slab, 64, dtype=torch.bfloat16, device="meta", requires_grad=True)
    stage = "forward"
    try:
        y = layer(x)
        stage = "backward"
        y.sum().backward()
    except RuntimeError as fault:
        return stage, str(fault)
    return None


def _below(rule, row):
    """Every smaller pack that the splits alone would allow."""
    if rule.layout == "thd":
        bf16 = align("bf16", rule.topology)
        return range(bf16.total, int(row["total"]), bf16.total)
    batch = int(row["batch"])
    step = align("bf16", rule.topology, layout="bshd").row(batch)
    return range(batch * step, batch * int(row["row"]), batch * step)


@pytest.mark.parametrize("row", ROWS, ids=lambda r: "-".join(filter(None, list(r.values())[:8])))
def test_the_golden_row_passes_forward_and_backward_and_nothing_smaller_does(row):
    rule = _rule(row)
    least = int(row["total"]) if rule.layout == "thd" else int(row["batch"]) * int(row["row"])
    assert _fault(rule, least) is None
    for tokens in _below(rule, row):
        stage, message = _fault(rule, tokens)
        assert stage == "backward", f"{tokens} tokens: {message}"


def test_the_table_has_rows_below_which_something_fails():
    tried = [tokens for row in ROWS for tokens in _below(_rule(row), row)]
    assert len(ROWS) >= 18
    assert len(tried) >= 100


@pytest.mark.parametrize("recipe", TORCHAO)
@pytest.mark.parametrize(("features", "passes"), [((64, 32), True), ((56, 32), False), ((64, 24), False)])
def test_the_feature_rule_is_that_of_the_kernels(recipe, features, passes):
    float8 = pytest.importorskip("torchao.float8")
    config = float8.Float8LinearConfig.from_recipe_name(recipe)
    with torch.device("meta"):
        layer = nn.Sequential(nn.Linear(*features, bias=False, dtype=torch.bfloat16))
    layer = float8.convert_to_float8_training(layer, config=config)
    x = torch.empty(32, features[0], dtype=torch.bfloat16, device="meta", requires_grad=True)
    if passes:
        layer(x).sum().backward()
        align(recipe).check_features("layer", *features)
    else:
        with pytest.raises(RuntimeError):
            layer(x).sum().backward()
        with pytest.raises(RuleError):
            align(recipe).check_features("layer", *features)
