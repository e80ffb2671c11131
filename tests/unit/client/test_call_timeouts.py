"""The timeout of one call means the same in every shell: its message has an outcome by then.

The error is the broker's last definite reason, and what failed for lack of time is not sent later.
"""

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import pytest

import pulque
from pulque import Outgoing, aio
from pulque.errors import (
    DisconnectedError,
    OverloadedError,
    PulqueError,
    ReadOnlyError,
    RequestTimeoutError,
    StorageFullError,
    UnavailableError,
)
from pulque.wire import requests
from tests.unit.client.fake_broker import Drop, FakeBroker, Silence
from tests.unit.client.fake_cluster import FakeCluster

SHORT = 1.0
LONG = 20.0
FULL = StorageFullError("12 bytes are free")
Send = Callable[..., None]
"""Sends bodies with a client of a long timeout; the calls have a short one."""


def blocking(url: str, *bodies: bytes, **parts: Any) -> None:
    with pulque.connect(url, timeout=LONG) as client:
        for body in bodies:
            client.send("orders", body, timeout=SHORT, **parts)


def blocking_many(url: str, *bodies: bytes, **parts: Any) -> None:
    with pulque.connect(url, timeout=LONG) as client:
        messages = [Outgoing(body, **parts) if parts else body for body in bodies]
        client.send_many("orders", messages, timeout=SHORT)


def asyncio_(url: str, *bodies: bytes, **parts: Any) -> None:
    async def main() -> None:
        async with aio.connect(url, timeout=LONG) as client:
            for body in bodies:
                await client.send("orders", body, timeout=SHORT, **parts)

    asyncio.run(main())


def asyncio_many(url: str, *bodies: bytes, **parts: Any) -> None:
    async def main() -> None:
        async with aio.connect(url, timeout=LONG) as client:
            messages = [Outgoing(body, **parts) if parts else body for body in bodies]
            await client.send_many("orders", messages, timeout=SHORT)

    asyncio.run(main())


def in_app(url: str, send: Callable[[pulque.App], Awaitable[object]]) -> None:
    app = pulque.App(url, timeout=LONG, grace=0)

    @app.subscribe("other", group="g")
    async def handle(message: pulque.ReceivedMessage) -> None: ...

    async def main() -> None:
        async with app:
            await send(app)

    asyncio.run(main())


def app(url: str, *bodies: bytes, **parts: Any) -> None:
    async def send(app: pulque.App) -> None:
        for body in bodies:
            await app.send("orders", body, timeout=SHORT, **parts)

    in_app(url, send)


def app_blocking(url: str, *bodies: bytes, **parts: Any) -> None:
    async def send(app: pulque.App) -> None:
        for body in bodies:
            await asyncio.to_thread(app.send_blocking, "orders", body, timeout=SHORT, **parts)

    in_app(url, send)


SHELLS = [blocking, blocking_many, asyncio_, asyncio_many, app, app_blocking]
every_shell = pytest.mark.parametrize("send", SHELLS, ids=lambda shell: shell.__name__)
every_part = pytest.mark.parametrize("parts", [{}, {"order_key": "k"}], ids=["plain", "keyed"])


@contextmanager
def lone() -> Iterator[tuple[str, list[FakeBroker]]]:
    with FakeBroker() as broker:
        yield broker.url, [broker]


@contextmanager
def two_of_a_cluster() -> Iterator[tuple[str, list[FakeBroker]]]:
    with FakeCluster(2) as cluster:
        yield cluster.url, cluster.brokers


@pytest.fixture(params=[lone, two_of_a_cluster])
def brokers(request: pytest.FixtureRequest) -> Iterator[tuple[str, list[FakeBroker]]]:
    with ExitStack() as stack:
        yield stack.enter_context(request.param())


def fails(*faults: Exception) -> Callable[[requests.Request], None]:
    """Have sends fail with these in turn, and with the last one from then on."""
    left = list(faults)

    def fault(request: requests.Request) -> None:
        if isinstance(request, requests.Send):
            raise left.pop(0) if len(left) > 1 else left[0]

    return fault


