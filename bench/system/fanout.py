"""Many groups on one subject: what a delivery costs the broker, compared with one group."""

from __future__ import annotations

import threading
from functools import partial
from statistics import median
from typing import NamedTuple

import pulque
from bench.broker import BrokerProcess, running_broker
from bench.measure import Gate, run
from bench.options import Options, tell
from bench.outcome import Aim, BenchFailedError, Section, Table
from bench.peers import work_directory
from bench.raw import RawClient, send_frames

__all__ = ["measure"]

_SIZE = 100
_BATCH = 1000
_SUBJECT = "fanout"
_TIMES = 1.2
_MOST_PROCESSES = 10
_CROWD = 19
"""So many consumers has one of fifty groups; the others have one."""
_SENDS_IN_FLIGHT = 16


class _Fanned(NamedTuple):
    """One run with so many groups."""

    groups: int
    broker_us: float
    rate: float
    foreign_cores: float


def measure(options: Options) -> Section:
    """Let one group, ten and fifty groups each consume everything."""
    count = 200_000 if options.is_quick else 1_000_000
    kinds = (1, 10) if options.is_quick else (1, 10, 50)
    section = Section("fanout", f"many groups on one subject, {count:,} messages")
    runs: dict[int, list[_Fanned]] = {}
    with work_directory() as directory, running_broker(directory) as broker:
        for groups in kinds:
            # One group is done soon, fifty are not; what counts is a message delivered.
            each = count // 4 if groups == 50 else count
            if groups != 10:  # ten read what one has read
                run(partial(_send, port=broker.port, count=each))
            runs[groups] = [
                _measure_groups(broker, groups, each, f"{groups}-{at}")
                for at in range(3 if groups == 1 else 1)
            ]
    _report(section, runs)
    return section


def _report(section: Section, runs: dict[int, list[_Fanned]]) -> None:
    costs = {groups: median(one.broker_us for one in some) for groups, some in runs.items()}
    rates = {groups: median(one.rate for one in some) for groups, some in runs.items()}
    section.aims = [
        Aim(
            f"{groups} groups: broker CPU per delivered message, × one group's",
            cost / costs[1],
            _TIMES,
            is_least=False,
            unit="×",
            detail=f"{cost:.2f} and {costs[1]:.2f} µs",
        )
        for groups, cost in costs.items()
        if groups > 1
    ]
    rows = [
        [str(groups), f"{rates[groups]:,.0f}", f"{cost:.3f}"] for groups, cost in costs.items()
    ]
    section.tables = [Table("", ("groups", "delivered/s", "broker µs/message"), rows)]
    section.note(
        f"Consumers are the client's, in up to {_MOST_PROCESSES} processes; every group got every "
        f"message. One of fifty groups has {_CROWD} consumers. The sends are not counted."
    )
    section.figures = {"broker_us": {str(groups): cost for groups, cost in costs.items()}}
    section.saw(max(one.foreign_cores for some in runs.values() for one in some))


def _measure_groups(broker: BrokerProcess, groups: int, count: int, name: str) -> _Fanned:
    processes = min(groups, _MOST_PROCESSES)
    workers = [
        partial(
            _consume_groups,
            url=broker.url,
            groups=[f"{name}-{number}" for number in range(at, groups, processes)],
            count=count,
            crowd=_CROWD if groups == 50 and at == 0 else 1,
        )
        for at in range(processes)
    ]
    before = _cpu_s(broker)
    done = run(*workers, watch=[broker.pid])
    broker_us = 1e6 * (_cpu_s(broker) - before) / (groups * count)
    got = [sum(worker.result) for worker in done.workers]
    if sum(got) != groups * count:
        raise BenchFailedError(f"{sum(got)} deliveries of {groups * count}")
    tell(f"  {groups} groups: {broker_us:.2f} µs of the broker's CPU per message")
    return _Fanned(groups, broker_us, groups * count / done.wall_s, done.foreign_cores)


def _cpu_s(broker: BrokerProcess) -> float:
    """The broker's own count is finer than the kernel's ticks."""
    with pulque.connect(broker.url, name="bench") as client:
        return float(client.status()["cpu_seconds"])


def _send(gate: Gate, *, port: int, count: int) -> None:
    with RawClient(port) as client:
        gate()
        frames = send_frames(f"{_SUBJECT}-{count}", count=count, size=_SIZE, batch=_BATCH)
        client.send_all(frames, _SENDS_IN_FLIGHT)


def _consume_groups(
    gate: Gate, *, url: str, groups: list[str], count: int, crowd: int
) -> list[int]:
    """Consume everything once for each group, each consumer in a thread; the first is a crowd.

    Returns:
        How many messages each group got.
    """
    subject = f"{_SUBJECT}-{count}"
    taken = [0] * len(groups)
    ends = [threading.Event() for _ in groups]
    locks = [threading.Lock() for _ in groups]

    def consume(at: int, consumer: pulque.Consumer) -> None:
        for message in consumer:
            message.ack()
            with locks[at]:
                taken[at] += 1
                is_all = taken[at] == count
            if is_all:
                ends[at].set()
                return

    with pulque.connect(url, name="bench") as client:
        consumers = [
            (at, client.consumer(subject, group=group, consumer_id=f"bench-{number}"))
            for at, group in enumerate(groups)
            for number in range(1 if at else crowd)
        ]
        threads = [threading.Thread(target=consume, args=each) for each in consumers]
        gate()
        for thread in threads:
            thread.start()
        for end in ends:
            end.wait()
        for _, consumer in consumers:
            consumer.close()
        for thread in threads:
            thread.join()
    return taken
