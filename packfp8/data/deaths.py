"""Deaths: the death of a loader's worker is told in the next draw, and nowhere else.

torch hears of it by SIGCHLD, and raises wherever the main process is then: in a backward pass, or in a collective in which
the other ranks then wait. Kept for the next draw, it can be told to all of them.
"""

from __future__ import annotations

import signal
import threading


class Deaths:
    """A context within which a worker's death is heard at once; outside of it, it is kept until the next entry.

    Outside the main thread, where signals are not handled, it does nothing.
    """

    def __init__(self) -> None:
        self._kept: list[tuple] = []
        self._handler = signal.getsignal(signal.SIGCHLD)

    def __enter__(self) -> None:
        if _signals_come_here():
            self._restore()
            while self._kept:
                arguments = self._kept.pop()
                if callable(self._handler):
                    self._handler(*arguments)  # torch's: raises where a worker of a loader has failed

    def __exit__(self, *_) -> None:
        # What came before this line is raised by it, and so within the context.
        if _signals_come_here():
            self._handler = signal.signal(signal.SIGCHLD, self._keep)

    def close(self) -> None:
        """Let others hear again as before."""
        if _signals_come_here():
            self._restore()

    def _restore(self) -> None:
        # A handler that was not set from Python is None, and cannot be set again.
        signal.signal(signal.SIGCHLD, signal.SIG_DFL if self._handler is None else self._handler)

    def _keep(self, *arguments) -> None:
        self._kept.append(arguments)


def _signals_come_here() -> bool:
    return threading.current_thread() is threading.main_thread()
