"""The demo: the main job on real files, and what it says of a user's folder."""

import io
import json
import shutil

import numpy as np
import pytest
import soundfile
import torch
from rich.console import Console

from packfp8.errors import AudioError, ConfigError, ExampleError
from packfp8.report.demo import make_model, run_demo
from packfp8.rule import align


@pytest.fixture
def folder(tmp_path):
    """Three recordings with texts (16 kHz, 8 kHz, stereo in a folder), and four files that cannot be used."""
    noise = np.random.default_rng(0)

    def recording(name, seconds, rate=16_000, channels=1, text=None):
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        soundfile.write(path, 0.1 * noise.standard_normal((int(seconds * rate), channels)), rate)
        if text is not None:
            path.with_suffix(".txt").write_bytes(text)

    recording("a.wav", 2.5, text=b"good morning\n")
    recording("b.flac", 0.8, rate=8_000, text="\ufeffgrüß Gott".encode())
    recording("more/c.wav", 1.1, rate=44_100, channels=2, text=b"two channels")
    recording("without.wav", 1.0)
    recording("empty.wav", 1.0, text=b" \n")
    recording("latin.wav", 1.0, text=b"gr\xfc\xdf Gott")
    (tmp_path / "broken.wav").write_bytes(b"RIFF and no more")
    (tmp_path / "broken.txt").write_text("who knows")
    (tmp_path / "notes.md").write_text("not audio")
    return tmp_path


def shown(result):
    console = Console(width=200, record=True, file=io.StringIO())
    console.print(result.table())
    return console.export_text()


@pytest.mark.parametrize("layout", ["thd", "bshd"])
@pytest.mark.parametrize("recipe", ["block", "mxfp8"])
def test_every_example_of_the_corpus_is_packed_once_and_every_token_accounted_for(layout, recipe):
    result = run_demo(steps=1, layout=layout, recipe=recipe, budget=1024)
    assert (result.examples, result.set_aside) == (260, ())
    assert sum(slots.sequences for slots in result.packs) == 260
    assert all(slots.total <= 1024 and slots.total % result.rule.total == 0 for slots in result.packs)
    assert result.tokens_real + sum(result.waste.values()) == result.tokens_total == len(result.packs) * result.capacity
    assert result.fill_real <= result.fill <= 1
    assert result.fill > (0.9 if layout == "thd" else 0.8)
    assert np.isfinite(result.losses).all()


@pytest.mark.parametrize("layout", ["thd", "bshd"])
def test_the_loss_falls_and_is_the_same_every_time(layout):
    first = run_demo(steps=6, layout=layout, budget=1024)
    torch.rand(1)  # the caller's own random state is another then
    again = run_demo(steps=6, layout=layout, budget=1024)
    assert first.losses == again.losses
    assert first.losses[0] == pytest.approx(np.log(272), abs=0.1)
    assert first.losses[-1] < first.losses[0] - 0.4
    assert first.losses != run_demo(steps=6, layout=layout, budget=1024, seed=1).losses


def test_epochs_follow_one_another_where_there_are_more_steps_than_packs(folder):
    result = run_demo(folder, steps=5, budget=512)
    assert len(result.packs) < 5 == len(result.losses)
    assert result.losses[-1] < result.losses[0]


def test_the_callers_random_state_and_threads_are_left_alone():
    torch.manual_seed(7)
    before, threads = torch.get_rng_state(), torch.get_num_threads()
    run_demo(steps=1, budget=512)
    assert torch.equal(before, torch.get_rng_state())
    assert torch.get_num_threads() == threads


def test_a_folder_is_read_and_what_cannot_be_used_is_named(folder):
    result = run_demo(folder, steps=2, budget=1024)
    assert result.examples == 3
    assert {one.id: one.reason.splitlines()[0] for one in result.set_aside} == {
        "without.wav": "no without.txt beside it",
        "latin.wav": "latin.txt is not UTF-8: invalid start byte at byte 2",
        "empty.wav": "example 'empty.wav' has no text to learn from",
        "broken.wav": next(one.reason.splitlines()[0] for one in result.set_aside if one.id == "broken.wav"),
    }
    # 2.5 s, 0.8 s and 1.1 s at 16 kHz, whatever their own rates, in each of the two epochs
    assert result.audio_seconds == pytest.approx(2 * 4.4, abs=1e-3)
    table = shown(result)
    assert "without.wav: no without.txt beside it" in table
    assert str(folder) in table


