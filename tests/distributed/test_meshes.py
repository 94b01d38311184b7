"""Ranks on real meshes (gloo, CPU): each step's loss and gradient are those of one process that sees the same packs."""

import os
import subprocess
import sys

import pytest
import torch

LAYOUTS = ["thd", "bshd"]
MESHES = {
    "dp 2": 2,
    "dp_shard 2, cp 2": 4,
    "cp 2, tp 2 with SP": 4,
    "dp 2, cp 2, tp 2 with SP": 8,
}


@pytest.fixture(scope="module")
def ranks(here, tmp_path_factory):
    """World size -> rank -> (scenario, mesh, layout) -> what it found; see `ranks.py`."""
    folder, root = tmp_path_factory.mktemp("ranks"), str(here.parents[1])
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([root, *filter(None, [os.environ.get("PYTHONPATH")])])}
    told = subprocess.run([sys.executable, here / "ranks.py", folder], env=env, capture_output=True, text=True, timeout=280)
    assert told.returncode == 0, told.stderr
    return torch.load(folder / "all.pt", weights_only=False)


@pytest.fixture(params=[(mesh, layout) for mesh in MESHES for layout in LAYOUTS], ids=", ".join)
def kind(request):
    return request.param


@pytest.mark.timeout(300)
def test_twenty_steps_on_a_mesh_have_the_loss_and_gradient_of_one_process(ranks, kind):
    mesh, layout = kind
    (alone,), peers = ranks[1], ranks[MESHES[mesh]]
    expected = alone["training", mesh, layout]
    assert len(peers) == MESHES[mesh]
    assert len(expected) == 20
    assert expected[-1][0] < 0.8 * expected[0][0]  # it learns: a loss that stands still would agree with anything
    for peer in peers:
        found = peer["training", mesh, layout]
        assert len(found) == 20
        for (loss, norm, _), (right_loss, right_norm, _) in zip(found, expected, strict=True):
            assert loss == pytest.approx(right_loss, rel=1e-5)
            assert norm == pytest.approx(right_norm, rel=1e-5)


@pytest.mark.timeout(300)
def test_peers_train_on_one_pack_and_data_parallel_ranks_on_different_ones(ranks, kind):
    mesh, layout = kind
    seen = [[ids for _, _, ids in peer["training", mesh, layout]] for peer in ranks[MESHES[mesh]]]
    columns = [list(column) for column in zip(*[ids for _, _, ids in ranks[1][0]["training", mesh, layout]], strict=True)]
    each = len(seen) // len(columns)
    assert seen == [column for column in columns for _ in range(each)]
    assert len({str(column) for column in columns}) == len(columns)


@pytest.mark.timeout(300)
def test_unequal_windows_have_the_gradient_of_one_batch(ranks, kind):
    """Audio beside text alone, many labels beside one, none at all, filler alone: over ranks and over micro-batches."""
    mesh, layout = kind
    expected, peers = ranks[1][0]["window", mesh, layout], [peer["window", mesh, layout] for peer in ranks[MESHES[mesh]]]
    tp = 2 if "tp" in mesh else 1
    assert sum(sum(peer["sums"]) for peer in peers) / tp == pytest.approx(expected["sum"], rel=1e-12)
    assert sum(sum(peer["counts"]) for peer in peers) == expected["count"] * tp
    assert any(0 in peer["counts"] for peer in peers)
    assert any(max(peer["counts"]) > 50 for peer in peers)
    for peer in peers:
        assert peer["count"] == expected["count"]
        for name, gradient in expected["gradients"].items():
            assert gradient.abs().max() > 0, name
            torch.testing.assert_close(peer["gradients"][name], gradient, rtol=0, atol=1e-12)


@pytest.mark.timeout(300)
def test_means_over_ranks_would_have_been_wrong(ranks):
    """The windows are unequal enough that a mean of each rank's mean is another number."""
    peers = [peer["window", "dp 2", "thd"] for peer in ranks[2]]
    means = sum(sum(peer["sums"]) / sum(peer["counts"]) for peer in peers) / len(peers)
    assert abs(means - sum(sum(peer["sums"]) for peer in peers) / peers[0]["count"]) > 1e-3
