"""Admission: what may enter a streaming packer, and what was set aside because no pack can hold it."""

from __future__ import annotations

from dataclasses import dataclass

from packfp8.errors import BudgetError, ConfigError, LengthError

_POLICIES = ("error", "set_aside")


@dataclass(frozen=True, kw_only=True, slots=True)
class SetAside:
    """An example that is in no pack: its key, its length in tokens, and why."""

    key: object
    length: int
    reason: str


class Admission:
    """The policy for what is over the budget: raise, or set aside and count.

    Attributes:
        policy: "error" or "set_aside".
        refused: what was set aside, in order of arrival.
    """

    def __init__(self, policy: str) -> None:
        if policy not in _POLICIES:
            raise ConfigError(
                "over_budget is not a policy",
                got=repr(policy),
                expected=" or ".join(_POLICIES),
                because="an example that fits no pack must be refused or listed, never cut or lost",
                fix='set over_budget to "error" or "set_aside"',
            )
        self.policy = policy
        self.refused: list[SetAside] = []

    def refuse(self, error: BudgetError, key: object, length: int) -> None:
        """Note what is over the budget, or raise the error, as the policy says."""
        if self.policy == "error":
            raise error
        self.refused.append(SetAside(key=key, length=length, reason=f"{error.got}; {error.expected}"))

    def state(self) -> list:
        """Return [key, length, reason] for each example set aside."""
        return [[one.key, one.length, one.reason] for one in self.refused]

    def load(self, state: list) -> None:
        """Take back what `state` returned."""
        self.refused = [SetAside(key=key, length=length, reason=reason) for key, length, reason in state]


def whole_length(key: object, length: int) -> int:
    """Return the length as an int; raises LengthError, naming the key, unless it is a whole number of at least 1."""
    if isinstance(length, bool) or not hasattr(length, "__index__") or length < 1:
        raise LengthError(
            f"example {key!r} has no usable length",
            got=repr(length),
            expected="a whole number of tokens, at least 1",
            because="a sequence of no tokens has no slot, and a length that is not an integer is a broken manifest's",
            fix="set such examples aside before packing, and report their number",
        )
    return length.__index__()


def whole_frames(key: object, frames: int) -> int:
    """Return the frames as an int; raises LengthError, naming the key, unless they are a whole number of at least 0."""
    if isinstance(frames, bool) or not hasattr(frames, "__index__") or frames < 0:
        raise LengthError(
            f"example {key!r} has no usable number of encoder frames",
            got=repr(frames),
            expected="a whole number of encoder frames, 0 where there is no audio",
            because="a pack meets its budget of encoder frames only where those of every example are known",
            fix="count them as the encoder does: packfp8.lengths.AudioFrames",
        )
    return frames.__index__()
