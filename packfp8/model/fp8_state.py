"""Fp8State: what FP8 layers keep from step to step beside their parameters, as distributed checkpoints save and load it.

    model    = without_extra_state(get_model_state_dict(model))     parameters and buffers, of sizes known beforehand
    fp8      = Fp8State(model)                                      delayed scaling's scales and maxima, of any size
    progress = Progress(sampler)

Delayed scaling alone has such a state; without it the steps after a restart quantise by scales of 1. Transformer Engine gives
it as `_extra_state`, a byte tensor that is empty before the first forward pass. `torch.distributed.checkpoint.load` reads into
the tensors of the model that is there, and refuses those of a fresh model: `Size mismatch` (tested: torch 2.13). Here the state
is one value of bytes, which a load replaces, whatever its size.
"""

from __future__ import annotations

import io
from collections.abc import Mapping

import torch
from torch import nn

from packfp8.errors import StateError

_SUFFIX = "_extra_state"  # of the keys under which `state_dict()` of torch has what `get_extra_state` gives


class Fp8State:
    """The extra state of all modules of a model, as `torch.distributed.checkpoint` takes it.

        state = {"model": without_extra_state(get_model_state_dict(model)), "fp8": Fp8State(model), ...}
        dcp.save(state, checkpoint_id=folder)

        dcp.load(state, checkpoint_id=folder)                       # with a fresh model, before or after its first step
        set_model_state_dict(model, state["model"], options=StateDictOptions(strict=False))

    `strict=False` is for the keys that were left out; a parameter that is missing is found by `dcp.load` itself.

    Transformer Engine pickles the state of delayed scaling, and from 2.20 on unpickles it only where the environment has
    NVTE_ALLOW_UNSAFE_PICKLE_EXTRA_STATE=1 (read): a pickle can run any code, so set it for checkpoints of your own. Around
    these bytes there is no other pickle than torch's own of one value.

    Args:
        model: sharded or not; its modules have the names that they had when the state was saved.
        part: names this rank's share where ranks keep different states, as f"tp{rank}" where the maxima are reduced over the
            TP group alone. Ranks of one part hold the same, and one of them saves it. Transformer Engine reduces over all
            ranks unless told otherwise: one part.
    """

    def __init__(self, model: nn.Module, *, part: str = "all") -> None:
        self.model, self.part = model, part

    def state_dict(self) -> dict[str, bytes]:
        """The state of every module that has one, as one value by the key `part`."""
        file = io.BytesIO()
        torch.save({name: module.get_extra_state() for name, module in self._keepers().items()}, file)
        return {self.part: file.getvalue()}

    def load_state_dict(self, state_dict: Mapping[str, bytes]) -> None:
        """Give every module its state back.

        Raises:
            StateError: there is none of this part, the model has other modules with a state, or one of them refuses its own.
        """
        if self.part not in state_dict:
            raise StateError(
                f"the checkpoint has no FP8 state of part {self.part!r}",
                got=", ".join(map(repr, state_dict)) or "no parts",
                expected=repr(self.part),
                because="each part is the share of ranks that keep the same maxima",
                fix="Fp8State(model, part=...) with the name under which this rank saved",
            )
        saved, keepers = torch.load(io.BytesIO(state_dict[self.part]), weights_only=True), self._keepers()
        if other := sorted(saved.keys() ^ keepers.keys()):
            raise StateError(
                f"module {other[0]!r} keeps FP8 state in one of the two: the checkpoint, or the model",
                got=f"{len(saved)} modules with state in the checkpoint",
                expected=f"the {len(keepers)} of the model, by the same names",
                because="a layer without its scales quantises by scales of 1 for its first steps",
                fix="build the model as it was when it was saved; wrap it for recomputation or compilation alike",
            )
        for name, module in keepers.items():
            try:
                module.set_extra_state(saved[name])
            except RuntimeError as fault:
                raise _refused(name, fault) from fault

    def _keepers(self) -> dict[str, nn.Module]:
        own = nn.Module.get_extra_state
        return {name: module for name, module in self.model.named_modules() if type(module).get_extra_state is not own}


def without_extra_state(state_dict: Mapping[str, object]) -> dict[str, object]:
    """The entries of a model's `state_dict()` that are parameters and buffers: those whose sizes a fresh model knows."""
    return {name: value for name, value in state_dict.items() if name.rpartition(".")[2] != _SUFFIX}


def _refused(name: str, fault: RuntimeError) -> StateError:
    return StateError(
        f"module {name!r} does not take its saved FP8 state",
        got=" ".join(str(fault).split()),
        expected="a state that it unpickles",
        because="Transformer Engine pickles the state of delayed scaling, and a pickle of strangers can run any code",
        fix="set NVTE_ALLOW_UNSAFE_PICKLE_EXTRA_STATE=1 where the checkpoint is your own",
    )
