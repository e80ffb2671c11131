"""Messages for later: how fast they are accepted, how late they come, and what many cost."""

from __future__ import annotations

import asyncio
import json
import os
import time
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import numpy.typing as npt
import psutil

from bench.machine import touch_page_cache
from bench.options import Options, tell
from bench.outcome import Aim, BenchFailedError, Section, Table
from bench.peers import work_directory
from pulque.client.aio.connection import AsyncConnection
from pulque.client.connection.url import parse_url
from pulque.model.batch import layout_of, read_header, seal, seed_of
from pulque.model.pack import BatchPacker
from pulque.testing.cluster import ClusterProcesses
from pulque.testing.process import ServerProcess
from pulque.wire.requests import Acks, Send, Status
from pulque.wire.responses import Response, Sent, StatusReport

__all__ = ["measure"]

_BATCH = 1000
_BODY = b"x" * 100
_HOUR_MS = 3_600_000
_YEARS_MS = 2 * 365 * 24 * _HOUR_MS
_WINDOW = 16
_AT_ONCE = 500
"""Batches that are made before they are sent: what a delay server takes before it throttles."""
_LIMIT_S = 600.0
_ROUNDS = 9
"""Broker and delay server take turns, and each turn has a ratio: the median counts."""
_REST_S = 1.5
"""Before each turn, so that the disk does not write for the one whose turn it was."""
_TOUCHED_MIB = 512
"""What a turn writes, and some more."""
_KEEP_S = 420.0
"""Not more are scheduled over two years after this time."""
_TOLD = 5_000_000
_FIRST_WAIT_S = 0.01
_LONGEST_WAIT_S = 0.2
_ASK_EVERY_S = 0.001
"""How far the schedule is: a turn takes a fifth of a second, and asking must not be part of it."""
_AHEAD_MS = 20_000
_MB = 1024 * 1024


def measure(options: Options) -> Section:
    """Accept messages that are due later; deliver many at once; restart with many."""
    count = 100_000 if options.is_quick else 1_000_000
    some, many = (100_000, 200_000) if options.is_quick else (10_000_000, 50_000_000)
    section = Section("delay", f"messages for later, {count:,} of 100 B in batches of {_BATCH:,}")
    with (
        work_directory() as directory,
        ClusterProcesses.start(directory / "cluster", brokers=1) as cluster,
    ):
        delay = cluster.add_delay("delay-1")
        accepted = 500_000 if options.is_quick else count
        section.aims += asyncio.run(
            _accept(section, directory, cluster["broker-1"], delay, accepted)
        )
        delay.stop()
        at_once = cluster.add_delay("delay-2")
        section.aims.append(asyncio.run(_deliver(section, at_once, count)))
        at_once.stop()
        section.aims += asyncio.run(_keep(cluster.add_delay("delay-3"), some, many))
    return section


