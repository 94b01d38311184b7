"""What every test shares: outside data by one variable, GPU tests by one mark, examples that
do not change from run to run, errors read line by line."""

import os
from pathlib import Path

import pytest
from hypothesis import settings

from packfp8.errors import PackError

settings.register_profile("packfp8", max_examples=60, deadline=None, derandomize=True)
settings.load_profile("packfp8")


@pytest.fixture(scope="session")
def outside_data():
    """The folder of real audio and real lengths that PACKFP8_TEST_DATA names; skips where it is unset."""
    folder = os.environ.get("PACKFP8_TEST_DATA")
    if not folder:
        pytest.skip("PACKFP8_TEST_DATA is unset: no outside audio or lengths on this machine")
    return Path(folder)


@pytest.fixture(scope="session")
def five_lines():
    """five_lines(error, what, got, expected, because, fix): each line of the message holds the given piece."""

    def check(error: PackError, **pieces: str) -> None:
        lines = str(error).split("\n")
        assert len(lines) == 5
        assert pieces.keys() == {"what", "got", "expected", "because", "fix"}
        for (name, piece), line in zip(pieces.items(), lines, strict=True):
            assert name == "what" or line.strip().startswith(f"{name}:")
            assert piece in line, f"{name}: {piece!r} not in {line!r}"

    return check


def pytest_collection_modifyitems(items):
    reason = _no_gpu()
    for item in items if reason else ():
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason=reason))


def _no_gpu():
    import torch

    if not torch.cuda.is_available():
        return "no CUDA GPU on this machine"
    if torch.cuda.get_device_capability() < (8, 9):
        return f"the GPU is sm{''.join(map(str, torch.cuda.get_device_capability()))}; FP8 needs sm89"
    return None
