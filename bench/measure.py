"""Run pieces of load in processes of their own, and measure time, CPU and memory.

A worker is a function that takes a *gate*. It connects and prepares, calls the gate, and then does
the work that counts::

    def produce(gate: Gate) -> int:
        client = connect()
        gate()                      # returns when every worker of the run is ready
        ...                         # from here on the clock runs

Workers are spawned, so they (and their arguments) must be picklable: a module's function, a method
of a small frozen dataclass, or a ``functools.partial`` of either. All clocks are the machine's
monotonic clock, so that times of different processes can be compared.
"""

from __future__ import annotations

import multiprocessing
import os
import statistics
import time
import traceback
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnProcess
from pathlib import Path
from typing import Any

__all__ = [
    "Gate",
    "Run",
    "Worker",
    "WorkerFailedError",
    "WorkerRun",
    "median_run",
    "percentile",
    "repeat",
    "run",
]

Gate = Callable[[], None]
"""Called once by a worker when it is ready; returns when the run begins."""

Worker = Callable[[Gate], Any]
"""One process of load; what it returns is kept in its ``WorkerRun``."""

_TICKS_PER_SECOND = os.sysconf("SC_CLK_TCK")
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
_STAT_FIELDS = 8  # user nice system idle iowait irq softirq steal


class WorkerFailedError(Exception):
    """A worker raised, died or took too long; the text says which."""


@dataclass(frozen=True, slots=True)
class WorkerRun:
    """What one worker did between the gate and its end."""

    result: Any
    begin_s: float
    end_s: float
    cpu_s: float
    rss_bytes: int

    @property
    def wall_s(self) -> float:
        """Seconds from the gate to the end of this worker."""
        return self.end_s - self.begin_s


@dataclass(frozen=True, slots=True)
class Run:
    """One run of several workers at the same time.

    Attributes:
        wall_s: From the first worker's gate to the last worker's end.
        workers: One per worker, in the order given.
        watched_cpu_s: CPU the watched processes (the server) used meanwhile.
        watched_rss_bytes: Their resident memory at the end.
        foreign_cores: CPU used by everybody else, in cores: how far to trust the run.
    """

    wall_s: float
    workers: tuple[WorkerRun, ...]
    watched_cpu_s: float
    watched_rss_bytes: int
    foreign_cores: float

    @property
    def client_cpu_s(self) -> float:
        """CPU of all workers together."""
        return sum(worker.cpu_s for worker in self.workers)


def run(*workers: Worker, watch: Sequence[int] = (), limit_s: float = 120.0) -> Run:
    """Run the workers at the same time, each in a new process.

    Args:
        workers: What to run.
        watch: Process ids whose CPU and memory (with their children's) are measured too.
        limit_s: The run fails if it takes longer, start of the processes included.

    Raises:
        WorkerFailedError: A worker raised, died or did not end in time.
    """
    deadline = time.monotonic() + limit_s
    children = [_Child(worker) for worker in workers]
    try:
        for child in children:
            child.receive("ready", deadline)
        before = _usage(watch)
        for child in children:
            child.connection.send("go")
        done = tuple(child.receive("done", deadline) for child in children)
        after = _usage(watch)
    finally:
        for child in children:
            child.end()
    return _summary(done, before, after)


def repeat(times: int, once: Callable[[], Run]) -> list[Run]:
    """Call ``once`` so many times; see ``median_run``."""
    return [once() for _ in range(times)]


