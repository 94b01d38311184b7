"""Rival packers, item by item: each returns the packs as lists of item numbers."""

from __future__ import annotations

from bisect import bisect_left, insort

import numpy as np


def best_fit_decreasing(lengths: np.ndarray, capacity: int) -> list[list[int]]:
    """Return the packs of best-fit decreasing: longest first, each where the least room is left; a sorted list of rooms."""
    packs: list[list[int]] = []
    rooms: list[int] = []  # distinct, ascending
    of_room: dict[int, list[list[int]]] = {}
    sizes = lengths.tolist()
    for item in np.argsort(-lengths, kind="stable").tolist():
        size = sizes[item]
        at = bisect_left(rooms, size)
        if at == len(rooms):
            room, pack = capacity - size, [item]
            packs.append(pack)
        else:
            room = rooms[at]
            pack = of_room[room].pop()
            if not of_room[room]:
                del of_room[room], rooms[at]
            pack.append(item)
            room -= size
        if room:
            if room in of_room:
                of_room[room].append(pack)
            else:
                of_room[room] = [pack]
                insort(rooms, room)
    return packs


def segment_tree_best_fit_decreasing(lengths: np.ndarray, capacity: int) -> list[list[int]]:
    """Return the same packs, the least sufficient room found in a segment tree over all rooms."""
    width = 1 << (capacity + 1).bit_length()
    count = [0] * (2 * width)  # open packs below each node; leaf `width + room`
    of_room: list[list[list[int]]] = [[] for _ in range(capacity + 1)]
    packs: list[list[int]] = []
    sizes = lengths.tolist()

    def add(room: int, change: int) -> None:
        node = width + room
        while node:
            count[node] += change
            node >>= 1

    for item in np.argsort(-lengths, kind="stable").tolist():
        node = width + sizes[item]
        while node > 1 and not (count[node] and node >= width):  # up to a subtree on the right that has one, then down
            if node & 1 == 0 and count[node + 1]:
                node += 1
                while node < width:
                    node = 2 * node if count[2 * node] else 2 * node + 1
            else:
                node >>= 1
        if node > 1:
            room = node - width
            pack = of_room[room].pop()
            add(room, -1)
            pack.append(item)
        else:
            room, pack = capacity, [item]
            packs.append(pack)
        room -= sizes[item]
        of_room[room].append(pack)
        add(room, 1)
    return packs


def next_fit(lengths: np.ndarray, capacity: int) -> list[list[int]]:
    """Return the packs of next fit: order of arrival, a new pack when one does not fit."""
    packs, pack, room = [], [], capacity
    for item, size in enumerate(lengths.tolist()):
        if size > room:
            packs.append(pack)
            pack, room = [], capacity
        pack.append(item)
        room -= size
    return [*packs, pack] if pack else packs


def lightbinpack(lengths: np.ndarray, capacity: int) -> list[list[int]] | None:
    """Return the packs of lightbinpack's optimised best fit (C++), or None where it is not installed."""
    try:
        import lightbinpack as rival
    except ImportError:
        return None
    return rival.obfd(lengths.tolist(), capacity)
