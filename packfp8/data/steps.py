"""Steps: one pass over the examples of an epoch, planned from metadata alone, alike on every rank.

    walk -> filter -> measure -> packer -> dealer -> steps of one pack for every data-parallel rank

No audio is read. An example is measured once. What is held in memory is the lookahead and at most two windows of steps.
"""

from __future__ import annotations

import zlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import chain

from packfp8.data.batch import SetAside
from packfp8.data.example import as_example, name_of_item
from packfp8.data.mark import Mark
from packfp8.data.source import walk
from packfp8.data.terms import Terms
from packfp8.errors import AudioError, BudgetError, ExampleError, LengthError, PackError, StateError
from packfp8.lengths import Measured

HISTORY_STEPS = 1024
"""At least so many steps back a state can be asked for. Loaders run ahead by `num_workers * prefetch_factor`, tens of steps."""
_MARK_STEPS = 16  # a mark costs as much as packing some examples: so seldom it is not felt, and resuming replays little


@dataclass(frozen=True, slots=True, kw_only=True)
class Held:
    """An example on its way into a pack: its place in the source, its name, the user's item, its lengths."""

    index: int
    name: str
    item: object
    measured: Measured


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """A step: its number in the epoch, from 0, and a pack for every data-parallel rank; one without examples is empty."""

    number: int
    packs: tuple[tuple[Held, ...], ...]


