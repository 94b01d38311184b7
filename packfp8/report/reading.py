"""Reading: manifests to one tally, on every core.

Plain files are cut into byte ranges at newlines. A gzipped file is unpacked here and its lines are counted by the workers;
several such files are left to them whole. Small inputs are counted in this process.
"""

from __future__ import annotations

import gc
import pickle
import zlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from packfp8.report.columns import count_csv, count_kaldi, count_numpy
from packfp8.report.counting import Counting
from packfp8.report.lines import Part, count_lines, count_list
from packfp8.report.manifests import Kind, Manifest
from packfp8.report.tally import NAMED, NOTHING, Rejected, Tally
from packfp8.report.workers import num_cores, on_all_cores

_RANGE = 16 << 20  # bytes of a file that one task counts
_BLOCK = 2 << 20  # bytes of text, about, that make a task of a gzipped file
_FED = 1 << 16  # packed bytes given to zlib at a time: its output grows by copies, which from 512 KB cost as much again
_SMALL = 8 << 20  # below so many bytes, starting processes costs more than it saves (0.3 s)
_PILE = 64  # partial tallies that are kept before they are added up

Progress = Callable[[int, int], None]
"""Called with the bytes done and the bytes in all."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Task:
    """A part of a manifest to count: a byte range, lines that are already here, or a fault of the file as a whole.

    Attributes:
        start, stop: bytes; the part holds the lines that begin in this range.
        block: whole lines, unpacked.
        fault: why the file cannot be read any further.
        done_bytes: for the progress: bytes of the file that this part stands for.
    """

    manifest: Manifest
    counting: Counting
    start: int = 0
    stop: int = 0
    block: bytes | None = None
    fault: str | None = None
    done_bytes: int = 0


def read(
    manifests: Iterable[Manifest], counting: Counting, *, progress: Progress | None = None, cores: int | None = None
) -> tuple[Tally, Rejected]:
    """The tally of all good lines, and the rejected ones.

    Args:
        manifests: as `find_manifests` gives them.
        counting: what a line means in tokens.
        progress: called after every part.
        cores: processes to use; None is all.

    Raises:
        OSError: a file that cannot be opened.
        PackError: a file that is not what it seems.
    """
    manifests = list(manifests)
    total = sum(manifest.num_bytes for manifest in manifests)
    cores = num_cores() if cores is None else cores
    apart = cores > 1 and total >= _SMALL and _travels(counting)
    unpack_here = apart and sum(manifest.kind is Kind.LINES_GZ for manifest in manifests) < cores
    tallies, rejected, done, lines, last = [], Rejected(), 0, 0, None
    for task, part in _counted(_tasks(manifests, counting, unpack_here), cores if apart else 1):
        lines = lines if task.manifest == last else 0
        named = tuple(f"{task.manifest.path}:{lines + number}: {reason}" for number, reason in part.faults)
        rejected += Rejected(count=part.rejected, named=named)
        tallies.append(part.tally)
        if len(tallies) == _PILE:
            tallies = [Tally.total(tallies)]
        last, lines, done = task.manifest, lines + part.lines, done + task.done_bytes
        if progress:
            progress(done, total)
    return Tally.total(tallies), rejected


def count(task: Task) -> Part:
    """What the task's part of its manifest holds."""
    looks = gc.isenabled()
    gc.disable()  # parsed lines hold no cycles, and looking for some takes a fifth of the time
    try:
        return _count(task)
    finally:
        if looks:
            gc.enable()


def _count(task: Task) -> Part:
    path, kind, counting = task.manifest.path, task.manifest.kind, task.counting
    if task.fault is not None:
        return Part(tally=NOTHING, lines=1, rejected=1, faults=((1, task.fault),))
    if task.block is not None:
        return count_lines(task.block, counting)
    if kind is Kind.LINES:
        return count_lines(_lines_of_range(path, task.start, task.stop), counting)
    if kind is Kind.LINES_GZ:
        return _joined(map(_count, _unpacked(task.manifest, counting)))
    if kind is Kind.LIST:
        return count_list(path.read_bytes(), counting)
    return {Kind.TABLE: count_csv, Kind.KALDI: count_kaldi, Kind.NUMPY: count_numpy}[kind](path, counting)


