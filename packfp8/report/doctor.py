"""Doctor: whether this machine would train packed FP8 batches rightly and fast, and what cures it where it would not."""

from __future__ import annotations

import platform
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass

from packfp8.report import probes
from packfp8.rule import RECIPES

OK, NOTE, BAD = "ok", "note", "bad"
"""In order; worth knowing; training would be wrong or needlessly slow."""

_PACKAGES = ("packfp8", "numpy", "lhotse", "soundfile", "torchao", "transformer_engine", "flash-attn", "nvidia-cudnn-cu13")
_CUDNN_CURE = (
    "nvidia=$(python -c 'import nvidia; print(list(nvidia.__path__)[0])'); export CUDNN_HOME=$nvidia/cudnn "
    "LD_LIBRARY_PATH=$(ls -d $nvidia/*/lib | tr '\\n' ':')$LD_LIBRARY_PATH"
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Finding:
    """One thing found.

    Attributes:
        name: what was looked at.
        value: what was found.
        status: OK, NOTE or BAD.
        cure: what to do about it; empty where nothing need be done.
    """

    name: str
    value: str
    status: str = OK
    cure: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Doctor:
    """All findings, in the order in which they matter to a reader."""

    findings: tuple[Finding, ...]

    @property
    def exit_code(self) -> int:
        """1 where training would be wrong or needlessly slow, else 0."""
        return int(any(finding.status == BAD for finding in self.findings))

    def to_dict(self) -> dict:
        """The findings under the keys of `packfp8 doctor --json`."""
        return {"healthy": not self.exit_code, "findings": [asdict(finding) for finding in self.findings]}

    def table(self):
        """The findings for a terminal: a rich renderable."""
        from packfp8.report.table import doctor_table

        return doctor_table(self)


def doctor(ask: Callable[[str], dict] = probes.ask, version: Callable[[str], str | None] | None = None) -> Doctor:
    """What is found on this machine.

    Args:
        ask: runs a probe; a stand-in in tests.
        version: the installed version of a package, or None.
    """
    version = version or installed
    found = [*_versions(version)]
    torch = ask(probes.TORCH)
    found += _torch(torch)
    gpus = torch.get("gpus", [])
    te = {} if version("transformer_engine") is None else ask(probes.TE)
    found += _te(te, torch, gpus)
    if gpus and te and "fault" not in te:
        found += _attention(ask(probes.ATTENTION), te, torch)
    torchao = None if version("torchao") is None else ask(probes.TORCHAO)
    found += _recipes(gpus, te, torchao)
    found += _known_bad(version, te)
    return Doctor(findings=tuple(found))


def installed(package: str) -> str | None:
    """The version of an installed package; None where it is not. The package is not imported."""
    import importlib.metadata  # takes as long as everything else here, which processes that count lines do without

    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def cudnn_text(number: int | None) -> str:
    """A cuDNN version as people write it: 91900 is 9.19.0 (from 9.0 on in steps of 10,000 and 100, before of 1,000)."""
    if not number:
        return "none"
    major, rest = divmod(number, 10_000) if number >= 90_000 else divmod(number, 1_000)
    return f"{major}.{rest // 100}.{rest % 100}"


def _versions(version: Callable[[str], str | None]) -> Iterator[Finding]:
    yield Finding(name="python", value=platform.python_version())
    for package in _PACKAGES:
        yield Finding(name=package, value=version(package) or "not installed")


def _torch(told: dict) -> Iterator[Finding]:
    if "fault" in told:
        cure = "pip install 'torch>=2.11'"
        yield Finding(name="torch", value=f"cannot be imported: {told['fault']}", status=BAD, cure=cure)
        return
    yield Finding(name="torch", value=f"{told['torch']}, CUDA {told['cuda'] or 'none'}, cuDNN {cudnn_text(told['cudnn'])}")
    for gpu in told["gpus"]:
        major, minor = gpu["capability"]
        yield Finding(name="GPU", value=f"{gpu['name']}, sm{major}{minor}, {gpu['bytes'] / 2**30:.0f} GiB")
    if told["gpus"]:
        yield Finding(name="NCCL", value=told["nccl"])
    else:
        yield Finding(name="GPU", value="none: data can be prepared here, but nothing trains in FP8", status=NOTE)


def _te(told: dict, torch: dict, gpus: list) -> Iterator[Finding]:
    if not gpus or not told:
        return
    if "fault" in told:
        cure = "pip install --no-build-isolation 'transformer-engine[pytorch]', built for this torch and CUDA"
        yield Finding(name="Transformer Engine", value=f"cannot be loaded: {told['fault']}", status=BAD, cure=cure)
        return
    versions = f"{cudnn_text(told['cudnn'])} in Transformer Engine, {cudnn_text(torch['cudnn'])} in torch"
    folders = sorted({path.rsplit("/", 1)[0] for path in told["cudnn_files"]})
    if told["cudnn"] != torch["cudnn"] or len(folders) > 1:
        value = f"{versions}, loaded from {' and '.join(folders) or 'an unknown place'}"
        yield Finding(name="cuDNN", value=f"two that differ: {value}", status=BAD, cure=_CUDNN_CURE)
    else:
        yield Finding(name="cuDNN", value=f"one for both: {versions}")


def _attention(told: dict, te: dict, torch: dict) -> Iterator[Finding]:
    if "fault" in told:
        cure = _CUDNN_CURE if "CUDNN" in told["fault"].upper() else "see the line above; packed attention does not run here"
        yield Finding(name="attention", value=f"packed attention fails: {told['fault']}", status=BAD, cure=cure)
        return
    backend = told["backend"] or "unknown backend"
    if "Unfused" in backend or not told["backend"]:
        why = f" ({told['why']})" if told["why"] else ""
        value = f"{backend}{why}: packed training is 4 to 5 times slower than with fused attention"
        yield Finding(name="attention", value=value, status=BAD, cure=_CUDNN_CURE)
    else:
        yield Finding(name="attention", value=f"{backend}, packed (THD), forward and backward")


def _recipes(gpus: list, te: dict, torchao: dict | None) -> Iterator[Finding]:
    if not gpus:
        return
    capability = min(tuple(gpu["capability"]) for gpu in gpus)
    if torchao and "fault" in torchao:
        cure = "pip install -U torchao, for this torch"
        yield Finding(name="torchao", value=f"cannot be imported: {torchao['fault']}", status=BAD, cure=cure)
    able = []
    for recipe in RECIPES.values():
        loaded = {"te": recipe.name in te.get("recipes", ()), "torchao": torchao == {}, "torch": True}[recipe.library]
        if loaded and recipe.capability <= capability:
            able.append(recipe.name)
    status = OK if len(able) > 1 else NOTE
    cure = "" if len(able) > 1 else "pip install 'transformer-engine[pytorch]' or torchao, on a GPU of sm89 or newer"
    yield Finding(name="recipes", value=", ".join(able) or "none", status=status, cure=cure)


def _known_bad(version: Callable[[str], str | None], te: dict) -> Iterator[Finding]:
    """Combinations that are known to be wrong, whatever the machine."""
    lhotse, urllib3 = version("lhotse"), version("urllib3")
    if lhotse and not urllib3:
        value = f"lhotse {lhotse} imports urllib3 and does not ask for it"
        yield Finding(name="lhotse", value=value, status=BAD, cure="pip install urllib3")
    for name, effect, fixed_in in te.get("faults", ()):
        cure = f"PackedModel patches it; or upgrade transformer-engine to {fixed_in}"
        yield Finding(name="Transformer Engine", value=f"{name}: {effect}", status=NOTE, cure=cure)
