"""Audio as its source holds it: all channels, at its own rate, the whole or the clip's part.

soundfile reads files and bytes (wav, flac, ogg, opus, mp3). A lhotse cut of one plain recording is read in the same way:
`Recording.load_audio` of lhotse 1.33 makes up for as much as half a second of missing audio by mirroring what there is,
and says nothing. Cuts with transforms, mixed cuts and streams go through their own `load_audio`.
"""

from __future__ import annotations

import io
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import numpy as np
import soundfile
from lhotse import MonoCut, MultiCut, Recording
from lhotse.audio import AudioLoadingError, DurationMismatchError

from packfp8.data.clip import Clip
from packfp8.errors import AudioError

# Samples decoded and dropped before a part of MPEG audio. A frame of layer III may use bits of up to 511 bytes before it
# (255 at 24 kHz and below), which a seek leaves unread: of libsndfile 1.2.2, up to 5,000 samples after it were wrong,
# none with 11,520 before. The smallest frames (8 kbit/s at 24 kHz, 11 bytes of data each) put 24 * 576 in 255 bytes.
PREROLL_SAMPLES = 1 << 15
READABLE = "audio that soundfile decodes to its end (wav, flac, ogg, opus, mp3)"

_Answer = TypeVar("_Answer")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Decoded:
    """What a source holds: `waves` is float32 `[channels, samples]` at `rate` Hz."""

    waves: np.ndarray
    rate: int


def decode(clip: Clip, *, tolerance_samples: float) -> Decoded:
    """What the clip's source holds; the tolerance, at the clip's rate, only helps to tell an array's time axis.

    Raises:
        AudioError: the audio is missing or broken, an array is not of floats or does not show which axis is time.
    """
    source, name = clip.source, name_of(clip.source)
    if isinstance(source, (str, Path, bytes)):
        return _read(source, clip.start_sample, clip, name)
    if isinstance(source, (MonoCut, MultiCut, Recording)):
        recording = source if isinstance(source, Recording) else source.recording
        if recording is not None and _is_plain(recording):
            return _read_recording(recording, source, clip, name)
    if hasattr(source, "load_audio"):
        return Decoded(waves=_from_lhotse(source, name), rate=int(source.sampling_rate))
    return Decoded(waves=_from_array(source, clip, tolerance_samples, name), rate=clip.sample_rate)


def probe_file(source: str | Path | bytes) -> tuple[int, int, int]:
    """(samples per channel, rate in Hz, channels) of a file or of encoded bytes; as many samples as decoding gives.

    Reads the header only, but for MPEG audio: its header may count samples that the decoder never gives (114,246 for
    114,048 in a clip of Common Voice), so there the samples are decoded and counted, and not kept.

    Raises:
        AudioError: the file is missing or is not audio.
    """

    def measure(file: soundfile.SoundFile) -> tuple[int, int, int]:
        count = file.frames
        if file.subtype.startswith("MPEG"):
            count = 0
            while block := len(file.read(1 << 16, dtype="float32")):
                count += block
        return count, file.samplerate, file.channels

    return _with_file(source, measure, name_of(source))


