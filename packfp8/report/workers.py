"""Workers: this process and its children count parts of manifests, so that reading uses every core.

A child is a plain `python -c`, not one of `multiprocessing`: it neither imports the caller's script again (spawn) nor copies
a process with torch's threads (fork), so that a notebook and a script without a main guard may call the report.
"""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from queue import SimpleQueue

_AHEAD = 2  # tasks of a child: one in work, one that it finds when it is done
_HELD = 8  # results for each core that may wait for an earlier one

_CHILD = "import sys; sys.path[:] = {path!r}; from packfp8.report.workers import serve; serve()"


def num_cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def on_all_cores(function: Callable, tasks: Iterable, cores: int) -> Iterator:
    """Results of `function(task)` in the order of the tasks, from this process and `cores - 1` children.

    This process draws the tasks, hands out as many as keep the children busy, and does the others itself.

    Args:
        function: importable by its name.
        tasks: picklable.
        cores: at least 1.

    Raises:
        What the function raises, and ChildProcessError where a child dies.
    """
    idle: SimpleQueue[subprocess.Popen] = SimpleQueue()
    processes = [_start() for _ in range(cores - 1)]
    for process in processes:
        idle.put(process)

    def ask_one(task):
        process = idle.get()
        try:
            return _ask(process, function, task)
        finally:
            idle.put(process)

    pending: deque[Future] = deque()
    try:
        with ThreadPoolExecutor(max(1, len(processes))) as threads:
            for task in tasks:
                if sum(not future.done() for future in pending) < _AHEAD * len(processes):
                    pending.append(threads.submit(ask_one, task))
                else:
                    pending.append(_done(function(task)))
                while pending and (pending[0].done() or len(pending) > _HELD * cores):
                    yield pending.popleft().result()
            while pending:
                yield pending.popleft().result()
    finally:
        for process in processes:
            process.kill()
            process.communicate()


def _done(result) -> Future:
    future: Future = Future()
    future.set_result(result)
    return future


def serve() -> None:
    """Nothing; answers tasks from stdin on stdout until the parent closes them. This is what a child runs."""
    requests, answers = sys.stdin.buffer, os.fdopen(os.dup(sys.stdout.fileno()), "wb")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # a print of some library must not end up between the answers
    while True:
        try:
            function, task = pickle.load(requests)
        except EOFError:
            return
        try:
            answer = function(task)
        except Exception as fault:  # noqa: BLE001  the parent raises it again
            answer = _Raised(fault)
        pickle.dump(answer, answers, protocol=pickle.HIGHEST_PROTOCOL)
        answers.flush()


class _Raised:
    def __init__(self, fault: Exception) -> None:
        self.fault = fault


def _start() -> subprocess.Popen:
    command = [sys.executable, "-c", _CHILD.format(path=[entry or str(Path.cwd()) for entry in sys.path])]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)


def _ask(process: subprocess.Popen, function: Callable, task):
    try:
        pickle.dump((function, task), process.stdin, protocol=pickle.HIGHEST_PROTOCOL)
        process.stdin.flush()
        answer = pickle.load(process.stdout)
    except (EOFError, BrokenPipeError) as fault:
        raise ChildProcessError(f"a process that counts lines died with exit code {process.wait()}") from fault
    if isinstance(answer, _Raised):
        raise answer.fault
    return answer
