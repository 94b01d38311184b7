"""TensorSplit: a decoder's layers over TP peers, in Transformer Engine's terms, with sequence parallelism or without.

    slab --enter--> shard --norm, gather--> qkv, attention of own heads --> proj, reduce-scatter--> shard ... --leave--> slab

Heads and the FFN are dealt out, norms, embedding and head are held whole by every peer. Under SP a norm sees the rows of its
shard alone: its gradient is summed over the peers as it is made. All other gradients of what is held whole are alike already.

Fresh parameters are alike where they are held whole, and of each peer's own drawing where they are dealt out, however the peers
are seeded: shares that began alike would get the same gradients, and stay alike.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from packfp8.errors import ConfigError, LengthError
from packfp8.model.plain_decoder import DecoderSizes

_MARK = "_packfp8_summed_over_tp"


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorSplit:
    """How a decoder is divided among TP peers. Without a group it is whole.

    Args:
        group: process group of the TP peers, or None.
        sp: whether the tokens between the layers are divided too.
    """

    group: dist.ProcessGroup | None = None
    sp: bool = False

    @property
    def tp(self) -> int:
        """Number of peers."""
        return 1 if self.group is None else dist.get_world_size(self.group)

    @property
    def rank(self) -> int:
        """This rank's place among them."""
        return 0 if self.group is None else dist.get_rank(self.group)

    @property
    def divides_tokens(self) -> bool:
        """Whether each peer holds a shard of the slab between the layers."""
        return self.sp and self.tp > 1

    def check(self, sizes: DecoderSizes) -> None:
        """Nothing, where every peer gets equal shares of heads and FFN.

        Raises:
            ConfigError: they do not divide.
        """
        if sizes.heads % self.tp or sizes.kv_heads % self.tp or sizes.ffn % self.tp:
            raise ConfigError(
                "the decoder cannot be divided among the TP peers",
                got=f"heads {sizes.heads}, kv_heads {sizes.kv_heads}, ffn {sizes.ffn} for {self.tp} peers",
                expected=f"multiples of {self.tp}",
                because="each peer attends with its own heads, and holds an equal part of the FFN",
                fix="choose a tp that divides heads, kv_heads and ffn",
            )

    def options(self) -> dict:
        """What Transformer Engine's linear layers are told of it."""
        return {"tp_group": self.group, "tp_size": self.tp, "sequence_parallel": self.divides_tokens}

    def share(self, name: str, whole: Tensor, sizes: DecoderSizes) -> Tensor:
        """This rank's share of the plain decoder's parameter `name`: rows of qkv and fc1, columns of proj and fc2, else all.

        qkv and fc1 hold several parts one after another (q, k, v; gate, up); the share has this rank's rows of each.
        """
        if self.tp == 1:
            return whole
        heads, kv = sizes.heads * sizes.head_dim, sizes.kv_heads * sizes.head_dim
        last = name.removesuffix(".weight").rpartition(".")[2]
        if last in ("proj", "fc2"):
            return whole.chunk(self.tp, dim=1)[self.rank]
        parts = {"qkv": (heads, kv, kv), "fc1": (sizes.ffn, sizes.ffn)}.get(last)
        if parts is None:
            return whole
        return torch.cat([part.chunk(self.tp)[self.rank] for part in whole.split(parts)])

    @contextmanager
    def drawing(self, device: torch.device | str) -> Iterator[None]:
        """Random numbers on `device` are this peer's own within; those after it are the same with and without.

        Peers enter it together.
        """
        device = torch.device(device)
        if self.tp == 1 or device.type == "meta":
            yield
            return
        with torch.random.fork_rng([device] if device.type == "cuda" else []):
            seed = torch.randint(1 << 31, (1,), device=device)
            self.make_alike([seed])
            torch.manual_seed(int(seed) + self.rank)
            yield

    def make_alike(self, tensors: Iterable[Tensor]) -> None:
        """Nothing; every peer has the first peer's values of `tensors` afterwards. Peers call it together."""
        if self.tp == 1:
            return
        for tensor in tensors:
            if not tensor.is_meta:
                dist.broadcast(tensor.detach(), dist.get_global_rank(self.group, 0), group=self.group)

    def enter(self, slab: Tensor) -> Tensor:
        """This rank's shard of `slab`, cut along the first dimension; every peer gets the gradient of the whole.

        Raises:
            LengthError: its rows do not divide among the peers.
        """
        if not self.divides_tokens:
            return slab
        if slab.shape[0] % self.tp:
            raise _no_equal_shards(slab.shape[0], self.tp)
        return _Enter.apply(slab, self.group)

    def leave(self, shard: Tensor) -> Tensor:
        """The slab of which the peers hold shards. What follows is computed by all alike, so each keeps its own gradient."""
        return _Leave.apply(shard, self.group) if self.divides_tokens else shard

    def sum_gradients(self, norms: list[nn.Parameter]) -> None:
        """Nothing; gradients of `norms` are summed over the peers from now on, each time before they are accumulated.

        Call it in every forward pass: FSDP puts other parameters in the place of those it was built with.
        """
        if not self.divides_tokens:
            return
        for weight in norms:
            if weight.requires_grad and not hasattr(weight, _MARK):
                setattr(weight, _MARK, weight.register_hook(self._summed))

    def _summed(self, grad: Tensor) -> Tensor:
        grad = grad.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(grad, group=self.group)
        return grad


WHOLE = TensorSplit()


def _no_equal_shards(rows: int, tp: int) -> LengthError:
    return LengthError(
        "a slab cannot be cut into equal shards",
        got=f"{rows} rows for {tp} TP peers with SP",
        expected=f"a multiple of {tp}",
        because="the collectives of SP exchange equal shards, and others end in a hang or in another rank's numbers",
        fix=f"make the batches by align(..., Topology(tp={tp}, sp=True)), which rounds for it",
    )


def _own(slab: Tensor, group: dist.ProcessGroup) -> Tensor:
    return slab.chunk(dist.get_world_size(group))[dist.get_rank(group)].contiguous()


def _all(shard: Tensor, group: dist.ProcessGroup) -> Tensor:
    slab = shard.new_empty((shard.shape[0] * dist.get_world_size(group), *shard.shape[1:]))
    dist.all_gather(list(slab.chunk(dist.get_world_size(group))), shard.contiguous(), group=group)
    return slab


class _Enter(torch.autograd.Function):
    @staticmethod
    def forward(ctx, slab: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return _own(slab, group)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: Tensor):
        return _all(grad, ctx.group), None


class _Leave(torch.autograd.Function):
    @staticmethod
    def forward(ctx, shard: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return _all(shard, group)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: Tensor):
        return _own(grad, ctx.group), None
