"""Layout: where every token of a pack sits, on every rank. numpy only."""

from packfp8.layout.plan import Plan, make_plan
from packfp8.layout.shard import cp_index, cp_inverse, sp_slice
from packfp8.layout.sizes import Buckets, Constant, Least
from packfp8.layout.slots import Slots, place

__all__ = ["Buckets", "Constant", "Least", "Plan", "Slots", "cp_index", "cp_inverse", "make_plan", "place", "sp_slice"]
