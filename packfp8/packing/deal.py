"""deal(): packs of like cost into one step, over data-parallel ranks.

A step takes as long as its slowest rank. So packs are collected for a window of steps, sorted by cost and cut into
steps. The order of the steps in a window, and who gets which pack of a step, follow a seed. All of it follows from the
costs alone: every rank deals the same without a word to the others.
"""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

import numpy as np

from packfp8.errors import ConfigError
from packfp8.packing.capacity import at_least_one
from packfp8.packing.snapshot import settings_checked


class Deal(NamedTuple):
    """Packs by step and rank.

    steps: int64 [steps, ranks], pack indices.
    remaining: int64 [fewer than ranks], the packs that make no whole step: the cheapest of the last window.
    """

    steps: np.ndarray
    remaining: np.ndarray


def deal(costs, ranks: int, window: int = 32, seed: int = 0) -> Deal:
    """Return steps of `ranks` packs of like cost, each pack once, and the packs that remain.

    Args:
        costs: float [packs], in the order in which packs were made.
        ranks: data-parallel ranks.
        window: steps over which packs are sorted; a pack moves by no more than a window.
        seed: of the order of the steps in a window, and of the ranks in a step.
    """
    dealer = Dealer(ranks, window=window, seed=seed)
    steps = []
    for index, cost in enumerate(np.asarray(costs, dtype=np.float64).tolist()):
        dealer.push(index, cost)
    dealer.flush()
    while (step := dealer.pop()) is not None:
        steps.append(step)
    return Deal(
        steps=np.array(steps, dtype=np.int64).reshape(-1, dealer.ranks),
        remaining=np.array(dealer.remaining, dtype=np.int64),
    )


class Dealer:
    """Deals packs as they are made: push packs with their cost, pop steps.

    Args:
        ranks: data-parallel ranks.
        window: steps over which packs are sorted.
        seed: of the order of the steps in a window, and of the ranks in a step.
    """

    def __init__(self, ranks: int, window: int = 32, seed: int = 0) -> None:
        self.ranks = at_least_one("ranks", ranks)
        self._window = at_least_one("window", window)
        self._settings = {"ranks": self.ranks, "window": self._window, "seed": int(seed)}
        self._packs: list = []
        self._costs: list[float] = []
        self._windows = 0  # windows dealt so far
        self._steps: deque[list] = deque()

    def push(self, pack, cost: float) -> None:
        """Add a pack; raises ConfigError for a cost that is not a finite number of at least 0."""
        if not 0 <= cost < float("inf"):
            raise ConfigError(
                "a pack's cost is not a number to sort by",
                got=repr(cost),
                expected="a finite number, at least 0",
                because="every rank sorts the packs of a window by cost, and must get the same order",
                fix="use PackCost",
            )
        self._packs.append(pack)
        self._costs.append(float(cost))
        if len(self._packs) == self.ranks * self._window:
            self._deal()

    def pop(self) -> list | None:
        """Return the packs of a step by rank, or None while none is ready."""
        return self._steps.popleft() if self._steps else None

    def flush(self) -> None:
        """Deal what is left into whole steps, so that `pop` drains them; what makes no step stays in `remaining`."""
        self._deal()

    @property
    def remaining(self) -> tuple:
        """The packs that wait for a window, in order of arrival; after `flush`, fewer than `ranks`."""
        return tuple(self._packs)

    def __len__(self) -> int:
        """Return the number of packs pushed and not popped."""
        return len(self._packs) + self.ranks * len(self._steps)

    def state_dict(self) -> dict:
        """Return the state in plain numbers, lists and packs: what comes after is the same from it."""
        return {
            "settings": dict(self._settings),
            "packs": list(self._packs),
            "costs": list(self._costs),
            "windows": self._windows,
            "steps": [list(step) for step in self._steps],
        }

    def load_state_dict(self, state: dict) -> None:
        """Take back a state; raises StateError where it was saved under other settings."""
        state = settings_checked("Dealer", self._settings, ("packs", "costs", "windows", "steps"), state)
        self._packs, self._costs = list(state["packs"]), list(state["costs"])
        self._windows = state["windows"]
        self._steps = deque(list(step) for step in state["steps"])

    def _deal(self) -> None:
        """Cut the window into whole steps by cost; the cheapest packs, if any are too many, wait on."""
        steps = len(self._packs) // self.ranks
        falling = np.argsort(-np.array(self._costs), kind="stable")
        dealt, kept = falling[: steps * self.ranks].reshape(steps, self.ranks), np.sort(falling[steps * self.ranks :])
        if steps:
            noise = _noise(self._settings["seed"], self._windows, steps * (self.ranks + 1))
            by_rank = noise[steps:].reshape(steps, self.ranks)
            dealt = np.take_along_axis(dealt, np.argsort(by_rank, axis=1, kind="stable"), axis=1)
            dealt = dealt[np.argsort(noise[:steps], kind="stable")]
            self._steps.extend([self._packs[index] for index in step] for step in dealt.tolist())
            self._windows += 1
        self._packs = [self._packs[index] for index in kept.tolist()]
        self._costs = [self._costs[index] for index in kept.tolist()]


def _noise(seed: int, window: int, count: int) -> np.ndarray:
    """Return uint64 [count] that look random and are the same on every machine and numpy version.

    The mixing function is SplitMix64 (Steele, Lea and Flood 2014), its three constants included.
    """
    start = np.uint64((seed * 0x9E3779B97F4A7C15 + window * 0xD1B54A32D192ED03) % 2**64)
    with np.errstate(over="ignore"):
        state = start + np.arange(1, count + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
        state = (state ^ (state >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        state = (state ^ (state >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return state ^ (state >> np.uint64(31))
