"""Kill a broker under load with a long log behind it: how long until it serves again."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import pulque
from bench.broker import BrokerProcess
from bench.measure import Gate, Run, run
from bench.options import Options, tell
from bench.outcome import Aim, BenchFailedError, Section, Table
from bench.peers import batches, work_directory
from bench.raw import RawClient, send_frame, send_frames

__all__ = ["measure"]

_LIMIT_S = 3.0
_GB = 1_000_000_000
_SIZE = 1024
_BATCH = 100
_SENDS_IN_FLIGHT = 16
_FILL_LIMIT_S = 200.0
_LOAD_S = 3.0
_LOAD_BATCH = 10


@dataclass(frozen=True, slots=True)
class _Restart:
    """One kill and what came after it, in seconds from the start of the new process."""

    is_cold: bool
    log_bytes: int
    confirmed: int
    ready_s: float
    serving_s: float
    recovery_ms: int
    replayed_batches: int
    replayed_facts: int


def measure(options: Options) -> Section:
    """Fill a log, then kill and restart: with the page cache as it was, and without."""
    wanted = _GB if options.is_quick else 10 * _GB
    section = Section("restart", "kill -9 under load, and the time until the broker serves again")
    with work_directory() as directory:
        home = directory / "broker"
        broker = BrokerProcess(home)
        try:
            filled = _fill(section, broker, wanted)
            with pulque.connect(broker.url, name="bench") as client:
                client.send("load", b"first")
            tell(f"  {filled / 1e9:.1f} GB of log")
            restarts = []
            for is_cold in (False, True) if options.is_quick else (False, False, True):
                confirmed = _kill_under_load(broker)
                if is_cold:
                    _leave_page_cache(home)
                broker, restart = _restart(home, broker.port, confirmed, is_cold=is_cold)
                restarts.append(restart)
                tell(f"  serving after {restart.serving_s:.2f} s")
        finally:
            broker.stop()
    _report(section, restarts, wanted)
    return section


def _report(section: Section, restarts: list[_Restart], wanted: int) -> None:
    warm = max((one for one in restarts if not one.is_cold), key=lambda one: one.serving_s)
    section.aims = [
        Aim(
            f"restart after kill -9 with {warm.log_bytes / 1e9:.0f} GB of log",
            warm.serving_s,
            _LIMIT_S,
            is_least=False,
            unit="s",
            detail=f"{warm.recovery_ms / 1000:.2f} s of it recovery",
        )
    ]
    head = ("page cache", "log GB", "ready s", "serving s", "recovery ms", "batches", "facts")
    section.tables = [
        Table(
            "",
            head,
            [
                [
                    "empty" if one.is_cold else "as it was",
                    f"{one.log_bytes / 1e9:.1f}",
                    f"{one.ready_s:.2f}",
                    f"{one.serving_s:.2f}",
                    str(one.recovery_ms),
                    f"{one.replayed_batches:,}",
                    f"{one.replayed_facts:,}",
                ]
                for one in restarts
            ],
        )
    ]
    section.note(
        "From the start of the new process until a client has connected, sent a message with "
        "acks=disk and pulled one. The load until the kill: batches of "
        f"{_LOAD_BATCH} sent and pulled all the while. Whatever was confirmed was there."
    )
    if warm.log_bytes < wanted:
        section.note(
            f"The disk was too slow for {wanted / 1e9:.0f} GB within {_FILL_LIMIT_S:.0f} s."
        )
    section.figures["restarts"] = [
        {name: getattr(one, name) for name in one.__slots__} for one in restarts
    ]


def _fill(section: Section, broker: BrokerProcess, wanted: int) -> int:
    """Send until the log has so many bytes, or the time is up; return its bytes."""
    work = partial(_send_bytes, port=broker.port, wanted=wanted)
    done = run(work, watch=[broker.pid], limit_s=_FILL_LIMIT_S + 60)
    section.saw(done.foreign_cores)
    filled: int = done.workers[0].result
    return filled


def _send_bytes(gate: Gate, *, port: int, wanted: int) -> int:
    frames = list(send_frames("filling", count=8 * _BATCH, size=_SIZE, batch=_BATCH))
    sent = 0
    with RawClient(port) as client:
        gate()
        deadline = time.monotonic() + _FILL_LIMIT_S
        while sent < wanted and time.monotonic() < deadline:
            client.send_all(frames * 20, _SENDS_IN_FLIGHT)
            sent += 20 * sum(map(len, frames))
    return sent


def _kill_under_load(broker: BrokerProcess) -> int:
    """Kill the broker while others send and pull; return how many messages were confirmed."""
    results: list[Run] = []
    workers = (
        partial(_send_until_cut, port=broker.port),
        partial(_consume_until_cut, url=broker.url),
    )
    thread = threading.Thread(target=lambda: results.append(run(*workers)), daemon=True)
    thread.start()
    before = _messages_of_load(broker.url)
    _wait(lambda: _messages_of_load(broker.url) > before, 30)
    time.sleep(_LOAD_S)
    broker.kill()
    thread.join(60)
    if not results:
        raise BenchFailedError("the load did not end with the broker")
    confirmed: int = results[0].workers[0].result
    return confirmed


def _restart(
    home: Path, port: int, confirmed: int, *, is_cold: bool
) -> tuple[BrokerProcess, _Restart]:
    broker = BrokerProcess(home, port=port)
    try:
        with pulque.connect(broker.url, name="bench") as client:
            client.send("load", b"after")
            with client.consumer("load", group="after", consumer_id="after") as consumer:
                messages = consumer.pull(1, timeout=30)
                serving_s = time.monotonic() - broker.spawned_s
            if not messages:
                raise BenchFailedError("nothing could be pulled")
            _check_stored(client, confirmed)
            log_bytes = int(client.status()["message_log"]["end"])
        started = broker.events("broker_started")[-1]
    except BaseException:
        broker.stop()
        raise
    return broker, _Restart(
        is_cold=is_cold,
        log_bytes=log_bytes,
        confirmed=confirmed,
        ready_s=broker.ready_s - broker.spawned_s,
        serving_s=serving_s,
        recovery_ms=started["recovery_ms"],
        replayed_batches=started["replayed_batches"],
        replayed_facts=started["replayed_facts"],
    )


def _check_stored(client: pulque.Client, confirmed: int) -> None:
    stored = sum(found.end for found in client.positions("load"))
    if stored < confirmed:
        raise BenchFailedError(f"{confirmed} messages were confirmed, and {stored} are there")


def _messages_of_load(url: str) -> int:
    with pulque.connect(url, name="bench") as client:
        return sum(found.end for found in client.positions("load"))


def _wait(condition: Callable[[], bool], limit_s: float) -> None:
    deadline = time.monotonic() + limit_s
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError("the load does not begin")
        time.sleep(0.1)


def _send_until_cut(gate: Gate, *, port: int) -> int:
    bodies = next(batches(count=_LOAD_BATCH, size=100, batch=_LOAD_BATCH))
    frame = send_frame("load", bodies)
    confirmed = 0
    with RawClient(port) as client:
        gate()
        try:
            while True:
                client.send_all([frame] * _SENDS_IN_FLIGHT, _SENDS_IN_FLIGHT)
                confirmed += _SENDS_IN_FLIGHT * _LOAD_BATCH
        except ConnectionError:
            return confirmed


def _consume_until_cut(gate: Gate, *, url: str) -> int:
    consumed = 0
    with (
        pulque.connect(url, name="bench", timeout=2) as client,
        client.consumer("load", group="group", consumer_id="bench") as consumer,
    ):
        gate()
        try:
            for message in consumer:
                message.ack()
                consumed += 1
        except pulque.DisconnectedError:
            pass
    return consumed


def _leave_page_cache(home: Path) -> None:
    """Have the kernel forget the files, as after a power cut; what is dirty is written first."""
    for path in home.rglob("*"):
        if path.is_file():
            descriptor = os.open(path, os.O_RDONLY)
            try:
                os.fdatasync(descriptor)
                os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            finally:
                os.close(descriptor)
