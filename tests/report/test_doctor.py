"""The doctor finds what makes training wrong or slow, and says the cure; probes are stand-ins but for the last tests."""

import json

import pytest

from packfp8.report import doctor, probes
from packfp8.report.doctor import BAD, NOTE, cudnn_text

HEALTHY = {
    probes.TORCH: {
        "torch": "2.11.0+cu130", "cuda": "13.0", "cudnn": 91900, "nccl": "2.27.7",
        "gpus": [{"name": "NVIDIA H200", "capability": [9, 0], "bytes": 150_000_000_000}],
    },
    probes.TE: {
        "version": [2, 20, 2], "cudnn": 91900, "cudnn_files": ["/v/nvidia/cudnn/lib/libcudnn.so.9"],
        "recipes": ["delayed", "current", "block", "mxfp8", "nvfp4"], "faults": [],
    },
    probes.ATTENTION: {"backend": "FusedAttention backend (sub-backend 1)", "why": ""},
    probes.TORCHAO: {},
}  # fmt: skip
VERSIONS = {"lhotse": "1.33.0", "urllib3": "2.5", "torchao": "0.18.0", "transformer_engine": "2.20.2"}


@pytest.fixture
def examine():
    """examine(probe=answer, ..., without=(packages,)) -> what the doctor finds on a machine that differs by these answers."""

    def examine(answers=None, without=()):
        told = {**HEALTHY, **(answers or {})}
        versions = {name: number for name, number in VERSIONS.items() if name not in without}
        return doctor(ask=told.__getitem__, version=versions.get)

    return examine


def _bad(found):
    return {finding.name: finding for finding in found.findings if finding.status == BAD}


def test_a_machine_on_which_all_is_well_has_exit_code_0(examine):
    found = examine()
    assert found.exit_code == 0
    values = {finding.name: finding.value for finding in found.findings}
    assert values["cuDNN"] == "one for both: 9.19.0 in Transformer Engine, 9.19.0 in torch"
    assert values["attention"].startswith("FusedAttention backend")
    assert values["recipes"] == "bf16, delayed, current, block, tensorwise, rowwise, rowwise_with_gw_hp"
    assert values["GPU"] == "NVIDIA H200, sm90, 140 GiB"
    assert values["NCCL"] == "2.27.7"


def test_another_cudnn_in_transformer_engine_than_in_torch_is_bad_and_the_cure_is_named(examine):
    found = examine({probes.TE: {**HEALTHY[probes.TE], "cudnn": 91400}})
    assert found.exit_code == 1
    assert "9.14.0 in Transformer Engine, 9.19.0 in torch" in _bad(found)["cuDNN"].value
    assert "LD_LIBRARY_PATH" in _bad(found)["cuDNN"].cure


def test_cudnn_from_two_folders_is_bad_though_the_versions_agree(examine):
    files = ["/v/nvidia/cudnn/lib/libcudnn.so.9", "/usr/lib/libcudnn_graph.so.9"]
    found = examine({probes.TE: {**HEALTHY[probes.TE], "cudnn_files": files}})
    assert "/usr/lib and /v/nvidia/cudnn/lib" in _bad(found)["cuDNN"].value


@pytest.mark.parametrize("backend", ["UnfusedDotProductAttention backend", ""])
def test_attention_that_is_not_fused_is_bad(examine, backend):
    found = examine({probes.ATTENTION: {"backend": backend, "why": "Disabling FusedAttention as no backend"}})
    assert found.exit_code == 1
    assert "4 to 5 times slower" in _bad(found)["attention"].value
    assert "Disabling FusedAttention as no backend" in _bad(found)["attention"].value


def test_attention_that_fails_is_bad(examine):
    found = examine({probes.ATTENTION: {"fault": "RuntimeError: CUDNN_STATUS_SUBLIBRARY_LOADING_FAILED"}})
    assert "CUDNN_HOME" in _bad(found)["attention"].cure


def test_a_transformer_engine_that_cannot_be_loaded_is_bad_on_a_gpu(examine):
    found = examine({probes.TE: {"fault": "FileNotFoundError: no extension"}})
    assert found.exit_code == 1
    assert "no extension" in _bad(found)["Transformer Engine"].value
    recipes = next(finding.value for finding in found.findings if finding.name == "recipes")
    assert recipes == "bf16, tensorwise, rowwise, rowwise_with_gw_hp"


def test_recipes_are_those_of_the_least_gpu(examine):
    old = {**HEALTHY[probes.TORCH], "gpus": [*HEALTHY[probes.TORCH]["gpus"], {"name": "A", "capability": [8, 0], "bytes": 1}]}
    found = examine({probes.TORCH: old})
    assert next((f.value, f.status) for f in found.findings if f.name == "recipes") == ("bf16", NOTE)


def test_without_a_gpu_nothing_is_wrong_but_it_is_said(examine):
    found = examine({probes.TORCH: {**HEALTHY[probes.TORCH], "gpus": []}, probes.TE: {"fault": "no CUDA GPU"}})
    assert found.exit_code == 0
    assert any(finding.name == "GPU" and finding.status == NOTE for finding in found.findings)


def test_with_no_library_at_all_it_still_answers(examine):
    found = examine({probes.TORCH: {"fault": "ModuleNotFoundError: No module named 'torch'"}}, without=VERSIONS)
    assert set(_bad(found)) == {"torch"}


def test_lhotse_without_urllib3_is_known_to_fail(examine):
    assert _bad(examine(without=("urllib3",)))["lhotse"].cure == "pip install urllib3"


def test_a_known_fault_of_the_installed_transformer_engine_is_noted(examine):
    found = examine({probes.TE: {**HEALTHY[probes.TE], "faults": [["FusedAdam", "its states are of the wrong type", "2.12"]]}})
    assert found.exit_code == 0
    (noted,) = [finding for finding in found.findings if "FusedAdam" in finding.value]
    assert noted.status == NOTE
    assert noted.cure.endswith("2.12")


def test_json_has_the_keys_that_scripts_read(examine):
    told = json.loads(json.dumps(examine().to_dict()))
    assert tuple(told) == ("healthy", "findings")
    assert all(tuple(finding) == ("name", "value", "status", "cure") for finding in told["findings"])


@pytest.mark.parametrize(("number", "text"), [(91900, "9.19.0"), (90100, "9.1.0"), (8907, "8.9.7"), (None, "none")])
def test_cudnn_numbers_are_written_as_versions(number, text):
    assert cudnn_text(number) == text


def test_a_probe_answers_from_a_process_of_its_own():
    assert probes.ask("    print('noise')\n    return {'pid': __import__('os').getpid()}")["pid"] != __import__("os").getpid()


def test_a_probe_that_raises_or_crashes_or_hangs_is_an_answer(monkeypatch):
    assert probes.ask("    raise OSError('no such\\nlibrary')") == {"fault": "OSError: no such library"}
    assert "ended with code -11" in probes.ask("    import os; os.kill(os.getpid(), 11)")["fault"]
    monkeypatch.setattr(probes, "_SECONDS", 0.5)
    assert "no answer within 0.5 s" in probes.ask("    import time; time.sleep(30)")["fault"]


def test_this_machine_can_be_examined():
    found = doctor()
    assert {"python", "torch", "GPU"} <= {finding.name for finding in found.findings}
