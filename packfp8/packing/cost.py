"""PackCost: the work of a pack in one number; imbalance: the share of a step that ranks wait for the slowest."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from packfp8.errors import ConfigError


@dataclass(frozen=True, kw_only=True, slots=True)
class PackCost:
    """The work of a pack, in units of one causal attention over one token pair.

    Attributes:
        linear: work of a token in the matrices of the language model.
        encoder: work of an encoder frame.
    """

    linear: float = 0.0
    encoder: float = 0.0

    def __post_init__(self) -> None:
        for name in ("linear", "encoder"):
            if not 0 <= getattr(self, name) < float("inf"):
                raise ConfigError(
                    f"PackCost.{name} is not a weight",
                    got=repr(getattr(self, name)),
                    expected="a finite number, at least 0",
                    because="packs are sorted by their cost",
                    fix="use PackCost.of_model(...), or PackCost() for attention alone",
                )

    @classmethod
    def of_model(cls, *, hidden: int, layers: int, encoder_hidden: int = 0, encoder_layers: int = 0) -> PackCost:
        """Return the cost for a decoder and an encoder of these sizes.

        A layer of width h multiplies a token with about 12 h * h weights: 24 h * h flops. Its attention scores and
        sums over s tokens take 4 h * s flops a token, half of them under a causal mask. So a token is worth 12 h pairs.
        """
        encoder = 12.0 * encoder_hidden**2 * encoder_layers / (hidden * layers)
        return cls(linear=12.0 * hidden, encoder=encoder)

    def __call__(self, slot_lengths: Iterable[int], encoder_frames: int = 0) -> float:
        """Return the work of a pack with slots of these lengths (tokens) and so many encoder frames in all."""
        lengths = [int(length) for length in slot_lengths]
        attention = sum(length * length for length in lengths)
        return float(attention + self.linear * sum(lengths) + self.encoder * int(encoder_frames))


def imbalance(costs_by_step) -> float:
    """Return the mean over steps of 1 - mean / max over ranks, for costs [steps, ranks]; 0 where there is no step.

    A step ends when its slowest rank does: this is the share of the time for which ranks wait.
    """
    costs = np.asarray(costs_by_step, dtype=np.float64)
    if not costs.size:
        return 0.0
    longest = costs.max(axis=1)
    busy = np.divide(costs.mean(axis=1), longest, out=np.ones_like(longest), where=longest > 0)
    return float(1 - busy.mean())
