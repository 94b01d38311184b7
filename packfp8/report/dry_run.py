"""The stream of packs that training would get: the real sampler run over lengths alone, on an instance of its own.

The order is that of one shuffled epoch, drawn from the tally by a seed; so a report of one process and one merged from many
ranks walk the same examples. Of more than 100,000 examples so many are drawn, and the figures stand for all.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from packfp8.lengths import AudioFrames, Measured, Template, rooms
from packfp8.packing import imbalance
from packfp8.report.tally import Tally
from packfp8.rule import Alignment

MOST_EXAMPLES = 100_000
"""Examples that a dry run walks at most: about three seconds, and more packs than a figure of one decimal needs."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Drawn:
    """Examples of a tally in the order of one shuffled epoch.

    Attributes:
        tokens, encoder_frames, supervised: int64 [n].
        complete: whether they are all examples of the tally.
    """

    tokens: np.ndarray
    encoder_frames: np.ndarray
    supervised: np.ndarray
    complete: bool

    @classmethod
    def of(cls, tally: Tally, *, prompt_tokens: int, seed: int, most: int) -> Drawn:
        """At most `most` examples, drawn without putting back."""
        rng = np.random.default_rng(seed)
        counts = tally.counts
        if tally.examples > most:
            counts = rng.multivariate_hypergeometric(counts, most, method="marginals")
        pairs = rng.permutation(np.repeat(np.arange(len(counts)), counts))
        columns = (tally.tokens(prompt_tokens), tally.encoder_frames, tally.supervised(prompt_tokens))
        tokens, frames, supervised = (column[pairs] for column in columns)
        return cls(tokens=tokens, encoder_frames=frames, supervised=supervised, complete=tally.examples <= most)

    @property
    def room_frames(self) -> np.ndarray:
        """int64 [n], encoder frames with the silence that ends the clip's room; 0 without audio."""
        return np.where(self.encoder_frames > 0, rooms(self.encoder_frames), 0)

    def only(self, chosen: np.ndarray) -> Drawn:
        """The examples of which `chosen` (bool [n]) is true."""
        tokens, frames, supervised = self.tokens[chosen], self.encoder_frames[chosen], self.supervised[chosen]
        return Drawn(tokens=tokens, encoder_frames=frames, supervised=supervised, complete=self.complete and chosen.all())


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Stream:
    """Packs as they leave the sampler.

    Attributes:
        capacity: tokens of a full pack.
        real_tokens, slot_tokens, sequences: int64 [packs], of packs with examples, in the order of their steps.
        longest_tokens: int64 [packs], the longest slot of each.
        clips, room_frames: int64 [packs], clips of each, and encoder frames of their rooms.
        attention, encoder_frames, supervised: float64 [steps, ranks], the work of each rank in each step: squared slot
            lengths, frames of audio, labels.
    """

    capacity: int
    real_tokens: np.ndarray
    slot_tokens: np.ndarray
    sequences: np.ndarray
    longest_tokens: np.ndarray
    clips: np.ndarray
    room_frames: np.ndarray
    attention: np.ndarray
    encoder_frames: np.ndarray
    supervised: np.ndarray

    @property
    def packs(self) -> int:
        """Packs with examples."""
        return len(self.real_tokens)

    @property
    def fill(self) -> float:
        """Slot tokens over packs * capacity; 0 where there is no pack."""
        return float(self.slot_tokens.sum()) / max(1, self.packs * self.capacity)

    @property
    def steady_fill(self) -> float:
        """`fill` without the emptiest pack, which is the last one of an epoch: what a longer epoch comes to."""
        if self.packs < 2:
            return self.fill
        return float(self.slot_tokens.sum() - self.slot_tokens.min()) / ((self.packs - 1) * self.capacity)

    @property
    def fill_real(self) -> float:
        """Real tokens over packs * capacity; 0 where there is no pack."""
        return float(self.real_tokens.sum()) / max(1, self.packs * self.capacity)

    def idle(self, work: str) -> float:
        """The share of a step for which ranks wait for the slowest: 1 - mean / max over ranks, averaged over steps."""
        return imbalance(getattr(self, work))


def dry_run(
    drawn: Drawn,
    rule: Alignment,
    *,
    budget: int,
    lookahead: int,
    max_sequences: int | None,
    frame_budget: int | None = None,
    window: int = 32,
) -> Stream:
    """The packs of the drawn examples, each of which fits the budgets."""
    from packfp8.data.sampler import PackingSampler  # imports torch and lhotse, which processes that count lines do without

    known = _Known(drawn)
    sampler = PackingSampler(
        known.items,
        measure=known,
        rule=rule,
        budget=budget,
        lookahead=lookahead,
        max_sequences=max_sequences,
        frame_budget=frame_budget,
        shuffle=False,  # they are shuffled
        window=window,
    )
    packs, works = [], []
    for step in sampler.forecast(epoch=0):
        works.append([_work(pack, rule) for pack in step])
        for pack in filter(None, step):
            slots = _slots(pack, rule)
            clips = [frames for one in pack for frames in one.encoder_frames]
            audio = (len(clips), sum(map(rooms, clips)))
            packs.append((sum(one.tokens for one in pack), slots.sum(), len(pack), slots.max(), *audio))
    columns = np.array(packs, dtype=np.int64).reshape(-1, 6).T
    work = np.array(works, dtype=np.float64).reshape(-1, rule.topology.dp, 3)
    return Stream(
        capacity=rule.floor(budget),
        real_tokens=columns[0],
        slot_tokens=columns[1],
        sequences=columns[2],
        longest_tokens=columns[3],
        clips=columns[4],
        room_frames=columns[5],
        attention=work[:, :, 0],
        encoder_frames=work[:, :, 1],
        supervised=work[:, :, 2],
    )


class _Known:
    """A measure of examples whose lengths are known already: what the sampler asks of `packfp8.lengths.Measure`."""

    sample_rate, template = 16_000, Template()  # of items that are not examples yet; here all are
    frames = AudioFrames.linear()  # some clips are counted; how is asked of nobody
    fingerprint = "known lengths"

    def __init__(self, drawn: Drawn) -> None:
        from packfp8.data.example import Example

        rows = np.stack((drawn.tokens, drawn.encoder_frames, drawn.supervised), axis=1)
        distinct, places = np.unique(rows, axis=0, return_inverse=True)
        self._measured = [
            Measured(tokens=tokens, text_tokens=tokens - frames, encoder_frames=(frames,) if frames else (), supervised=labels)
            for tokens, frames, labels in distinct.tolist()
        ]
        examples = [Example(id=str(number), turns=()) for number in range(len(distinct))]
        self.items = [examples[place] for place in places.ravel().tolist()]

    def __call__(self, example) -> Measured:
        return self._measured[int(example.id)]


def _slots(pack: tuple[Measured, ...], rule: Alignment) -> np.ndarray:
    """int64 [sequences]: slot of each sequence; in a padded batch all are as long as the longest."""
    lengths = np.array([one.tokens for one in pack], dtype=np.int64)
    if rule.layout == "bshd":
        lengths[:] = lengths.max()
    multiple = rule.row(len(pack)) if rule.layout == "bshd" else rule.sequence
    return -(-lengths // multiple) * multiple


def _work(pack: tuple[Measured, ...], rule: Alignment) -> tuple[float, float, float]:
    """Attention work, encoder frames and labels of one rank's pack, which may be empty."""
    if not pack:
        return 0.0, 0.0, 0.0
    slots = _slots(pack, rule).astype(np.float64)
    return float(slots @ slots), float(sum(sum(one.encoder_frames) for one in pack)), float(sum(one.supervised for one in pack))
