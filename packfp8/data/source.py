"""Source: the order in which the examples of an epoch come, the same on every rank and after every restart.

A walk is a function of the source as it was given, the seed and the epoch. lhotse's lazy sets count how often they were
iterated, draw from a generator that they share, or leave their seed to chance (`CutSet.from_files` does by default), which
would give every rank another order. Each walk therefore goes over copies of those nodes: counters stand for the epoch, and
what was left to chance follows from the sampler's seed. The set itself is left as it was.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator, Sequence
from os import PathLike

from lhotse import CutSet

from packfp8.errors import ConfigError

_COUNTERS = ("epoch", "num_iters", "num_times_iterated")
"""How lhotse 1.33 names the number of times that a Shar reader, a chain of shards and a mixer of noise were iterated."""
_CHANCE = ("trng", "randomized", None)
"""Seeds that lhotse 1.33 takes for: from the system, from the process, from Python's global generator."""
_FIX = "pass a CutSet; list(...) makes a list of an iterator"


def walk(cuts: Iterable, *, seed: int, epoch: int, shuffle: bool, shuffle_buffer: int) -> Iterator[tuple[int, object]]:
    """The items of an epoch with their place in the source.

    What can be indexed is permuted as a whole. What comes one by one goes through a buffer of `shuffle_buffer` items, from
    which each new arrival drives out one at random.
    """
    rows = indexable(cuts)
    if not shuffle:
        yield from enumerate(_Copy(seed, epoch).of(cuts) if rows is None else rows)
        return
    rng = random.Random(f"{seed} {epoch}")  # a text is hashed by SHA-512: alike seeds give unlike orders
    if rows is not None:
        order = list(range(len(rows)))
        rng.shuffle(order)
        for index in order:
            yield index, rows[index]
        return
    buffer: list[tuple[int, object]] = []
    for pair in enumerate(_Copy(seed, epoch).of(cuts)):
        if len(buffer) < shuffle_buffer:
            buffer.append(pair)
            continue
        place = rng.randrange(shuffle_buffer)
        leaving, buffer[place] = buffer[place], pair
        yield leaving
    rng.shuffle(buffer)
    yield from buffer


def indexable(cuts: Iterable) -> Sequence | None:
    """The items as a sequence where they are in memory; None where they come one by one."""
    data = cuts.data if isinstance(cuts, CutSet) else cuts
    return data if isinstance(data, (list, tuple)) else None


def check_source(cuts: object) -> None:
    """Nothing, where `cuts` can be walked again and again by every rank.

    Raises:
        ConfigError: it is no iterable, an iterator that is spent after one pass, or a Shar set that splits itself.
    """
    if not hasattr(cuts, "__iter__") or isinstance(cuts, (dict, str, bytes)):
        fix = "CutSet.from_file(path) opens a manifest" if isinstance(cuts, (str, PathLike)) else _FIX
        raise _no_source(type(cuts).__name__, "nothing in it is an example", fix)
    data = getattr(cuts, "data", cuts)
    if iter(cuts) is cuts or iter(data) is data:
        raise _no_source(
            f"{type(data).__name__}, an iterator", "it is spent after one pass: no epoch could follow, or be resumed"
        )
    if getattr(data, "split_for_dataloading", False):
        raise ConfigError(
            "the Shar set splits itself among ranks and workers",
            got="split_for_dataloading=True",
            expected="split_for_dataloading=False",
            because="every rank walks the metadata of all and takes its own packs; from a part of it, ranks get unequal steps",
            fix="leave split_for_dataloading out of CutSet.from_shar",
        )


def _no_source(got: str, why: str, fix: str = _FIX) -> ConfigError:
    return ConfigError(
        "the examples cannot be walked",
        got=got,
        expected="a CutSet, a list of examples, or any object that can be iterated again and again",
        because=why,
        fix=fix,
    )


class _Copy:
    """Copies lazy lhotse sets for one walk; the cuts in memory are shared."""

    def __init__(self, seed: int, epoch: int) -> None:
        self._seed, self._epoch = seed, epoch

    def of(self, node: object) -> object:
        """A copy of a node and of those below it; anything else as it is."""
        if isinstance(node, random.Random):
            twin = random.Random()
            twin.setstate(node.getstate())
            return twin
        if isinstance(node, (list, tuple)):
            # A list of nodes is copied node by node; a list of cuts is long, and is shared.
            return type(node)(map(self.of, node)) if node and _is_node(node[0]) else node
        if not _is_node(node):
            return node
        twin = object.__new__(type(node))  # copy.copy would share the attributes: lhotse's __getstate__ gives its own __dict__
        twin.__dict__.update({name: self._attribute(name, value) for name, value in vars(node).items()})
        return twin

    def _attribute(self, name: str, value: object) -> object:
        if name in _COUNTERS and isinstance(value, int):
            return value + self._epoch
        if name == "seed" and value in _CHANCE:
            return self._seed * 1_000_003 + self._epoch
        if name == "rng" and (value is None or value is random):
            return random.Random(f"{self._seed} {self._epoch} of the source")
        return self.of(value)


def _is_node(value: object) -> bool:
    """Whether it is one of lhotse's iterables, rather than a cut, a function or a number."""
    return type(value).__module__.startswith("lhotse.") and hasattr(type(value), "__iter__")
