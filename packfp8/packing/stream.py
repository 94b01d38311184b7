"""StreamPacker: packs from a stream, in order of arrival, each closed to the last unit from a lookahead.

A pack takes examples as they arrive while it is far from full. Near its end, a subset sum over the lookahead, oldest
first, finds those that close it exactly: one, two, three or a few. The lookahead is refilled after each example taken,
so that packs of any budget close as well. Plain Python: one to five microseconds an example where lengths are those of speech,
more where hardly any sum fits (tests/bench/bench_stream.py prints both).

A second weight with a budget of its own belongs beside `_room` and `_slots`, and in the sets that `_closing` accepts.
"""

from __future__ import annotations

from collections import deque

from packfp8.packing.admission import Admission, SetAside, whole_length
from packfp8.packing.capacity import Capacity, counted, too_long
from packfp8.packing.lookahead import Lookahead
from packfp8.packing.snapshot import settings_checked
from packfp8.packing.subset import fullest, fullest_of

# A pack is near its end when the oldest example would leave less room than so many average ones need. Measured on
# lognormal and speech-like lengths: 2, 3 and 5 fill alike; 3 needs a subset sum over about 11 examples.
_NEAR_EXAMPLES = 3
_NEAR_SLOTS = 3  # or when max_sequences leaves no more than so many
_COUNTED_SLOTS = 8  # up to so many, subset sums also count their parts; beyond, examples are taken one by one


class StreamPacker:
    """Packs of at most `capacity` tokens: push examples, pop packs.

    An example is taken into a pack at most `lookahead` pushes after its own, and each push after the one that opened a
    pack adds to it or closes it: so nobody waits longer than the lookahead and one pack.

    Args:
        capacity: tokens of a pack, floored to the multiple.
        multiple: each slot is its example's length rounded up to this (`rule.sequence`).
        lookahead: arrivals among which a pack may choose.
        max_sequences: most examples in a pack.
        over_budget: "error" raises BudgetError for an example longer than a pack, "set_aside" lists it in `set_aside`.
    """

    def __init__(
        self,
        capacity: int,
        multiple: int = 1,
        lookahead: int = 256,
        max_sequences: int | None = None,
        over_budget: str = "error",
    ) -> None:
        self._capacity = Capacity.of(capacity, multiple, max_sequences)
        self._admission = Admission(over_budget)
        self._lookahead = Lookahead(counted("lookahead", lookahead))
        self._settings = {
            "capacity": self._capacity.tokens,
            "multiple": self._capacity.multiple,
            "lookahead": int(lookahead),
            "max_sequences": self._capacity.max_sequences,
            "over_budget": over_budget,
        }
        self._open: list = []  # keys in the open pack
        self._room = self._capacity.units  # units left in it
        self._closed: deque[list] = deque()

    def push(self, key, length: int) -> None:
        """Let an example of `length` tokens arrive; `key` is what `pop` returns for it.

        Raises LengthError for a length that is not a whole number of at least 1, BudgetError for one longer than a pack.
        """
        length = whole_length(key, length)
        size = -(-length // self._capacity.multiple)
        if size > self._capacity.units:
            slot = f"a slot of {size * self._capacity.multiple}"
            self._admission.refuse(too_long(f"example {key!r}", length, self._capacity.tokens, slot=slot), key, length)
            return
        self._lookahead.add(key, size)
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
        """What was longer than a pack, with the reason, in order of arrival."""
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
            "closed": [list(pack) for pack in self._closed],
            "set_aside": self._admission.state(),
        }

    def load_state_dict(self, state: dict) -> None:
        """Take back a state; raises StateError where it was saved under other settings."""
        fields = ("lookahead", "open", "room", "closed", "set_aside")
        state = settings_checked("StreamPacker", self._settings, fields, state)
        self._lookahead.load(state["lookahead"])
        self._open, self._room = list(state["open"]), state["room"]
        self._closed = deque(list(pack) for pack in state["closed"])
        self._admission.load(state["set_aside"])

    def _step(self, ending: bool = False) -> None:
        """Take at least one example, or close the open pack because nothing fits."""
        if self._far_from_full(ending):
            return self._take(self._lookahead.oldest)
        chosen, exact = self._closing()
        if exact:
            for number in chosen:
                self._take(number)
        elif chosen:
            self._take(chosen[0])  # one only: the next arrival may close the pack exactly
        else:
            self._close()

    def _far_from_full(self, ending: bool) -> bool:
        """Whether the oldest example goes into the pack whatever the others are."""
        if not self._open:
            return True
        ahead = self._lookahead
        slots = self._capacity.max_sequences - len(self._open)
        if ending:
            return ahead.units <= self._room and len(ahead) <= slots
        if slots <= _NEAR_SLOTS:
            return slots * max(ahead.sizes.values()) <= self._room
        return (self._room - ahead.sizes[ahead.oldest]) * len(ahead) >= _NEAR_EXAMPLES * ahead.units

    def _closing(self) -> tuple[list[int], bool]:
        """Return numbers of examples that fill the open pack best, older ones first, and whether they fill it exactly."""
        slots = self._capacity.max_sequences - len(self._open)
        chosen, total = fullest(self._lookahead.sizes.items(), self._room)
        if len(chosen) > slots:
            if slots > _COUNTED_SLOTS:
                return chosen, False
            chosen, total = fullest_of(slots, self._lookahead.sizes.items(), self._room)
        return chosen, total == self._room

    def _take(self, number: int) -> None:
        self._room -= self._lookahead.sizes[number]
        self._open.append(self._lookahead.take(number))
        if not self._room or len(self._open) == self._capacity.max_sequences:
            self._close()

    def _close(self) -> None:
        self._closed.append(self._open)
        self._open, self._room = [], self._capacity.units
