"""Terms: everything that decides which examples go into which pack of which step, and nothing else."""

from __future__ import annotations

from dataclasses import dataclass

from packfp8.data.checks import POLICIES, check_bounds
from packfp8.data.longest_slot import longer_than_a_slot, longest_slot
from packfp8.errors import BudgetError, ConfigError
from packfp8.lengths import Measure, Measured, rooms
from packfp8.packing import Dealer, PackCost, RowPacker, StreamPacker
from packfp8.packing.capacity import too_many_frames
from packfp8.rule import Alignment, checked_rule

ENDS = ("fill", "drop")


@dataclass(frozen=True, slots=True, kw_only=True)
class Terms:
    """The settings of a sampler; the same on every rank, but for the rank's own coordinates in `rule.topology`.

    Attributes as `PackingSampler` takes them.

    Raises:
        ConfigError: an unknown policy or end, a seed that is not a whole number, a bound that leaves no room or bounds nothing.
        BudgetError: a budget below the least pack.
    """

    measure: Measure
    rule: Alignment
    budget: int
    lookahead: int
    max_sequences: int | None
    frame_budget: int | None
    max_seqlen: int | None
    seed: int
    shuffle: bool
    shuffle_buffer: int
    window: int
    cost: PackCost
    over_budget: str
    on_fault: str
    end: str

    def __post_init__(self) -> None:
        checked_rule(self.rule)
        for name, choices in (("over_budget", POLICIES), ("on_fault", POLICIES), ("end", ENDS)):
            if getattr(self, name) not in choices:
                raise ConfigError(
                    f"{name} is not a policy",
                    got=repr(getattr(self, name)),
                    expected=" or ".join(map(repr, choices)),
                    because="what is in no pack is refused or named, and every rank gets as many steps as the others",
                    fix=f"choose {name}={choices[0]!r} or {name}={choices[1]!r}",
                )
        for name, least in (("seed", 0), ("shuffle_buffer", 1)):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < least:
                raise ConfigError(
                    f"{name} is not a number that every rank can share",
                    got=repr(value),
                    expected=f"a whole number of at least {least}",
                    because="each rank walks all examples by itself; orders that differ would repeat some and lose others",
                    fix=f"pass the same {name} on every rank",
                )
        self.longest_tokens  # noqa: B018, it raises where the budget or max_seqlen has no room for a slot
        self.packer()
        check_bounds(max_sequences=self.max_sequences, frame_budget=self.frame_budget, measure=self.measure)
        self.dealer(0)

    @property
    def ranks(self) -> int:
        """Data-parallel ranks: packs of a step."""
        return self.rule.topology.dp

    @property
    def longest_tokens(self) -> int:
        """Tokens of the longest sequence that a pack can hold."""
        capacity = self.rule.floor(self.budget)  # a multiple of every slot, and of a row that is a batch by itself
        return capacity if self.max_seqlen is None else longest_slot(self.max_seqlen, self.rule, capacity)

    def packer(self) -> StreamPacker | RowPacker:
        """An empty packer."""
        bounds = {"lookahead": self.lookahead, "max_sequences": self.max_sequences, "frame_budget": self.frame_budget}
        if self.rule.layout == "bshd":
            return RowPacker(self.rule, self.budget, **bounds)
        return StreamPacker(self.rule.floor(self.budget), self.rule.sequence, **bounds)

    def dealer(self, epoch: int) -> Dealer:
        """An empty dealer; the order within a window follows from seed and epoch."""
        return Dealer(self.ranks, window=self.window, seed=self.seed * 1_000_003 + epoch)

    def frames_of(self, one: Measured) -> int:
        """Encoder frames that an example takes of the frame budget, those of its clips' rooms; 0 where there is none."""
        return 0 if self.frame_budget is None else sum(map(rooms, one.encoder_frames))

    def too_long(self, name: str, tokens: int) -> BudgetError:
        """The error for an example of more tokens than `longest_tokens`."""
        longest = self.longest_tokens
        if longest < self.rule.floor(self.budget):
            return longer_than_a_slot(name, tokens, longest)
        return BudgetError(
            f"example {name!r} is longer than a pack",
            got=f"{tokens} tokens",
            expected=f"at most {longest}, what a budget of {self.budget} holds under the rule",
            because="a sequence is never cut: a cut would drop audio frames or supervised tokens",
            fix="raise the budget, or choose over_budget='set_aside' to leave such examples out and have them named",
        )

    def check_frames(self, name: str, one: Measured) -> None:
        """Nothing, where a pack has room for the example's audio.

        Raises:
            BudgetError: none has; it names the example.
        """
        if self.frame_budget is not None and (frames := self.frames_of(one)) > self.frame_budget:
            raise too_many_frames(f"example {name!r}", frames, self.frame_budget)

    def cost_of(self, pack: list[Measured]) -> float:
        """The work of a pack, padding included."""
        lengths = [one.tokens for one in pack]
        multiple = self.rule.row(len(pack)) if self.rule.layout == "bshd" else self.rule.sequence
        if self.rule.layout == "bshd":
            lengths = [max(lengths)] * len(lengths)
        slots = [-(-tokens // multiple) * multiple for tokens in lengths]
        return self.cost(slots, sum(sum(one.encoder_frames) for one in pack))

    def summary(self) -> dict:
        """The terms in plain values; two samplers with equal ones plan the same steps from the same examples."""
        return {
            "rule": self.rule.fingerprint,
            "measure": self.measure.fingerprint,
            "dp": self.ranks,
            "budget": int(self.budget),
            "lookahead": int(self.lookahead),
            "max_sequences": None if self.max_sequences is None else int(self.max_sequences),
            "frame_budget": None if self.frame_budget is None else int(self.frame_budget),
            "max_seqlen": None if self.max_seqlen is None else int(self.max_seqlen),
            "seed": self.seed,
            "shuffle": bool(self.shuffle),
            "shuffle_buffer": self.shuffle_buffer,
            "window": int(self.window),
            "cost": [self.cost.linear, self.cost.encoder],
            "over_budget": self.over_budget,
            "on_fault": self.on_fault,
            "end": self.end,
        }