def test_real_recordings_of_all_formats(outside_data, tmp_path):
    files = [path for path in sorted((outside_data / "audio").iterdir()) if path.suffix in (".wav", ".flac", ".opus", ".mp3")]
    assert len(files) > 5
    for path in files:
        shutil.copy(path, tmp_path / path.name)
        (tmp_path / path.name).with_suffix(".txt").write_text(f"what is said in {path.stem}")
    result = run_demo(tmp_path, steps=3, budget=2048)
    assert (result.examples, result.set_aside) == (len(files), ())
    assert result.losses[-1] < result.losses[0]
    assert result.audio_seconds > 60


def test_a_recording_over_the_budget_is_set_aside_and_named(folder):
    result = run_demo(folder, steps=1, budget=64)
    assert [one.id for one in result.set_aside if "budget" in one.reason] == ["a.wav"]
    assert result.examples == 2


def test_a_recipe_decides_the_packs_and_the_sizes_and_the_table_says_what_ran():
    result = run_demo(steps=1, recipe="mxfp8", budget=700)
    assert result.rule.total == 32
    assert result.capacity == 672
    assert "float32 on the CPU" in shown(result)
    from packfp8.lengths import AudioFrames, Measure

    llm = make_model(Measure(frames=AudioFrames.fastconformer()), align("mxfp8")).llm
    assert all(size % 32 == 0 for name, p in llm.named_parameters() for size in p.shape), "legal for MXFP8 as they stand"


def test_the_figures_are_plain_values():
    result = run_demo(steps=2, budget=1024)
    figures = json.loads(json.dumps(result.to_dict()))
    assert figures["packs"] == len(result.packs)
    assert figures["losses"] == list(result.losses)
    assert (figures["steps"], figures["precision"], figures["set_aside"]) == (2, "float32", [])
    assert figures["tokens_real"] + figures["waste"]["slot"] + figures["waste"]["filler"] == figures["tokens_total"]


def test_a_folder_without_audio_is_refused(tmp_path):
    (tmp_path / "notes.md").write_text("not audio")
    with pytest.raises(AudioError) as caught:
        run_demo(tmp_path)
    assert str(caught.value).splitlines() == [
        f"{tmp_path} holds no audio",
        "  got:      no file",
        "  expected: files that end in .wav, .flac, .ogg, .opus, .mp3",
        "  because:  the demo packs recordings; other formats are not read without ffmpeg",
        "  fix:      name the folder of the recordings, or convert them to wav or flac",
    ]
    with pytest.raises(AudioError, match="not a folder"):
        run_demo(tmp_path / "nowhere")


def test_a_folder_without_texts_is_refused(tmp_path):
    soundfile.write(tmp_path / "a.wav", np.zeros(16_000), 16_000)
    with pytest.raises(ExampleError) as caught:
        run_demo(tmp_path)
    assert str(caught.value).splitlines() == [
        f"no recording in {tmp_path} has a text",
        "  got:      1 recordings; a.wav: no a.txt beside it",
        "  expected: a .txt of the same name beside each recording, in UTF-8",
        "  because:  without an answer none of a sequence's tokens would be supervised",
        "  fix:      write what is said in a.wav into a.txt, and so on",
    ]


def test_a_folder_of_which_nothing_is_left_is_refused(folder):
    for name in ("a.wav", "b.flac", "more/c.wav"):
        (folder / name).unlink()
    with pytest.raises(ExampleError) as caught:
        run_demo(folder)
    lines = str(caught.value).splitlines()
    assert lines[0] == "no example is left to train on"
    assert lines[1].startswith("  got:      4 set aside; latin.wav: latin.txt is not UTF-8")
    assert lines[2:] == [
        "  expected: at least one that fits the budget",
        "  because:  a pack of no token teaches nothing",
        "  fix:      raise the budget, or repair the files that are named",
    ]


def test_no_step_is_refused():
    with pytest.raises(ConfigError) as caught:
        run_demo(steps=0)
    assert str(caught.value).splitlines() == [
        "the demo has no step to take",
        "  got:      steps=0",
        "  expected: at least 1",
        "  because:  it shows a loss, and that it falls",
        "  fix:      leave steps out, or give a positive number",
    ]
