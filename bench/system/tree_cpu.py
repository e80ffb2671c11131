"""CPU of a tree of processes, whose branches come and go."""

from __future__ import annotations

import threading
from contextlib import suppress
from types import TracebackType
from typing import Self

import psutil

__all__ = ["TreeCpu"]

_LOOK_EVERY_S = 0.02


class TreeCpu:
    """CPU-seconds of this process and of all below it, of those that have ended, too.

    Spark's daemon lets its workers go without asking what they used, so that the system
    forgets it. A thread looks often instead: what a worker used after its last look is lost.
    """

    def __init__(self) -> None:
        self._used: dict[tuple[int, float], float] = {}
        self._here = psutil.Process()
        self._lock = threading.Lock()
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="tree-cpu", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._is_over.set()
        self._thread.join()

    def seconds(self) -> float:
        """All that was used so far."""
        with self._lock:
            self._look()
            return sum(self._used.values())

    def _watch(self) -> None:
        while not self._is_over.wait(_LOOK_EVERY_S):
            with self._lock:
                self._look()

    def _look(self) -> None:
        for process in (self._here, *self._here.children(recursive=True)):
            with suppress(psutil.Error):
                times = process.cpu_times()
                self._used[process.pid, process.create_time()] = times.user + times.system
