"""Every snippet of the README and of the guides runs: Python blocks in the order of their page, and `packfp8` command lines.

A comment `<!-- needs: NAME -->` on the line before a block names a package, or "gpu", without which it is compiled only. A
fence without a language right after a Python block is what that block prints.
"""

from __future__ import annotations

import contextlib
import io
import re
import shlex
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner

from packfp8 import corpus
from packfp8.cli import main

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "notebooks" / "guides").glob("*.md"))]
_FENCE = re.compile(r"(?:<!-- needs: (?P<needs>\w+) -->\n)?^```(?P<language>\w*)\n(?P<text>.*?)^```$", re.DOTALL | re.MULTILINE)


@dataclass(frozen=True, kw_only=True, slots=True)
class Snippet:
    """A fenced block of a page: its language, its text, the line it starts on, what it needs, and what it prints if told."""

    page: Path
    line: int
    language: str
    text: str
    needs: str
    printed: str | None

    @property
    def runs_here(self) -> bool:
        return not self.needs or (torch.cuda.is_available() if self.needs == "gpu" else find_spec(self.needs) is not None)


def snippets(page: Path) -> list[Snippet]:
    text = page.read_text(encoding="utf-8")
    fences = list(_FENCE.finditer(text))
    found = []
    for fence, after in zip(fences, [*fences[1:], None], strict=True):
        tells = after is not None and not after["language"] and not text[fence.end() : after.start()].strip()
        found.append(
            Snippet(
                page=page,
                line=text.count("\n", 0, fence.start("text")),
                language=fence["language"],
                text=fence["text"],
                needs=fence["needs"] or "",
                printed=after["text"] if tells else None,
            )
        )
    return found


def commands(page: Path) -> list[tuple[Snippet, str]]:
    """The lines of shell blocks that start with packfp8, with or without a prompt sign."""
    shells = [one for one in snippets(page) if one.language in ("bash", "console", "sh")]
    return [
        (one, line.removeprefix("$ "))
        for one in shells
        for line in one.text.splitlines()
        if line.startswith(("packfp8 ", "$ packfp8 "))
    ]


def run_python(page: Path) -> int:
    """How many blocks of the page ran, one after another in one namespace."""
    namespace, ran = {"__name__": "__main__"}, 0
    for one in snippets(page):
        if one.language != "python":
            continue
        code = compile("\n" * one.line + one.text, str(page), "exec")
        if not one.runs_here:
            continue
        with contextlib.redirect_stdout(io.StringIO()) as printed:
            exec(code, namespace)
        if one.printed is not None:
            assert printed.getvalue().rstrip() == one.printed.rstrip(), f"{page.name}:{one.line} prints something else"
        ran += 1
    return ran


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A user's folder: a manifest, and recordings each with its text beside it."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "data").mkdir()
    corpus().to_file("data/train.jsonl.gz")
    (tmp_path / "my_recordings").mkdir()
    for cut in corpus().subset(first=6):
        source = Path(cut.recording.sources[0].source)
        (tmp_path / "my_recordings" / source.name).write_bytes(source.read_bytes())
        (tmp_path / "my_recordings" / f"{source.stem}.txt").write_text(cut.supervisions[0].text, encoding="utf-8")
    return tmp_path


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
@pytest.mark.filterwarnings("default")  # a user's own session; torchao and lhotse warn at import
def test_every_python_snippet_of_a_page_runs_and_prints_what_the_page_says(page, folder):
    told = [one for one in snippets(page) if one.language == "python" and one.runs_here]
    assert run_python(page) == len(told)


@pytest.mark.parametrize(
    ("one", "line"),
    [pytest.param(*found, id=f"{page.stem}:{found[1]}") for page in PAGES for found in commands(page)],
)
@pytest.mark.filterwarnings("default")
def test_every_command_line_of_a_page_ends_well(one, line, folder):
    if not one.runs_here:
        pytest.skip(f"needs {one.needs}")
    arguments = shlex.split(line, comments=True)[1:]
    result = CliRunner().invoke(main, arguments)
    allowed = (0, 1) if arguments[0] == "doctor" else (0,)  # 1: something is wrong with this machine, not with the page
    assert result.exit_code in allowed, f"{one.page.name}: {line}\n{result.output}"


def test_the_pages_have_snippets_in_them():
    pythons = {page.relative_to(ROOT).as_posix(): sum(s.language == "python" for s in snippets(page)) for page in PAGES}
    assert pythons["README.md"] >= 1
    assert pythons["notebooks/guides/troubleshooting.md"] >= 4
    assert pythons["notebooks/guides/migration.md"] >= 4
    assert sum(len(commands(page)) for page in PAGES) >= 6
    assert any(one.printed for one in snippets(ROOT / "README.md"))


@pytest.mark.parametrize(
    ("text", "raises"),
    [
        ("```python\nfrom packfp8 import no_such_name\n```\n", ImportError),
        ("```python\nprint(1)\n```\n\n```\n2\n```\n", AssertionError),
        ("<!-- needs: no_such_package -->\n```python\nthis is no Python\n```\n", SyntaxError),
    ],
)
def test_a_snippet_that_is_wrong_is_found(text, raises, tmp_path):
    page = tmp_path / "page.md"
    page.write_text(text, encoding="utf-8")
    with pytest.raises(raises):
        run_python(page)
