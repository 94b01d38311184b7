"""Whether the settings of a collator go together: told before the first batch."""

from __future__ import annotations

from packfp8.errors import ConfigError
from packfp8.lengths import LEAST_ROOM_FRAMES, Measure, check_rooms
from packfp8.rule import Alignment

POLICIES = ("error", "set_aside")


def check_policies(**policies: object) -> None:
    """Nothing, where each is one of `POLICIES`.

    Raises:
        ConfigError: one is not.
    """
    for name, policy in policies.items():
        if policy not in POLICIES:
            raise _unknown_policy(name, policy)


def is_count(value: object, least: int) -> bool:
    """Whether it is a whole number of at least `least`; True and 64.0 are none."""
    return not isinstance(value, bool) and hasattr(value, "__index__") and value >= least


def check_bounds(*, max_sequences: int | None, frame_budget: int | None, measure: Measure) -> None:
    """Nothing, where a pack has room for a sequence and for a clip.

    Raises:
        ConfigError: it has not, or a bound is no whole number; or a frame budget, where no example has audio.
    """
    if max_sequences is not None and not is_count(max_sequences, 1):
        raise _no_sequences(max_sequences)
    if frame_budget is None:
        return
    if measure.frames is None:
        raise _frames_of_text(frame_budget)
    if not is_count(frame_budget, LEAST_ROOM_FRAMES):
        raise _no_clips(frame_budget)


def check_static(
    budget: int | None,
    max_sequences: int | None,
    frame_budget: int | None,
    *,
    measure: Measure,
    rule: Alignment,
    share_encoder: bool,
) -> None:
    """Nothing, where everything that has a shape has a bound.

    Raises:
        ConfigError: a bound is missing, the layout is padded, the encoder is shared, or clips cannot stand in one row.
    """
    if budget is None or max_sequences is None or rule.layout == "bshd":
        raise _static_without_bounds(budget, max_sequences, rule)
    if share_encoder:
        raise _static_and_shared()
    if frame_budget is None and measure.frames is not None:
        raise _static_without_frames()
    if measure.frames is not None:
        check_rooms(measure.frames)


def _no_sequences(max_sequences: int) -> ConfigError:
    return ConfigError(
        "packs have no room for a sequence",
        got=f"max_sequences={max_sequences!r}",
        expected="a whole number of at least 1, or None for no bound",
        because="every example would be over it; filler is not counted",
        fix="leave out max_sequences, or give the most sequences that a pack may hold",
    )


def check_buckets(budget: int | None, *, rule: Alignment, static: bool) -> None:
    """Nothing, where packs have a capacity to take eighths of, and no constant size already.

    Raises:
        ConfigError: no budget, a padded layout, or static.
    """
    if budget is None or rule.layout == "bshd" or static:
        raise _no_buckets(budget, rule, static)


def _unknown_policy(name: str, policy: object) -> ConfigError:
    return ConfigError(
        f"{name} is not a policy",
        got=repr(policy),
        expected="'error' or 'set_aside'",
        because="what cannot be used is either refused or counted and named; it is never lost silently",
        fix=f"choose {name}='error' or {name}='set_aside'",
    )


def _static_without_bounds(budget: int | None, max_sequences: int | None, rule: Alignment) -> ConfigError:
    return ConfigError(
        "packs cannot be static",
        got=f"budget={budget}, max_sequences={max_sequences}, layout {rule.layout!r}",
        expected="a budget, max_sequences, and layout 'thd'",
        because="a constant shape needs a constant number of tokens and of offsets",
        fix="give both bounds, e.g. budget=8192, max_sequences=64",
    )


def _static_and_shared() -> ConfigError:
    return ConfigError(
        "packs cannot be static where CP ranks share the encoder",
        got="static=True, share_encoder=True",
        expected="one of them",
        because="how many frames travel between two ranks follows from the clips of each pack, so it is no constant",
        fix="leave out share_encoder: each rank then encodes the clips of which it holds a frame",
    )


def _static_without_frames() -> ConfigError:
    return ConfigError(
        "packs cannot be static without a frame budget",
        got="frame_budget=None, and a measure of audio",
        expected=f"frame_budget of at least {LEAST_ROOM_FRAMES} encoder frames",
        because="a constant shape needs a constant number of clips and of encoder frames",
        fix="give the frame budget that `packfp8 report --static` prints; or Measure(frames=None), where all is text",
    )


def _frames_of_text(frame_budget: int) -> ConfigError:
    return ConfigError(
        "a frame budget bounds nothing where no example has audio",
        got=f"frame_budget={frame_budget}, Measure(frames=None)",
        expected="no frame budget, or a measure that counts clips",
        because="a setting that silently does nothing hides a mistake",
        fix="leave out frame_budget, or Measure(frames=AudioFrames.fastconformer())",
    )


def _no_clips(frame_budget: int) -> ConfigError:
    return ConfigError(
        "packs have no room for a clip",
        got=f"frame_budget={frame_budget!r}",
        expected=f"a whole number of at least {LEAST_ROOM_FRAMES}, or None for no bound",
        because="the smallest room is one encoder frame of its clip and one of silence",
        fix="leave out frame_budget, or give the most encoder frames that a pack may hold",
    )


def _no_buckets(budget: int | None, rule: Alignment, static: bool) -> ConfigError:
    return ConfigError(
        "packs cannot be rounded up to buckets",
        got=f"budget={budget}, layout {rule.layout!r}, static={static}",
        expected="a budget, layout 'thd', and static=False",
        because="buckets are eighths of a budget in slots of their own sizes, and static packs have one size already",
        fix="give the budget that the sampler packs to, or leave out buckets",
    )
