"""The page in a real browser: nothing is asked of a network, nothing is wrong in the console, nothing sticks out."""

import html.parser
import json
import re
import shutil
import subprocess

import numpy as np
import pytest

from packfp8 import Topology
from packfp8.report import payoff, report

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
FLAGS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
    "--disable-component-update", "--disable-sync", "--enable-logging=stderr", "--log-level=0",
)  # fmt: skip
BROWSERS_OWN = ("google.com", "googleapis.com", "gstatic.com")  # Chromium asks these at its start, whatever the page


class Stand:
    """Made-up times of one recipe."""

    device, versions, recipes = "stand-in <GPU> & co", {"torch": "0"}, ("current",)
    baseline, blocks = (lambda self, recipe: "bf16"), (lambda self, recipe: ("linear", "layer"))

    def time(self, case):
        return tuple(case.tokens * (0.7 if case.recipe == "current" else 1) * x for x in (1, 1.01, 1.05))


@pytest.fixture(scope="module")
def pages(tmp_path_factory):
    """Name -> path of a page of each kind."""
    folder = tmp_path_factory.mktemp("pages")
    lengths = np.random.default_rng(0).lognormal(5.5, 0.9, 3000).astype(np.int64) + 4
    np.save(folder / "lengths<b>.npy", lengths)
    (folder / "bad.jsonl").write_text('{"duration": 1.0, "text": "<script>alert(1)</script>"}\n{"text": </b>\n')
    paths = [folder / "lengths<b>.npy", folder / "bad.jsonl"]
    full = report(paths, budget=4096, recipe="block", topology=Topology(dp=4, cp=2), compare=True)
    made = {
        "report": full.html(),
        "bshd": report(paths, budget=8192, layout="bshd", recipe="current").html(),
        "payoff": payoff(tokens=[1024, 2048, 4096], timer=Stand()).html(),
    }
    for name, text in made.items():
        (folder / f"{name}.html").write_text(text, encoding="utf-8")
    return {name: folder / f"{name}.html" for name in made}


@pytest.fixture
def browse(tmp_path):
    """browse(path, *flags) -> the DOM after loading, the console's lines, and the hosts that were asked."""
    if CHROMIUM is None:
        pytest.skip("no Chromium on this machine: the page is not tested in a browser")

    def browse(path, *flags):
        log = tmp_path / "net.json"
        command = [CHROMIUM, *FLAGS, f"--user-data-dir={tmp_path / 'profile'}", f"--log-net-log={log}", *flags, "--dump-dom"]
        run = subprocess.run([*command, f"file://{path}"], capture_output=True, text=True, timeout=90, check=True)
        console = [line for line in run.stderr.splitlines() if "CONSOLE" in line]
        hosts = set(re.findall(r'"(?:https?|wss?|ftp)://([\w.-]+)', log.read_text()))
        return run.stdout, console, {host for host in hosts if not host.endswith(BROWSERS_OWN)}

    return browse


@pytest.mark.timeout(120)
@pytest.mark.parametrize("name", ["report", "bshd", "payoff"])
def test_a_page_asks_for_nothing_and_logs_nothing(pages, browse, name):
    dom, console, asked = browse(pages[name])
    assert dom.count("<svg") >= 4
    assert console == []
    assert asked == set()


@pytest.mark.timeout(120)
def test_the_browser_test_can_fail(pages, browse, tmp_path):
    broken = pages["report"].read_text().replace("</body>", '<img src="http://127.0.0.1:9/x.png"><script>1</script></body>')
    open_policy = re.sub(r"<meta http-equiv[^>]*>", "", broken)
    (tmp_path / "broken.html").write_text(broken)
    (tmp_path / "open.html").write_text(open_policy)
    assert browse(tmp_path / "broken.html")[1] != []
    assert browse(tmp_path / "open.html")[2] == {"127.0.0.1"}


@pytest.mark.timeout(120)
@pytest.mark.parametrize("width", [400, 1200])
@pytest.mark.parametrize("name", ["report", "payoff"])
def test_nothing_sticks_out_of_the_page(pages, browse, tmp_path, name, width):
    probe = (
        "<script>addEventListener('load', () => setTimeout(() => { const root = document.querySelector('.packfp8');"
        "const out = [...root.children].filter(e => e.getBoundingClientRect().right > innerWidth + 1).length;"
        "const small = [...document.querySelectorAll('svg text')].filter(t => t.textContent.trim() && "
        "t.getBoundingClientRect().height < 9).length;"
        "parent.postMessage({out, small, scroll: document.documentElement.scrollWidth > innerWidth}, '*') }))</script>"
    )
    page = re.sub(r"<meta http-equiv[^>]*>", "", pages[name].read_text()).replace("</body>", probe + "</body>")
    (tmp_path / "inner.html").write_text(page)
    (tmp_path / "outer.html").write_text(
        f"<iframe src=inner.html style='width:{width}px;height:3000px;border:0'></iframe>"
        "<script>onmessage = e => document.body.setAttribute('data-seen', JSON.stringify(e.data))</script>"
    )
    dom, _, _ = browse(tmp_path / "outer.html", "--window-size=1300,3000", "--virtual-time-budget=3000")
    seen = json.loads(re.search(r'data-seen="([^"]*)"', dom)[1].replace("&quot;", '"'))
    assert seen == {"out": 0, "small": 0, "scroll": False}


def test_text_of_the_manifests_is_not_markup(pages):
    text = pages["report"].read_text()
    assert "<script" not in text
    assert "lengths&lt;b&gt;.npy" in text
    assert "stand-in &lt;GPU&gt; &amp; co" in pages["payoff"].read_text()


@pytest.mark.parametrize("name", ["report", "bshd", "payoff"])
def test_every_id_is_used_once_and_every_colour_follows_the_theme(pages, name):
    class Ids(html.parser.HTMLParser):
        seen = ()

        def handle_starttag(self, tag, attrs):
            self.seen = (*self.seen, *(value for key, value in attrs if key == "id"))

    parser, text = Ids(), pages[name].read_text()
    parser.feed(text)
    assert len(parser.seen) == len(set(parser.seen)) > 0
    body = text[text.index("<body>") :]
    drawn = "".join(re.findall(r"<svg.*?</svg>", body, flags=re.DOTALL))
    assert re.findall(r"#[0-9a-f]{6}\b", drawn) == []


def test_the_page_of_the_same_figures_is_the_same(pages, tmp_path, lengths_file):
    path = lengths_file(np.arange(1, 200))
    first, second = (report(path, budget=1024, compare=True).html() for _ in range(2))
    assert first == second


def test_a_notebook_gets_the_content_without_a_document(lengths_file):
    shown = report(lengths_file(np.arange(1, 200)), budget=1024)._repr_html_()
    assert "<svg" in shown
    assert "<html" not in shown


def test_a_figure_holds_all_charts(lengths_file):
    figure = report(lengths_file(np.arange(1, 200)), budget=1024, topology=Topology(dp=2), compare=True).figure()
    assert len(figure.axes) == 7
    assert all(axes.get_xlabel() for axes in figure.axes)
    assert len(payoff(tokens=[1024, 2048], timer=Stand()).figure().axes) == 4
