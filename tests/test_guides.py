"""The pages: the made one is up to date, every link leads somewhere, and the reference can be built."""

from __future__ import annotations

import json
import re
import runpy
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
GUIDES = ROOT / "notebooks" / "guides"
PAGES = [ROOT / "README.md", ROOT / "CHANGELOG.md", *sorted(GUIDES.glob("*.md")), *sorted((ROOT / "notebooks").glob("*.ipynb"))]
_LINK = re.compile(r"(?<!!)\[[^\]]*\]\(([^)\s]+)\)")
_ANCHOR = re.compile(r"^#+ +(.*)$", re.MULTILINE)


def prose(page: Path) -> str:
    """The text of a page, or of a notebook's text cells."""
    text = page.read_text(encoding="utf-8")
    if page.suffix != ".ipynb":
        return text
    return "\n\n".join("".join(cell["source"]) for cell in json.loads(text)["cells"] if cell["cell_type"] == "markdown")


def links(text: str) -> list[str]:
    return _LINK.findall(re.sub(r"^```.*?^```$", "", text, flags=re.DOTALL | re.MULTILINE))


def anchors(text: str) -> set[str]:
    """The names by which GitHub links to the headings of a page."""
    headings = _ANCHOR.findall(re.sub(r"^```.*?^```$", "", text, flags=re.DOTALL | re.MULTILINE))
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def broken(page: Path, link: str) -> str:
    """Why a link of the page leads nowhere; empty where it leads somewhere. What is on the network is only checked in form."""
    if re.match(r"https://[\w.-]+(/\S*)?$", link):
        return ""
    if ":" in link:
        return "neither a path nor https"
    path, _, anchor = link.partition("#")
    target = (page.parent / path).resolve() if path else page
    if not target.exists() or ROOT not in (target, *target.parents):
        return "no such file in this project"
    if anchor and anchor not in anchors(prose(target)):
        return "no such heading"
    return ""


def test_the_page_of_what_must_divide_what_is_made_from_the_tables_as_they_are():
    made = runpy.run_path(str(ROOT / "tests" / "make_guides.py"))
    assert made["PAGE"].read_text(encoding="utf-8") == made["page"](), "run: python tests/make_guides.py"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_every_link_leads_somewhere(page):
    assert {link: why for link in links(prose(page)) if (why := broken(page, link))} == {}


def test_there_are_links_and_one_that_leads_nowhere_is_found():
    assert sum(len(links(prose(page))) for page in PAGES) >= 10
    here = GUIDES / "troubleshooting.md"
    assert broken(here, "#product-of-leading-dims") == ""
    assert [broken(here, link) for link in ("#no-such-heading", "gone.md", "http://example.com", "../../../etc")] == [
        "no such heading",
        "no such file in this project",
        "neither a path nor https",
        "no such file in this project",
    ]


def test_every_guide_and_notebook_is_reached_from_the_index():
    index = {(GUIDES / link).resolve() for link in links(prose(GUIDES / "README.md"))}
    assert {*GUIDES.glob("*.md"), *(ROOT / "notebooks").glob("*.ipynb")} - {GUIDES / "README.md"} <= index


def test_notebooks_hold_no_trace_of_the_machine_that_ran_them():
    for notebook in (ROOT / "notebooks").glob("*.ipynb"):
        cells = json.loads(notebook.read_text(encoding="utf-8"))["cells"]
        outputs = [out for cell in cells for out in cell.get("outputs", [])]
        assert {out.get("name", "stdout") for out in outputs} <= {"stdout"}, f"{notebook.name}: strip what went to stderr"
        assert not [out for out in outputs if out["output_type"] == "error"]
        told = [str({key: value for key, value in out.get("data", {}).items() if key != "image/png"}) for out in outputs]
        told += ["".join(out.get("text", "")) for out in outputs]
        assert not re.search(r"(?<![\w.])/(?:home|root|tmp|opt|usr|work|Users)/", "\n".join(told)), notebook.name


@pytest.mark.skipif(find_spec("pdoc") is None, reason="pdoc, of the extra 'docs', is not installed")
def test_the_reference_is_built_with_the_guides_and_every_public_name(tmp_path):
    import packfp8

    command = [sys.executable, str(ROOT / "tests" / "make_reference.py"), str(tmp_path)]
    subprocess.run(command, check=True, cwd=ROOT, capture_output=True, timeout=200)
    start = (tmp_path / "packfp8.html").read_text(encoding="utf-8")
    assert [name for name in packfp8.__all__ if f'id="{name}"' not in start and name != "__version__"] == []
    for guide in GUIDES.glob("*.md"):
        made = tmp_path / ("guides.html" if guide.stem == "README" else f"guides/{guide.stem}.html")
        text = re.sub(r"<script.*?</script>", "", made.read_text(encoding="utf-8"), flags=re.DOTALL)
        assert guide.read_text(encoding="utf-8").splitlines()[0].removeprefix("# ") in text
        local = [link for link in re.findall(r'href="([^"#]+)', text) if not link.startswith(("http", "mailto"))]
        assert [link for link in local if not (made.parent / link).exists()] == []
    for room in ("rule", "lengths", "packing", "layout", "data", "model", "report"):
        assert (tmp_path / "packfp8" / f"{room}.html").exists()
