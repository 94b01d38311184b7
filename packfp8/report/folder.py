"""A user's folder of recordings, each with its text in a `.txt` of the same name beside it."""

from __future__ import annotations

from pathlib import Path

from packfp8.data import SetAside
from packfp8.errors import AudioError, ExampleError

SUFFIXES = (".wav", ".flac", ".ogg", ".opus", ".mp3")
"""Endings that are taken for audio: what the soundfile package reads by itself."""


def read_folder(folder: Path) -> tuple[list[dict], list[SetAside]]:
    """An item `{"id", "audio", "text"}` for each recording with a text, sorted by path, and the recordings without one.

    Folders within are walked too. No audio is read.

    Raises:
        AudioError: there is no recording.
        ExampleError: no recording has a text.
    """
    files = sorted(path for path in folder.rglob("*") if path.suffix.lower() in SUFFIXES and path.is_file())
    if not files:
        raise AudioError(
            f"{folder} holds no audio",
            got="no file" if folder.is_dir() else "not a folder",
            expected=f"files that end in {', '.join(SUFFIXES)}",
            because="the demo packs recordings; other formats are not read without ffmpeg",
            fix="name the folder of the recordings, or convert them to wav or flac",
        )
    items, aside = [], []
    for path in files:
        name, text = path.relative_to(folder).as_posix(), path.with_suffix(".txt")
        try:
            items.append({"id": name, "audio": path, "text": text.read_bytes().decode("utf-8-sig").strip()})
        except FileNotFoundError:
            aside.append(SetAside(id=name, reason=f"no {text.name} beside it"))
        except UnicodeDecodeError as fault:
            aside.append(SetAside(id=name, reason=f"{text.name} is not UTF-8: {fault.reason} at byte {fault.start}"))
    if not items:
        raise ExampleError(
            f"no recording in {folder} has a text",
            got=f"{len(files)} recordings; {aside[0].id}: {aside[0].reason}",
            expected="a .txt of the same name beside each recording, in UTF-8",
            because="without an answer none of a sequence's tokens would be supervised",
            fix=f"write what is said in {files[0].name} into {files[0].with_suffix('.txt').name}, and so on",
        )
    return items, aside