@every_part
@pytest.mark.parametrize(
    "refusal",
    [FULL, ReadOnlyError("it takes no sends"), OverloadedError("1 byte waits")],
    ids=lambda error: type(error).__name__,
)
@every_shell
def test_a_refusal_is_told_as_it_is(
    brokers: tuple[str, list[FakeBroker]], send: Send, refusal: PulqueError, parts: dict[str, Any]
) -> None:
    url, servers = brokers
    for each in servers:
        each.fault = fails(refusal)

    with pytest.raises(type(refusal), match="it had no effect") as caught:
        send(url, b"tea", **parts)

    assert caught.value.code == refusal.code
    assert caught.value.outcome_known
    assert str(refusal) in str(caught.value)


@every_part
@every_shell
def test_a_refusal_after_a_lost_answer_leaves_the_outcome_open(
    brokers: tuple[str, list[FakeBroker]], send: Send, parts: dict[str, Any]
) -> None:
    url, servers = brokers
    for each in servers:
        each.fault = fails(Drop(handled=True), FULL)

    with pytest.raises(UnavailableError, match="the outcome is unknown") as caught:
        send(url, b"tea", **parts)

    assert not caught.value.outcome_known
    assert "StorageFullError (code 52): 12 bytes are free" in str(caught.value)


@every_shell
def test_no_answer_leaves_the_outcome_open(
    brokers: tuple[str, list[FakeBroker]], send: Send
) -> None:
    url, servers = brokers
    for each in servers:
        each.fault = fails(Silence())

    with pytest.raises(RequestTimeoutError) as caught:
        send(url, b"tea")

    assert not caught.value.outcome_known


@every_shell
def test_what_reached_nobody_was_never_sent(send: Send) -> None:
    with FakeCluster(1) as cluster:
        cluster.kill(0)

        with pytest.raises(DisconnectedError, match="never sent") as caught:
            send(cluster.url, b"tea")

    assert caught.value.outcome_known


@every_part
@every_shell
def test_the_search_for_a_route_ends_in_time(send: Send, parts: dict[str, Any]) -> None:
    def refuse(request: requests.Request) -> None:
        if isinstance(request, requests.Route):
            raise UnavailableError("no broker takes messages now")

    with FakeCluster(1) as cluster:
        cluster.meta.fault = refuse

        with pytest.raises(UnavailableError, match="no broker takes") as caught:
            send(cluster.url, b"tea", **parts)

    assert caught.value.outcome_known


@every_part
async def test_what_ran_out_of_time_is_not_sent_later(parts: dict[str, Any]) -> None:
    with FakeBroker() as broker:
        broker.fault = fails(FULL)
        async with aio.connect(broker.url, timeout=LONG) as client:
            patient = asyncio.create_task(client.send("orders", b"patient", **parts))
            for call in (
                client.send("orders", b"one", timeout=SHORT, **parts),
                client.send_many("orders", [b"two", Outgoing(b"three")], timeout=SHORT),
            ):
                with pytest.raises(StorageFullError):
                    await call
            broker.fault = None

            await patient
            await client.send("orders", b"last", **parts)
        assert broker.messages("orders") == [b"patient", b"last"]


async def test_calls_of_one_timeout_travel_together() -> None:
    with FakeBroker() as broker:
        async with aio.connect(broker.url, timeout=LONG) as client:
            await client.send("orders", b"warm")
            before = len(broker.seen(requests.Send))
            await asyncio.gather(
                *(client.send("orders", b"%d" % n, timeout=SHORT * 10) for n in range(100))
            )
            assert len(broker.seen(requests.Send)) - before < 20


async def test_a_call_that_runs_out_of_time_leaves_the_others_their_connection() -> None:
    with FakeBroker() as broker:
        async with aio.connect(broker.url, timeout=LONG) as client:
            await client.send("orders", b"warm")
            connected = len(broker.seen(requests.Hello))
            broker.fault = fails(Silence())
            with pytest.raises(RequestTimeoutError, match="the outcome is unknown"):
                await client.send("orders", b"tea", timeout=SHORT)

            broker.fault = None
            await client.send("orders", b"milk")
            assert len(broker.seen(requests.Hello)) == connected


async def test_a_call_may_wait_for_longer_than_its_client() -> None:
    with FakeBroker() as broker:
        broker.fault = fails(FULL)
        async with aio.connect(broker.url, timeout=SHORT) as client:
            patient = asyncio.create_task(client.send("orders", b"patient", timeout=LONG))
            with pytest.raises(StorageFullError):
                await client.send("orders", b"tea")
            broker.fault = None
            await patient
        assert broker.messages("orders") == [b"patient"]
