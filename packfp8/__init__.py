"""packfp8: packed audio-text batches whose token counts are right by construction.

`import packfp8` loads neither torch nor lhotse: each public name is fetched from its room on first use.
"""

from __future__ import annotations

import importlib

__version__ = "0.1.0"

_ROOMS = {
    "packfp8.errors": (
        "PackError", "RuleError", "BudgetError", "LengthError", "ExampleError", "AudioError", "StateError", "ConfigError",
    ),
    "packfp8.rule": ("Topology", "Need", "Alignment", "align", "RECIPES"),
    "packfp8.lengths": ("AudioFrames", "Measure", "Template", "ByteTokenizer", "Histogram", "probe"),
    "packfp8.packing": ("pack", "Packs", "StreamPacker", "RowPacker", "deal"),
    "packfp8.layout": ("Slots", "Plan"),
    "packfp8.data": (
        "Example", "Turn", "Clip", "Collator", "PackedBatch", "PackingSampler", "PackedDataset", "corpus",
        "ShardedPackingSampler", "MicroBatches", "PeerLoader", "Progress", "check_loader", "check_start", "in_lockstep",
    ),
    "packfp8.model": ("PackedModel", "Fp8", "Fp8State", "CapturedStep"),
}  # fmt: skip
_HOME = {name: room for room, names in _ROOMS.items() for name in names}

__all__ = ["__version__", *_HOME]


def __getattr__(name: str):
    if name not in _HOME:
        raise AttributeError(f"module 'packfp8' has no attribute {name!r}")
    value = getattr(importlib.import_module(_HOME[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
