"""Packing: which examples share a pack, and which packs share a step. Needs numpy only."""

from packfp8.packing.admission import SetAside
from packfp8.packing.bounds import Bounds, bounds
from packfp8.packing.cost import PackCost, imbalance
from packfp8.packing.deal import Deal, Dealer, deal
from packfp8.packing.offline import Forecast, Packs, forecast, pack
from packfp8.packing.rows import RowPacker
from packfp8.packing.stream import StreamPacker

__all__ = [
    "Bounds",
    "Deal",
    "Dealer",
    "Forecast",
    "PackCost",
    "Packs",
    "RowPacker",
    "SetAside",
    "StreamPacker",
    "bounds",
    "deal",
    "forecast",
    "imbalance",
    "pack",
]
