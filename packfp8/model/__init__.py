"""Model: the edge to FP8 layers. The wrapper that consumes a `PackedBatch`, and small real models in plain torch."""

import importlib

from packfp8.model.wrapper import PackedModel, PackedOutput

__all__ = ["CapturedStep", "Fp8", "Fp8State", "PackedModel", "PackedOutput"]

# on first use: they know of libraries that plain models do without
_HOME = {"Fp8": "fp8", "Fp8State": "fp8_state", "CapturedStep": "captured"}


def __getattr__(name: str):
    if name in _HOME:
        return getattr(importlib.import_module(f"packfp8.model.{_HOME[name]}"), name)
    raise AttributeError(f"module 'packfp8.model' has no attribute {name!r}")
