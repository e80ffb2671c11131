"""What requests cost the broker's own code: frames in, answers out, no sockets in between.

A real broker runs in this process on a real directory; a transport that forgets what it is given
stands for the client. Syncs happen in the broker's own thread and are not counted.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from bench.micro.timing import Row
from bench.peers import work_directory
from bench.raw import send_frames
from pulque.broker.config import BrokerSettings, ListenSection, LogSection, StorageSection
from pulque.broker.server import Broker
from pulque.model.positions import Tenure
from pulque.net.server import AcceptedConnection
from pulque.settings.logs import configure_logging
from pulque.wire.frame import FrameReader
from pulque.wire.requests import (
    EARLIEST,
    Hello,
    Pull,
    Request,
    Seal,
    Settle,
    Wanted,
    encode_request,
)
from pulque.wire.responses import Pulled, Settled, decode_response

__all__ = ["requests"]

_SENT = "sent"
_STORED = "stored"
_STORED_BATCHES = 2000
_SIZE = 100
_RUNS = 5
_SENDS = ((1, 1, 1500), (1, 64, 40), (10, 16, 100), (100, 16, 80), (1000, 8, 40))
"""Messages of a batch, sends in a turn of the loop, turns."""


def requests() -> list[Row]:
    """Sends of several sizes, one by one and many in a turn of the loop; pulls with settles."""
    with work_directory() as directory:
        return asyncio.run(_measure(directory))


async def _measure(directory: Path) -> list[Row]:
    broker = await _started(directory)
    try:
        client = _Client(broker)
        return [*await _pulls(client), *await _sends(client)]
    finally:
        await broker.close()


async def _pulls(client: _Client) -> list[Row]:
    await client.store()
    rows = []
    for wanted in (100, 1000, 4000):
        us = await client.pull(f"group-{wanted}", wanted, 400)
        rows.append(Row(f"a pull of {wanted} and its settle", us, wanted, wanted * _SIZE))
    us = await client.pull("group-cut", 1000, 400, first=10)
    rows.append(Row("the same with 1000, cutting batches", us, 1000, 1000 * _SIZE))
    await client.seal()
    us = await client.pull("group-sealed", 1000, 400)
    rows.append(Row("the same with 1000 in a sealed segment", us, 1000, 1000 * _SIZE))
    return rows


async def _sends(client: _Client) -> list[Row]:
    rows = []
    for batch, at_once, turns in _SENDS:
        frames = list(send_frames(_SENT, count=8 * batch, size=_SIZE, batch=batch))
        turn = b"".join(frames[at % len(frames)] for at in range(at_once))
        us = await client.send(turn, turns) / at_once
        what = f"a send of {batch}, {at_once} in a turn of the loop"
        rows.append(Row(what, us, batch, batch * _SIZE))
    return rows


async def _started(directory: Path) -> Broker:
    settings = BrokerSettings(
        listen=ListenSection(port=0),
        storage=StorageSection(directory=directory / "broker"),
        log=LogSection(level="error"),
    )
    configure_logging(settings.log)
    broker = Broker(settings)
    await broker.start()
    return broker


class _Transport:
    """Takes what the broker writes, and keeps the last of it."""

    def __init__(self) -> None:
        self.written: list[Any] = []

    def write(self, data: Any) -> None:
        self.written = [data]

    def writelines(self, data: Any) -> None:
        self.written = list(data)

    def last_answer(self) -> object:
        """What was written last, which must be one answer."""
        data = memoryview(b"".join(self.written))
        reader = FrameReader()
        while (frame := reader.next_frame()) is None:
            buffer = reader.buffer()
            some = data[: len(buffer)]
            buffer[: len(some)] = some
            reader.received(len(some))
            data = data[len(some) :]
        return decode_response(frame)

    def __getattr__(self, name: str) -> Callable[..., Any]:
        """Whatever else a connection asks of its transport."""
        return _quiet


def _quiet(*_: object, **__: object) -> Any:
    return _Nothing()


class _Nothing(int):
    """The answer to every other question: zero, no, and nothing to be done."""

    def __getitem__(self, index: object) -> str:
        """Whatever a socket's address says."""
        return ""

    def __getattr__(self, name: str) -> Callable[..., Any]:
        return _quiet


