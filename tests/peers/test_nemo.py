"""NeMo Speech: our pack beside its own packing of the same examples, and in the place of it in SALMAutomodel's code."""

from types import SimpleNamespace

import pytest
import torch
from lightning.fabric.utilities.apply_func import move_data_to_device
from nemo.collections.speechlm2.models.salm_automodel import SALMAutomodel
from nemo.collections.speechlm2.parts.packed_sequences import pack_audio_into_text_embeds
from nemo_automodel.components.models.common import BackendConfig
from nemo_automodel.components.models.llama.model import LlamaForCausalLM
from transformers import LlamaConfig

from packfp8.data import Collator, Example, Turn
from packfp8.errors import ConfigError, RuleError
from packfp8.lengths import Measure, Template
from packfp8.model.nemo import SalmCollator, salm_inputs
from packfp8.rule import Topology, align

PLACEHOLDER, PAD, HIDDEN = 298, 299, 32
SIZES = {"vocab_size": 300, "hidden_size": HIDDEN, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}


class Perception(torch.nn.Module):
    """Frames of the right number, each telling its clip (by its loudness) and its place; more than asked for, as padding."""

    def __init__(self, frames):
        super().__init__()
        self.frames = frames

    def forward(self, input_signal, input_signal_length):
        counts = torch.tensor([self.frames.encoder_frames(int(n)) for n in input_signal_length], dtype=torch.int64)
        place = torch.arange(int(counts.max()) + 3 if len(counts) else 0, dtype=torch.float64)
        clip = input_signal.abs().sum(-1).double()
        out = torch.sin(clip[:, None, None] + place[:, None] * torch.linspace(0.1, 3, HIDDEN, dtype=torch.float64))
        return out, counts


class SALM(SimpleNamespace):
    """The parts of a SALMAutomodel that `prepare_inputs` and `forward` touch; its methods are the real ones."""

    prepare_inputs = SALMAutomodel.prepare_inputs
    forward = SALMAutomodel.forward
    _embed_tokens = SALMAutomodel._embed_tokens
    embed_tokens = SALMAutomodel.embed_tokens


@pytest.fixture
def salm(measure, attention_by_offsets):
    def salm(**cfg):
        config = LlamaConfig(**SIZES, num_key_value_heads=2, attn_implementation="sdpa", dtype="float64")
        llm = LlamaForCausalLM(config, BackendConfig(attn="sdpa", linear="torch", rms_norm="torch", rope_fusion=False))
        for layer in llm.model.layers:
            layer.self_attn.attn_module = attention_by_offsets
        return SALM(
            llm=llm.double().eval(),
            perception=Perception(measure.frames),
            cfg=cfg,
            sampling_rate=16_000,
            audio_locator_tag_id=PLACEHOLDER,
            text_pad_id=PAD,
            _use_tp="tp" in cfg,
            device_mesh={"tp": SimpleNamespace(size=lambda: cfg["tp"])} if "tp" in cfg else None,
        )

    return salm


@pytest.fixture
def their_batch(measure):
    """The same examples as SALM's dataset collates them: left-padded ids with one placeholder a clip, and a loss mask."""

    def their_batch(examples, measure=measure):
        rows, masks, waves = [], [], []
        for example in examples:
            encoded = measure.encode(example)
            keep = torch.ones(len(encoded), dtype=torch.bool)
            ids = torch.from_numpy(encoded.ids.copy())
            for span in encoded.clips:
                ids[span.start] = PLACEHOLDER
                keep[span.start + 1 : span.start + span.encoder_frames] = False
            rows.append(ids[keep])
            masks.append(torch.from_numpy(encoded.supervised.copy())[keep])
            waves += [torch.from_numpy(clip.source) for clip in example.clips]
        width = max(map(len, rows))
        return {
            "input_ids": torch.stack([torch.nn.functional.pad(row, (width - len(row), 0), value=PAD) for row in rows]),
            "loss_mask": torch.stack([torch.nn.functional.pad(mask, (width - len(mask), 0)) for mask in masks]),
            "audios": torch.nn.utils.rnn.pad_sequence(waves, batch_first=True) if waves else torch.zeros(0, 0),
            "audio_lens": torch.tensor([len(wave) for wave in waves], dtype=torch.int64),
        }

    return their_batch


