"""A meta server with many clients that wait for news, and many subjects."""

from __future__ import annotations

import asyncio
import contextlib
import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import NamedTuple

import psutil

from bench.measure import Gate, run
from bench.options import Options, tell
from bench.outcome import Aim, BenchFailedError, Section, Table
from bench.peers import work_directory
from bench.raw import RawClient
from pulque.model.cluster import ServerState
from pulque.model.routes import Role, RouteKind
from pulque.wire.frame import FRAME_HEADER_SIZE, FrameReader
from pulque.wire.registration import Register
from pulque.wire.requests import Hello, Route, Watch, encode_request
from pulque.wire.responses import Routed, Watched, decode_response
from pulque.wire.routes import KnownRoute

__all__ = ["measure"]

_WAIT_MS = 30_000
_EACH = 4
_AT_ONCE = 200
_BROKERS = 6


class _Size(NamedTuple):
    clients: int
    subjects: int
    steady_s: float


class _Watched(NamedTuple):
    """What the clients saw."""

    answers: int
    spread_s: float
    """From the moment that a broker left until the last client knew it."""
    spread_cpu_s: float
    """What that cost the meta server."""


def measure(options: Options) -> Section:
    """Let clients wait for news for a while, then give them some."""
    size = _Size(500, 2_000, 6.0) if options.is_quick else _Size(10_000, 40_000, 60.0)
    section = Section(
        "meta", f"a meta server, {size.clients:,} clients, {size.subjects:,} subjects"
    )
    with work_directory() as directory, _running(directory) as (process, port):
        began_s = time.monotonic()
        _fill(port, size.subjects)
        created_s = time.monotonic() - began_s
        tell(f"  {size.subjects:,} subjects created in {created_s:.1f} s")
        usage = psutil.Process(process.pid)
        done = run(
            partial(_watch, port=port, pid=process.pid, size=size),
            watch=[process.pid],
            limit_s=300 + size.steady_s,
        )
        seen: _Watched = done.workers[0].result
        rss = usage.memory_info().rss
    cores = done.watched_cpu_s / done.wall_s
    section.aims = [
        Aim("cores, clients beating every 30 s", cores, 1.0, is_least=False, unit="cores"),
        Aim("memory", rss / 2**20, 500, is_least=False, unit="MiB"),
    ]
    section.tables = [
        Table(
            "",
            (
                "watches answered",
                "subjects created/s",
                "a broker leaves: known to all after",
                "CPU for that",
            ),
            [
                [
                    f"{seen.answers:,}",
                    f"{size.subjects / created_s:,.0f}",
                    f"{seen.spread_s:.2f} s",
                    f"{seen.spread_cpu_s:.2f} s",
                ]
            ],
        )
    ]
    section.note(
        f"Each client watches {_EACH} subjects over a connection of its own, and asks again as "
        "soon as it is answered. A beat in 60 s is what the aim says, so this is twice as much. "
        "SQLite in a file; six brokers are registered."
    )
    return section


@contextmanager
def _running(directory: Path) -> Iterator[tuple[subprocess.Popen[str], int]]:
    environ = {k: v for k, v in os.environ.items() if not k.startswith("PULQUE_")}
    # Nobody beats for the brokers of the bench, so that nobody may fall silent.
    command = [sys.executable, "-m", "pulque", "meta", "--data", str(directory / "meta")]
    command += ["--port", "0", "--set", "cluster.heartbeat=1h"]
    with (directory / "meta.log").open("ab") as log:
        process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=log, env=environ, text=True
        )
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        if not line.startswith("ready "):
            raise BenchFailedError((directory / "meta.log").read_text()[-2000:])
        yield process, int(line.strip().rpartition(":")[2])
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(20)
        if process.stdout is not None:
            process.stdout.close()


def _register(name: str, state: ServerState = ServerState.READY) -> Register:
    now_ms = time.time_ns() // 1_000_000
    return Register(
        "", name, name, Role.BROKER, "127.0.0.1", 1, f"of-{name}", 1, now_ms, state, 0, 0
    )


def _fill(port: int, subjects: int) -> None:
    """Register brokers, and ask for a route of each subject, many at a time."""
    with RawClient(port) as client:
        for number in range(_BROKERS):
            client.ask(_register(f"b{number}"))
    frames = [encode_request(Route(_name(n)), n + 1, 0) for n in range(subjects)]
    for start in range(0, subjects, _AT_ONCE * 10):
        asyncio.run(_ask_all(port, frames[start : start + _AT_ONCE * 10]))


