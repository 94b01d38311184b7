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
def real_lengths(outside_data):
    """real_lengths(name): tokens of a real corpus: 12.5 frames a second, a quarter of the text's bytes, 24 of a prompt."""

    def read(name: str) -> list[int]:
        with (outside_data / "lengths" / name).open(newline="") as lines:
            return [
                int(12.5 * float(row["duration_s"])) + int(row.get("utf8_bytes") or row["chars"]) // 4 + 24
                for row in csv.DictReader(lines)
            ]

    return read
