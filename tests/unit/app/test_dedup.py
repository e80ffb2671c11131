"""A handler with a checker is not called for what it has handled."""

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest
from sqlalchemy import create_engine

import pulque
from pulque.dedup import Checker, MemoryChecker
from pulque.dedup.sql import SqlChecker
from pulque.errors import UsageError
from pulque.testing.broker import InProcessBroker
from tests.unit.app.conftest import running


@pytest.fixture
def app(pulque_broker: InProcessBroker) -> pulque.App:
    return pulque.App(pulque_broker.url, name="test", timeout=5, grace=5)


async def hours_pass(broker: InProcessBroker, attempts: list[int]) -> None:
    """Let time pass until the second attempt is over, however long a group waits for it."""
    async with asyncio.timeout(30):
        while len(attempts) < 2:
            await asyncio.sleep(0.05)
            await asyncio.to_thread(broker.advance_time, 3600)


@pytest.fixture(params=["memory", "sql"])
def checker(request: pytest.FixtureRequest, tmp_path: Path) -> Checker:
    if request.param == "memory":
        return MemoryChecker()
    engine = create_engine(f"sqlite:///{tmp_path / 'shop.db'}")
    made = SqlChecker(engine, group="g")
    made.create_table()
    return made


@pytest.mark.parametrize("kind", ["async", "plain"])
async def test_a_message_that_comes_again_is_acked_without_a_call(
    pulque_broker: InProcessBroker,
    pulque_client: pulque.Client,
    app: pulque.App,
    checker: Checker,
    kind: str,
) -> None:
    calls: list[bytes] = []
    attempts: list[int] = []

    @app.middleware
    async def fail_once(
        message: pulque.ReceivedMessage, call_next: Callable[[], Awaitable[object]]
    ) -> object:
        result = await call_next()
        attempts.append(message.attempt)
        if message.attempt == 1:
            raise OSError("after the work, before the ack")
        return result

    async def on_loop(message: pulque.ReceivedMessage) -> None:
        calls.append(message.body)

    def in_thread(message: pulque.ReceivedMessage) -> None:
        calls.append(message.body)

    app.subscribe("orders", group="g", dedup=checker)(on_loop if kind == "async" else in_thread)
    pulque_client.send("orders", b"tea")

    async with running(app):
        await hours_pass(pulque_broker, attempts)

    assert attempts == [1, 2]
    assert calls == [b"tea"]


@pytest.mark.parametrize("kind", ["async", "plain"])
async def test_what_failed_is_called_again(
    pulque_broker: InProcessBroker,
    pulque_client: pulque.Client,
    app: pulque.App,
    checker: Checker,
    kind: str,
) -> None:
    attempts: list[int] = []

    def work(message: pulque.ReceivedMessage) -> None:
        attempts.append(message.attempt)
        if message.attempt == 1:
            raise OSError("no milk")

    async def on_loop(message: pulque.ReceivedMessage) -> None:
        await asyncio.sleep(0)
        work(message)

    app.subscribe("orders", group="g", dedup=checker)(on_loop if kind == "async" else work)
    pulque_client.send("orders", b"tea")

    async with running(app):
        await hours_pass(pulque_broker, attempts)
    assert attempts == [1, 2]


def test_with_manual_acks_only_the_handler_can_know(app: pulque.App) -> None:
    with pytest.raises(UsageError, match="dedup needs to know"):

        @app.subscribe("orders", group="g", ack="manual", dedup=MemoryChecker())
        def handle(message: pulque.ReceivedMessage) -> None:
            del message


def test_groups_that_share_a_memory_checker_each_do_their_work(
    pulque_client: pulque.Client,
) -> None:
    checker, handled = MemoryChecker(), []
    pulque_client.send("orders", b"tea")

    for group in ("kitchen", "accounts"):
        with pulque_client.consumer("orders", group=group) as consumer:
            (message,) = consumer.pull(1, timeout=5)
            for _ in range(2):
                with checker.once(message) as is_first:
                    handled.append((message.group, is_first))
            message.ack()

    assert handled == [
        ("kitchen", True),
        ("kitchen", False),
        ("accounts", True),
        ("accounts", False),
    ]


def test_a_sql_checker_refuses_messages_of_another_group(
    pulque_client: pulque.Client, app: pulque.App, tmp_path: Path
) -> None:
    engine = create_engine(f"sqlite:///{tmp_path / 'shop.db'}")
    checker = SqlChecker(engine, group="kitchen")
    checker.create_table()
    pulque_client.send("orders", b"tea")

    with pulque_client.consumer("orders", group="accounts") as consumer:
        (message,) = consumer.pull(1, timeout=5)
        with pytest.raises(UsageError, match=r"accounts.*kitchen"), checker.once(message):
            pass
        with (
            engine.begin() as connection,
            pytest.raises(UsageError, match="a SqlChecker of its own"),
        ):
            checker.mark(connection, message)
    with pytest.raises(UsageError, match=r"kitchen.*accounts"):

        @app.subscribe("orders", group="accounts", dedup=checker)
        def handle(message: pulque.ReceivedMessage) -> None:
            """Never called."""

    engine.dispose()
