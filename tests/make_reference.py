"""Builds the reference from the docstrings, and the guides beside it, as pages of HTML.

    pip install '.[docs]'
    python tests/make_reference.py build/reference

What only the GPU side imports need not be installed.
"""

from __future__ import annotations

import pkgutil
import re
import sys
import tempfile
import warnings
from pathlib import Path

import pdoc

ROOT = Path(__file__).parent.parent
GUIDES = ROOT / "notebooks" / "guides"
_GUIDE, _ELSEWHERE = re.compile(r"\]\((\w+)\.md"), re.compile(r"\[([^\]]*)\]\(\.\./[^)\s]*\)")


def write_guides(folder: Path) -> list[str]:
    """The names of modules that it writes into the folder: without code, each with a guide as its docstring."""
    package, names = folder / "guides", ["guides"]
    package.mkdir()
    for guide in sorted(GUIDES.glob("*.md")):
        index = guide.stem == "README"
        text = _ELSEWHERE.sub(r"\1", guide.read_text(encoding="utf-8"))  # notebooks and README are no part of the site
        text = _GUIDE.sub(r"](guides/\1.html" if index else r"](\1.html", text)
        (package / f"{'__init__' if index else guide.stem}.py").write_text(f"{text!r}\n__all__ = []\n", encoding="utf-8")
        names += [] if index else [f"guides.{guide.stem}"]
    return names


def modules() -> list[str]:
    """Every public module of the package; `__all__` of a room names what is in them, not themselves."""
    import packfp8

    found = [one.name for one in pkgutil.walk_packages(packfp8.__path__, "packfp8.")]
    return ["packfp8", *(name for name in found if not name.rpartition(".")[2].startswith("_"))]


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: python tests/make_reference.py FOLDER")
    warnings.simplefilter("ignore")  # of the libraries that are imported
    with tempfile.TemporaryDirectory() as folder:
        pages = write_guides(Path(folder))
        sys.path[:0] = [str(ROOT), folder]
        pdoc.render.configure(docformat="google", search=True)
        pdoc.pdoc(*pages, *modules(), output_directory=Path(sys.argv[1]))