async def _ask_all(port: int, frames: list[list[bytes | memoryview]]) -> None:
    """Ask over some connections, each with as many requests under way as may wait."""
    share = 100

    async def some(mine: list[list[bytes | memoryview]]) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"".join(encode_request(Hello(1, 1, "bench"), 0, 0)))
        writer.writelines([part for frame in mine for part in frame])
        for _ in range(len(mine) + 1):
            header = await reader.readexactly(FRAME_HEADER_SIZE)
            await reader.readexactly(int.from_bytes(header[4:8], "little"))
            if header[2] == 0xFF:
                raise BenchFailedError("a route was refused")
        writer.close()
        with contextlib.suppress(OSError):
            await writer.wait_closed()

    slices = [frames[at : at + share] for at in range(0, len(frames), share)]
    await asyncio.gather(*map(some, slices))


def _name(number: int) -> str:
    return f"shop.orders.subject-{number}"


def _watch(gate: Gate, *, port: int, pid: int, size: _Size) -> _Watched:
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    return asyncio.run(_watch_all(gate, port, psutil.Process(pid), size))


async def _watch_all(gate: Gate, port: int, server: psutil.Process, size: _Size) -> _Watched:
    crowd = _Crowd()
    loop = asyncio.get_running_loop()
    for start in range(0, size.clients, _AT_ONCE):
        await asyncio.gather(
            *(
                loop.create_connection(
                    partial(_Client, crowd, number, size.subjects), "127.0.0.1", port
                )
                for number in range(start, min(start + _AT_ONCE, size.clients))
            )
        )
    async with asyncio.timeout(60):
        while crowd.known < size.clients:  # noqa: ASYNC110  # nobody else is there to tell
            await asyncio.sleep(0.01)
    # The gate waits for the parent: the loop may do so, as everybody waits for news now.
    gate()
    before = crowd.answers
    await asyncio.sleep(size.steady_s)
    answers = crowd.answers - before
    crowd.expects_news = True
    crowd.heard = 0
    began_s, began_cpu_s = time.monotonic(), _cpu_s(server)
    leave = partial(_leave, port)
    await loop.run_in_executor(None, leave)
    async with asyncio.timeout(60):
        while crowd.heard < crowd.concerned:  # noqa: ASYNC110
            await asyncio.sleep(0.005)
    return _Watched(answers, time.monotonic() - began_s, _cpu_s(server) - began_cpu_s)


def _cpu_s(process: psutil.Process) -> float:
    times = process.cpu_times()
    return float(times.user + times.system)


def _leave(port: int) -> None:
    with RawClient(port) as client:
        client.ask(_register("b0", ServerState.LEAVING))


class _Crowd:
    """What all clients of the bench have in common."""

    def __init__(self) -> None:
        self.answers = 0
        self.known = 0
        self.heard = 0
        self.concerned = 0
        self.expects_news = False


class _Client(asyncio.Protocol):
    """One client: asks for its routes, then waits for news, over and over."""

    def __init__(self, crowd: _Crowd, number: int, subjects: int) -> None:
        self._crowd = crowd
        self._names = [_name((number * _EACH + n) % subjects) for n in range(_EACH)]
        self._number = number
        self._reader = FrameReader()
        self._transport: asyncio.Transport | None = None
        self._frame = b""

        self._versions: dict[str, int] = {}
        self._is_concerned = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        parts = encode_request(Hello(1, 1, "bench"), 0, 0)
        for name in self._names:
            parts += encode_request(Route(name, "g"), 1, 0)
        transport.write(b"".join(parts))

    def data_received(self, data: bytes) -> None:
        while data:
            room = self._reader.buffer()
            count = min(len(room), len(data))
            room[:count] = data[:count]
            self._reader.received(count)
            data = data[count:]
            while (frame := self._reader.next_frame()) is not None:
                self._answered(decode_response(frame))

    def _answered(self, answer: object) -> None:
        if isinstance(answer, Routed):
            self._learn(answer.route.subject, answer.route.version)
            self._is_concerned |= any(
                each.broker_group == "b0" for each in answer.route.partitions
            )
            if len(self._versions) == _EACH:
                self._crowd.known += 1
                self._crowd.concerned += self._is_concerned
                self._ask()
        elif isinstance(answer, Watched):
            self._crowd.answers += 1
            for each in answer.changed:
                self._learn(each.route.subject, each.route.version)
            if answer.changed and self._crowd.expects_news:
                self._crowd.heard += 1
            self._ask()

    def _learn(self, subject: str, version: int) -> None:
        self._versions[subject] = version
        self._frame = b""

    def _ask(self) -> None:
        if not self._frame:
            known = tuple(
                KnownRoute(RouteKind.REALTIME, name, "g", version)
                for name, version in self._versions.items()
            )
            watch = Watch(f"client-{self._number}", "bench", known, _WAIT_MS)
            self._frame = b"".join(encode_request(watch, 2, 0))
        assert self._transport is not None
        self._transport.write(self._frame)
