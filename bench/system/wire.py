"""Batches of 1 KiB messages made beforehand, over plain sockets, beside loopback TCP itself."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median

from bench.broker import BrokerProcess, running_broker
from bench.limits import loopback_bytes_per_s
from bench.machine import touch_page_cache
from bench.measure import Gate, Run, run
from bench.options import Options, tell
from bench.outcome import Aim, BenchFailedError, Section, Table
from bench.peers import work_directory
from bench.raw import PullPlan, RawClient, send_frames
from pulque.net.sockets import prepare_socket

__all__ = ["measure"]

_SIZE = 1024
_BATCH = 1000
_SENDS_IN_FLIGHT = 8
_PULLED_AT_ONCE = 4 * _BATCH
_PERCENT = 50
_SUBJECT = "wire"


@dataclass(frozen=True, slots=True)
class _Round:
    """Rates of one round, in bytes of bodies per second."""

    loopback: float
    unpaced: float
    produce: Run
    consume: Run
    count: int

    def rate(self, done: Run) -> float:
        return self.count * _SIZE / done.wall_s


def measure(options: Options) -> Section:
    """Alternate between loopback, sending and pulling."""
    count = 500_000 if options.is_quick else 2_000_000
    section = Section(
        "wire", f"1 KiB messages in batches of {_BATCH} made beforehand, over plain sockets"
    )
    _measure_round(count)  # fills caches of all kinds
    rounds = []
    for _ in range(options.repeats):
        one = _measure_round(count)
        rounds.append(one)
        tell(
            f"  loopback {one.loopback / 1e9:.2f} GB/s ({one.unpaced / 1e9:.2f} as our own "
            f"sockets are), produce "
            f"{one.rate(one.produce) / 1e9:.2f}, consume {one.rate(one.consume) / 1e9:.2f}"
        )
    loopback = median(one.loopback for one in rounds)
    unpaced = median(one.unpaced for one in rounds)
    rows = [
        ["loopback TCP, 1 MiB at a time", f"{loopback / 1e9:.2f}", "100 %", "", ""],
        ["the same, sockets like our own", *_beside(unpaced, loopback), "", ""],
    ]
    for name in ("produce", "consume"):
        runs: list[Run] = [getattr(one, name) for one in rounds]
        rate = median(one.rate(done) for one, done in zip(rounds, runs, strict=True))
        broker_us = median(1e6 * done.watched_cpu_s * _BATCH / count for done in runs)
        client_us = median(1e6 * done.client_cpu_s * _BATCH / count for done in runs)
        share = 100 * rate / loopback
        section.aims.append(
            Aim(
                f"1 KiB messages packed beforehand, {name}, of loopback TCP",
                share,
                _PERCENT,
                is_least=True,
                unit="%",
                detail=f"{rate / 1e9:.2f} of {loopback / 1e9:.2f} GB/s",
            )
        )
        rows.append([name, *_beside(rate, loopback), f"{broker_us:.0f}", f"{client_us:.0f}"])
        section.figures[f"{name}_bytes_per_s"] = rate
        section.figures[f"{name}_broker_us_per_batch"] = broker_us
        section.saw(max(done.foreign_cores for done in runs))
    section.figures["loopback_bytes_per_s"] = loopback
    section.figures["loopback_unpaced_bytes_per_s"] = unpaced
    head = ("", "GB/s of bodies", "of loopback", "broker µs/batch", "client µs/batch")
    section.tables = [Table("", head, rows)]
    section.note(
        f"{count:,} messages a round, acks=memory, {_SENDS_IN_FLIGHT} sends under way; pulls of "
        f"{_PULLED_AT_ONCE:,} messages with a settle each, out of the page cache. The log is "
        "written to a file all the while and synced every 500 ms: sustained rates are the disk's. "
        "Right before a round a file as large as its log is written and removed, so that the "
        "virtual machine's page cache has its memory from the host, which is not measured. "
        "Connections within a machine ask for a congestion control that does not pace them; "
        "loopback TCP is measured as the system sets it up, and so."
    )
    return section


def _beside(rate: float, loopback: float) -> list[str]:
    return [f"{rate / 1e9:.2f}", f"{100 * rate / loopback:.0f} %"]


def _measure_round(count: int) -> _Round:
    loopback = loopback_bytes_per_s(2048)
    unpaced = loopback_bytes_per_s(2048, prepare_socket)
    with work_directory() as directory, running_broker(directory) as broker:
        produce = _produce(broker, directory, count)
        return _Round(loopback, unpaced, produce, _consume(broker, count), count)


def _produce(broker: BrokerProcess, directory: Path, count: int) -> Run:
    send = partial(_send, port=broker.port, directory=directory, count=count)
    return run(send, watch=[broker.pid])


def _consume(broker: BrokerProcess, count: int) -> Run:
    done = run(partial(_pull, port=broker.port, count=count), watch=[broker.pid])
    if done.workers[0].result < count * _SIZE:
        raise BenchFailedError(f"{done.workers[0].result} bytes came of {count * _SIZE}")
    return done


def _send(gate: Gate, *, port: int, directory: Path, count: int) -> None:
    frames = send_frames(_SUBJECT, count=count, size=_SIZE, batch=_BATCH)
    first = next(frames)  # makes them all
    with RawClient(port) as client:
        touch_page_cache(directory, len(first) * (count // _BATCH) // 2**20)
        gate()
        client.send_all([first], 1)
        client.send_all(frames, _SENDS_IN_FLIGHT)


def _pull(gate: Gate, *, port: int, count: int) -> int:
    with RawClient(port) as client:
        gate()
        return client.pull_all(PullPlan(_SUBJECT, "group", _PULLED_AT_ONCE), count)
