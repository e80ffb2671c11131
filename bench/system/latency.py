"""One message at a time: against Redis from memory, against the disk itself when synced."""

from __future__ import annotations

import itertools
import threading
from collections import deque
from functools import partial
from pathlib import Path
from statistics import median
from typing import NamedTuple

import pulque
from bench.broker import BrokerProcess, running_broker
from bench.limits import fdatasync_times_us, ping_pong_times_us
from bench.measure import Gate, Run, percentile, run
from bench.options import Options, tell
from bench.outcome import Aim, BenchFailedError, Section, Table
from bench.peers import Clients, Peer, all_peers, batches, work_directory
from bench.raw import RawClient, send_frames
from bench.system.pulque_peer import PulqueClients
from pulque.wire.requests import Acks

__all__ = ["measure"]

_SIZE = 100
_IN_FLIGHT = 64
_PER_SUBJECT = 32  # as many as a producer allows for one partition
_TIMES = 10
_PRODUCER = f"a producer, {_IN_FLIGHT} in flight"
_SINGLES = "the same, each message a batch of its own"
_THREADS = f"{_IN_FLIGHT} threads, `client.send`"
_FRAMES = f"frames made beforehand, {_IN_FLIGHT} in flight"
_ROUNDS = 5


def measure(options: Options) -> Section:
    """Alternate between Redis and Pulque, then between the disk and Pulque."""
    section = Section("latency", f"one {_SIZE} B message at a time through the blocking client")
    with work_directory() as directory:
        _measure_memory(section, options, directory)
        _measure_disk(section, options, directory)
    return section


# ── from memory, beside Redis ──────────────────────────────────────────────────────────────


def _measure_memory(section: Section, options: Options, directory: Path) -> None:
    redis: Peer = all_peers()["redis"]
    missing = redis.available()
    if missing is not None:
        section.note(f"Redis could not be measured: {missing}")
    home = directory / "redis"
    home.mkdir()
    try:
        others = redis.start(home) if missing is None else None
        with running_broker(directory) as broker:
            ours = PulqueClients(broker.url, "memory", one_by_one=True)
            _compare(section, options, ours, others)
    finally:
        redis.stop()


