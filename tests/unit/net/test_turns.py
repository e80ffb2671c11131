"""No connection keeps the event loop for longer than a turn, whatever its frames cost."""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import pytest

from pulque.net.server import AcceptedConnection, ConnectionLimits, FrameServer, Work
from pulque.testing.clock import ManualClock
from pulque.wire.frame import FRAME_HEADER_SIZE, Frame, pack_frame_header

PLAIN, SLOW, STEPS, FOREVER, TWICE = range(5)
"""Opcodes of this server: answered at once, at the cost of time, in steps, never ready, and in
steps while the rest of another request is taken on, before and within them."""
COST_MS = 2
STEPS_OF_ONE = 10


@dataclass
class Costly:
    """Answers every frame with its number; what it costs is put on the clock."""

    clock: ManualClock
    turns: list[list[str]] = field(default_factory=lambda: [[]])
    """What was done, by the turn of the event loop that it was done in."""
    is_closed: bool = False

    def handle(self, connection: AcceptedConnection, frame: Frame) -> Work | None:
        connection.welcome()
        name = f"{bytes(frame.payload).decode()}{frame.request_id}"
        if frame.opcode in (STEPS, FOREVER):
            return self._in_steps(
                connection, frame.request_id, name, is_endless=frame.opcode == FOREVER
            )
        if frame.opcode == TWICE:
            connection.go_on_with(self._in_steps(connection, 8, "8", is_endless=False))
            return self._twice(connection, frame.request_id, name)
        if frame.opcode == SLOW:
            self.clock.advance(COST_MS)
        self._done(connection, frame.request_id, name)
        return None

    def _twice(self, connection: AcceptedConnection, number: int, name: str) -> Iterator[None]:
        connection.go_on_with(self._in_steps(connection, 9, "9", is_endless=False))
        yield from self._in_steps(connection, number, name, is_endless=False)

    def _in_steps(
        self, connection: AcceptedConnection, number: int, name: str, *, is_endless: bool
    ) -> Iterator[None]:
        step = 0
        while is_endless or step < STEPS_OF_ONE:
            self.clock.advance(1)
            self.turns[-1].append(f"{name}/{step}")
            step += 1
            yield
            if is_endless and connection.is_gone:
                return
        self._done(connection, number, name)

    def _done(self, connection: AcceptedConnection, number: int, name: str) -> None:
        self.turns[-1].append(name)
        connection.send([pack_frame_header(0x80, 1, 0, number, 0)])

    def pause(self, connection: AcceptedConnection) -> None: ...

    def closed(self, connection: AcceptedConnection) -> None:
        self.is_closed = True


@dataclass
class Served:
    handler: Costly
    server: FrameServer
    port: int
    writers: list[asyncio.StreamWriter] = field(default_factory=list)

    async def connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        self.writers.append(writer)
        return reader, writer


@asynccontextmanager
async def serving(clock: ManualClock) -> AsyncIterator[Served]:
    handler = Costly(clock)
    limits = ConnectionLimits(100, 2**20, 2**20, 10_000, 10_000, 60_000)
    server = FrameServer(handler, limits, clock, lambda *_, **__: None)
    _, port = await server.listen("127.0.0.1", 0)
    loop = asyncio.get_running_loop()
    is_over = False

    def next_turn() -> None:
        handler.turns.append([])
        if not is_over:
            loop.call_soon(next_turn)

    next_turn()
    served = Served(handler, server, port)
    try:
        yield served
    finally:
        is_over = True
        for writer in served.writers:
            writer.close()
        await server.close()


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


def frames(opcode: int, count: int, name: str = "", first: int = 1) -> bytes:
    payload = name.encode()
    return b"".join(
        pack_frame_header(opcode, 1, len(payload), number, 0) + payload
        for number in range(first, first + count)
    )


async def answers(reader: asyncio.StreamReader, count: int) -> list[int]:
    async with asyncio.timeout(10):
        found = [await reader.readexactly(FRAME_HEADER_SIZE) for _ in range(count)]
    return [int.from_bytes(each[8:12], "little") for each in found]


async def until(is_so: Callable[[], bool]) -> None:
    async with asyncio.timeout(5):
        while not is_so():  # noqa: ASYNC110  # it comes with some turn of the loop
            await asyncio.sleep(0)


