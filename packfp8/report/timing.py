"""Times of a payoff: what is timed, by whom, and what comes of it."""

from __future__ import annotations

from dataclasses import dataclass
from statistics import median
from typing import Protocol

from packfp8.errors import ConfigError

BLOCKS = ("linear", "layer")
"""The linear layers, and the decoder layer with attention."""

MODES = ("eager", "graph")
"""Launched one by one, and captured in a CUDA graph."""

TOKENS = (1024, 2048, 4096, 8192, 16384, 32768, 65536)
BF16, COMPILED = "bf16", "bf16 compiled"


@dataclass(frozen=True, kw_only=True, slots=True)
class Sizes:
    """Sizes of the decoder that is timed.

    Args:
        hidden, ffn, layers: of the decoder; ffn is the inner width of a SwiGLU MLP.
        sequence_tokens: length of every sequence in a pack: about a spoken sentence with its text.

    Raises:
        ConfigError: a size that FP8 layers cannot have.
    """

    hidden: int
    ffn: int
    layers: int
    sequence_tokens: int = 256

    def __post_init__(self) -> None:
        for name, multiple in (("hidden", 64), ("ffn", 16), ("layers", 1)):
            value = getattr(self, name)
            if not isinstance(value, int) or value < 1 or value % multiple:
                raise ConfigError(
                    f"{name} is not a size that can be timed",
                    got=repr(value),
                    expected=f"a positive multiple of {multiple}",
                    because="FP8 layers take features in multiples of 16, and heads are 64 or 128 wide",
                    fix=f"choose {name} as in your model",
                )

    @property
    def head_dim(self) -> int:
        """128 where it divides hidden, else 64."""
        return 128 if self.hidden % 128 == 0 else 64


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """One thing to time.

    Args:
        block: of BLOCKS.
        recipe: a recipe of `packfp8.rule`, BF16, or COMPILED.
        mode: of MODES.
        tokens: in the pack of one rank.
    """

    block: str
    recipe: str
    mode: str
    tokens: int

    def __str__(self) -> str:
        return f"{self.block} {self.recipe} {self.mode}, {self.tokens:,} tokens"


class Timer(Protocol):
    """What times cases: a GPU, or a stand-in of a test."""

    device: str
    versions: dict[str, str]
    recipes: tuple[str, ...]

    def baseline(self, recipe: str) -> str:
        """The BF16 that a recipe is compared with."""

    def blocks(self, recipe: str) -> tuple[str, ...]:
        """Blocks in which the recipe can be timed."""

    def time(self, case: Case) -> tuple[float, ...]:
        """Milliseconds of several repeats; raises Untimed where the GPU refuses."""


class Untimed(Exception):  # noqa: N818
    """A case that cannot be timed here, with the reason: out of memory, or refused by the library."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """Milliseconds of one case, forward and backward together; or why there are none."""

    case: Case
    milliseconds: tuple[float, ...] = ()
    reason: str = ""

    @property
    def median(self) -> float:
        """Median milliseconds."""
        return median(self.milliseconds)


@dataclass(frozen=True, kw_only=True, slots=True)
class Gain:
    """How many times faster than BF16 a recipe is: the ratio of medians, and the least and the most of all pairs."""

    ratio: float
    least: float
    most: float

    @classmethod
    def of(cls, bf16: Row, fp8: Row) -> Gain:
        """The gain of two timed rows."""
        return cls(
            ratio=bf16.median / fp8.median,
            least=min(bf16.milliseconds) / max(fp8.milliseconds),
            most=max(bf16.milliseconds) / min(fp8.milliseconds),
        )
