"""Looking for an answer for a moment, before the thread goes to sleep for it.

To sleep and to be woken costs a thread about as much as a broker needs for a lone message, on a
machine that has nothing else to do. So where answers come that fast, the thread looks for the
next one again and again: for a while as short as that, one thread of a process at a time, and
not where there is one core only. ``PULQUE_SPIN=0`` turns it off, for those who pay for every bit
of a core.
"""

import os
import socket
import threading
import time
from collections.abc import Callable

from pulque.client.connection.fork_safety import free

__all__ = ["LONGEST_LOOK", "Lookout"]

LONGEST_LOOK = 0.0004
"""How long to look, in seconds; an answer that takes longer is slept for the next time."""
_one_looks = threading.Lock()
os.register_at_fork(after_in_child=lambda: free(_one_looks))


def _cores() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


_IS_WORTHWHILE = _cores() > 1 and os.environ.get("PULQUE_SPIN", "1") != "0"


class Lookout:
    """Looks for the answers of one connection."""

    __slots__ = ("_are_prompt", "_is_worthwhile", "_now", "_read")

    def __init__(
        self,
        read: Callable[[int], int],
        *,
        now: Callable[[], float] = time.perf_counter,
        is_worthwhile: bool = _IS_WORTHWHILE,
    ) -> None:
        self._read = read
        """Takes what is there, with these flags of ``recv``; returns 0 for nothing."""
        self._now = now
        self._is_worthwhile = is_worthwhile
        self._are_prompt = False

    def ask(self) -> float:
        """Return when something is asked: now."""
        return self._now()

    def look(self, asked_at: float) -> None:
        """Return when something was read, or when there is no more point in looking."""
        if not (self._are_prompt and self._is_worthwhile and _one_looks.acquire(blocking=False)):
            return
        try:
            read, now, until = self._read, self._now, asked_at + LONGEST_LOOK
            while not read(socket.MSG_DONTWAIT) and now() < until:
                os.sched_yield()  # the broker may wait for this very core
        finally:
            _one_looks.release()

    def answered(self, asked_at: float) -> None:
        """Learn from an answer how long answers take."""
        self._are_prompt = self._now() - asked_at < LONGEST_LOOK
