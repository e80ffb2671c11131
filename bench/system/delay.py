"""Messages for later: how fast they are accepted, how late they come, and what many cost."""

from __future__ import annotations

import asyncio
import json
import os
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import psutil

from bench.options import Options, tell
from bench.outcome import Aim, BenchFailedError, Section, Table
from bench.peers import work_directory
from pulque.client.aio_connection import AsyncConnection
from pulque.client.url import parse_url
from pulque.model.batch import seed_of
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
_AHEAD_MS = 20_000
_MB = 1024 * 1024


def measure(options: Options) -> Section:
    """Accept messages that are due later; deliver many at once; restart with many."""
    count = 100_000 if options.is_quick else 1_000_000
    many = 100_000 if options.is_quick else 10_000_000
    section = Section("delay", f"messages for later, {count:,} of 100 B in batches of {_BATCH:,}")
    with (
        work_directory() as directory,
        ClusterProcesses.start(directory / "cluster", brokers=1) as cluster,
    ):
        delay = cluster.add_delay("delay-1")
        section.aims += asyncio.run(_accept(section, cluster["broker-1"], delay, count))
        section.aims.append(asyncio.run(_deliver(section, delay, count)))
        years = cluster.add_delay("delay-2")
        section.aims += asyncio.run(_keep(years, many))
    return section


async def _accept(
    section: Section, broker: ServerProcess, delay: ServerProcess, count: int
) -> list[Aim]:
    """Compare the rates at which a broker and a delay server accept the same messages."""
    now_ms = time.time_ns() // 1_000_000 + _AHEAD_MS
    random = np.random.default_rng(1)
    rates = {"broker": await _rate(broker, [_batch(None) for _ in range(count // _BATCH)])}
    for name, span_ms in (("one hour", _HOUR_MS), ("two years", _YEARS_MS)):
        dues = random.integers(now_ms, now_ms + span_ms, count)
        batches = [_batch(dues[i : i + _BATCH].tolist()) for i in range(0, count, _BATCH)]
        rates[name] = await _rate(delay, batches)
        tell(f"  over {name}: {rates[name]:,.0f} messages/s")
    rows = [[name, f"{rate:,.0f}"] for name, rate in rates.items()]
    section.tables.append(Table("Accepted and in the schedule", ("", "messages/s"), rows))
    section.figures["accepted_per_s"] = rates
    return [
        Aim(
            "delayed sends over one hour beside a broker's",
            rates["one hour"] / rates["broker"],
            0.5,
            is_least=True,
            unit="×",
            detail=f"{rates['one hour']:,.0f} and {rates['broker']:,.0f} messages/s",
        )
    ]


async def _deliver(section: Section, delay: ServerProcess, count: int) -> Aim:
    """Have all messages due within one second; return how long they take."""
    before = (await _status(delay))["dispatch"]["dispatched"]
    due_ms = time.time_ns() // 1_000_000 + 10_000 + count // 50
    random = np.random.default_rng(2)
    batches = [
        _batch(random.integers(due_ms, due_ms + 1000, _BATCH).tolist())
        for _ in range(count // _BATCH)
    ]
    await _rate(delay, batches)
    await _until(lambda _: time.time_ns() // 1_000_000 >= due_ms, delay)
    began_s = time.monotonic()
    await _until(lambda status: status["dispatch"]["dispatched"] - before >= count, delay)
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


async def _keep(delay: ServerProcess, many: int) -> list[Aim]:
    """Schedule many messages over two years; return what they take, and how long a restart."""
    now_ms = time.time_ns() // 1_000_000 + _HOUR_MS
    random = np.random.default_rng(3)
    at_once = min(many // _BATCH, _AT_ONCE)
    for _ in range(0, many, at_once * _BATCH):
        dues = random.integers(now_ms, now_ms + _YEARS_MS, at_once * _BATCH)
        await _rate(delay, [_batch(part.tolist()) for part in np.split(dues, at_once)])
    status = await _status(delay)
    checkpoints = status["checkpoints"]
    await _until(lambda each: each["checkpoints"] > checkpoints, delay)
    rss = psutil.Process(delay.pid).memory_info().rss
    delay.kill()
    began_s = time.monotonic()
    delay.restart()
    took_s = time.monotonic() - began_s
    if (await _status(delay))["schedule"]["messages"] != many:
        raise BenchFailedError("messages are missing after the restart")
    return [
        Aim(
            f"{many:,} messages over two years: memory",
            rss / _MB,
            300,
            is_least=False,
            unit="MB",
        ),
        Aim(
            f"restart after kill -9 with {many:,} scheduled",
            took_s,
            5,
            is_least=False,
            unit="s",
        ),
    ]


def _batch(dues_ms: Sequence[int] | None) -> bytes:
    packer = BatchPacker()
    for i in range(_BATCH):
        packer.add_encoded(_BODY, due_at_ms=dues_ms[i] if dues_ms else 0)
    now_ms = time.time_ns() // 1_000_000
    ids = os.urandom(16 * _BATCH)
    return packer.encode(seed=seed_of("load"), ids=ids, created_at_ms=now_ms)


async def _rate(server: ServerProcess, batches: list[bytes]) -> float:
    """Send batches, and again what is refused as too much; return messages per second."""
    connection = await _connected(server)
    turns = asyncio.Semaphore(_WINDOW)

    async def send(batch: bytes) -> None:
        request = Send(Acks.MEMORY, 60_000, (("load", batch),))
        async with turns:
            while (await connection.request(request, _LIMIT_S, _sent)).outcomes[0].code:  # noqa: ASYNC110
                await asyncio.sleep(0.02)

    began_s = time.monotonic()
    await asyncio.gather(*map(send, batches))
    await _until(lambda status: not status.get("schedule", {}).get("lag_bytes"), server)
    took_s = time.monotonic() - began_s
    await connection.close()
    return len(batches) * _BATCH / took_s


async def _until(check: Callable[[dict[str, Any]], object], server: ServerProcess) -> None:
    async with asyncio.timeout(_LIMIT_S):
        while not check(await _status(server)):  # noqa: ASYNC110
            await asyncio.sleep(0.05)


async def _status(server: ServerProcess) -> dict[str, Any]:
    connection = await _connected(server)
    try:
        found: dict[str, Any] = json.loads(await connection.request(Status(), 60, _report))
    finally:
        await connection.close()
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