def ours_of(model, batch):
    return salm_inputs(model, batch, shortest_samples=2_000)


def test_our_pack_has_the_real_rows_labels_and_positions_of_theirs_in_their_order(salm, spoken, pack, their_batch):
    model, batch = salm(packed_sequences=True), pack(spoken)
    theirs, ours = model.prepare_inputs(their_batch(spoken)), ours_of(model, batch)
    assert set(ours) == set(theirs)
    assert set(theirs["llm_kwargs"]) <= set(ours["llm_kwargs"])
    bounds = theirs["llm_kwargs"]["cu_seqlens"].tolist()
    for name, theirs_value, ours_value in (
        ("embeds", theirs["input_embeds"], ours["input_embeds"]),
        ("labels", theirs["target_ids"], ours["target_ids"]),
        ("positions", theirs["llm_kwargs"]["position_ids"], ours["llm_kwargs"]["position_ids"]),
    ):
        real = batch.unpack(ours_value)
        assert list(real) == [example.id for example in spoken]
        for rows, a, b in zip(real.values(), bounds, bounds[1:], strict=False):
            torch.testing.assert_close(rows, theirs_value[a:b], msg=name)


@pytest.mark.parametrize(("cp", "tp"), [(1, 1), (2, 1), (2, 2), (4, 2)])
def test_our_offsets_are_theirs_up_to_the_rule(cp, tp, salm, spoken, measure, their_batch):
    """The same slots; then ours goes on to a total that the rule accepts, in a filler of its own, and theirs stretches its last
    sequence to a multiple of tp."""
    model = salm()
    theirs = packed_by_nemo(model, their_batch(spoken), cp, tp)
    batch = Collator(measure=measure, rule=align("block", Topology(cp=cp, tp=tp, sp=tp > 1)))(spoken)
    sequences = batch.slots.sequences
    assert theirs["cu_seqlens"][:-1].tolist() == batch.cu_seqlens[:sequences].tolist()
    assert theirs["cu_seqlens"][-1] <= batch.cu_seqlens[-1]
    batch.rule.check(batch.slots.total)


def packed_by_nemo(model, batch, cp, tp):
    frames, lens = model.perception(input_signal=batch["audios"], input_signal_length=batch["audio_lens"])
    return pack_audio_into_text_embeds(
        input_ids=batch["input_ids"],
        embeds=model._embed_tokens(batch["input_ids"]),
        target_ids=batch["input_ids"].where(batch["loss_mask"], -100),
        replacements=[row[:n] for row, n in zip(frames, lens.tolist(), strict=True)],
        padding_id=PAD,
        placeholder_id=PLACEHOLDER,
        cp_size=cp,
        tp_size=tp,
    )


@pytest.mark.parametrize(("cp", "tp"), [(1, 1), (2, 1), (2, 2)])
def test_where_theirs_is_short_its_total_knows_nothing_of_the_recipe(cp, tp, salm, spoken, their_batch):
    """Their totals are rounded for CP and tp only; FP8 needs slabs of 16 rows in the backward pass. Ours are."""
    theirs = packed_by_nemo(salm(), their_batch(spoken), cp, tp)
    with pytest.raises(RuleError):
        align("block", Topology(cp=cp, tp=tp, sp=tp > 1)).check(int(theirs["cu_seqlens"][-1]))


@pytest.mark.parametrize("tp", [2, 4])
def test_where_theirs_is_short_its_padded_batch_is_cut_and_loses_labels_under_tp(tp, salm, spoken, measure, their_batch):
    """`(S - 1) % tp` rows are cut from the right, where the row ends: the last labels go, and S is no multiple of tp after."""
    template = Template(roles={**Template().roles, "assistant": (Template().roles["assistant"][0], "")})
    ends_on_a_label = Measure(frames=measure.frames, template=template)
    for letters in range(1, 6):  # rows of several lengths, so that no luck of one decides
        examples = [longer(spoken[0], letters)]
        whole = salm().prepare_inputs(their_batch(examples, ends_on_a_label))["target_ids"]
        theirs = salm(tp=tp).prepare_inputs(their_batch(examples, ends_on_a_label))
        cut = (whole.shape[1] - 1) % tp
        assert (theirs["target_ids"] != -100).sum() == (whole != -100).sum() - cut
        assert theirs["input_embeds"].shape[1] % tp == 1
        rule = align("bf16", Topology(tp=tp, sp=True), layout="bshd")
        ours = ours_of(salm(), Collator(measure=ends_on_a_label, rule=rule)(examples))
        assert (ours["target_ids"] != -100).sum() == (whole != -100).sum()
        assert ours["input_embeds"].shape[1] % tp == 0


