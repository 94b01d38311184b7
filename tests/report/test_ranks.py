"""Two real processes over gloo come to the report of one; what one of them cannot read stops both, at once."""

import json
import os
import socket
import subprocess
import sys

import pytest

from packfp8 import Topology
from packfp8.report import report

_SCRIPT = """
import json, os, sys
from packfp8 import Topology
from packfp8.errors import PackError
from packfp8.report import launched, report
with launched() as ranks:
    for paths in json.loads(sys.argv[1]):
        paths = [path.replace("{rank}", os.environ["RANK"]) for path in paths]
        try:
            told = report(paths, budget=512, topology=Topology(dp=2), compare=True, ranks=ranks)
            print("@" + json.dumps({**told.to_dict(), "named": told.rejected.named}))
        except PackError as fault:
            print("@" + json.dumps({"what": fault.what}))
"""


@pytest.fixture
def files(write, rows):
    """Five manifests of several kinds, bad lines in two of them."""
    bad = write("nemo.json", rows * 3, "bad.jsonl")
    bad.write_bytes(bad.read_bytes() + b"{\n")
    worse = write("nemo.json", rows, "worse.jsonl")
    worse.write_bytes(b"nothing\n" + worse.read_bytes())
    return [bad, write("cuts.jsonl.gz", rows * 5), write("table.csv", rows), worse, write("kaldi", rows)]


def _launch(cases, size=2):
    """What each of `size` processes says about each case."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free.getsockname()[1])}
    command = [sys.executable, "-c", _SCRIPT, json.dumps([[str(path) for path in case] for case in cases])]
    processes = []
    for rank in range(size):
        place = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(size), "LOCAL_WORLD_SIZE": str(size)}
        env = {**os.environ, **address, **place}
        processes.append(subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True))
    told = []
    for process in processes:
        out, err = process.communicate(timeout=100)
        assert process.returncode == 0, err
        told.append([json.loads(line[1:]) for line in out.splitlines() if line.startswith("@")])
    return told


@pytest.mark.timeout(150)
def test_two_processes_report_what_one_reports_and_neither_waits_for_one_that_fails(files, tmp_path):
    (tmp_path / "only-0.jsonl").write_bytes(files[0].read_bytes())
    for rank in range(2):
        (tmp_path / f"part-{rank}.jsonl").write_bytes(files[0].read_bytes())
    cases = [[*files, tmp_path / "only-{rank}.jsonl"], [*files, tmp_path / "part-{rank}.jsonl"], files]
    first, second = _launch(cases)
    assert first == second
    missing, differing, whole = first
    assert "only-1.jsonl names no file" in missing["what"]
    assert "rank 1 finds other manifests than rank 0" in differing["what"]

    alone = report(files, budget=512, topology=Topology(dp=2), compare=True)
    assert sorted(whole.pop("named")) == sorted(alone.rejected.named)
    assert whole == json.loads(json.dumps(alone.to_dict()))
    assert whole["examples"] == 6 * (3 + 5 + 1 + 1 + 1)
    assert whole["rejected"] == 2
