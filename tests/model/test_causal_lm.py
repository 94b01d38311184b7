"""CausalLM: a Hugging Face model driven by packs gives the sum of its sequences; with audio, FP8's rule and tied weights."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from packfp8.data import Collator
from packfp8.errors import ConfigError
from packfp8.model.causal_lm import CausalLM
from packfp8.rule import align


class Stub(nn.Module):
    """What Hugging Face models have in common, and no more."""

    def __init__(self, **config):
        super().__init__()
        self.config, self.embedding, self.lm_head = SimpleNamespace(**config), nn.Embedding(9, 4), nn.Linear(4, 9, bias=False)
        self.told = {}

    def get_input_embeddings(self):
        return self.embedding

    def get_output_embeddings(self):
        return self.lm_head

    def base_model(self, *, inputs_embeds, **told):
        self.told = {"shape": tuple(inputs_embeds.shape), **told}
        return (2 * inputs_embeds,)


@pytest.mark.parametrize(("tokens", "handed"), [((5,), (1, 5, 4)), ((2, 5), (2, 5, 4))])
def test_packed_tokens_go_in_as_one_row_and_padded_ones_as_they_are(tokens, handed):
    llm = CausalLM(Stub())
    x = llm.embed(torch.zeros(tokens, dtype=torch.int64))
    assert torch.equal(llm(x, max_length_q=3), 2 * x)
    assert llm.model.told == {"shape": handed, "max_length_q": 3}
    assert llm.head is llm.model.lm_head


def test_parameters_are_listed_once():
    assert [name for name, _ in CausalLM(Stub()).named_parameters()] == ["model.embedding.weight", "model.lm_head.weight"]


def test_a_model_that_caps_its_logits_is_refused_and_a_neutral_setting_is_not():
    CausalLM(Stub(final_logit_softcapping=None, logit_scale=1.0, router_logit_softcapping=5.0))
    for name in ("logits_scaling", "logit_scale", "output_logit_soft_cap", "logit_softcap", "lm_head_multiplier"):
        with pytest.raises(ConfigError, match=f"{name}=0.5"):
            CausalLM(Stub(text_config=SimpleNamespace(**{name: 0.5})))
    with pytest.raises(ConfigError) as caught:
        CausalLM(Stub(final_logit_softcapping=30.0))
    assert str(caught.value).splitlines() == [
        "Stub changes its logits after the head",
        "  got:      final_logit_softcapping=30.0",
        "  expected: final_logit_softcapping None or 1",
        "  because:  the loss makes its logits in chunks from hidden states and the head's weight alone",
        "  fix:      write a small module whose forward folds the factor into the hidden states; a cap cannot be folded",
    ]


@pytest.mark.parametrize("layout", ["thd", "bshd"])
@pytest.mark.parametrize("tied", [False, True])
def test_a_real_model_gives_the_sum_of_its_sequences(build, measure, mixed, layout, tied):
    transformers = pytest.importorskip("transformers", exc_type=ImportError)
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = transformers.LlamaConfig(vocab_size=272, num_key_value_heads=2, tie_word_embeddings=tied, **sizes)
    torch.manual_seed(0)
    rule = align("block", layout=layout)
    model = build(rule, llm=CausalLM(transformers.LlamaForCausalLM(config)), consumer="hf")
    batch = Collator(measure=measure, rule=rule)(mixed)
    model.prove_isolation(batch, tolerance=1e-12)
    packed = model(batch, global_supervised=batch.num_supervised).loss_sum
    alone = 0
    for example in mixed:
        encoded = measure.encode(example)
        x = list(model.llm.embed(torch.tensor(encoded.ids)))
        for span, clip in zip(encoded.clips, example.clips, strict=True):
            frames, _ = model.encoder(torch.tensor(clip.source)[None], torch.tensor([len(clip.source)]))
            x[span.start : span.start + span.encoder_frames] = model.projector(frames)[0]
        logits = model.llm.model(inputs_embeds=torch.stack(x)[None], use_cache=False).logits[0]
        labels = torch.where(torch.tensor(encoded.supervised), torch.tensor(encoded.ids), -100)
        alone = alone + F.cross_entropy(logits[:-1], labels[1:], reduction="sum")
    assert packed.item() == pytest.approx(alone.item(), rel=0, abs=1e-5)  # Llama's norms and rotations are in float32
    names = [name for name, _ in model.named_parameters()]
    theirs = torch.autograd.grad(alone, list(model.parameters()))
    ours = torch.autograd.grad(packed, list(model.parameters()))
    for name, one, other in zip(names, ours, theirs, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5, msg=lambda text, name=name: f"{name}: {text}")
