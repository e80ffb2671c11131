"""A server whose own code failed ends, and says why."""

import asyncio
from collections.abc import Callable

import pytest
import structlog

from pulque.errors import PulqueError, StorageError
from pulque.serving.supervised import Supervised


def _server() -> Supervised:
    server = Supervised(structlog.get_logger(), failed="server_failed")
    asyncio.get_running_loop().set_exception_handler(server.callback_failed)
    return server


def _raising(error: Exception) -> Callable[[], None]:
    def callback() -> None:
        raise error

    return callback


async def test_a_callback_that_fails_ends_the_server() -> None:
    server = _server()
    asyncio.get_running_loop().call_soon(_raising(KeyError("a bug")))
    with pytest.raises(StorageError, match="a bug"):
        await asyncio.wait_for(server.stopped(), 10)


async def test_a_socket_that_died_does_not() -> None:
    server = _server()
    asyncio.get_running_loop().call_soon(_raising(ConnectionResetError()))
    await asyncio.sleep(0.01)
    server.stop()
    await asyncio.wait_for(server.stopped(), 10)


async def test_the_first_failure_is_told() -> None:
    server = _server()

    async def work() -> None:
        raise PulqueError("the first")

    await server._supervise(work())  # noqa: SLF001  # what a server does with its own tasks
    asyncio.get_running_loop().call_soon(_raising(KeyError("another one")))
    await asyncio.sleep(0.01)
    with pytest.raises(PulqueError, match="the first"):
        await asyncio.wait_for(server.stopped(), 10)
