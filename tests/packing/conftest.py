"""Fixtures of the packing room: real lengths, a packer driven to its end."""

from __future__ import annotations

import csv

import pytest


@pytest.fixture(scope="session")
def drain():
    """drain(packer): the packs that are ready."""

    def popped(packer) -> list[list]:
        packs = []
        while (pack := packer.pop()) is not None:
            packs.append(pack)
        return packs

    return popped


@pytest.fixture(scope="session")
def packed(drain):
    """packed(packer, lengths): all packs of a stream whose keys are 0, 1, 2, ..., flushed at its end."""

    def run(packer, lengths) -> list[list[int]]:
        for key, length in enumerate(lengths):
            packer.push(key, length)
        packer.flush()
        return drain(packer)

    return run


@pytest.fixture(scope="session")
def real_parts(outside_data):
    """real_parts(name): (tokens, frames) of a real corpus: 12.5 frames a second, a quarter of the text's bytes, 24 of a prompt.

    Frames are those in the encoder's budget: with one of silence after the clip.
    """

    def read(name: str) -> list[tuple[int, int]]:
        with (outside_data / "lengths" / name).open(newline="") as lines:
            rows = list(csv.DictReader(lines))
        frames = [int(12.5 * float(row["duration_s"])) for row in rows]
        texts = [int(row.get("utf8_bytes") or row["chars"]) // 4 + 24 for row in rows]
        return [(count + text, count + 1) for count, text in zip(frames, texts)]

    return read


@pytest.fixture(scope="session")
def real_lengths(real_parts):
    """real_lengths(name): tokens of a real corpus."""
    return lambda name: [tokens for tokens, _ in real_parts(name)]
