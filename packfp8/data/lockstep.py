"""in_lockstep: batches for as long as every rank has one; what ends one rank ends all of them, with the same words.

    for batch in in_lockstep(loader, group=dist.new_group(backend="gloo", timeout=timedelta(seconds=30))):
        ...

Without it a rank whose file is broken or whose worker was killed raises by itself, and the others wait for it in the next
collective of the model. With it every rank says, after each draw, how that went: one all-reduce of three numbers.

    rank 0   step 7                    |
    rank 1   a fault, or the end       |  all raise: rank 1 has no batch, its words, its step
    rank 2   step 7                    |

A worker that is killed while the model computes is told of at the next draw. A process that dies says nothing more: its peers
lose the connection, or the group's time runs out, and torchrun stops them and starts all again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

import torch
from torch import distributed as dist

from packfp8.data.batch import PackedBatch
from packfp8.data.deaths import Deaths
from packfp8.data.peers import check_peers, device_of, differing
from packfp8.errors import StateError

_END = 1 << 62  # the place of a rank without a further batch: beyond every step


def in_lockstep(
    batches: Iterable[PackedBatch],
    group: dist.ProcessGroup | None = None,
    *,
    peers: dist.ProcessGroup | None = None,
) -> Iterator[PackedBatch]:
    """The batches, each after all ranks have theirs of the same step. A collective: every rank iterates its own to the end.

    Args:
        batches: this rank's loader.
        group: all ranks that train together; the default group where it is left out. One of gloo spares the GPU a wait at
            each step, and its timeout is how long a rank that says nothing is waited for.
        peers: the CP and TP peers of one pack, to compare the checksums of their packs at every step, as for debugging.

    Raises:
        StateError: on every rank alike: a rank could not make its batch, ended before the others, is at another step, or holds
            another pack than its peers; or a rank is gone.
    """
    drawn, deaths = _each(batches), Deaths()
    try:
        while (batch := _agreed(group, lambda: next(drawn, None), deaths)) is not None:
            if peers is not None:
                _agreed(group, lambda batch=batch: check_peers(batch, peers) or batch, deaths)
            yield batch
    finally:
        deaths.close()


def _each(batches: Iterable[PackedBatch]) -> Iterator[PackedBatch]:
    yield from batches  # so that a loader that cannot start fails at the first draw


def _agreed(group: dist.ProcessGroup | None, draw: Callable[[], PackedBatch | None], deaths: Deaths) -> PackedBatch | None:
    """What `draw` gives, once every rank is at the same place."""
    try:
        with deaths:
            batch = draw()
    except Exception as fault:  # whatever it is, the others wait
        _compare(group, 0, failed=True)
        raise _apart(group, fault=_words(fault)) from fault
    place = _END if batch is None else batch.step
    if not _compare(group, place):
        raise _apart(group, place=place)
    return batch


def _compare(group: dist.ProcessGroup | None, place: int, *, failed: bool = False) -> bool:
    """Whether no rank has failed and all are at one place."""
    told = torch.tensor([failed, place, -place], device=device_of(group))
    try:
        dist.all_reduce(told, dist.ReduceOp.MAX, group=group)
    except RuntimeError as fault:  # of gloo and NCCL alike; they have no type for it
        raise _lost(fault) from fault
    any_failed, last, first = told.tolist()
    return not any_failed and last == -first


def _apart(group: dist.ProcessGroup | None, *, place: int = 0, fault: str = "") -> StateError:
    """The same error on every rank, from what each of them says."""
    told: list = [None] * dist.get_world_size(group)
    dist.all_gather_object(told, (place, fault), group=group)
    by_rank = dict(zip(dist.get_process_group_ranks(group), told, strict=True))
    faults = {rank: fault for rank, (_, fault) in by_rank.items() if fault}
    if faults:
        return StateError(
            f"rank {', '.join(map(str, faults))} has no batch, and all ranks stop",
            got="; ".join(f"rank {rank}: {fault}" for rank, fault in faults.items()),
            expected="a batch on every rank",
            because="a rank that stops by itself leaves the others waiting for it in the next collective",
            fix="repair what was named, or choose on_fault='set_aside'; then resume from the last checkpoint",
        )
    usual, others = differing(by_rank)
    return StateError(
        f"rank {', '.join(map(str, others))} is not at the step of the other ranks",
        got="; ".join(f"rank {rank}: {_place(by_rank[rank][0])}" for rank in others),
        expected=f"as rank {usual}: {_place(by_rank[usual][0])}",
        because="ranks that train on different steps repeat some examples and lose others, and one of them ends too early",
        fix="give every rank the same examples, settings, epoch and state; check_start names what differs",
    )


def _place(place: int) -> str:
    return "the end of the epoch" if place == _END else f"step {place}"


def _words(fault: Exception) -> str:
    """The fault on one line; of a worker's error, which brings its traceback along, the part after it."""
    lines = str(fault).splitlines() or [""]
    last = max((n for n, line in enumerate(lines) if line and not line[0].isspace()), default=0)
    return f"{type(fault).__name__}: " + " | ".join(line.strip() for line in lines[last:])


def _lost(fault: RuntimeError) -> StateError:
    return StateError(
        "another rank is gone, or has said nothing for too long",
        got=_words(fault),
        expected="an answer from every rank after each draw",
        because="the process died, hangs, or is in another collective",
        fix="look for the first error among the ranks; torchrun --max-restarts starts all again from the last checkpoint",
    )