def _compare(section: Section, options: Options, ours: Clients, others: Clients | None) -> None:
    count = 500 if options.is_quick else 2000
    rows: dict[str, list[list[float]]] = {}
    sides = {"Pulque, acks=memory": ours, "Redis Streams": others}
    for _ in range(1 if options.is_quick else _ROUNDS):
        for name, clients in sides.items():
            if clients is not None:
                done = run(partial(clients.sync_latency, count=count, size=_SIZE))
                times_us: list[float] = done.workers[0].result
                rows.setdefault(name, []).append(times_us[count // 10 :])
                section.saw(done.foreign_cores)
        rows.setdefault("plain sockets, no server's work", []).append(
            ping_pong_times_us(count=count, size=_SIZE)[count // 10 :]
        )
    p50s = {name: median(percentile(each, 50) for each in runs) for name, runs in rows.items()}
    p99s = {name: median(percentile(each, 99) for each in runs) for name, runs in rows.items()}
    section.tables.append(
        Table(
            "One at a time, confirmed from memory",
            ("", "p50 µs", "p99 µs"),
            [[name, f"{p50s[name]:.0f}", f"{p99s[name]:.0f}"] for name in rows],
        )
    )
    section.figures["p50_us"] = p50s
    section.figures["p99_us"] = p99s
    if others is not None:
        mine, theirs = p50s["Pulque, acks=memory"], p50s["Redis Streams"]
        section.aims.append(
            Aim(
                "one at a time from memory, p50, × Redis Streams",
                mine / theirs,
                1.0,
                is_least=False,
                unit="×",
                detail=f"{mine:.0f} and {theirs:.0f} µs",
            )
        )
    tell(f"  p50 µs: {', '.join(f'{name} {value:.0f}' for name, value in p50s.items())}")


# ── synced, beside the disk ────────────────────────────────────────────────────────────────


def _measure_disk(section: Section, options: Options, directory: Path) -> None:
    count = 5_000 if options.is_quick else 40_000
    syncs = 200 if options.is_quick else 1000
    one_sync: list[float] = []
    sides = {
        _PRODUCER: partial(_produce_in_flight, count=2 * count),
        _SINGLES: partial(_produce_singles, count=count),
        _THREADS: partial(_send_in_threads, count=count // 4),
        _FRAMES: partial(_send_frames, count=count),
    }
    runs: dict[str, list[_Singles]] = {name: [] for name in sides}
    with running_broker(directory, "synced") as broker:
        for _ in range(options.repeats):
            times_us = fdatasync_times_us(directory, count=syncs, size=_SIZE)
            one_sync.append(1e6 * syncs / sum(times_us))
            for name, work in sides.items():
                runs[name].append(_singles(broker, work))
                if name != _PRODUCER and runs[name][-1].per_batch > 1:
                    raise BenchFailedError(f"{name}: messages shared batches")
                section.saw(runs[name][-1].foreign_cores)
    rates = {name: median(each.rate for each in some) for name, some in runs.items()}
    _report_disk(section, median(one_sync), rates, runs)


def _report_disk(
    section: Section,
    one_sync: float,
    rates: dict[str, float],
    runs: dict[str, list[_Singles]],
) -> None:
    alone = "append and fdatasync, one after the other"
    rows = [[alone, f"{one_sync:,.0f}", "1.0", "", "", ""]]
    for name, rate in rates.items():
        per_batch = median(each.per_batch for each in runs[name])
        broker_us = median(each.broker_us for each in runs[name])
        client_us = median(each.client_us for each in runs[name])
        cells = [f"{rate / one_sync:.1f}", f"{per_batch:.0f}", f"{broker_us:.0f}"]
        rows.append([name, f"{rate:,.0f}", *cells, f"{client_us:.0f}"])
    head = ("", "messages/s", "× one sync each", "in a batch", "broker CPU µs", "client CPU µs")
    section.tables.append(Table("Single messages, each synced before it is confirmed", head, rows))
    section.aims.append(
        Aim(
            f"{_IN_FLIGHT} single messages in flight, synced, × one sync per message",
            rates[_PRODUCER] / one_sync,
            _TIMES,
            is_least=True,
            unit="×",
            detail=f"{rates[_PRODUCER]:,.0f} and {one_sync:,.0f} messages/s",
        )
    )
    section.figures["synced_messages_per_s"] = {"one sync per message": one_sync, **rates}
    section.note(
        f"acks=disk. A producer with {_IN_FLIGHT} in flight is given one message after the other, "
        f"the next one once the oldest of {_IN_FLIGHT} is confirmed; no batch "
        "waits to be filled (`linger=0`), and what gathers while one is under way is the next one "
        "(`max_in_flight=1`). Where each "
        f"message is a batch of its own (`max_batch=1`, `max_in_flight={_PER_SUBJECT}` for each "
        "of two subjects), batches that are small together still share a request. "
        "Frames made beforehand over a plain socket show what the broker alone can do."
    )
    tell(f"  synced/s: {one_sync:,.0f}, {', '.join(f'{n} {r:,.0f}' for n, r in rates.items())}")


class _Singles(NamedTuple):
    """One run of single messages."""

    rate: float
    per_batch: float
    broker_us: float
    client_us: float
    foreign_cores: float


def _singles(broker: BrokerProcess, work: partial[int]) -> _Singles:
    before = _batches_sent(broker)
    placed = partial(work, url=broker.url, port=broker.port)
    done: Run = run(placed, watch=[broker.pid])
    count: int = done.workers[0].result
    stored = _batches_sent(broker) - before
    return _Singles(
        count / done.wall_s,
        count / stored,
        1e6 * done.watched_cpu_s / count,
        1e6 * done.client_cpu_s / count,
        done.foreign_cores,
    )


def _batches_sent(broker: BrokerProcess) -> int:
    with pulque.connect(broker.url, name="bench") as client:
        return int(client.status()["batches_sent"])


def _produce_in_flight(gate: Gate, *, url: str, port: int, count: int) -> int:
    """Send one message for each that is confirmed, so that so many are always under way."""
    del port
    with (
        pulque.connect(url, name="bench", acks="disk") as client,
        client.producer(linger=0, max_in_flight=1) as producer,
    ):
        producer.send("in-flight", b"first").result()
        gate()
        waiting: deque[pulque.PendingSend] = deque()
        for (body,) in batches(count=count, size=_SIZE, batch=1):
            if len(waiting) == _IN_FLIGHT:
                waiting.popleft().result()
            waiting.append(producer.send("in-flight", body))
        while waiting:
            waiting.popleft().result()
    return count


def _produce_singles(gate: Gate, *, url: str, port: int, count: int) -> int:
    del port
    with (
        pulque.connect(url, name="bench", acks="disk") as client,
        client.producer(linger=0, max_batch=1, max_in_flight=_PER_SUBJECT) as producer,
    ):
        subjects = [f"singles-{number}" for number in range(_IN_FLIGHT // _PER_SUBJECT)]
        for subject in subjects:
            producer.send(subject, b"first").result()
        gate()
        bodies = zip(itertools.cycle(subjects), batches(count=count, size=_SIZE, batch=1))
        promises = [producer.send(subject, body) for subject, (body,) in bodies]
        producer.flush()
        for promise in promises:
            if (error := promise.exception()) is not None:
                raise error
    return count


def _send_in_threads(gate: Gate, *, url: str, port: int, count: int) -> int:
    del port
    each = count // _IN_FLIGHT
    failures: list[BaseException] = []
    with pulque.connect(url, name="bench", acks="disk") as client:

        def work(number: int) -> None:
            try:
                for (body,) in batches(count=each, size=_SIZE, batch=1):
                    client.send(f"threads-{number % 4}", body)
            except pulque.PulqueError as failure:
                failures.append(failure)

        threads = [threading.Thread(target=work, args=(n,)) for n in range(_IN_FLIGHT)]
        gate()
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    if failures:
        raise failures[0]
    return each * _IN_FLIGHT


def _send_frames(gate: Gate, *, url: str, port: int, count: int) -> int:
    del url
    frames = send_frames("frames", count=count, size=_SIZE, batch=1, acks=Acks.DISK)
    with RawClient(port) as client:
        gate()
        client.send_all(frames, _IN_FLIGHT)
    return count
