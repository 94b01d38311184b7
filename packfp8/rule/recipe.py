"""RECIPES: the one table from an FP8 recipe to what it needs of features, slabs and shards.

Measured on an NVIDIA H200 (sm90) with torch 2.11.0+cu130, Transformer Engine 2.20.2 and torchao 0.18 unless the source says
"read". A changed number here is a breaking change and stands under its own heading in the changelog.

Three things decide a row. Forward, each rank quantises the rows that it holds: the shard. Under SP these are gathered, and
the GEMMs see the slab. Backward, the weight gradient multiplies over those rows, so the slab is its inner dimension and
cuBLAS asks for twice as much. Who rounds by the forward number passes forward and dies in backward half of the time.
"""

from __future__ import annotations

from dataclasses import dataclass

from packfp8.rule.need import Need

H200 = "measured: H200, torch 2.11.0+cu130"
TE = f"{H200}, Transformer Engine 2.20.2"
TORCHAO = f"{H200}, torchao 0.18; the same on device='meta'"
TE_READ = "read: Transformer Engine 2.20.2 (needs sm100, not run)"


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """What one recipe needs.

    Args:
        library: "torch", "te" or "torchao".
        capability: least CUDA compute capability that runs it.
        always: needs in force whatever is trained.
        trained: needs of a backward pass that computes weight gradients.
        fast: needs that only buy speed.
        fast_gathered: those that buy speed only where SP gathers the rows.
    """

    name: str
    library: str
    capability: tuple[int, int]
    always: tuple[Need, ...] = ()
    trained: tuple[Need, ...] = ()
    fast: tuple[Need, ...] = ()
    fast_gathered: tuple[Need, ...] = ()


def _features(multiple: int, source: str) -> Need:
    because = "a feature dimension is the inner or the leading dimension of a GEMM in forward or backward"
    return Need(unit="features", multiple=multiple, because=because, source=source)


def _te_hopper(name: str, *, fast_gathered: tuple[Need, ...] = ()) -> Recipe:
    """delayed, current and block ask for the same rows: 8 forward on the shard, 16 in the weight gradient on the slab."""
    forward = Need(
        unit="shard", multiple=8, because="the rows that a rank quantises; otherwise a ValueError in forward", source=TE
    )
    backward = Need(
        unit="slab",
        multiple=16,
        because="inner dimension of the weight gradient; otherwise a cuBLAS RuntimeError in backward",
        source=TE,
    )
    return Recipe(
        name=name,
        library="te",
        capability=(9, 0) if name == "block" else (8, 9),
        always=(_features(16, TE), forward),
        trained=(backward,),
        fast_gathered=fast_gathered,
    )


def _torchao(name: str, *rows: Need) -> Recipe:
    return Recipe(name=name, library="torchao", capability=(8, 9), always=(_features(16, TORCHAO), *rows))


_SCALED_MM = Need(
    unit="slab",
    multiple=16,
    because="inner dimension of the FP8 weight gradient, frozen weights included; otherwise a RuntimeError in backward",
    source=TORCHAO,
)
_BLOCK_GATHER = Need(
    unit="shard",
    multiple=128,
    because="whole 128-row blocks are gathered in FP8; otherwise TE warns and gathers in BF16",
    source="measured: two H200, Transformer Engine 2.20.2: 1.2 times as long without, at hidden 4,096",
    kind="fast",
)
_MXFP8 = Need(
    unit="shard",
    multiple=32,
    because="one scale covers 32 values, counted on the rows before the gather",
    source=TE_READ,
)
_NVFP4 = Need(
    unit="shard",
    multiple=16,
    because="one scale covers 16 values, counted on the rows before the gather",
    source=TE_READ,
)
_NVFP4_FAST = Need(
    unit="shard",
    multiple=128,
    because="the fast quantisation kernels take 128 rows at a time",
    source=TE_READ,
    kind="fast",
)

RECIPES: dict[str, Recipe] = {
    recipe.name: recipe
    for recipe in (
        Recipe(name="bf16", library="torch", capability=(8, 0)),
        _te_hopper("delayed"),
        _te_hopper("current"),
        _te_hopper("block", fast_gathered=(_BLOCK_GATHER,)),
        Recipe(name="mxfp8", library="te", capability=(10, 0), always=(_features(32, TE_READ), _MXFP8)),
        Recipe(name="nvfp4", library="te", capability=(10, 0), always=(_features(16, TE_READ), _NVFP4), fast=(_NVFP4_FAST,)),
        _torchao("tensorwise", _SCALED_MM),
        _torchao("rowwise", _SCALED_MM),
        _torchao("rowwise_with_gw_hp"),
    )
}
