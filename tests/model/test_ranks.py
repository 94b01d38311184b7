"""Two real processes: FSDP where one rank has no audio, CP where each holds a slab, one count over both."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from packfp8.data import Collator
from packfp8.rule import align

SCRIPT = Path(__file__).parent / "ranks.py"


@pytest.fixture(scope="module")
def ranks():
    spec = importlib.util.spec_from_file_location("packfp8_test_ranks", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """What the two processes saved, by rank and kind; one start for all kinds."""
    folder, root = tmp_path_factory.mktemp("ranks"), str(Path(__file__).parents[2])
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([root, *filter(None, [os.environ.get("PYTHONPATH")])])}
    commands = [[sys.executable, str(SCRIPT), str(rank), str(folder)] for rank in range(2)]
    started = [subprocess.Popen(command, env=env, stderr=subprocess.PIPE, text=True) for command in commands]
    try:
        said = [process.communicate(timeout=120)[1] for process in started]
    finally:
        for process in started:
            process.kill()
    assert [process.returncode for process in started] == [0, 0], "\n".join(said)
    return [torch.load(folder / f"{rank}.pt") for rank in range(2)]


@pytest.mark.parametrize(("kind", "clips"), [("fsdp", [1, 0]), ("cp", [1, 1])])
def test_two_ranks_give_the_gradient_of_one_batch(ranks, results, kind, clips):
    rule = align("block")
    batch, model = Collator(measure=ranks.MEASURE, rule=rule)(ranks.examples()), ranks.make_model(rule)
    out = model(batch, global_supervised=batch.num_supervised)
    out.loss.backward()
    own = [result[kind] for result in results]
    assert [result["clips"] for result in own] == clips
    assert [result["count"].item() for result in own] == [batch.num_supervised] * 2
    assert sum(result["sum"] for result in own).item() == pytest.approx(out.loss_sum.item(), rel=0, abs=1e-9)
    for name, parameter in model.named_parameters():
        assert parameter.grad.abs().max() > 1e-7
        for result in own:
            torch.testing.assert_close(result["grads"][name], parameter.grad, rtol=0, atol=1e-10)
