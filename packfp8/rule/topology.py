"""Topology: how many ranks share the data, the sequence and the features, and which of them this one is."""

from __future__ import annotations

from dataclasses import dataclass

from packfp8.errors import RuleError

_DATA = ("dp", "dp_replicate", "dp_shard")
_SAME_PACK = ("pp",)  # the stages of a pipeline work on one pack


@dataclass(frozen=True, slots=True)
class Topology:
    """Sizes and this rank's coordinates.

    Args:
        dp, cp, tp: ranks that share the examples, the tokens of a pack, and the features; each at least 1.
        sp: sequence parallelism: the TP peers also share the tokens between linear layers.
        dp_rank, cp_rank, tp_rank: this rank's place in each, from 0.

    Raises:
        RuleError: a size below 1, a rank outside its size, or an sp that is no bool.
    """

    dp: int = 1
    cp: int = 1
    tp: int = 1
    sp: bool = False
    dp_rank: int = 0
    cp_rank: int = 0
    tp_rank: int = 0

    def __post_init__(self) -> None:
        if not isinstance(self.sp, bool):
            raise RuleError(
                "the topology's sp is neither True nor False",
                got=repr(self.sp),
                expected="a bool",
                because="a text such as 'false' counts as true, and each rank would be thought to hold a share of its slab",
                fix="pass sp=True where the model splits tokens over tp, sp=False where it does not",
            )
        for dim in ("dp", "cp", "tp"):
            size, rank = getattr(self, dim), getattr(self, f"{dim}_rank")
            if not _whole(size) or not _whole(rank) or not 0 <= rank < size:
                raise RuleError(
                    f"the topology's {dim} is not a group of ranks with a place in it",
                    got=f"{dim}={size!r}, {dim}_rank={rank!r}",
                    expected=f"whole numbers with 0 <= {dim}_rank < {dim}",
                    because="every token count is divided by these sizes",
                    fix="give the sizes of the launched job; Topology.from_mesh(mesh) reads them",
                )

    @property
    def shards(self) -> int:
        """Ranks among which the tokens of a pack are divided between linear layers: cp*tp with SP, else cp."""
        return self.cp * self.tp if self.sp else self.cp

    @property
    def gathers(self) -> bool:
        """Whether SP gathers rows from a peer before a GEMM; false for SP over one rank."""
        return self.sp and self.tp > 1

    @classmethod
    def from_mesh(cls, mesh, *, sp: bool = False) -> Topology:
        """The topology of a `torch.distributed.device_mesh.DeviceMesh`, asked by its methods only.

        Args:
            mesh: with dimension names among dp, dp_replicate, dp_shard, cp and tp. `dp_replicate` and `dp_shard` together are
                data parallel, the earlier one in the mesh the slower. `pp` is passed over: stages work on one pack.
            sp: whether the model splits tokens over tp; a mesh does not say.

        Raises:
            RuleError: the mesh has no names, or one that is not known and larger than 1.
        """
        names = tuple(mesh.mesh_dim_names or ())
        sizes = {name: int(mesh.size(position)) for position, name in enumerate(names)}
        unknown = [n for n in names if n not in (*_DATA, *_SAME_PACK, "cp", "tp") and sizes[n] > 1]
        if not names or unknown or ("dp" in names and {"dp_replicate", "dp_shard"} & set(names)):
            raise RuleError(
                "the device mesh cannot be read as a topology",
                got=f"dimensions {names or 'without names'}",
                expected="names among dp (or dp_replicate and dp_shard), cp, tp, pp",
                because="a rank that takes the wrong share of the data trains on a different pack than its peers",
                fix="pass the root mesh of init_device_mesh(..., mesh_dim_names=...) or build Topology(...) by hand",
            )
        dp, dp_rank = 1, 0
        for name in names:
            if name in _DATA:
                dp, dp_rank = dp * sizes[name], dp_rank * sizes[name] + int(mesh.get_local_rank(name))
        rank = {name: int(mesh.get_local_rank(name)) for name in ("cp", "tp") if name in names}
        return cls(
            dp=dp,
            cp=sizes.get("cp", 1),
            tp=sizes.get("tp", 1),
            sp=sp,
            dp_rank=dp_rank,
            cp_rank=rank.get("cp", 0),
            tp_rank=rank.get("tp", 0),
        )

    def __str__(self) -> str:
        return f"dp {self.dp}, cp {self.cp}, tp {self.tp}{' with SP' if self.sp else ''}"


def _whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
