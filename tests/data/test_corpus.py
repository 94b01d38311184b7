"""The embedded corpus: whole, small, honest about its lengths, and readable by soundfile alone."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import soundfile

from packfp8.data.corpus import corpus, texts


@pytest.fixture(scope="module")
def cuts():
    return corpus()


def path_of(cut) -> Path:
    return Path(cut.recording.sources[0].source)


def test_has_at_least_200_utterances_of_0_4_to_20_seconds(cuts):
    assert len(cuts) >= 200
    assert all(0.4 <= cut.duration <= 20.0 for cut in cuts)


def test_durations_are_many_short_ones_and_a_tail_of_long_ones(cuts):
    seconds = np.array([cut.duration for cut in cuts])
    assert (seconds < 2).mean() > 0.25
    assert (seconds > 10).mean() > 0.05
    assert seconds.max() > 15


def test_takes_at_most_3_mb_of_the_package_and_holds_no_stray_file(cuts):
    folder = path_of(cuts[0]).parent
    files = set(folder.iterdir())
    assert files == {path_of(cut) for cut in cuts} | {folder / "cuts.jsonl", folder / "texts.jsonl"}
    assert sum(path.stat().st_size for path in files) <= 3e6


def test_declared_length_is_the_decoded_length_of_every_file(cuts):
    for cut in cuts:
        samples, rate = soundfile.read(path_of(cut), dtype="float32", always_2d=True)
        assert (rate, samples.shape) == (16_000, (cut.num_samples, 1)), cut.id
        assert cut.recording.num_samples == cut.num_samples
        assert np.isfinite(samples).all()
        assert np.abs(samples).max() > 0.05, f"{cut.id} is silent"


def test_files_are_opus_in_ogg(cuts):
    kinds = {(info.format, info.subtype) for info in (soundfile.info(path_of(cut)) for cut in cuts)}
    assert kinds == {("OGG", "OPUS")}


def test_every_text_is_spoken_once_and_has_a_language_and_a_speaker(cuts):
    supervisions = [supervision for cut in cuts for supervision in cut.supervisions]
    spoken = [supervision.text for supervision in supervisions]
    assert len(supervisions) == len(cuts)
    assert len(set(spoken)) == len(cuts)
    assert all(text.strip() == text and text for text in spoken)
    assert len({supervision.speaker for supervision in supervisions}) >= 40
    assert {s.language for s in supervisions} >= {"en", "de", "fr", "es"}
    assert sum(not text.isascii() for text in spoken) >= 30


def test_ids_are_distinct_and_in_a_fixed_order(cuts):
    ids = [cut.id for cut in cuts]
    assert len(set(ids)) == len(ids)
    assert ids == [cut.id for cut in corpus()]
    assert (ids[0], ids[-1]) == ("en-001", "zh-004")


def test_is_eager(cuts):
    assert not cuts.is_lazy


def test_texts_without_audio_have_an_id_and_are_spoken_nowhere(cuts):
    examples = texts()
    spoken = {cut.supervisions[0].text for cut in cuts}
    assert len(examples) == len({example.id for example in examples}) == 20
    assert all(example.text.strip() and example.language for example in examples)
    assert not spoken & {example.text for example in examples}


def test_loads_through_lhotse_without_ffmpeg_from_any_folder(tmp_path):
    program = (
        "import shutil; assert shutil.which('ffmpeg') is None\n"
        "from packfp8.data.corpus import corpus\n"
        "cuts = corpus()\n"
        "for cut in (cuts[0], cuts['zh-004']):\n"
        "    audio = cut.load_audio()\n"
        "    assert audio.shape == (1, cut.num_samples) and audio.dtype == 'float32', audio.shape\n"
    )
    root = Path(__file__).parents[2]
    environment = {**os.environ, "PATH": str(tmp_path), "PYTHONPATH": str(root)}
    done = subprocess.run([sys.executable, "-c", program], cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