async def _accept(
    section: Section, directory: Path, broker: ServerProcess, delay: ServerProcess, count: int
) -> list[Aim]:
    """Compare the rates at which a broker and a delay server accept the same messages."""
    random = np.random.default_rng(1)

    async def once(name: str) -> float:
        now_ms = time.time_ns() // 1_000_000 + _AHEAD_MS
        span_ms = _HOUR_MS if name == "one hour" else _YEARS_MS
        is_broker = name == "broker"
        batches = (
            [_batch(None) for _ in range(count // _BATCH)]
            if is_broker
            else _batches(random.integers(now_ms, now_ms + span_ms, count))
        )
        await asyncio.sleep(_REST_S)
        # Else it is chance whose turn has to wait for the host's memory.
        touch_page_cache(directory, _TOUCHED_MIB)
        return await _rate(broker if is_broker else delay, batches)

    found: dict[str, list[float]] = {}
    for turn in range(_ROUNDS + 1):
        rates_now = {name: await once(name) for name in ("broker", "one hour")}
        shown = ", ".join(f"{name} {rate:,.0f}" for name, rate in rates_now.items())
        tell(f"  accepted per second: {shown}" + ("" if turn else " (to warm up)"))
        if turn:  # then both have their memory, and their first segment, behind them
            for name, rate in rates_now.items():
                found.setdefault(name, []).append(rate)
    found["two years"] = [await once("two years")]  # last, as its thousands of files are synced
    tell(f"  accepted per second: two years {found['two years'][0]:,.0f}")
    rates = {name: median(each) for name, each in found.items()}
    rows = [[name, f"{rate:,.0f}"] for name, rate in rates.items()]
    section.tables.append(Table("Accepted and in the schedule", ("", "messages/s"), rows))
    section.figures["accepted_per_s"] = rates
    turns = zip(found["one hour"], found["broker"], strict=True)
    section.figures["accepted_ratios"] = ratios = [delayed / now for delayed, now in turns]
    return [
        Aim(
            "delayed sends over one hour beside a broker's",
            median(ratios),
            0.3,
            is_least=True,
            unit="×",
            detail=f"{rates['one hour']:,.0f} and {rates['broker']:,.0f} messages/s",
        )
    ]


async def _deliver(section: Section, delay: ServerProcess, count: int) -> Aim:
    """Have all messages due within one second; return how long they take."""
    due_ms = time.time_ns() // 1_000_000 + 10_000 + count // 50
    random = np.random.default_rng(2)
    await _rate(delay, _batches(random.integers(due_ms, due_ms + 1000, count)))
    await _until(lambda _: time.time_ns() // 1_000_000 >= due_ms, delay)
    began_s = time.monotonic()
    await _until(lambda status: status["dispatch"]["dispatched"] >= count, delay)
    took_s = time.monotonic() - began_s
    late = (await _status(delay))["dispatch"]["lateness_ms"]
    rows = [[name, f"{messages:,}"] for name, messages in late.items()]
    section.tables.append(Table("How late they were accepted", ("at most, ms", "messages"), rows))
    section.figures["lateness_ms"] = late
    return Aim(
        f"{count:,} messages due in one second: all delivered",
        took_s,
        10,
        is_least=False,
        unit="s",
    )


async def _keep(delay: ServerProcess, some: int, many: int) -> list[Aim]:
    """Schedule messages over two years: restart with some of them, and go on to many."""
    began_s = time.monotonic()
    highest = await _schedule(delay, 0, some, began_s)
    status = await _status(delay)
    before = status["schedule"]["messages"]
    await _until(lambda each: each["checkpoints"] > status["checkpoints"], delay)
    delay.kill()
    killed_s = time.monotonic()
    delay.restart()
    took_s = time.monotonic() - killed_s
    if (await _status(delay))["schedule"]["messages"] != before:
        raise BenchFailedError("messages are missing after the restart")
    highest = max(highest, await _schedule(delay, some, many, began_s))
    kept = (await _status(delay))["schedule"]["messages"]
    return [
        Aim(
            f"{kept:,} messages over two years: memory at most",
            highest / _MB,
            300,
            is_least=False,
            unit="MB",
            detail="" if kept == many else f"{many:,} were not reached within {_KEEP_S:.0f} s",
        ),
        Aim(
            f"restart after kill -9 with {before:,} scheduled",
            took_s,
            5,
            is_least=False,
            unit="s",
        ),
    ]


async def _schedule(delay: ServerProcess, first: int, last: int, began_s: float) -> int:
    """Send messages from one number to another; return the most memory that it took."""
    random = np.random.default_rng(first)
    process = psutil.Process(delay.pid)
    highest = process.memory_info().rss
    at_once = min(last - first, _AT_ONCE * _BATCH)
    for done in range(first, last, at_once):
        now_ms = time.time_ns() // 1_000_000 + _HOUR_MS
        rate = await _rate(delay, _batches(random.integers(now_ms, now_ms + _YEARS_MS, at_once)))
        highest = max(highest, process.memory_info().rss)
        if not (done + at_once) % _TOLD:
            shown = f"{rate:,.0f} messages/s, {highest / _MB:,.0f} MB"
            tell(f"  {done + at_once:,} over two years: {shown}")
        if time.monotonic() - began_s > _KEEP_S:
            break
    return highest


def _batches(dues_ms: npt.NDArray[np.int64]) -> list[bytes]:
    """Return batches of messages that are due at these times."""
    return [_batch(part) for part in np.split(dues_ms, len(dues_ms) // _BATCH)]


def _batch(dues_ms: npt.NDArray[np.int64] | None) -> bytes:
    """Return a batch with ids of its own: a copy of one that was packed before."""
    pattern = _pattern(has_due=dues_ms is not None)
    made = bytearray(pattern)
    layout = layout_of(read_header(pattern).flags)
    columns = {"id": os.urandom(16 * _BATCH)}
    if dues_ms is not None:
        columns["due_at_ms"] = dues_ms.astype("<i8").tobytes()
    for name, column in columns.items():
        at = layout.column_start(name, _BATCH)
        made[at : at + len(column)] = column
    return seal(bytes(made[4:]), seed_of("load"))


@lru_cache
def _pattern(*, has_due: bool) -> bytes:
    packer = BatchPacker()
    for _ in range(_BATCH):
        packer.add_encoded(_BODY, due_at_ms=int(has_due))
    now_ms = time.time_ns() // 1_000_000
    return packer.encode(seed=seed_of("load"), ids=bytes(16 * _BATCH), created_at_ms=now_ms)


async def _rate(server: ServerProcess, batches: list[bytes]) -> float:
    """Send batches, and again what is refused as too much; return messages per second."""
    connection = await _connected(server)
    turns = asyncio.Semaphore(_WINDOW)

    async def send(batch: bytes) -> None:
        request = Send(Acks.MEMORY, 60_000, (("load", batch),))
        async with turns:
            wait_s = _FIRST_WAIT_S
            while (await connection.request(request, _LIMIT_S, _sent)).outcomes[0].code:
                await asyncio.sleep(wait_s)
                wait_s = min(wait_s * 2, _LONGEST_WAIT_S)

    began_s = time.monotonic()
    await asyncio.gather(*map(send, batches))
    async with asyncio.timeout(_LIMIT_S):
        while (await _report_of(connection)).get("schedule", {}).get("lag_bytes"):  # noqa: ASYNC110
            await asyncio.sleep(_ASK_EVERY_S)
    took_s = time.monotonic() - began_s
    await connection.close()
    return len(batches) * _BATCH / took_s


async def _until(check: Callable[[dict[str, Any]], object], server: ServerProcess) -> None:
    async with asyncio.timeout(_LIMIT_S):
        while not check(await _status(server)):  # noqa: ASYNC110
            await asyncio.sleep(_FIRST_WAIT_S)


async def _status(server: ServerProcess) -> dict[str, Any]:
    connection = await _connected(server)
    try:
        return await _report_of(connection)
    finally:
        await connection.close()


async def _report_of(connection: AsyncConnection) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(await connection.request(Status(), 60, _report))
    return found


async def _connected(server: ServerProcess) -> AsyncConnection:
    (address,) = parse_url(server.url)
    return await AsyncConnection.open(address, client="bench", timeout=10)


def _sent(response: Response) -> Sent:
    if not isinstance(response, Sent):
        raise BenchFailedError(f"{response!r} came instead of Sent")
    return response


def _report(response: Response) -> bytes:
    if not isinstance(response, StatusReport):
        raise BenchFailedError(f"{response!r} came instead of a report")
    return bytes(response.report)
