"""Model: the edge to FP8 layers. The wrapper that consumes a `PackedBatch`, and small real models in plain torch."""

from packfp8.model.wrapper import PackedModel, PackedOutput

__all__ = ["Fp8", "PackedModel", "PackedOutput"]


def __getattr__(name: str):
    if name == "Fp8":  # on first use: it knows of libraries that plain models do without
        from packfp8.model.fp8 import Fp8

        return Fp8
    raise AttributeError(f"module 'packfp8.model' has no attribute {name!r}")