async def test_a_turn_ends_when_its_time_is_up_and_nothing_is_left_out(
    clock: ManualClock,
) -> None:
    async with serving(clock) as served:
        reader, writer = await served.connect()
        writer.write(frames(SLOW, 50))

        assert await answers(reader, 50) == list(range(1, 51))
        longest = max(map(len, served.handler.turns))
        assert longest <= 10 // COST_MS


async def test_frames_that_cost_nothing_are_handled_in_one_turn(clock: ManualClock) -> None:
    async with serving(clock) as served:
        reader, writer = await served.connect()
        writer.write(frames(PLAIN, 500))

        assert await answers(reader, 500) == list(range(1, 501))
        assert sum(1 for turn in served.handler.turns if turn) <= 2


async def test_a_request_in_steps_goes_over_turns_and_keeps_its_place(
    clock: ManualClock,
) -> None:
    async with serving(clock) as served:
        reader, writer = await served.connect()
        writer.write(frames(STEPS, 2) + frames(PLAIN, 1, first=3))

        assert await answers(reader, 3) == [1, 2, 3]
        assert max(map(len, served.handler.turns)) <= 10


async def test_requests_that_are_taken_on_while_another_is_handled_are_all_answered(
    clock: ManualClock,
) -> None:
    async with serving(clock) as served:
        reader, writer = await served.connect()
        writer.write(frames(TWICE, 1) + frames(PLAIN, 1, first=2))

        found = await answers(reader, 4)

        assert sorted(found) == [1, 2, 8, 9]
        assert found[-1] == 2


async def test_connections_in_the_backlog_share_a_turn_one_after_the_other(
    clock: ManualClock,
) -> None:
    async with serving(clock) as served:
        both = [await served.connect() for _ in range(2)]
        for name, (_, writer) in zip("ab", both, strict=True):
            writer.write(frames(SLOW, 50, name))
        for reader, _ in both:
            await answers(reader, 50)
        order = [each[0] for turn in served.handler.turns for each in turn]
        both_wait = order[order.index("b") :]
        both_wait = both_wait[: both_wait.index("a") + 30]

        assert max(map(len, served.handler.turns)) <= 2 * (10 // COST_MS)
        assert "a" * 10 not in "".join(both_wait)
        assert "b" * 10 not in "".join(both_wait)


async def test_who_asks_little_is_answered_while_another_is_never_done(
    clock: ManualClock,
) -> None:
    async with serving(clock) as served:
        _, busy = await served.connect()
        busy.write(frames(FOREVER, 1))
        reader, writer = await served.connect()
        for number in range(1, 20):
            writer.write(frames(PLAIN, 1, first=number))

            assert await answers(reader, 1) == [number]


async def test_what_waits_for_its_turn_is_not_taken_for_a_frame_that_does_not_end(
    clock: ManualClock,
) -> None:
    async with serving(clock) as served:
        reader, writer = await served.connect()
        # 20 s of work, with a limit of 10 s for a frame; the sweep looks at each second.
        writer.write(frames(SLOW, 10_000) + frames(PLAIN, 1, first=10_001)[:-1])
        await answers(reader, 10_000)
        (connection,) = served.server.connections

        assert connection.overdue(clock.monotonic_ms()) is None
        assert connection.overdue(clock.monotonic_ms() + 11_000) is not None


async def test_work_that_was_begun_is_done_though_its_connection_is_gone(
    clock: ManualClock,
) -> None:
    async with serving(clock) as served:
        _, writer = await served.connect()
        writer.write(frames(STEPS, 1))
        await until(lambda: any(served.handler.turns))
        (connection,) = served.server.connections
        connection.abort()
        await until(lambda: served.handler.is_closed)
        is_counted = bool(served.server.connections)
        await until(lambda: not served.server.connections)
        done = [each for turn in served.handler.turns for each in turn]

        assert done == [*(f"1/{step}" for step in range(STEPS_OF_ONE)), "1"]
        assert is_counted


async def test_work_that_ends_with_its_connection_frees_its_place(clock: ManualClock) -> None:
    async with serving(clock) as served:
        _, writer = await served.connect()
        writer.write(frames(FOREVER, 1))
        await until(lambda: any(served.handler.turns))
        (connection,) = served.server.connections
        connection.abort()

        await until(lambda: not served.server.connections)
