"""Payoff: from how many tokens on FP8 beats BF16, for given sizes, on the GPU at hand.

Two blocks are timed, forward and backward: the linear layers alone, and whole decoder layers with packed attention; each
launched eagerly and as one captured CUDA graph. FP8 loses at small sizes: it launches more kernels than BF16, and each one
saves less time there than a launch takes.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from pathlib import Path

from packfp8.errors import ConfigError
from packfp8.report.timing import BLOCKS, MODES, TOKENS, Case, Gain, Row, Sizes, Timer, Untimed


@dataclass(frozen=True, kw_only=True, slots=True)
class Payoff:
    """Where FP8 pays.

    Attributes:
        device, versions: what was timed on.
        sizes: of the decoder.
        baselines: recipe -> the BF16 that it is compared with.
        rows: every case.
    """

    device: str
    versions: dict[str, str]
    sizes: Sizes
    baselines: dict[str, str]
    rows: tuple[Row, ...]

    @property
    def tokens(self) -> tuple[int, ...]:
        """Token counts, rising."""
        return tuple(sorted({row.case.tokens for row in self.rows}))

    def row(self, block: str, recipe: str, mode: str, tokens: int) -> Row | None:
        """The row of a case; None where it was not tried."""
        wanted = Case(block=block, recipe=recipe, mode=mode, tokens=tokens)
        return next((row for row in self.rows if row.case == wanted), None)

    def gain(self, block: str, recipe: str, mode: str, tokens: int) -> Gain | None:
        """The gain over BF16 in the same mode; None where either could not be timed."""
        fp8, bf16 = (self.row(block, name, mode, tokens) for name in (recipe, self.baselines[recipe]))
        timed = fp8 and bf16 and fp8.milliseconds and bf16.milliseconds
        return Gain.of(bf16, fp8) if timed else None

    def wins_from(self, block: str, recipe: str, mode: str) -> int | None:
        """The least tokens from which on the recipe is faster at every count, its spread included; None if never."""
        start = None
        for tokens in self.tokens:
            gain = self.gain(block, recipe, mode, tokens)
            if gain is not None:
                start = (start or tokens) if gain.least > 1 else None
        return start

    def verdict(self, recipe: str, tokens: int) -> str:
        """One sentence: whether `tokens` in the pack of a rank are on the winning side for the recipe."""
        if recipe not in self.baselines:
            return f"The payoff file has no timing of {recipe}, so it cannot say whether this budget is where FP8 pays."
        nearest = min(self.tokens, key=lambda count: abs(count - tokens))
        block = "layer" if self.row("layer", recipe, "eager", nearest) else "linear"
        gains = {mode: self.gain(block, recipe, mode, nearest) for mode in MODES}
        said = [f"{gain.ratio:.2f} times BF16's speed {_HOW[mode]}" for mode, gain in gains.items() if gain]
        if not said:
            return f"The payoff file has no timing of {recipe} near {tokens:,} tokens."
        winning = [mode for mode, gain in gains.items() if gain and gain.least > 1]
        side = "on the winning side" if len(winning) == len(said) else "on the winning side only as a graph" if winning else ""
        start = self.wins_from(block, recipe, "graph")
        fix = f"; captured, it wins from {start:,} on" if start and not winning else ""
        return (
            f"{tokens:,} tokens on a rank are {side or 'on the losing side'} for {recipe}: "
            f"{' and '.join(said)} at {nearest:,}{fix}."
        )

    def to_dict(self) -> dict:
        """Everything, under the keys of `packfp8 payoff --json`."""
        return {
            "device": self.device,
            "versions": self.versions,
            **asdict(self.sizes),
            "baselines": self.baselines,
            "rows": [{**asdict(row.case), "milliseconds": list(row.milliseconds), "reason": row.reason} for row in self.rows],
            "wins_from": [
                {"block": block, "recipe": recipe, "mode": mode, "tokens": self.wins_from(block, recipe, mode)}
                for block in BLOCKS
                for recipe in self.baselines
                for mode in MODES
                if any(row.case.block == block and row.case.recipe == recipe for row in self.rows)
            ],
        }

    @classmethod
    def load(cls, path: str | Path) -> Payoff:
        """What `packfp8 payoff --json` wrote to a file.

        Raises:
            ConfigError: the file is missing, or holds something else.
        """
        try:
            told = json.loads(Path(path).read_bytes())
            sizes = Sizes(**{name: told[name] for name in ("hidden", "ffn", "layers", "sequence_tokens")})
            rows = tuple(
                Row(
                    case=Case(**{name: row[name] for name in ("block", "recipe", "mode", "tokens")}),
                    milliseconds=tuple(row["milliseconds"]),
                    reason=row["reason"],
                )
                for row in told["rows"]
            )
            return cls(device=told["device"], versions=told["versions"], sizes=sizes, baselines=told["baselines"], rows=rows)
        except (OSError, ValueError, LookupError, TypeError) as fault:
            raise ConfigError(
                f"{path} is not a saved payoff",
                got=f"{type(fault).__name__}: {fault}",
                expected="what `packfp8 payoff --json` prints",
                because="a verdict needs the times that were measured on the GPU",
                fix="run `packfp8 payoff --json > payoff.json` on the GPU",
            ) from fault

    def table(self):
        """The gains for a terminal: a rich renderable."""
        from packfp8.report.table import payoff_table

        return payoff_table(self)

    def figure(self):
        """The gains as a matplotlib figure."""
        from packfp8.report.payoff_charts import figure

        return figure(self)

    def html(self) -> str:
        """One page that needs no network."""
        from packfp8.report.page import payoff_page

        return payoff_page(self)

    def _repr_html_(self) -> str:
        from packfp8.report.page import payoff_fragment

        return payoff_fragment(self)


_HOW = {"eager": "launched eagerly", "graph": "as a captured graph"}


def payoff(
    *,
    hidden: int = 4096,
    ffn: int | None = None,
    layers: int = 2,
    tokens: Iterable[int] = TOKENS,
    recipes: Iterable[str] = (),
    timer: Timer | None = None,
    progress: Callable[[Case], None] | None = None,
) -> Payoff:
    """Where FP8 pays for a decoder of these sizes, by timing it here.

    Args:
        hidden, layers: of the decoder.
        ffn: inner width of the MLP; 2.75 * hidden, rounded to 256, where it is left out (SwiGLU's usual two thirds of 4).
        tokens: counts to try, in the pack of one rank; multiples of 16.
        recipes: those to time; every one that the GPU and its libraries have where it is left out.
        timer: what times; the GPU of this machine where it is left out.
        progress: called before each case.

    Raises:
        ConfigError: there is no GPU, or a size or token count that FP8 cannot have.
    """
    sizes = Sizes(hidden=hidden, ffn=-(-hidden * 11 // 4 // 256) * 256 if ffn is None else ffn, layers=layers)
    counts = tuple(sorted(set(tokens)))
    if not counts or any(count < 16 or count % 16 for count in counts):
        raise ConfigError(
            "the token counts cannot be timed",
            got=", ".join(map(str, counts)) or "none",
            expected="multiples of 16",
            because="FP8 GEMMs take tokens in multiples of 16 when weights are trained (see `packfp8 explain block`)",
            fix="--tokens 1024,4096,16384",
        )
    if timer is None:
        from packfp8.report.payoff_gpu import GpuTimer

        timer = GpuTimer.here(sizes)
    wanted = tuple(dict.fromkeys(recipes)) or timer.recipes
    if missing := set(wanted) - set(timer.recipes):
        raise ConfigError(
            "a recipe cannot be timed here",
            got=", ".join(sorted(missing)),
            expected=f"among {', '.join(timer.recipes)}",
            because=f"{timer.device} or the installed libraries do not have it",
            fix="leave it out, or see `packfp8 doctor`",
        )
    baselines = {recipe: timer.baseline(recipe) for recipe in wanted}
    rows = []
    for recipe in dict.fromkeys([*baselines.values(), *baselines]):
        for block in timer.blocks(recipe):
            for mode in MODES:
                for count in counts:
                    case = Case(block=block, recipe=recipe, mode=mode, tokens=count)
                    if progress:
                        progress(case)
                    rows.append(_timed(timer, case))
    return Payoff(device=timer.device, versions=timer.versions, sizes=sizes, baselines=baselines, rows=tuple(rows))


def _timed(timer: Timer, case: Case) -> Row:
    try:
        return Row(case=case, milliseconds=timer.time(case))
    except Untimed as fault:
        return Row(case=case, reason=str(fault))
