"""Constancy: what packs of one shape cost, by a second dry run of the sampler, under both budgets and a bound of sequences.

Tokens are filled up to the capacity, and audio to the frame budget. Packs close nearly full in one of the two; what is left of
the other is silence or filler, and this is where it is counted.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from packfp8.errors import ConfigError
from packfp8.lengths import LEAST_ROOM_FRAMES
from packfp8.report.dry_run import Drawn, Stream, dry_run
from packfp8.rule import Alignment

USUAL = 95
"""Percentile of the packs' frames that is the frame budget where none is given: few packs are closed early by it."""
WHOLE_TOKENS = 64
"""`max_seqlen` is a multiple of so many tokens: to as many Transformer Engine rounds up the one that it finds by itself
(2.20.2, `DotProductAttention.forward` without `max_seqlen_q`)."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Constancy:
    """Packs of constant shape, and what in them is nothing.

    Attributes:
        frame_budget: encoder frames of a pack's audio; 0 where no example is known to have any.
        max_sequences: most sequences of a pack.
        max_seqlen: tokens of the longest slot of all examples that a pack can hold, rounded up, and at most a pack's.
        stream: the packs under these bounds.
        over_budget: examples walked whose audio no pack can hold.
    """

    frame_budget: int
    max_sequences: int
    max_seqlen: int
    stream: Stream
    over_budget: int

    @property
    def filler_tokens(self) -> int:
        """Tokens of all packs walked that are in no sequence's slot."""
        return self.stream.packs * self.stream.capacity - int(self.stream.slot_tokens.sum())

    @property
    def filler(self) -> float:
        """Their share of all tokens."""
        return self.filler_tokens / max(1, self.stream.packs * self.stream.capacity)

    @property
    def silent_frames(self) -> int:
        """Frames of all rows of audio that are no clip's: those that end rooms, and those after the last room."""
        frames = int(self.stream.room_frames.sum() - self.stream.clips.sum())
        return self.stream.packs * self.frame_budget - frames

    @property
    def silent(self) -> float:
        """Their share of all frames that the encoder computes."""
        return self.silent_frames / max(1, self.stream.packs * self.frame_budget)

    @property
    def clips(self) -> int:
        """Clips that a pack has places for."""
        return self.frame_budget // LEAST_ROOM_FRAMES

    @property
    def unused_clips(self) -> int:
        """Places for clips, over all packs walked, that hold none: a length and an offset each, and no samples."""
        return self.stream.packs * self.clips - int(self.stream.clips.sum())

    def to_dict(self) -> dict:
        """The figures under the key `static` of `packfp8 report --json`."""
        return {
            "frame_budget": self.frame_budget,
            "max_sequences": self.max_sequences,
            "max_seqlen": self.max_seqlen,
            "packs": self.stream.packs,
            "fill": self.stream.fill,
            "fill_real": self.stream.fill_real,
            "filler_tokens": self.filler_tokens,
            "filler": self.filler,
            "silent_frames": self.silent_frames,
            "silent": self.silent,
            "unused_clips": self.unused_clips,
            "over_frame_budget": self.over_budget,
        }


def constancy(
    drawn: Drawn,
    rule: Alignment,
    usual: Stream,
    *,
    budget: int,
    lookahead: int,
    longest_tokens: int,
    max_sequences: int | None,
    frame_budget: int | None,
) -> Constancy:
    """The packs of the drawn examples under a frame budget.

    Args:
        drawn, rule, budget, lookahead: as for `dry_run`; the rule is one of `check_constant`.
        usual: the packs without one; what bound is not given follows from them.
        longest_tokens: of the longest example that a pack can hold, drawn or not; 0 where there is none.
        max_sequences: the most of `usual` where left out.
        frame_budget: where left out, that of 95 of 100 of `usual`, or of the example with the most audio.
    """
    frames = drawn.room_frames
    if not frames.any():
        frame_budget = 0
    elif frame_budget is None:
        frame_budget = max(int(np.ceil(np.percentile(usual.room_frames, USUAL))), int(frames.max()))
    if max_sequences is None:
        max_sequences = int(usual.sequences.max(initial=1))
    fits = frames <= frame_budget
    stream = dry_run(
        drawn.only(fits),
        rule,
        budget=budget,
        lookahead=lookahead,
        max_sequences=max_sequences,
        frame_budget=frame_budget or None,
    )
    return Constancy(
        frame_budget=frame_budget,
        max_sequences=max_sequences,
        max_seqlen=min(stream.capacity, -(-rule.slot(max(1, longest_tokens)) // WHOLE_TOKENS) * WHOLE_TOKENS),
        stream=stream,
        over_budget=int(np.count_nonzero(~fits)),
    )


def check_constant(rule: Alignment) -> None:
    """Nothing, where packs of this rule can have one shape.

    Raises:
        ConfigError: its rows are padded.
    """
    if rule.layout == "bshd":
        raise ConfigError(
            "padded rows have no constant shape",
            got="static, layout 'bshd'",
            expected="layout 'thd'",
            because="a batch of many short rows and one of few long ones are of different shapes within one budget",
            fix="leave out static, or pack with layout thd",
        )