def _counted(tasks: Iterable[Task], cores: int) -> Iterator[tuple[Task, Part]]:
    """Every task with its part, in order."""
    begun: deque[Task] = deque()

    def remembered() -> Iterator[Task]:
        for task in tasks:
            begun.append(task)
            yield task

    for part in on_all_cores(count, remembered(), cores):
        yield begun.popleft(), part


def _tasks(manifests: Iterable[Manifest], counting: Counting, unpack_here: bool) -> Iterator[Task]:
    for manifest in manifests:
        size = manifest.num_bytes
        if manifest.kind is Kind.LINES:
            for start in range(0, size, _RANGE):
                stop = min(start + _RANGE, size)
                yield Task(manifest=manifest, counting=counting, start=start, stop=stop, done_bytes=stop - start)
        elif manifest.kind is Kind.LINES_GZ and unpack_here:
            yield from _unpacked(manifest, counting)
        else:
            yield Task(manifest=manifest, counting=counting, done_bytes=size)


def _unpacked(manifest: Manifest, counting: Counting) -> Iterator[Task]:
    """The gzipped file in tasks of whole lines; what is broken ends it with a fault."""
    try:
        for block, num_bytes in _unzipped(manifest.path):
            yield Task(manifest=manifest, counting=counting, block=block, done_bytes=num_bytes)
    except (zlib.error, EOFError) as fault:
        yield Task(manifest=manifest, counting=counting, fault=f"the gzipped file is broken from here on: {fault}")


def _unzipped(path: Path) -> Iterator[tuple[bytes, int]]:
    """Blocks of whole lines, each with the number of gzipped bytes that it took.

    Raises zlib.error or EOFError after the last whole line of a file that is broken or cut off.
    """
    unzip, text, size, length, fault = zlib.decompressobj(wbits=31), [], 0, 0, None  # 31: a gzip header and its checksum
    with path.open("rb") as file:
        while fault is None and (packed := file.read(_FED)):
            size += len(packed)
            while packed and fault is None:
                if unzip.eof:  # a file may be several gzip members one after another
                    unzip = zlib.decompressobj(wbits=31)
                try:
                    text.append(unzip.decompress(packed))
                except zlib.error as error:
                    fault = error
                    break
                length += len(text[-1])
                packed = unzip.unused_data
            if length >= _BLOCK:
                block, text = _cut(text)
                yield block, size
                size, length = 0, len(text[0])
    block, text = _cut(text)
    yield block, size
    if fault or not unzip.eof:
        raise fault or EOFError("it ends too early")
    yield text[0], 0


def _cut(text: list[bytes]) -> tuple[bytes, list[bytes]]:
    """The whole lines of a text in pieces, copied once, and what is left of it."""
    rest: list[bytes] = []
    while text:
        last = text.pop()
        end = last.rfind(b"\n") + 1
        rest.append(last[end:])
        if end:
            return b"".join((*text, memoryview(last)[:end])), [b"".join(reversed(rest))]
    return b"", [b"".join(reversed(rest))]


def _lines_of_range(path: Path, start: int, stop: int) -> bytes:
    """The lines that begin in bytes [start, stop) of the file."""
    with path.open("rb") as file:
        file.seek(max(0, start - 1))
        if start and file.read(1) != b"\n":
            file.readline()
        first = file.tell()
        if first >= stop:
            return b""
        block = file.read(stop - first)
        return block if block.endswith(b"\n") else block + file.readline()


def _joined(parts: Iterable[Part]) -> Part:
    """Consecutive parts of one file as one."""
    tallies, lines, rejected, faults = [], 0, 0, []
    for part in parts:
        faults += [(lines + number, reason) for number, reason in part.faults[: NAMED - len(faults)]]
        tallies.append(part.tally)
        lines, rejected = lines + part.lines, rejected + part.rejected
    return Part(tally=Tally.total(tallies), lines=lines, rejected=rejected, faults=tuple(faults))


def _travels(counting: Counting) -> bool:
    """Whether another process can have the tokenizer: one that is defined in a notebook or a script stays there."""
    if type(counting.tokenizer).__module__ == "__main__" or getattr(counting.tokenizer, "__module__", "") == "__main__":
        return False
    try:
        pickle.dumps(counting)
    except (pickle.PicklingError, AttributeError, TypeError):
        return False
    return True
