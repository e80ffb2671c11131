"""Opening a connection ends, also if it is given up in the very moment in which it is there."""

import asyncio
import socket
from collections.abc import Callable

import pytest

from pulque.client.aio.connection import AsyncConnection
from pulque.client.connection.url import Address, parse_address
from pulque.net.process import loop_factory
from pulque.testing.broker import InProcessBroker

LIMIT = 20.0
"""Nothing here takes as long, in seconds."""


class GivenUpConnection(AsyncConnection):
    """Whoever opens it is cancelled, as by a timeout, before the loop has told it the outcome."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        for task in asyncio.all_tasks():
            if task.get_name() == "opener":
                task.cancel()


class GivenUpLaterConnection(AsyncConnection):
    """Whoever opens it is cancelled just before the answer to the handshake is looked at."""

    def buffer_updated(self, nbytes: int) -> None:
        for task in asyncio.all_tasks():
            if task.get_name() == "opener":
                task.cancel()
        super().buffer_updated(nbytes)


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


async def test_an_answer_to_a_handshake_that_was_given_up_is_no_failure() -> None:
    failures: list[dict[str, object]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: failures.append(context))
    with InProcessBroker(delays=False) as broker:
        opening = GivenUpLaterConnection.open(
            parse_address(broker.url.removeprefix("pulque://"), default_port=0),
            client="test",
            timeout=LIMIT,
        )
        with pytest.raises(asyncio.CancelledError):
            await asyncio.create_task(opening, name="opener")

    assert failures == []
