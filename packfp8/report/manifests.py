"""Manifests: which files a list of paths and globs names, and what each of them is, by name and by content."""

from __future__ import annotations

import glob  # Path.glob takes no absolute pattern
from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

from packfp8.errors import ConfigError

_SNIFF = 4096  # bytes that tell what a file is
_ZIPPED = b"\x1f\x8b"  # RFC 1952, section 2.3.1
_NUMPY = b"\x93NUMPY"  # numpy.lib.format


class Kind(Enum):
    """What a manifest is."""

    LINES = "lines of JSON: lhotse cuts or NeMo entries"
    LINES_GZ = "lines of JSON, gzipped"
    LIST = "one JSON list"
    TABLE = "comma- or tab-separated table"
    NUMPY = "NumPy array of lengths"
    KALDI = "Kaldi data folder"


@dataclass(frozen=True, kw_only=True, slots=True)
class Manifest:
    """One file, or one Kaldi data folder."""

    path: Path
    kind: Kind

    @property
    def num_bytes(self) -> int:
        """Bytes to read."""
        files = [self.path] if self.kind is not Kind.KALDI else [p for p in self.path.iterdir() if p.is_file()]
        return sum(file.stat().st_size for file in files)


def find_manifests(paths: Iterable[str | Path]) -> tuple[Manifest, ...]:
    """The manifests that the paths name, in their order, each once; globs and folders in the order of their names.

    A folder is a Kaldi data folder (`utt2dur` or `utt2num_frames`) or a lhotse Shar folder (`cuts.*.jsonl.gz`).

    Raises:
        ConfigError: a path that names nothing, or a file of an unknown kind.
        OSError: a file that cannot be read.
    """
    found: dict[Path, Manifest] = {}
    for given in paths:
        for path in _expanded(Path(given)):
            for manifest in _of_path(path):
                found.setdefault(manifest.path.resolve(), manifest)
    if not found:
        raise _unknown("no manifest is named", "no paths")
    return tuple(found.values())


def _expanded(path: Path) -> list[Path]:
    if path.exists():
        return [path]
    matches = [Path(match) for match in sorted(glob.glob(str(path), recursive=True))]  # noqa: PTH207
    if matches:
        return matches
    raise ConfigError(
        f"{path} names no file",
        got="nothing by that name" if not glob.has_magic(str(path)) else "a pattern that matches nothing",
        expected="a manifest, a folder, or a pattern that matches some",
        because="a report on part of the data would look like a report on all of it",
        fix="check the spelling and the folder that the command runs in",
    )


def _of_path(path: Path) -> list[Manifest]:
    if path.name in ("utt2dur", "utt2num_frames"):
        path = path.parent
    if not path.is_dir():
        return [Manifest(path=path, kind=_kind(path))]
    if any((path / name).is_file() for name in ("utt2dur", "utt2num_frames")):
        return [Manifest(path=path, kind=Kind.KALDI)]
    shards = [p for p in sorted(path.glob("cuts.*")) if ".jsonl" in p.suffixes]
    if shards:
        return [Manifest(path=shard, kind=_kind(shard)) for shard in shards]
    raise _unknown(f"{path} is a folder of neither kind that is known", f"{len(list(path.iterdir()))} entries")


def _kind(path: Path) -> Kind:
    with path.open("rb") as file:
        head = file.read(_SNIFF)
    if head.startswith(_NUMPY):
        return Kind.NUMPY
    if head.startswith(_ZIPPED):
        return Kind.LINES_GZ
    first = head.removeprefix(b"\xef\xbb\xbf").lstrip()[:1]
    if first == b"[":
        return Kind.LIST
    if first == b"{" or path.suffix in (".jsonl", ".json", ".ndjson"):
        return Kind.LINES
    if path.suffix in (".csv", ".tsv") or b"," in head.split(b"\n")[0]:
        return Kind.TABLE
    raise _unknown(f"{path} is of an unknown kind", f"a file that begins with {head[:24]!r}")


def _unknown(what: str, got: str) -> ConfigError:
    return ConfigError(
        what,
        got=got,
        expected="lhotse cuts (jsonl, jsonl.gz, Shar), a NeMo manifest, CSV, a Kaldi data folder, or .npy lengths",
        because="lengths are read from the manifest, never from the audio",
        fix="give manifests, e.g. 'data/*.jsonl.gz'; of recordings, lhotse cuts, or `packfp8 demo --data FOLDER`",
    )