class _Client:
    """Feeds frames to a connection of the broker."""

    def __init__(self, broker: Broker) -> None:
        self._transport = _Transport()
        self._connection = AcceptedConnection(broker._server)  # noqa: SLF001
        transport: Any = self._transport
        self._connection.connection_made(transport)
        self._feed(_joined(Hello(1, 1, "micro")))

    async def send(self, turn: bytes, turns: int) -> float:
        """Microseconds of CPU for one turn of sends: the least of some runs."""
        best = float("inf")
        for _ in range(_RUNS):
            began = time.thread_time()
            for _ in range(turns):
                self._feed(turn)
                await asyncio.sleep(0)  # the turn ends: what is queued is written
                await asyncio.sleep(0)
            best = min(best, (time.thread_time() - began) / turns)
        return 1e6 * best

    async def store(self) -> None:
        """Store what is pulled afterwards."""
        count = 1000 * _STORED_BATCHES
        for frame in send_frames(_STORED, count=count, size=_SIZE, batch=1000):
            self._feed(frame)
            await asyncio.sleep(0)
        await asyncio.sleep(0.1)

    async def seal(self) -> None:
        """Close the open segment, and wait until its index is written."""
        self._feed(_joined(Seal()))
        await asyncio.sleep(1.5)

    async def pull(self, group: str, messages: int, times: int, *, first: int = 0) -> float:
        """Microseconds of CPU for a pull and its settle: the least of some runs."""
        best = float("inf")
        expected = 0
        if first:
            _, expected = await self._pull_once(group, first, 0)
        for _ in range(_RUNS):
            total = 0.0
            for _ in range(times // _RUNS):
                taken, expected = await self._pull_once(group, messages, expected)
                total += taken
            best = min(best, total / (times // _RUNS))
        return 1e6 * best

    async def _pull_once(self, group: str, messages: int, expected: int) -> tuple[float, int]:
        """Pull and settle; return seconds of CPU, and the pull sequence that comes next."""
        pull_s = await self._timed(_joined(_pull(group, messages, expected)))
        pulled = self._transport.last_answer()
        assert isinstance(pulled, Pulled), pulled
        (delivered,) = pulled.deliveries
        end = expected + delivered.count
        settle = _settle(group, delivered.tenure, expected, end - 1)
        settle_s = await self._timed(_joined(settle))
        answer = self._transport.last_answer()
        assert isinstance(answer, Settled), answer
        return pull_s + settle_s, end

    async def _timed(self, frame: bytes) -> float:
        self._transport.written = []
        began = time.thread_time()
        self._feed(frame)
        while not self._transport.written:  # noqa: ASYNC110 - turns of the loop are the point
            await asyncio.sleep(0)
        return time.thread_time() - began

    def _feed(self, data: bytes) -> None:
        for part in _parts(data, self._connection):
            self._connection.buffer_updated(part)


def _parts(data: bytes, connection: AcceptedConnection) -> Iterator[int]:
    at = 0
    while at < len(data):
        buffer = connection.get_buffer(-1)
        some = data[at : at + len(buffer)]
        buffer[: len(some)] = some
        at += len(some)
        yield len(some)


def _joined(request: Request) -> bytes:
    return b"".join(encode_request(request, 1, 0))


def _pull(group: str, messages: int, expected: int) -> Pull:
    wanted = (Wanted(_STORED, expected),)
    return Pull(group, "micro", 1, messages, 8 * 2**20, 1000, EARLIEST, wanted)


def _settle(group: str, tenure: Tenure, first: int, last: int) -> Settle:
    return Settle(_STORED, group, "micro", 1, tenure, first, last)
