"""RowPacker: padded batches of B rows of S tokens (BSHD) from a stream, of rows as equal as a lookahead allows."""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from itertools import accumulate

from packfp8.packing.admission import Admission, SetAside, whole_frames, whole_length
from packfp8.packing.capacity import counted, too_long, too_many_frames
from packfp8.packing.lookahead import Lookahead
from packfp8.packing.snapshot import settings_checked


class RowPacker:
    """Padded batches whose B * S is at most `budget` tokens: push examples, pop batches.

    S is the longest example rounded up to `rule.row(B)`. A batch is closed when an example has seen `lookahead` others
    arrive: it then leaves with those next to it in length, with which the batch holds the most real tokens.

    Args:
        rule: only `rule.row(B)` is asked, the least S for B rows; legal S are its multiples.
        budget: the most tokens B * S of a batch.
        lookahead: arrivals among which a batch may choose; nobody waits longer.
        max_sequences: most rows in a batch.
        over_budget: "error" raises BudgetError for an example that no batch can hold, "set_aside" lists it.
        frame_budget: most encoder frames in a batch; None does not count them.
    """

    def __init__(
        self,
        rule,
        budget: int,
        lookahead: int = 256,
        max_sequences: int | None = None,
        over_budget: str = "error",
        frame_budget: int | None = None,
    ) -> None:
        self._row = rule.row
        self._rows = [0]  # rule.row by number of rows, as far as it was asked
        self._budget = counted("budget", budget)
        self._most = self._budget if max_sequences is None else counted("max_sequences", max_sequences)
        self._admission = Admission(over_budget)
        self._lookahead = Lookahead(counted("lookahead", lookahead))
        self._frame_budget = None if frame_budget is None else counted("frame_budget", frame_budget)
        self._settings = {
            "budget": self._budget,
            "rows": [rule.row(number) for number in range(1, 9)],  # stands for the rule
            "lookahead": int(lookahead),
            "max_sequences": self._most,
            "over_budget": over_budget,
            "frame_budget": self._frame_budget,
        }
        self._closed: deque[list] = deque()

    def push(self, key, length: int, frames: int = 0) -> None:
        """Let an example of `length` tokens and `frames` encoder frames arrive; `key` is what `pop` returns for it.

        Raises LengthError for a length that is not a whole number of at least 1, or with a frame budget for frames that are
        none of at least 0; BudgetError for an example that no batch can hold.
        """
        length = whole_length(key, length)
        alone = self._tokens(1, length)
        if alone > self._budget:
            error = too_long(f"example {key!r}", length, self._budget, slot=f"a row of {alone}")
            self._admission.refuse(error, key, length)
            return
        frames = 0 if self._frame_budget is None else whole_frames(key, frames)
        if self._frame_budget is not None and frames > self._frame_budget:
            self._admission.refuse(too_many_frames(f"example {key!r}", frames, self._frame_budget), key, length)
            return
        self._lookahead.add(key, length, frames)
        while self._lookahead.overdue:
            self._close()

    def pop(self) -> list | None:
        """Return the keys of a batch, shortest row first, or None while none is ready."""
        return self._closed.popleft() if self._closed else None

    def flush(self) -> None:
        """Pack all that is left, so that `pop` drains it. More may be pushed after."""
        while len(self._lookahead):
            self._close()

    @property
    def set_aside(self) -> tuple[SetAside, ...]:
        """What no batch can hold, with the reason, in order of arrival."""
        return tuple(self._admission.refused)

    def __len__(self) -> int:
        """Return the number of examples pushed that no batch popped has brought, but for those set aside."""
        return len(self._lookahead) + sum(map(len, self._closed))

    def state_dict(self) -> dict:
        """Return the state in plain ints, lists and keys: what comes after is the same from it, batch by batch."""
        return {
            "settings": dict(self._settings),
            "lookahead": self._lookahead.state(),
            "closed": [list(pack) for pack in self._closed],
            "set_aside": self._admission.state(),
        }

    def load_state_dict(self, state: dict) -> None:
        """Take back a state; raises StateError where it was saved under other settings."""
        state = settings_checked("RowPacker", self._settings, ("lookahead", "closed", "set_aside"), state)
        self._lookahead.load(state["lookahead"])
        self._closed = deque(list(pack) for pack in state["closed"])
        self._admission.load(state["set_aside"])

    def _close(self) -> None:
        """Close the batch of the oldest example with its neighbours in length.

        Neighbours on both sides only: to fill up with longer ones pads the oldest's row, and costs 2 to 9 points of
        fill on speech-like and lognormal lengths.
        """
        sizes = self._lookahead.sizes
        number = self._lookahead.oldest
        rising = sorted((size, number) for number, size in sizes.items())
        anchor = bisect_left(rising, (sizes[number], number))
        tokens = [0, *accumulate(size for size, _ in rising)]
        frames = []
        if self._frame_budget is not None:
            frames = [0, *accumulate(self._lookahead.frames.get(number, 0) for _, number in rising)]
        best = (0, 0, anchor, anchor)
        for last in range(anchor, len(rising)):
            if (last - anchor + 1) * rising[last][0] > self._budget:
                break
            first = last + 1 - self._rows_of(rising[last][0], last + 1)
            if frames:  # begins later where there would be too many
                first = bisect_left(frames, frames[last + 1] - self._frame_budget, first)
            if first <= anchor:
                padded = self._tokens(last + 1 - first, rising[last][0])
                best = max(best, (tokens[last + 1] - tokens[first], -padded, first, last))
        _, _, first, last = best
        self._closed.append([self._lookahead.take(number) for _, number in rising[first : last + 1]])

    def _rows_of(self, longest: int, most: int) -> int:
        """Return the most rows, up to `most`, of which the budget holds that many as long as `longest`."""
        rows = min(most, self._most, self._budget // longest)
        while rows > 1 and self._tokens(rows, longest) > self._budget:
            rows -= 1
        return rows

    def _tokens(self, rows: int, longest: int) -> int:
        """Return B * S for B rows of which the longest has `longest` tokens."""
        while len(self._rows) <= rows:
            self._rows.append(self._row(len(self._rows)))
        return -(-longest // self._rows[rows]) * self._rows[rows] * rows
