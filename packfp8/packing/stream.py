"""StreamPacker: packs from a stream, in order of arrival, each closed to the last unit from a lookahead.

A pack takes examples as they arrive while it is far from full. Near its end, a subset sum over the lookahead, oldest
first, finds those that close it exactly: one, two, three or a few. The lookahead is refilled after each example taken,
so that packs of any budget close as well. Plain Python: one to five microseconds an example where lengths are those of speech,
more where hardly any sum fits (tests/bench/bench_stream.py prints both).

With a frame budget a pack has two rooms, for tokens and for encoder frames. Either may close it: that which the examples
waiting would use up first. What keeps it within the other is an inequality. Light examples have at most as many frames to a
token as the rooms left: those that fit in tokens fit in frames. Heavy ones have at least as many: those that fit in frames fit
in tokens. Of either kind those next to that ratio come first, so that both rooms are used up as far as can be. It takes half
as long again where frames seldom bind, five times as long where both bind alike (tests/bench/bench_budgets.py).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection

from packfp8.packing.admission import Admission, SetAside, whole_frames, whole_length
from packfp8.packing.capacity import Capacity, counted, too_long, too_many_frames
from packfp8.packing.lookahead import Lookahead
from packfp8.packing.snapshot import settings_checked
from packfp8.packing.subset import fullest, fullest_of

# A pack is near its end when the oldest example would leave less room than so many average ones need. Measured on
# lognormal and speech-like lengths: 2, 3 and 5 fill alike; 3 needs a subset sum over about 11 examples.
_NEAR_EXAMPLES = 3
_NEAR_SLOTS = 3  # or when max_sequences leaves no more than so many
_COUNTED_SLOTS = 8  # up to so many, subset sums also count their parts; beyond, examples are taken one by one


class StreamPacker:
    """Packs of at most `capacity` tokens, and of at most `frame_budget` encoder frames: push examples, pop packs.

    An example is taken into a pack at most `lookahead` pushes after its own, and each push after the one that opened a
    pack adds to it or closes it: so nobody waits longer than the lookahead and one pack.

    Args:
        capacity: tokens of a pack, floored to the multiple.
        multiple: each slot is its example's length rounded up to this (`rule.sequence`).
        lookahead: arrivals among which a pack may choose.
        max_sequences: most examples in a pack.
        over_budget: "error" raises BudgetError for an example that no pack can hold, "set_aside" lists it in `set_aside`.
        frame_budget: most encoder frames in a pack; None does not count them.
    """

    def __init__(
        self,
        capacity: int,
        multiple: int = 1,
        lookahead: int = 256,
        max_sequences: int | None = None,
        over_budget: str = "error",
        frame_budget: int | None = None,
    ) -> None:
        self._capacity = Capacity.of(capacity, multiple, max_sequences)
        self._admission = Admission(over_budget)
        self._lookahead = Lookahead(counted("lookahead", lookahead))
        self._frame_budget = None if frame_budget is None else counted("frame_budget", frame_budget)
        self._settings = {
            "capacity": self._capacity.tokens,
            "multiple": self._capacity.multiple,
            "lookahead": int(lookahead),
            "max_sequences": self._capacity.max_sequences,
            "over_budget": over_budget,
            "frame_budget": self._frame_budget,
        }
        self._open: list = []  # keys in the open pack
        self._room = self._capacity.units  # units left in it
        self._frames_left = self._frame_budget
        self._closed: deque[list] = deque()

    def push(self, key, length: int, frames: int = 0) -> None:
        """Let an example of `length` tokens and `frames` encoder frames arrive; `key` is what `pop` returns for it.

        Raises LengthError for a length that is not a whole number of at least 1, or with a frame budget for frames that are
        none of at least 0; BudgetError for an example that no pack can hold.
        """
        length = whole_length(key, length)
        size = -(-length // self._capacity.multiple)
        if size > self._capacity.units:
            slot = f"a slot of {size * self._capacity.multiple}"
            self._admission.refuse(too_long(f"example {key!r}", length, self._capacity.tokens, slot=slot), key, length)
            return
        if self._frame_budget is None:
            self._lookahead.add(key, size)
        elif (frames := whole_frames(key, frames)) <= self._frame_budget:
            self._lookahead.add(key, size, frames)
        else:
            self._admission.refuse(too_many_frames(f"example {key!r}", frames, self._frame_budget), key, length)
            return
        if self._open:
            self._step()
        while self._lookahead.overdue:
            self._step()

    def pop(self) -> list | None:
        """Return the keys of a closed pack, in the order in which they were taken, or None while none is ready."""
        return self._closed.popleft() if self._closed else None

    def flush(self) -> None:
        """Pack all that is left, so that `pop` drains it. More may be pushed after."""
        while len(self._lookahead):
            self._step(ending=True)
        if self._open:
            self._close()

    @property
    def set_aside(self) -> tuple[SetAside, ...]:
        """What no pack can hold, with the reason, in order of arrival."""
        return tuple(self._admission.refused)

    def __len__(self) -> int:
        """Return the number of examples pushed that no pack popped has brought, but for those set aside."""
        return len(self._lookahead) + len(self._open) + sum(map(len, self._closed))

    def state_dict(self) -> dict:
        """Return the state in plain ints, lists and keys: what comes after is the same from it, pack by pack."""
        return {
            "settings": dict(self._settings),
            "lookahead": self._lookahead.state(),
            "open": list(self._open),
            "room": self._room,
            "frames_left": self._frames_left,
            "closed": [list(pack) for pack in self._closed],
            "set_aside": self._admission.state(),
        }

    def load_state_dict(self, state: dict) -> None:
        """Take back a state; raises StateError where it was saved under other settings."""
        fields = ("lookahead", "open", "room", "frames_left", "closed", "set_aside")
        state = settings_checked("StreamPacker", self._settings, fields, state)
        self._lookahead.load(state["lookahead"])
        self._open, self._room, self._frames_left = list(state["open"]), state["room"], state["frames_left"]
        self._closed = deque(list(pack) for pack in state["closed"])
        self._admission.load(state["set_aside"])

    def _step(self, ending: bool = False) -> None:
        """Take at least one example, or close the open pack because nothing fits."""
        if self._far_from_full(ending):
            return self._take(self._lookahead.oldest)
        chosen, exact = self._closing(ending)
        if not chosen:
            self._close()
        elif exact:
            for number in chosen:
                self._take(number)
        else:
            self._take(chosen[0])  # one only: the next arrival may close the pack exactly

    def _far_from_full(self, ending: bool) -> bool:
        """Whether the oldest example goes into the pack whatever the others are."""
        if not self._open:
            return True
        ahead = self._lookahead
        slots = self._capacity.max_sequences - len(self._open)
        if ending:
            far = ahead.units <= self._room and len(ahead) <= slots
        elif slots <= _NEAR_SLOTS:
            far = slots * max(ahead.sizes.values()) <= self._room
        else:
            far = (self._room - ahead.sizes[ahead.oldest]) * len(ahead) >= _NEAR_EXAMPLES * ahead.units
        return far and (self._frame_budget is None or self._far_in_frames(slots, ending))

    def _far_in_frames(self, slots: int, ending: bool) -> bool:
        """The same by frames alone."""
        ahead, left = self._lookahead, self._frames_left
        if ending:
            return ahead.total_frames <= left
        if slots <= _NEAR_SLOTS:
            return slots * max(ahead.frames.values(), default=0) <= left
        return (left - ahead.frames.get(ahead.oldest, 0)) * len(ahead) >= _NEAR_EXAMPLES * ahead.total_frames

    def _closing(self, ending: bool) -> tuple[list[int], bool]:
        """Return numbers of examples that fill the open pack best, older ones first, and whether they fill it exactly.

        With a frame budget exactly is by tokens or by frames, and examples that stand first need not be the older ones.
        """
        ahead, budget = self._lookahead, self._frame_budget
        frames_are_short = budget is not None and self._frames_are_short(ending)
        if not frames_are_short:
            chosen, exact = self._fullest(ahead.sizes.items(), self._room)
            if budget is None or sum(ahead.frames.get(number, 0) for number in chosen) <= self._frames_left:
                return chosen, exact
        light, heavy = (self._light(), self._room), (self._heavy(), self._frames_left)
        for parts, room in (heavy, light) if frames_are_short else (light, heavy):
            chosen, exact = self._fullest(parts, room)
            if chosen:
                break
        return chosen, exact

    def _frames_are_short(self, ending: bool) -> bool:
        """Whether the frames ahead would fill more packs than the tokens ahead; at the end, more whole ones after this."""
        ahead, units, frames = self._lookahead, self._capacity.units, self._frame_budget
        if ending:  # the last pack, which is not full, has room for the frames that the others leave
            return -((self._frames_left - ahead.total_frames) // frames) > -((self._room - ahead.units) // units)
        return ahead.total_frames * units > ahead.units * frames

    def _light(self) -> list[tuple[int, int]]:
        """Return (number, units) of examples with at most as many frames to a unit as the rooms left, most frames first."""
        ahead, room, left = self._lookahead, self._room, self._frames_left
        frames = ((number, size, ahead.frames.get(number, 0)) for number, size in ahead.sizes.items())
        light = [(-count / size, number, size) for number, size, count in frames if count * room <= size * left]
        return [(number, size) for _, number, size in sorted(light)]

    def _heavy(self) -> list[tuple[int, int]]:
        """Return (number, frames) of examples with at least as many frames to a unit as the rooms left, fewest first."""
        ahead, room, left = self._lookahead, self._room, self._frames_left
        sizes = ((number, ahead.sizes[number], count) for number, count in ahead.frames.items())
        heavy = [(count / size, number, count) for number, size, count in sizes if count * room >= size * left]
        return [(number, count) for _, number, count in sorted(heavy)]

    def _fullest(self, parts: Collection[tuple[int, int]], room: int) -> tuple[list[int], bool]:
        """Return numbers of parts, each given with its units or frames, that fill that room best, and whether exactly."""
        slots = self._capacity.max_sequences - len(self._open)
        chosen, total = fullest(parts, room)
        if len(chosen) > slots:
            if slots > _COUNTED_SLOTS:
                return chosen, False
            chosen, total = fullest_of(slots, parts, room)
        return chosen, total == room

    def _take(self, number: int) -> None:
        self._room -= self._lookahead.sizes[number]
        if self._frame_budget is not None:
            self._frames_left -= self._lookahead.frames.get(number, 0)
        self._open.append(self._lookahead.take(number))
        if not self._room or len(self._open) == self._capacity.max_sequences:
            self._close()

    def _close(self) -> None:
        self._closed.append(self._open)
        self._open, self._room, self._frames_left = [], self._capacity.units, self._frame_budget
