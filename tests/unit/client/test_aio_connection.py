"""Opening a connection ends, also if it is given up in the very moment in which it is there."""

import asyncio
import socket
from collections.abc import Callable

import pytest

from pulque.client.aio_connection import AsyncConnection
from pulque.client.url import Address
from pulque.net.process import loop_factory

LIMIT = 20.0
"""Nothing here takes as long, in seconds."""


class GivenUpConnection(AsyncConnection):
    """Whoever opens it is cancelled, as by a timeout, before the loop has told it the outcome."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        for task in asyncio.all_tasks():
            if task.get_name() == "opener":
                task.cancel()


async def give_up(address: Address) -> bool:
    """Return whether somebody who is cancelled while connecting comes to an end."""
    opening = GivenUpConnection.open(address, client="test", timeout=LIMIT)
    task = asyncio.create_task(opening, name="opener")
    await asyncio.wait([task], timeout=LIMIT)
    is_over = task.done()
    task.cancel()
    return is_over


@pytest.mark.parametrize("factory", [None, loop_factory()])
def test_who_gives_up_as_the_connection_is_made_does_not_wait_for_its_end(
    factory: Callable[[], asyncio.AbstractEventLoop] | None,
) -> None:
    with (
        socket.create_server(("127.0.0.1", 0)) as listening,
        asyncio.Runner(loop_factory=factory) as runner,
    ):
        assert runner.run(give_up(Address(*listening.getsockname())))
