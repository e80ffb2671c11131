"""Messages reach a consumer's socket as they came: the broker makes no copy of them."""

import asyncio
import socket
import tracemalloc
from pathlib import Path

import pytest

from pulque.client.connection.url import parse_url
from pulque.net.process import loop_factory
from pulque.testing.raw import RawConnection
from pulque.wire.requests import EARLIEST, FROM_SETTLED, Hello, Pull, Wanted
from pulque.wire.responses import Welcome
from tests.unit.broker.running import Running

BODY = b"x" * 900_000
COUNT = 8


@pytest.mark.accepts("000-24")
def test_what_is_in_memory_goes_to_the_socket_without_a_copy(tmp_path: Path) -> None:
    with asyncio.Runner(loop_factory=loop_factory()) as runner:  # as brokers run
        copied = runner.run(_allocated_by_a_pull(tmp_path / "data"))

    assert copied < len(BODY) / 2, f"{COUNT * len(BODY)} bytes were sent, {copied} allocated"


async def _allocated_by_a_pull(folder: Path) -> int:
    """Return how much memory the broker takes to hand out some large messages."""
    running = Running(folder, {}, None, None)
    await running.start()
    loop = asyncio.get_running_loop()
    received = memoryview(bytearray(2 * COUNT * len(BODY)))
    with socket.socket() as connected:
        try:
            sender = await running.connect()
            for _ in range(COUNT):
                await sender.send("orders", [BODY])
            connected.setblocking(False)
            await loop.sock_connect(connected, parse_url(running.broker.url)[0])
            raw = RawConnection(connected)
            await raw.ask(Hello(1, 1, "raw"), Welcome)

            tracemalloc.start()
            before = tracemalloc.get_traced_memory()[0]
            wanted = (Wanted("orders", FROM_SETTLED),)
            await raw.put(Pull("g", "c", 1, COUNT, len(received), 0, EARLIEST, wanted))
            at = 0
            async with asyncio.timeout(10):
                while at < COUNT * len(BODY):
                    # Into a buffer that is there: all that is allocated is the broker's.
                    at += await loop.sock_recv_into(connected, received[at:])
            return tracemalloc.get_traced_memory()[1] - before
        finally:
            tracemalloc.stop()
            await running.close()
