"""CausalLM: a Hugging Face causal language model, as `PackedModel` drives it."""

from __future__ import annotations

import re

from torch import Tensor, nn

from packfp8.errors import ConfigError

_AFTER_HEAD = re.compile(r"(final_|output_)?logits?_(soft_?cap(ping)?|scal(e|ing))|(lm_head|output)_multiplier(_scale)?")
"""Settings of models that change logits after the head: Gemma, Granite, Cohere, Falcon-H1 (read: transformers 5.24)."""


class CausalLM(nn.Module):
    """Embeddings, layers and head of a causal language model, each where the wrapper looks for it.

        PackedModel(..., llm=CausalLM(AutoModelForCausalLM.from_pretrained(name)), consumer="hf")

    Packed tokens go in as one row. Whether its attention keeps their sequences apart depends on the model and the version:
    `PackedModel.prove_isolation(batch)` shows it.

    Args:
        model: with `get_input_embeddings`, `get_output_embeddings` and `base_model`, whose first output are the hidden states
            that the head takes.

    Raises:
        ConfigError: the model changes its logits after the head; the loss, which makes them itself, would not.
    """

    consumer = "hf"
    layouts = ("thd", "bshd")

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        settings = {**vars(model.config), **vars(getattr(model.config, "text_config", model.config))}
        for name, value in settings.items():
            if _AFTER_HEAD.fullmatch(name) and value not in (None, 1):
                raise ConfigError(
                    f"{type(model).__name__} changes its logits after the head",
                    got=f"{name}={value}",
                    expected=f"{name} None or 1",
                    because="the loss makes its logits in chunks from hidden states and the head's weight alone",
                    fix="write a small module whose forward folds the factor into the hidden states; a cap cannot be folded",
                )
        self.model = model

    @property
    def head(self) -> nn.Module:
        """The module that makes logits of hidden states."""
        return self.model.get_output_embeddings()

    def embed(self, ids: Tensor) -> Tensor:
        """The embeddings `[..., hidden]` of `ids`."""
        return self.model.get_input_embeddings()(ids)

    def forward(self, embeddings: Tensor, **metadata) -> Tensor:
        """Hidden states, shaped as `embeddings`: `[T, hidden]` or `[B, S, hidden]`."""
        packed = embeddings.dim() == 2
        hidden = self.model.base_model(inputs_embeds=embeddings[None] if packed else embeddings, **metadata)[0]
        return hidden[0] if packed else hidden
