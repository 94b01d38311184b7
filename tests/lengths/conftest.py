"""Fixtures of the lengths room: outside data and examples."""

from __future__ import annotations

import importlib.util
import os
import sys
from pathlib import Path

import pytest

from packfp8.data.example import Clip, Example, Turn


@pytest.fixture
def data_dir() -> Path:
    """The folder of outside data."""
    folder = os.environ.get("PACKFP8_TEST_DATA")
    if not folder:
        pytest.skip("PACKFP8_TEST_DATA is not set: the real Kaldi counts are not here")
    return Path(folder)


@pytest.fixture(scope="session")
def kaldi_agreement():
    """The reporting script as a module."""
    spec = importlib.util.spec_from_file_location("kaldi_agreement", Path(__file__).with_name("kaldi_agreement.py"))
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="session")
def clip():
    """clip(samples, rate=16_000): a piece of audio that is never read."""
    return lambda samples=16_000, rate=16_000: Clip(source=None, num_samples=samples, sample_rate=rate)


@pytest.fixture(scope="session")
def conversation():
    """conversation(("user", part, ...), ("assistant", part, ...), id="ex"): an example."""
    return lambda *turns, id="ex": Example(id=id, turns=tuple(Turn(role, tuple(parts)) for role, *parts in turns))
