"""Middleware runs around handlers, in order, whatever each of them is."""

import asyncio
import itertools
import threading
from collections.abc import Awaitable, Callable

import pytest

import pulque
from pulque.errors import UsageError
from tests.unit.app.conftest import running, until
from tests.unit.client.fake_broker import FakeBroker

Send = Callable[..., None]


@pytest.mark.parametrize("kinds", list(itertools.product(["async", "plain"], repeat=4)))
async def test_the_first_is_outermost_whatever_is_async(
    broker: FakeBroker, app: pulque.App, send: Send, kinds: tuple[str, ...]
) -> None:
    told: list[str] = []

    def layer(number: int, kind: str) -> Callable[..., object]:
        async def on_loop(
            _: pulque.ReceivedMessage, call_next: Callable[[], Awaitable[object]]
        ) -> object:
            assert threading.current_thread() is threading.main_thread()
            told.append(f"{number} before")
            try:
                return await call_next()
            finally:
                told.append(f"{number} after")

        def in_thread(_: pulque.ReceivedMessage, call_next: Callable[[], object]) -> object:
            assert threading.current_thread() is not threading.main_thread()
            told.append(f"{number} before")
            try:
                return call_next()
            finally:
                told.append(f"{number} after")

        return on_loop if kind == "async" else in_thread

    for number, kind in enumerate(kinds[:3]):
        app.middleware(layer(number, kind))

    async def on_loop(_: pulque.ReceivedMessage) -> None:
        told.append("handled")
        raise ValueError("seen by all")

    def in_thread(_: pulque.ReceivedMessage) -> None:
        told.append("handled")
        raise ValueError("seen by all")

    app.subscribe("orders", group="g")(on_loop if kinds[3] == "async" else in_thread)
    send(b"one")
    async with running(app):
        await until(lambda: broker.nacked)

    assert told == [
        "0 before",
        "1 before",
        "2 before",
        "handled",
        "2 after",
        "1 after",
        "0 after",
    ]
    assert broker.nacked == [("orders", 0, "ValueError: seen by all", -1)]


async def test_middleware_decides_what_becomes_of_an_error(
    broker: FakeBroker, app: pulque.App, send: Send
) -> None:
    @app.middleware
    async def decide(
        message: pulque.ReceivedMessage, call_next: Callable[[], Awaitable[object]]
    ) -> None:
        try:
            await call_next()
        except pulque.PayloadError:
            return
        except ValueError as error:
            raise pulque.Retry("translated", delay=3) from error

    @app.subscribe("orders", group="g")
    async def handle(_: dict[str, int]) -> None:
        raise ValueError("of the handler")

    send(b"garbage", b"{}")
    async with running(app):
        await until(lambda: len(broker.settled) == 2)

    assert broker.acked == [("orders", 0)]
    assert broker.nacked == [("orders", 1, "translated", 3000)]


async def test_middleware_of_a_batch_gets_the_list(
    broker: FakeBroker, app: pulque.App, send: Send
) -> None:
    sizes: list[int] = []

    @app.middleware
    def count(messages: list[pulque.ReceivedMessage], call_next: Callable[[], object]) -> object:
        sizes.append(len(messages))
        return call_next()

    @app.subscribe_batch("orders", group="g", max_messages=3, max_wait=60)
    async def handle(_: list[bytes]) -> None: ...

    send(b"1", b"2", b"3")
    async with running(app):
        await until(lambda: len(broker.acked) == 3)
    assert sizes == [3]


async def test_a_timeout_reaches_an_async_handler_behind_plain_middleware(
    broker: FakeBroker, app: pulque.App, send: Send
) -> None:
    cancelled = asyncio.Event()

    @app.middleware
    def around(_: object, call_next: Callable[[], object]) -> object:
        return call_next()

    @app.subscribe("orders", group="g", timeout=0.05)
    async def handle(_: bytes) -> None:
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            cancelled.set()
            raise

    send(b"1")
    async with running(app):
        await until(lambda: broker.nacked)
        await until(cancelled.is_set)


def test_a_generator_is_no_middleware(app: pulque.App) -> None:
    with pytest.raises(UsageError, match="yields"):

        @app.middleware
        def around(_: object, call_next: Callable[[], object]) -> object:
            yield call_next()
