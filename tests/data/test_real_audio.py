"""Real recordings of several kinds, rates and channels through the collator."""

import lhotse
import pytest
import soundfile
import torch

from packfp8.data import Collator
from packfp8.errors import AudioError
from packfp8.lengths import AudioFrames, Measure
from packfp8.rule import Topology, align


@pytest.fixture(scope="module")
def files(outside_data):
    return sorted((outside_data / "audio").iterdir())


def collators(layout="thd", cp=1, **options):
    measure = Measure(frames=AudioFrames.fastconformer())
    rules = [align("block", Topology(cp=cp, cp_rank=rank), layout=layout) for rank in range(cp)]
    return [Collator(measure=measure, rule=rule, **options) for rule in rules]


@pytest.mark.parametrize("layout", ["thd", "bshd"])
def test_every_file_becomes_as_many_frames_as_its_decoded_samples_give(files, layout):
    (collator,) = collators(layout, resample=True)
    batch = collator([{"audio": path, "text": path.stem} for path in files])
    decoded = [soundfile.read(path, always_2d=True) for path in files]
    samples = [-(-len(wave) * 16_000 // rate) for wave, rate in decoded]
    assert batch.audio_lens.tolist() == samples
    assert len(batch.audio_source) == sum(map(collator.measure.frames.encoder_frames, samples))
    assert batch.ids == tuple(map(str, files))
    assert batch.trimmed_samples == 0
    assert torch.isfinite(batch.audio).all()
    assert (batch.audio.abs().amax(1) > 0.01).all()


def test_ranks_together_hold_every_frame_once_and_lhotse_names_the_same_audio(files):
    cuts = []
    for path in (path for path in files if soundfile.info(path).samplerate == 16_000 and path.suffix in (".wav", ".flac")):
        cut = lhotse.Recording.from_file(path, recording_id=str(path)).to_cut()
        cut.id, cut.supervisions = str(path), [lhotse.SupervisionSegment(str(path), cut.id, 0.0, cut.duration, text=path.stem)]
        cuts.append(cut)
    assert len(cuts) >= 3
    (whole,) = collators()
    batch = whole([{"audio": cut.id, "text": cut.supervisions[0].text} for cut in cuts])
    slabs = [collator(cuts) for collator in collators(cp=2)]
    assert sum(len(slab.audio_source) for slab in slabs) == len(batch.audio_source)
    assert torch.equal(
        torch.cat(list(batch.unpack(batch.labels).values())),
        torch.cat(list(slabs[0].unpack([s.labels for s in slabs]).values())),
    )
    assert torch.equal(whole(cuts).audio, batch.audio)


def test_a_rate_that_is_not_the_encoders_is_refused_unless_resampling_was_asked_for(files):
    other = [path for path in files if soundfile.info(path).samplerate != 16_000]
    assert other
    (collator,) = collators(on_fault="set_aside")
    batch = collator([{"audio": path, "text": "a"} for path in files])
    assert [left.id for left in batch.set_aside] == [str(path) for path in other]
    with pytest.raises(AudioError, match="another sample rate than the encoder"):
        collators()[0]([{"audio": other[0], "text": "a"}])
