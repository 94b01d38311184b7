"""report, payoff and doctor on the command line: options and keys are a contract, exit codes mean what they say."""

import json
import os
import subprocess
import sys

import pytest
from click.testing import CliRunner

from packfp8.cli import main

OPTIONS = {
    "report": "budget recipe dp cp tp sp layout frozen fast lookahead max-sequences frames-per-second tokenizer prompt-tokens "
    "payoff static frame-budget html compare json help",
    "payoff": "hidden ffn layers tokens recipes html json help",
    "doctor": "json help",
}


@pytest.fixture
def run():
    """run(words...) -> what the command gave."""
    return lambda *words: CliRunner().invoke(main, [str(word) for word in words])


@pytest.mark.parametrize("command", OPTIONS)
def test_options_are_those_of_the_contract_and_help_shows_an_example_on_one_screen(run, command):
    text = run(command, "--help").output
    declared = [name for option in main.commands[command].params for name in option.opts if name.startswith("--")]
    assert {name.removeprefix("--") for name in declared} | {"help"} == set(OPTIONS[command].split())
    assert f"Example:  packfp8 {command} " in text
    assert len(text.splitlines()) <= 40


def test_report_prints_a_table_or_json_and_writes_a_page(run, write, rows, tmp_path):
    path = write("nemo.json", rows)
    words = ("report", path, "--budget", 512, "--recipe", "block", "--cp", 2, "--dp", 2, "--compare")
    shown = run(*words, "--html", tmp_path / "page.html")
    assert shown.exit_code == 0
    assert "A budget of 512 wastes" in shown.output
    assert "best-fit decreasing" in shown.output
    assert (tmp_path / "page.html").read_text().startswith("<!doctype html>")
    told = json.loads(run(*words, "--json").output)
    assert told["examples"] == len(rows)
    assert [rival["name"] for rival in told["compare"]][-1] == "packfp8"


def test_settings_reach_the_report(run, write, rows):
    path = write("nemo.json", rows)
    base = json.loads(run("report", path, "--budget", 512, "--json").output)["tokens_real"]
    longer = run("report", path, "--budget", 512, "--json", "--prompt-tokens", 3, "--frames-per-second", 25).output
    frames = sum(round(seconds * 16000) // 640 - round(seconds * 16000) // 1280 for seconds, _ in rows)
    assert json.loads(longer)["tokens_real"] == base + 3 * len(rows) + frames
    tokens = json.loads(run("report", path, "--budget", 512, "--json", "--tokenizer", "bytes").output)["tokens_real"]
    assert tokens > base
    few = json.loads(run("report", path, "--budget", 512, "--json", "--max-sequences", 1).output)
    assert few["packs"] == len(rows)


def test_rejected_lines_do_not_change_the_exit_code_and_nothing_readable_does(run, write, rows, tmp_path):
    bad = tmp_path / "bad.jsonl"
    bad.write_text("{\n")
    shown = run("report", write("nemo.json", rows), bad, "--budget", 512)
    assert shown.exit_code == 0
    assert f"{bad}:1:notJSON" in "".join(shown.output.split())
    assert run("report", bad, "--budget", 512).exit_code == 1


@pytest.mark.parametrize(
    ("words", "code"),
    [
        (("report", "missing.jsonl", "--budget", 512), 1),
        (("report", "missing.jsonl", "--budget", 8, "--recipe", "block"), 1),
        (("report", "missing.jsonl"), 2),
        (("report", "--budget", 512), 2),
        (("report", "x", "--budget", 512, "--recipe", "auto"), 2),
        (("payoff", "--tokens", "1024,many"), 2),
        (("payoff", "--hidden", 100), 1),
    ],
    ids=str,
)
def test_exit_codes_tell_bad_data_from_wrong_usage(run, words, code):
    assert run(*words).exit_code == code


def test_payoff_without_a_gpu_is_told_and_exits_with_1(run, monkeypatch):
    import torch

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    shown = run("payoff", "--json")
    assert shown.exit_code == 1
    assert "no CUDA GPU" in shown.output


def test_doctor_exits_with_what_it_finds(run, monkeypatch):
    from packfp8.report import doctor, probes

    asked = []
    monkeypatch.setattr(doctor, "__defaults__", (lambda body: asked.append(body) or {"fault": "no torch"}, lambda name: None))
    shown = run("doctor", "--json")
    assert shown.exit_code == 1
    assert json.loads(shown.output)["healthy"] is False
    assert asked == [probes.TORCH]


@pytest.mark.timeout(100)
def test_torchrun_prints_one_report(write, rows, tmp_path):
    paths = [write("nemo.json", rows, f"m{n}.json") for n in range(3)]
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port", "0", "--standalone"]
    words = ["-m", "packfp8", "report", *map(str, paths), "--budget", "512", "--json"]
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run([*command, *words], capture_output=True, text=True, timeout=90, env=env)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["examples"] == 3 * len(rows)
