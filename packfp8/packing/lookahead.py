"""Lookahead: the examples that arrived last and are in no pack yet, oldest first."""

from __future__ import annotations


class Lookahead:
    """A window over the order of arrival. Examples leave from anywhere in it; whoever is `limit` arrivals old is overdue.

    Every example has a number, its place in the order of arrival.

    Attributes:
        sizes: number -> size in units, oldest first.
        frames: number -> encoder frames, oldest first, of the examples that have any.
        oldest: number of the oldest example; that of the next arrival where there is none.
        units: sum of all sizes.
        total_frames: sum of all frames.
    """

    __slots__ = ("_keys", "_limit", "_next", "frames", "oldest", "sizes", "total_frames", "units")

    def __init__(self, limit: int) -> None:
        self.sizes: dict[int, int] = {}
        self.frames: dict[int, int] = {}
        self.oldest = 0
        self.units = self.total_frames = 0
        self._keys: dict[int, object] = {}
        self._limit = limit
        self._next = 0

    def add(self, key: object, size: int, frames: int = 0) -> None:
        """Let an example arrive."""
        self.sizes[self._next] = size
        self._keys[self._next] = key
        self.units += size
        if frames:
            self.frames[self._next] = frames
            self.total_frames += frames
        self._next += 1

    def take(self, number: int) -> object:
        """Return the key of an example, which leaves."""
        self.units -= self.sizes.pop(number)
        if self.frames:
            self.total_frames -= self.frames.pop(number, 0)
        while self.oldest < self._next and self.oldest not in self.sizes:
            self.oldest += 1
        return self._keys.pop(number)

    @property
    def overdue(self) -> bool:
        """Whether the oldest example has seen `limit` others arrive: it must leave before the next one comes."""
        return self._next - self.oldest > self._limit

    def __len__(self) -> int:
        return len(self.sizes)

    def state(self) -> dict:
        """Return the window in plain ints and lists."""
        waiting = [[n, self._keys[n], size, self.frames.get(n, 0)] for n, size in self.sizes.items()]
        return {"next": self._next, "waiting": waiting}

    def load(self, state: dict) -> None:
        """Take back what `state` returned."""
        self._next = state["next"]
        self._keys = {number: key for number, key, _, _ in state["waiting"]}
        self.sizes = {number: size for number, _, size, _ in state["waiting"]}
        self.frames = {number: frames for number, _, _, frames in state["waiting"] if frames}
        self.units, self.total_frames = sum(self.sizes.values()), sum(self.frames.values())
        self.oldest = next(iter(self.sizes), self._next)
