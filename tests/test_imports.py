"""What importing costs: each room loads only what it says, and each public name is found in its room."""

import importlib
import subprocess
import sys

import pytest

import packfp8

HEAVY = ("torch", "lhotse", "numpy", "scipy", "soundfile")


def loaded_by(statement: str) -> set[str]:
    """Which of the heavy packages a fresh interpreter has loaded after `statement`."""
    ask = f"{statement}\nimport sys\nprint(*(name for name in {HEAVY} if name in sys.modules))"
    made = subprocess.run([sys.executable, "-c", ask], capture_output=True, text=True, check=True)
    return set(made.stdout.split())


@pytest.mark.parametrize("statement", ["import packfp8", "import packfp8.errors", "from packfp8.rule import align, Topology"])
def test_the_ground_floor_loads_nothing_heavy(statement):
    assert loaded_by(statement) == set()


def test_a_rule_is_asked_and_explained_without_numpy():
    ask = "import packfp8\nstr(packfp8.align('block', packfp8.Topology(cp=2)))\ndir(packfp8)"
    assert loaded_by(ask) == set()


@pytest.mark.parametrize("room", ["lengths", "packing", "layout"])
def test_rooms_below_data_load_numpy_at_most(room):
    assert loaded_by(f"import packfp8.{room}") == {"numpy"}


@pytest.mark.parametrize("name", ["torch", "numpy"])
def test_this_check_sees_a_module_that_does_load_something(tmp_path, name):
    (tmp_path / "heavy.py").write_text(f"import {name}\n")
    assert name in loaded_by(f"import sys; sys.path.insert(0, {str(tmp_path)!r})\nimport packfp8, heavy")


@pytest.mark.parametrize("name", packfp8.__all__)
def test_every_public_name_is_found_in_its_room(name):
    value = getattr(packfp8, name)
    if hasattr(value, "__module__"):
        assert value.__module__.startswith("packfp8.")
        room = importlib.import_module(".".join(value.__module__.split(".")[:2]))
        assert getattr(room, name) is value
    assert getattr(packfp8, name) is value


def test_a_name_that_is_not_public_is_an_attribute_error():
    with pytest.raises(AttributeError, match="module 'packfp8' has no attribute 'Colator'"):
        _ = packfp8.Colator
    assert set(dir(packfp8)) == set(packfp8.__all__)
