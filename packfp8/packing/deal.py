"""deal(): packs of like cost into one step, over data-parallel ranks.

A step takes as long as its slowest rank. So packs are collected for a window of steps, sorted by cost and cut into
steps. Steps that are still uneven, mostly those of a few very long sequences, wait for later windows to bring their
like. The order of the steps of a window, and who gets which pack of a step, follow a seed. All of it follows from the
costs alone: every rank deals the same without a word to the others.
"""

from __future__ import annotations

import math
from collections import deque
from typing import NamedTuple

import numpy as np

from packfp8.errors import ConfigError
from packfp8.packing.capacity import counted
from packfp8.packing.snapshot import settings_checked

# A step is uneven when its ranks would idle for more than this share of it. Attention over lognormal lengths to 16,384 on
# 64 ranks, window 32: 4.4 % idle without waiting, 1.5 % with patience 4.
_EVEN = 0.01


class Deal(NamedTuple):
    """Packs by step and rank.

    steps: int64 [steps, ranks], pack indices.
    remaining: int64 [fewer than ranks], the packs that make no whole step: the cheapest of those dealt last.
    """

    steps: np.ndarray
    remaining: np.ndarray


def deal(costs, ranks: int, window: int = 32, seed: int = 0, patience: int = 4) -> Deal:
    """Return steps of `ranks` packs of like cost, each pack once, and the packs that remain.

    Args:
        costs: float [packs], in the order in which packs were made.
        ranks: data-parallel ranks.
        window: steps over which packs are sorted.
        seed: of the order of the steps of a window, and of the ranks of a step.
        patience: windows for which a pack may wait for others of its cost.
    """
    dealer = Dealer(ranks, window=window, seed=seed, patience=patience)
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
    """Deals packs as they are made: push packs with their cost, pop steps. Holds two windows of packs at most.

    Args:
        ranks: data-parallel ranks.
        window: steps over which packs are sorted.
        seed: of the order of the steps of a window, and of the ranks of a step.
        patience: windows for which a pack may wait for others of its cost; 0 deals every window out.
    """

    def __init__(self, ranks: int, window: int = 32, seed: int = 0, patience: int = 4) -> None:
        self.ranks = counted("ranks", ranks)
        self._window = counted("window", window)
        self._patience = counted("patience", patience, least=0)
        self._settings = {"ranks": self.ranks, "window": self._window, "seed": int(seed), "patience": self._patience}
        self._packs: list = []
        self._costs: list[float] = []
        self._since: list[int] = []  # the window in which each pack came
        self._new = 0  # packs that came in this window
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
        self._since.append(self._windows)
        self._new += 1
        if self._new == self.ranks * self._window:
            self._deal(ending=False)

    def pop(self) -> list | None:
        """Return the packs of a step by rank, or None while none is ready."""
        return self._steps.popleft() if self._steps else None

    def flush(self) -> None:
        """Deal what is left into whole steps, so that `pop` drains them; what makes no step stays in `remaining`."""
        self._deal(ending=True)

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
            "since": list(self._since),
            "new": self._new,
            "windows": self._windows,
            "steps": [list(step) for step in self._steps],
        }

    def load_state_dict(self, state: dict) -> None:
        """Take back a state; raises StateError where it was saved under other settings."""
        state = settings_checked("Dealer", self._settings, ("packs", "costs", "since", "new", "windows", "steps"), state)
        self._packs, self._costs, self._since = (list(state[name]) for name in ("packs", "costs", "since"))
        self._new, self._windows = state["new"], state["windows"]
        self._steps = deque(list(step) for step in state["steps"])

    def _deal(self, *, ending: bool) -> None:
        """Cut the packs into whole steps by cost; uneven steps, unless at the end, and what makes no step wait on."""
        whole = len(self._packs) // self.ranks * self.ranks
        falling = np.argsort(-np.array(self._costs), kind="stable")
        steps, rest = falling[:whole].reshape(-1, self.ranks), falling[whole:]
        waiting = np.zeros(len(steps), dtype=bool) if ending else self._uneven(steps)
        kept = np.sort(np.concatenate((steps[waiting].ravel(), rest))).tolist()
        for step in _shuffled(steps[~waiting], self._settings["seed"], self._windows).tolist():
            self._steps.append([self._packs[index] for index in step])
        self._packs = [self._packs[index] for index in kept]
        self._costs = [self._costs[index] for index in kept]
        self._since = [self._since[index] for index in kept]
        self._new = 0
        self._windows += 1

    def _uneven(self, steps: np.ndarray) -> np.ndarray:
        """Return bool [steps]: the most uneven of the steps by cost, no more than a window, none of whose packs is overdue."""
        costs, since = np.array(self._costs)[steps], np.array(self._since)[steps]
        busy = np.array([math.fsum(step) for step in costs])  # rounded once: alike on hosts that add in other orders
        idle = 1 - busy / self.ranks / np.maximum(costs[:, 0], np.finfo(float).tiny)
        idle[since.min(axis=1) <= self._windows - self._patience] = 0
        worst = np.argsort(-idle, kind="stable")[: self._window]
        uneven = np.zeros(len(steps), dtype=bool)
        uneven[worst] = idle[worst] > _EVEN
        return uneven


def _shuffled(steps: np.ndarray, seed: int, window: int) -> np.ndarray:
    """Return the steps [steps, ranks] in an order of their own, and the packs of each in another."""
    noise = _noise(seed, window, steps.size + len(steps))
    by_rank, by_step = noise[: steps.size].reshape(steps.shape), noise[steps.size :]
    steps = np.take_along_axis(steps, np.argsort(by_rank, axis=1, kind="stable"), axis=1)
    return steps[np.argsort(by_step, kind="stable")]


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
