"""Clip: one piece of audio and its declared length."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Clip:
    """One piece of audio and its declared length.

    Args:
        source: a path, encoded bytes, an array (float, `[samples]` or with a channel axis), or a lhotse cut or recording.
        num_samples: declared length in samples at `sample_rate`; at least 1.
        sample_rate: in Hz. A manifest that gives seconds and no rate is counted at the encoder's rate.
        start_sample: where the clip begins, counted at `sample_rate`, in a source that may go on after it; None is the whole
            source, which must then be as long as declared.
        channel: index of the channel to take; None takes the mean over the channels.
    """

    source: object
    num_samples: int
    sample_rate: int
    start_sample: int | None = None
    channel: int | None = None
