"""Consumers of different speed share the work; one that comes later helps at once."""

from __future__ import annotations

import threading
import time
from functools import partial
from itertools import pairwise
from statistics import mean

import pulque
from bench.broker import BrokerProcess, running_broker
from bench.measure import Gate, run
from bench.options import Options, tell
from bench.outcome import Aim, BenchFailedError, Section, Table
from bench.peers import work_directory
from bench.raw import RawClient, send_frames

__all__ = ["measure"]

_CONSUMERS = 10
_TASK_S = 0.001
"""What a task takes the fastest consumer; the n-th takes n times as long."""
_OVER_PERCENT = 10
_LATE_S = 1.0
_ALONE_S = 2.0
_TOGETHER_S = 3.0
_WINDOW_S = 0.1
_FULL = 0.8


def measure(options: Options) -> Section:
    """Share tasks among ten consumers, then let a second one join a first."""
    tasks = 3_000 if options.is_quick else 10_000
    section = Section("sharing", f"{tasks:,} tasks, {_CONSUMERS} consumers of different speed")
    with work_directory() as directory, running_broker(directory) as broker:
        _share(section, broker, tasks)
        _join(section, broker)
    return section


def _share(section: Section, broker: BrokerProcess, tasks: int) -> None:
    run(partial(_send, port=broker.port, subject="tasks", count=tasks))
    done = run(partial(_work_together, url=broker.url, tasks=tasks))
    handled: list[tuple[int, float]] = done.workers[0].result
    if sum(count for count, _ in handled) != tasks:
        raise BenchFailedError(f"{sum(count for count, _ in handled)} tasks were done of {tasks}")
    # What each one needed for a task decides the ideal, as a sleep lasts longer than it says.
    ideal_s = tasks / sum(count / busy_s for count, busy_s in handled)
    section.aims.append(
        Aim(
            f"{section.title}: longer than the ideal split",
            100 * (done.wall_s / ideal_s - 1),
            _OVER_PERCENT,
            is_least=False,
            unit="%",
            detail=f"{done.wall_s:.2f} and {ideal_s:.2f} s",
        )
    )
    rows = [
        [f"{1000 * busy_s / count:.2f}", f"{count:,}", f"{count * ideal_s / tasks:.0f}"]
        for count, busy_s in handled
    ]
    head = ("ms/task", "tasks done", "per ideal second")
    section.tables.append(Table("One line for each consumer", head, rows))
    section.figures["shared"] = {"wall_s": done.wall_s, "ideal_s": ideal_s}
    section.saw(done.foreign_cores)
    tell(f"  {done.wall_s:.2f} s, ideal {ideal_s:.2f}")


def _join(section: Section, broker: BrokerProcess) -> None:
    run(partial(_send, port=broker.port, subject="pile", count=20_000))
    done = run(partial(_work_and_join, url=broker.url))
    late_s: float | None = done.workers[0].result
    if late_s is None:
        raise BenchFailedError("the consumer that came later never had its full share")
    section.aims.append(
        Aim(
            "a consumer joins a backlog: until it does its full share",
            late_s,
            _LATE_S,
            is_least=False,
            unit="s",
            detail=f"at least {100 * _FULL:.0f} % of its own speed",
        )
    )
    section.saw(done.foreign_cores)
    tell(f"  the second consumer was at full speed after {late_s:.2f} s")


def _send(gate: Gate, *, port: int, subject: str, count: int) -> None:
    with RawClient(port) as client:
        gate()
        client.send_all(send_frames(subject, count=count, size=100, batch=100), 8)


def _work_together(gate: Gate, *, url: str, tasks: int) -> list[tuple[int, float]]:
    """How many tasks each consumer did, and how long it was busy with them."""
    handled = [(0, 0.0)] * _CONSUMERS
    left = threading.Semaphore(0)

    def work(number: int) -> None:
        busy_s = 0.0
        for message in consumers[number]:
            began = time.perf_counter()
            time.sleep(_TASK_S * (number + 1))
            message.ack()
            busy_s += time.perf_counter() - began
            handled[number] = (handled[number][0] + 1, busy_s)
            left.release()

    with pulque.connect(url, name="bench") as client:
        consumers = [
            client.consumer("tasks", group="sharing", consumer_id=f"bench-{number}")
            for number in range(_CONSUMERS)
        ]
        threads = [threading.Thread(target=work, args=(n,)) for n in range(_CONSUMERS)]
        gate()
        for thread in threads:
            thread.start()
        for _ in range(tasks):
            left.acquire()
        result = list(handled)
        for consumer in consumers:
            consumer.close()
        for thread in threads:
            thread.join()
    return result


def _work_and_join(gate: Gate, *, url: str) -> float | None:
    """After how many seconds a second consumer was at full speed; None if it never was."""
    ends: list[float] = []

    def work(name: str, until: float, times: list[float]) -> None:
        with client.consumer("pile", group="joining", consumer_id=name) as consumer:
            for message in consumer:
                time.sleep(_TASK_S)
                message.ack()
                times.append(time.monotonic())
                if times[-1] > until:
                    return

    with pulque.connect(url, name="bench") as client:
        gate()
        end = time.monotonic() + _ALONE_S + _TOGETHER_S
        first = threading.Thread(target=work, args=("first", end, []))
        first.start()
        time.sleep(_ALONE_S)
        began = time.monotonic()
        second = threading.Thread(target=work, args=("second", end, ends))
        second.start()
        first.join()
        second.join()
    # Its own speed is that of its last second, when it has long settled.
    task_s = mean(b - a for a, b in pairwise(t for t in ends if t > ends[-1] - 1))
    full = _FULL * _WINDOW_S / task_s
    starts = (began + at * _WINDOW_S for at in range(int(_TOGETHER_S / _WINDOW_S)))
    for start in starts:
        if sum(start <= t < start + _WINDOW_S for t in ends) >= full:
            return start + _WINDOW_S - began
    return None