def median_run(runs: Iterable[Run]) -> Run:
    """The run whose wall time is the median (the slower of the middle two)."""
    ordered = sorted(runs, key=lambda one: one.wall_s)
    return ordered[len(ordered) // 2]


def percentile(values: Sequence[float], percent: int) -> float:
    """The value below which ``percent`` percent of the values lie."""
    if len(values) == 1:
        return values[0]
    return statistics.quantiles(values, n=100, method="inclusive")[percent - 1]


class _Child:
    """One worker process and the pipe to it."""

    def __init__(self, worker: Worker) -> None:
        context = multiprocessing.get_context("spawn")
        self.connection, theirs = context.Pipe()
        self.process: SpawnProcess = context.Process(
            target=_work, args=(worker, theirs), daemon=True
        )
        self.process.start()
        theirs.close()

    def receive(self, expected: str, deadline: float) -> Any:
        if not self.connection.poll(max(0.0, deadline - time.monotonic())):
            raise WorkerFailedError(f"a worker was not {expected} in time")
        try:
            kind, value = self.connection.recv()
        except EOFError:
            self.process.join(5)
            raise WorkerFailedError(
                f"a worker died before it was {expected}, exit code {self.process.exitcode}"
            ) from None
        if kind != expected:
            raise WorkerFailedError(f"a worker failed instead of being {expected}:\n{value}")
        return value

    def end(self) -> None:
        self.connection.close()
        self.process.join(5)
        if self.process.is_alive():
            self.process.kill()
            self.process.join(5)


@dataclass(frozen=True, slots=True)
class _Usage:
    watched_cpu_s: float
    watched_rss_bytes: int
    machine_cpu_s: float
    at_s: float


def _work(worker: Worker, connection: Connection) -> None:
    """Body of the worker process."""
    began: list[tuple[float, float]] = []

    def gate() -> None:
        connection.send(("ready", None))
        connection.recv()
        began.append((time.monotonic(), time.process_time()))

    try:
        result = worker(gate)
        end_s, cpu_s = time.monotonic(), time.process_time()
        begin_s, begin_cpu_s = began[0]
        done = WorkerRun(result, begin_s, end_s, cpu_s - begin_cpu_s, _peak_rss_bytes())
    except Exception:  # noqa: BLE001 - the root of this process: the parent must hear of it
        connection.send(("failed", traceback.format_exc()))
    else:
        connection.send(("done", done))


def _summary(done: tuple[WorkerRun, ...], before: _Usage, after: _Usage) -> Run:
    wall_s = max(one.end_s for one in done) - min(one.begin_s for one in done)
    watched_cpu_s = after.watched_cpu_s - before.watched_cpu_s
    ours_s = watched_cpu_s + sum(one.cpu_s for one in done)
    busy_s = after.machine_cpu_s - before.machine_cpu_s
    return Run(
        wall_s=wall_s,
        workers=done,
        watched_cpu_s=watched_cpu_s,
        watched_rss_bytes=after.watched_rss_bytes,
        foreign_cores=max(0.0, busy_s - ours_s) / (after.at_s - before.at_s),
    )


def _usage(pids: Sequence[int]) -> _Usage:
    cpu_s = 0.0
    rss_bytes = 0
    for pid in _with_children(pids):
        one_cpu_s, one_rss_bytes = _process_usage(pid)
        cpu_s += one_cpu_s
        rss_bytes += one_rss_bytes
    return _Usage(cpu_s, rss_bytes, _machine_cpu_s(), time.monotonic())


def _with_children(pids: Iterable[int]) -> list[int]:
    found: list[int] = []
    waiting = list(pids)
    while waiting:
        pid = waiting.pop()
        found.append(pid)
        for children in Path(f"/proc/{pid}/task").glob("*/children"):
            waiting.extend(int(child) for child in _text(children).split())
    return found


def _process_usage(pid: int) -> tuple[float, int]:
    # The name in parentheses may hold spaces; what follows it has fixed places.
    fields = _text(Path(f"/proc/{pid}/stat")).rpartition(")")[2].split()
    if not fields:
        return 0.0, 0
    user, system, rss_pages = int(fields[11]), int(fields[12]), int(fields[21])
    return (user + system) / _TICKS_PER_SECOND, rss_pages * _PAGE_BYTES


def _machine_cpu_s() -> float:
    fields = [int(field) for field in _text(Path("/proc/stat")).split()[1 : 1 + _STAT_FIELDS]]
    user, nice, system, _idle, _wait, irq, softirq, _steal = fields
    return (user + nice + system + irq + softirq) / _TICKS_PER_SECOND


def _peak_rss_bytes() -> int:
    # getrusage's peak is inherited over exec from the parent; this one is the process's own.
    for line in _text(Path("/proc/self/status")).splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    return 0


def _text(path: Path) -> str:
    """The file's text, or nothing when its process is gone."""
    try:
        return path.read_text()
    except (FileNotFoundError, ProcessLookupError):
        return ""