def samples_at(num_samples: int, from_rate: int, to_rate: int) -> int:
    """How many samples `num_samples` become at another rate: rounded up, as polyphase resampling gives them."""
    return -(-num_samples * to_rate // from_rate)


def name_of(source: object) -> str:
    """How errors call a source: by its path, or by the id of its cut."""
    if hasattr(source, "load_audio"):
        return f"audio of {source.id!r}"
    if isinstance(source, (str, Path)):
        return f"audio file {str(source)!r}"
    return f"audio in {len(source)} bytes" if isinstance(source, bytes) else "audio in an array"


def _read(source: str | Path | bytes, start_sample: int | None, clip: Clip, name: str) -> Decoded:
    """The whole of a file or of encoded bytes, or the clip's part of it from `start_sample` on."""

    def read(file: soundfile.SoundFile) -> Decoded:
        skipped, count = 0, file.frames
        if start_sample is not None:
            start = min(round(start_sample * file.samplerate / clip.sample_rate), file.frames)
            preroll = PREROLL_SAMPLES if file.subtype.startswith("MPEG") else 0
            skipped = min(start, preroll) if file.seekable() else start
            if file.seekable():
                file.seek(start - skipped)
            count = skipped + samples_at(clip.num_samples, clip.sample_rate, file.samplerate)
        # One read: soundfile seeks after each, and so loses the bits that a next one would need.
        waves = file.read(count, dtype="float32", always_2d=True)[skipped:]
        return Decoded(waves=waves.T, rate=file.samplerate)

    return _with_file(source, read, name)


def _with_file(source: str | Path | bytes, use: Callable[[soundfile.SoundFile], _Answer], name: str) -> _Answer:
    """What `use` gives for the opened file."""
    if not isinstance(source, bytes) and not Path(source).exists():
        raise AudioError(
            f"{name} is missing",
            got="no file of this name",
            expected="a file that can be read here and in every worker",
            because="a clip without its audio would train on silence",
            fix="correct the path in the manifest; relative paths start at the working directory",
        )
    try:
        file = soundfile.SoundFile(io.BytesIO(source) if isinstance(source, bytes) else source)
    except (soundfile.LibsndfileError, TypeError) as error:  # TypeError: a name in .raw, which says no rate
        raise _broken(getattr(error, "error_string", str(error)), name) from error
    try:
        with file:
            return use(file)
    except soundfile.LibsndfileError as error:
        raise _broken(error.error_string, name) from error


def _is_plain(recording: Recording) -> bool:
    """Whether a recording is one file, or its bytes, as it stands."""
    plain = len(recording.sources) == 1 and recording.sources[0].type in ("file", "memory")
    return plain and not recording.transforms and not recording.has_video


def _read_recording(recording: Recording, source: MonoCut | MultiCut | Recording, clip: Clip, name: str) -> Decoded:
    """The cut's channels of a plain recording; a cut of less than the recording is a part of its file."""
    file, start = recording.sources[0], getattr(source, "start", 0.0)
    whole = start == 0 and abs(source.duration - recording.duration) * recording.sampling_rate < 1
    decoded = _read(file.source, None if whole else round(start * clip.sample_rate), clip, name)
    wanted = np.atleast_1d(getattr(source, "channel", recording.channel_ids)).tolist()
    for channel in wanted:
        if channel not in file.channels or file.channels.index(channel) >= len(decoded.waves):
            raise no_channel(channel, len(decoded.waves), name)
    return Decoded(waves=decoded.waves[[file.channels.index(channel) for channel in wanted]], rate=decoded.rate)


def _from_lhotse(source: object, name: str) -> np.ndarray:
    """`[channels, samples]` as lhotse loads a cut with transforms, a mixed cut or a stream."""
    try:
        audio = source.load_audio()
    except (AudioLoadingError, DurationMismatchError, soundfile.LibsndfileError, OSError) as error:
        raise _broken(" ".join(str(error).split())[:300], name) from error
    if audio is None:
        raise _broken("the cut has no recording", name)
    return np.atleast_2d(np.asarray(audio, dtype=np.float32))


def _from_array(source: object, clip: Clip, tolerance_samples: float, name: str) -> np.ndarray:
    """`[channels, samples]` of an array; its time axis is the one that is as long as declared."""
    array = np.asarray(source)
    if array.dtype.kind != "f":
        raise AudioError(
            f"{name} does not hold floating point numbers",
            got=f"dtype {array.dtype}",
            expected="float16, float32 or float64 samples between -1 and 1",
            because="the full scale of an integer type is a convention, and a wrong one is far too loud or silent",
            fix="divide 16-bit integers by 32768",
        )
    with np.errstate(over="ignore"):  # what becomes infinite is refused as not finite
        array = array.astype(np.float32)
    if array.ndim == 1:
        return array[None]
    exact = [axis for axis, size in enumerate(array.shape) if size == clip.num_samples]
    near = [axis for axis, size in enumerate(array.shape) if abs(size - clip.num_samples) <= tolerance_samples]
    time = exact or near
    if array.ndim != 2 or len(time) != 1:
        raise AudioError(
            f"{name} does not show which axis is time",
            got=f"shape {array.shape}, {clip.num_samples} samples declared",
            expected="[samples], or two axes of which exactly one is as long as declared",
            because="[2, n] and [n, 2] look alike; averaging over the wrong axis destroys the signal",
            fix="correct 'num_samples', or average the channels beforehand",
        )
    return np.moveaxis(array, time[0], 1)


def _broken(reason: str, name: str) -> AudioError:
    return AudioError(
        f"{name} cannot be read",
        got=reason,
        expected=READABLE,
        because="what is left of a broken file is not what its text says",
        fix="fetch the file again, convert it, or remove the example",
    )


def no_channel(channel: int, channels: int, name: str) -> AudioError:
    """The error of a channel that the audio does not have."""
    return AudioError(
        f"{name} has no channel {channel}",
        got=f"channel {channel} of {channels}",
        expected=f"0 to {channels - 1}",
        because="the text belongs to one channel; another one says something else",
        fix="correct 'channel', or leave it out to take the mean",
    )