def longer(example, letters):
    return Example(id=example.id, turns=(*example.turns, Turn("user", ("x" * letters,)), Turn("assistant", ("fine",))))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("layout", ["thd", "bshd"])
def test_its_forward_gives_our_pack_the_logits_of_one_by_one(layout, salm, spoken, pack, their_batch):
    model, batch = salm(), pack(spoken, layout)
    inputs = ours_of(model, batch)
    logits = model.forward(inputs["input_embeds"], attention_mask=inputs["attention_mask"], **inputs["llm_kwargs"])["logits"]
    packed = batch.unpack(logits.reshape(*batch.input_ids.shape, -1))
    for example in spoken:
        alone = model.prepare_inputs(their_batch([example]))
        expected = model.forward(alone["input_embeds"])["logits"][0]
        torch.testing.assert_close(packed[example.id][: len(expected)], expected)


def test_a_pack_without_audio_still_runs_perception_and_places_nothing(salm, spoken, pack):
    model, heard = salm(), []
    perception = model.perception
    model.perception = lambda **kwargs: heard.append(kwargs["input_signal"].shape) or perception(**kwargs)
    batch = pack(spoken[3:])
    inputs = ours_of(model, batch)
    assert heard == [(1, 2_000)]
    torch.testing.assert_close(inputs["input_embeds"], model._embed_tokens(batch.input_ids))


def test_a_padded_batch_under_cp_is_refused(salm, spoken, pack):
    with pytest.raises(ConfigError, match="padded batch under context parallelism") as caught:
        ours_of(salm(), pack(spoken, "bshd", cp=2))
    assert "layout='thd'" in str(caught.value)


def test_the_collator_gives_what_the_training_step_counts(measure, spoken):
    batch = SalmCollator(collator=Collator(measure=measure, rule=align("block", Topology())))(spoken)
    assert torch.equal(batch["input_ids"], batch["pack"].input_ids)


class PackedSALM(SALM):
    """The recipe of `packfp8.model.nemo`: one method of SALMAutomodel is another, the rest is its own."""

    training_step = SALMAutomodel.training_step

    def prepare_inputs(self, batch):
        return salm_inputs(self, batch["pack"], shortest_samples=2_000)

    def __call__(self, *args, **kwargs):
        return self.forward(*args, **kwargs)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("layout", ["thd", "bshd"])
def test_its_training_step_on_our_pack_gives_the_loss_of_the_examples_one_by_one(layout, salm, spoken, measure, their_batch):
    parts, logged = salm(), {}
    parts.perception.preprocessor = parts.perception.encoder = torch.nn.Identity()
    model = PackedSALM(
        **vars(parts),
        _trainer=None,
        log=lambda name, value, **_: logged.update({name: value}),
        log_dict=lambda values, **_: logged.update(values),
        maybe_log_moe_metrics=lambda step: None,
        _get_moe_dp_group=lambda: None,
    )
    collator = Collator(measure=measure, rule=align("block", Topology(), layout=layout))
    batch = move_data_to_device(SalmCollator(collator=collator)(spoken), torch.device("cpu"))
    loss = model.training_step(batch, 0)["loss"]
    total, count = 0.0, 0
    for example in spoken:
        alone = parts.prepare_inputs(their_batch([example]))
        logits, labels = parts.forward(alone["input_embeds"])["logits"][0], alone["target_ids"][0]
        total += torch.nn.functional.cross_entropy(logits, labels, reduction="sum")
        count += int((labels != -100).sum())
    torch.testing.assert_close(loss, total / count)
    assert logged["num_frames"] == count == batch["pack"].num_supervised