class Steps:
    """An iterator over the steps of an epoch, from the start or from a mark.

    Args:
        terms: what decides the packs.
        cuts: the source.
        epoch: whose order is walked.
        accepts: the user's filter.
        mark: where to go on; the walk passes over what came before it.
        aside: places in the source of what was set aside before the mark.

    Attributes:
        marks: places from which the pass can be taken up, oldest first.
        set_aside: what was set aside so far, in the order of the walk.
        filtered: items that the filter rejected so far.
        next_step: number of the step that comes next.

    Raises:
        StateError: at the first step, if the source does not come as it did before the mark; at any step after a failure.
        ExampleError, LengthError, AudioError, BudgetError: an example that cannot be packed, under the policy "error".
    """

    def __init__(
        self,
        terms: Terms,
        cuts: Iterable,
        *,
        epoch: int,
        accepts: Callable[[object], bool],
        mark: Mark | None = None,
        aside: Iterable[int] = (),
    ) -> None:
        self.terms, self._accepts = terms, accepts
        self._packer, self._dealer = terms.packer(), terms.dealer(epoch)
        self._held: dict[int, Held] = {}  # what is in the packer, by its place in the source
        self._aside: list[tuple[int, SetAside]] = []
        self._given = tuple(aside)
        self._longest_tokens = terms.longest_tokens
        self.filtered = self._position = self._order = self.next_step = 0
        source = walk(cuts, seed=terms.seed, epoch=epoch, shuffle=terms.shuffle, shuffle_buffer=terms.shuffle_buffer)
        self._spacing = max(_MARK_STEPS, terms.window)
        self.marks = deque([mark or self._mark()], maxlen=2 + HISTORY_STEPS // self._spacing)
        self.next_step = self.marks[-1].step
        self._broken = False
        self._plan = self._planned(source, mark)

    def __iter__(self) -> Iterator[Step]:
        return self

    def __next__(self) -> Step:
        if self._broken:
            raise _broken_off(self.next_step)
        self._broken = True  # and stays so where the source or an example raises: an early end would hang the other ranks
        step = next(self._plan, None)
        self._broken = False
        if step is None:
            raise StopIteration
        return step

    @property
    def set_aside(self) -> tuple[SetAside, ...]:
        """What was set aside so far, with the reason."""
        return tuple(one for _, one in self._aside)

    def aside_before(self, mark: Mark) -> list[int]:
        """Places in the source of what was set aside before the mark."""
        # Before the first step nothing was walked again, and what the saved state lists stands for it.
        return [index for index, _ in self._aside][: mark.set_aside] or list(self._given[: mark.set_aside])

    def mark_before(self, step: int) -> Mark | None:
        """The latest mark from which `step` lies ahead, or None where it is no longer kept."""
        return next((mark for mark in reversed(self.marks) if mark.step <= step), None)

    def _planned(self, source: Iterator[tuple[int, object]], mark: Mark | None) -> Iterator[Step]:
        if mark is not None:
            self._take_up(source, mark)
        for index, item in source:
            if not self._pass(index, item):
                continue
            held = self._admitted(index, item)
            if held is not None:
                self._held[index] = held
                self._packer.push(index, held.measured.tokens, self.terms.frames_of(held.measured))
                yield from self._dealt()
        self._packer.flush()
        yield from self._dealt()
        self._dealer.flush()
        yield from self._drained()
        yield from self._last()

    def _pass(self, index: int, item: object) -> bool:
        """Move on by one item; whether the filter accepts it."""
        self._position += 1
        if not self._accepts(item):
            self.filtered += 1
            return False
        self._order = zlib.crc32(name_of_item(item, index).encode("utf-8", "surrogatepass"), self._order)
        return True

    def _admitted(self, index: int, item: object) -> Held | None:
        """The example with its lengths; None where it was set aside."""
        try:
            return self._measured(index, item)
        except BudgetError as error:
            policy, fault = self.terms.over_budget, error
        except (ExampleError, LengthError, AudioError) as error:
            policy, fault = self.terms.on_fault, error
        if policy == "error":
            raise fault
        self._put_aside(index, name_of_item(item, index), fault)
        return None

    def _measured(self, index: int, item: object) -> Held:
        measure = self.terms.measure
        example = as_example(item, sample_rate=measure.sample_rate, template=measure.template, position=index)
        measured = measure(example)
        if measured.tokens > self._longest_tokens:
            raise self.terms.too_long(example.id, measured.tokens)
        self.terms.check_frames(example.id, measured)
        return Held(index=index, name=example.id, item=item, measured=measured)

    def _put_aside(self, index: int, name: str, reason: PackError) -> None:
        self._aside.append((index, SetAside(id=name, reason=str(reason))))

    def _dealt(self) -> Iterator[Step]:
        """Packs that are ready go to the dealer, steps that are ready come out."""
        while (keys := self._packer.pop()) is not None:
            pack = [self._held.pop(key) for key in keys]
            if self.terms.ranks == 1:  # nobody to be balanced with: packs keep their order
                yield self._step([pack])
            else:
                self._dealer.push(pack, self.terms.cost_of([one.measured for one in pack]))
                yield from self._drained()
            if self.next_step - self.marks[-1].step >= self._spacing:
                self.marks.append(self._mark())

    def _drained(self) -> Iterator[Step]:
        while (packs := self._dealer.pop()) is not None:
            yield self._step(packs)

    def _last(self) -> Iterator[Step]:
        """What makes no whole step: filled up with packs of no examples, or set aside."""
        packs = [*self._dealer.remaining]
        if packs and self.terms.end == "fill":
            yield self._step(packs + [[]] * (self.terms.ranks - len(packs)))
        elif packs:
            for held in (one for pack in packs for one in pack):
                self._put_aside(held.index, held.name, _dropped(held.name, len(packs), self.terms.ranks))

    def _step(self, packs: list[list[Held]]) -> Step:
        self.next_step += 1
        return Step(number=self.next_step - 1, packs=tuple(map(tuple, packs)))

    def _mark(self) -> Mark:
        """A mark of this place, at which all steps that were dealt have come out."""
        dealer = self._dealer.state_dict()
        return Mark(
            step=self.next_step,
            position=self._position,
            order=self._order,
            held=tuple(self._held),
            lengths=self._lengths(),
            packer=self._packer.state_dict(),
            dealer=dealer | {"packs": [[held.index for held in pack] for pack in dealer["packs"]]},
            set_aside=len(self._aside),
        )

    def _lengths(self) -> int:
        """Checksum of place, tokens and frames of all examples in the packer and the dealer."""
        dealt = (held for pack in self._dealer.remaining for held in pack)
        measured = ((held.index, held.measured) for held in chain(self._held.values(), dealt))
        return zlib.crc32(repr(sorted((index, one.tokens, self.terms.frames_of(one)) for index, one in measured)).encode())

    def _take_up(self, source: Iterator[tuple[int, object]], mark: Mark) -> None:
        """Walk to the mark; measure again only what was held there and what was set aside."""
        wanted = {*mark.held, *self._given}.union(*mark.dealer["packs"])
        while self._position < mark.position:
            index, item = next(source, (None, None))
            if index is None:
                raise _other_source(f"{self._position} examples", f"at least {mark.position}")
            if self._pass(index, item) and index in wanted:
                held = self._admitted(index, item)
                if held is not None:
                    self._held[index] = held
        if self._order != mark.order or self._lengths() != mark.lengths:
            raise _other_source("other examples, or another order", "the examples, order and filter of the saved run")
        self._packer.load_state_dict(mark.packer)
        packs = [[self._held.pop(index) for index in pack] for pack in mark.dealer["packs"]]
        self._dealer.load_state_dict(mark.dealer | {"packs": packs})


def _dropped(name: str, packs: int, ranks: int) -> PackError:
    return PackError(
        f"example {name!r} is in the last step, which is not whole",
        got=f"{packs} packs",
        expected=f"{ranks}, one for each rank",
        because="end='drop' leaves out a step in which some rank would have no pack",
        fix="choose end='fill' to give those ranks a pack of zero weight",
    )


def _other_source(got: str, expected: str) -> StateError:
    return StateError(
        "the examples do not come as they came before the state was saved",
        got=got,
        expected=expected,
        because="the packs that were open hold examples by their place in the order; another order would repeat and lose some",
        fix="resume with the same manifests and filters; give every lhotse shuffle and mux a whole number as its seed",
    )


def _broken_off(step: int) -> StateError:
    return StateError(
        "the sampler broke off and cannot go on",
        got=f"a failure while step {step} was planned",
        expected="a source that can be walked to its end",
        because="an end that comes early on one rank leaves the others waiting",
        fix="repair what failed, then load the state of the last step that was trained on",
    )
