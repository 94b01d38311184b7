"""DemoResult: what the demo did, as numbers and as a table."""

from __future__ import annotations

from dataclasses import dataclass

from packfp8.data import SetAside
from packfp8.layout import Slots
from packfp8.rule import Alignment

_NAMED = 3  # of what was set aside, how many the table names


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class DemoResult:
    """What the demo did.

    Args:
        source: where the examples are from, for people.
        rule: the rule that made the packs.
        budget: most tokens of a pack, as asked.
        examples: examples of an epoch, those set aside left out.
        packs: the slots of each pack of the first epoch.
        set_aside: examples that were not trained on, and why.
        losses: mean loss per supervised token, step by step.
        supervised_tokens, trained_tokens: labels and tokens (padding included) over all steps.
        audio_seconds: seconds of audio that the encoder heard over all steps.
        seconds: the whole demo took.
    """

    source: str
    rule: Alignment
    budget: int
    examples: int
    packs: tuple[Slots, ...]
    set_aside: tuple[SetAside, ...]
    losses: tuple[float, ...]
    supervised_tokens: int
    trained_tokens: int
    audio_seconds: float
    seconds: float

    @property
    def capacity(self) -> int:
        """Tokens of a full pack: the budget floored to the rule."""
        return self.rule.floor(self.budget)

    @property
    def tokens_real(self) -> int:
        """Real tokens of an epoch."""
        return sum(int(slots.lengths.sum()) for slots in self.packs)

    @property
    def tokens_total(self) -> int:
        """packs * capacity: real, slot and filler tokens."""
        return len(self.packs) * self.capacity

    @property
    def waste(self) -> dict[str, int]:
        """Tokens that hold nothing, by cause: rounding within slots, and the rest of the packs, counted against full ones."""
        slot = sum(slots.waste["slot"] for slots in self.packs)
        return {"slot": slot, "filler": self.tokens_total - self.tokens_real - slot}

    @property
    def fill(self) -> float:
        """Slot tokens over packs * capacity."""
        return (self.tokens_real + self.waste["slot"]) / self.tokens_total

    @property
    def fill_real(self) -> float:
        """Real tokens over packs * capacity."""
        return self.tokens_real / self.tokens_total

    def to_dict(self) -> dict:
        """Plain values, as `packfp8 demo --json` prints them."""
        return {
            "source": self.source,
            "recipe": self.rule.recipe,
            "layout": self.rule.layout,
            "fingerprint": self.rule.fingerprint,
            "precision": "float32",
            "budget": self.budget,
            "capacity": self.capacity,
            "examples": self.examples,
            "packs": len(self.packs),
            "tokens_real": self.tokens_real,
            "tokens_total": self.tokens_total,
            "fill": self.fill,
            "fill_real": self.fill_real,
            "waste": self.waste,
            "set_aside": [{"id": one.id, "reason": one.reason} for one in self.set_aside],
            "steps": len(self.losses),
            "losses": list(self.losses),
            "trained_tokens": self.trained_tokens,
            "supervised_tokens": self.supervised_tokens,
            "audio_seconds": self.audio_seconds,
            "seconds": self.seconds,
        }

    def table(self):
        """The same for a terminal: a rich table."""
        from rich.table import Table

        table = Table(title=f"packfp8 demo: {self.source}", show_header=False, title_justify="left")
        table.add_column(style="bold", no_wrap=True)
        table.add_column(overflow="fold")
        for name, value in self._rows():
            table.add_row(name, value)
        return table

    def _rows(self) -> list[tuple[str, str]]:
        waste, total = self.waste, self.tokens_total
        sizes = [slots.sequences for slots in self.packs]
        rows = [
            (
                "rule",
                f"{self.rule.recipe}, {self.rule.layout}: packs of multiples of {self.rule.total}, at most {self.capacity}",
            ),
            ("model", "small, plain torch, float32 on the CPU; an FP8 run on a GPU is given these same packs"),
            ("examples", f"{self.examples} ({self.tokens_real:,} tokens)"),
            ("packs", f"{len(sizes)}, of {min(sizes)} to {max(sizes)} sequences"),
            ("fill", f"{self.fill:.2%} (real tokens {self.fill_real:.2%}), the last pack of the epoch counted too"),
            ("waste", f"slot {waste['slot'] / total:.2%}, filler {waste['filler'] / total:.2%}"),
            ("set aside", f"{len(self.set_aside)}" + "".join(f"\n{one.id}: {_first(one)}" for one in self.set_aside[:_NAMED])),
            ("trained", f"{len(self.losses)} steps, {self.trained_tokens:,} tokens, {self.audio_seconds:.0f} s of audio"),
            ("loss", _falling(self.losses)),
            ("time", f"{self.seconds:.1f} s"),
        ]
        return rows


def _first(one: SetAside) -> str:
    return one.reason.splitlines()[0]


def _falling(losses: tuple[float, ...], parts: int = 5) -> str:
    """Means over `parts` equal stretches of the run, where it is that long: one pack is harder than another."""
    size = max(1, len(losses) // parts)
    stretches = [losses[at : at + size] for at in range(0, len(losses), size)]
    means = " ".join(f"{sum(stretch) / len(stretch):.2f}" for stretch in stretches)
    return f"{means} (per token{f', means of {size} steps' if size > 1 else ''})"
