"""Messages that are sent together: what can be refused is refused before the first one goes.

Whatever happens after that, the error says how many are confirmed.
"""

import asyncio
from collections.abc import Callable
from datetime import datetime
from typing import Any

import google_crc32c
import pytest

import pulque
from pulque import Outgoing, aio
from pulque.errors import (
    NoDelayServerError,
    PulqueError,
    UnavailableError,
    UsageError,
)
from pulque.model.routes import SLOTS, Slots
from pulque.wire import requests
from tests.unit.client.fake_broker import FakeBroker
from tests.unit.client.fake_cluster import FakeCluster
from tests.unit.client.fake_delay import HOUR, FakeDelay, delayed_routes

Sender = Callable[[str, list[Any]], None]
YEAR = 365 * 24 * 3600.0


def by_client(url: str, messages: list[Any]) -> None:
    with pulque.connect(url, timeout=5) as client:
        client.send_many("orders", messages)


def by_asyncio_client(url: str, messages: list[Any]) -> None:
    async def main() -> None:
        async with aio.connect(url, timeout=5) as client:
            await client.send_many("orders", messages)

    asyncio.run(main())


def by_producer(url: str, messages: list[Any]) -> None:
    with pulque.connect(url, timeout=5) as client, client.producer() as producer:
        producer.send_many("orders", messages).result()


def by_asyncio_producer(url: str, messages: list[Any]) -> None:
    async def main() -> None:
        async with aio.connect(url, timeout=5) as client, client.producer() as producer:
            await (await producer.send_many("orders", messages))

    asyncio.run(main())


CLIENTS = [by_client, by_asyncio_client]
SENDERS = [*CLIENTS, by_producer, by_asyncio_producer]


@pytest.mark.parametrize("send", SENDERS, ids=lambda send: send.__name__)
def test_nothing_goes_where_some_have_nowhere_to_go(send: Sender) -> None:
    with FakeBroker() as broker:
        with pytest.raises(NoDelayServerError) as caught:
            send(broker.url, [b"tea", b"milk", Outgoing(b"late", delay=10)])

        assert caught.value.outcome_known
        assert not broker.seen(requests.Send)


BAD_ONES: list[tuple[Callable[[], object], type[PulqueError]]] = [
    (lambda: Outgoing(b"too late", delay=YEAR), UsageError),
    (lambda: Outgoing(b"never", priority=17), UsageError),
    (lambda: Outgoing(b"never", delay=-1), UsageError),
    (lambda: Outgoing(b"never", expires_at=datetime(2030, 1, 1)), UsageError),  # noqa: DTZ001
    (object, UsageError),
]


@pytest.mark.parametrize(("make", "kind"), BAD_ONES, ids=range(len(BAD_ONES)))
@pytest.mark.parametrize("send", SENDERS, ids=lambda send: send.__name__)
def test_nothing_goes_where_one_is_no_message(
    send: Sender, make: Callable[[], object], kind: type[PulqueError]
) -> None:
    with FakeCluster(1) as cluster, FakeDelay("d0") as delay:
        delay.max_delay_ms = HOUR
        cluster.meta.delayed_routes = delayed_routes([delay])

        with pytest.raises(kind) as caught:
            send(
                cluster.url,
                [b"tea", Outgoing(b"milk", key="k"), Outgoing(b"late", delay=10), make()],
            )

        assert caught.value.outcome_known
        assert not cluster.brokers[0].seen(requests.Send)
        assert not delay.seen(requests.Send)


def key_in(slots: Slots) -> str:
    keys = (f"k{n}" for n in range(100 * SLOTS))
    return next(k for k in keys if slots[0] <= google_crc32c.value(k.encode()) % SLOTS < slots[1])


@pytest.mark.parametrize("send", CLIENTS, ids=lambda send: send.__name__)
def test_an_error_in_the_middle_says_how_many_are_confirmed(send: Sender) -> None:
    here, elsewhere = Slots(0, SLOTS // 2), Slots(SLOTS // 2, SLOTS)
    sent = [Outgoing(b"%d" % n, order_key=key_in(here)) for n in range(1500)]
    with FakeCluster(1) as cluster:
        cluster.serve_strictly(0, here)

        with pytest.raises(UnavailableError, match="is away") as caught:
            send(cluster.url, [*sent, Outgoing(b"last", order_key=key_in(elsewhere))])

        stored = cluster.bodies(0)
    assert 0 < stored <= 1500
    assert f"{stored} of 1501 messages are confirmed" in caught.value.__notes__


def test_an_error_between_two_ways_says_how_many_are_confirmed() -> None:
    def refuse(request: requests.Request) -> None:
        if isinstance(request, requests.Send):
            raise UsageError("no")

    with FakeCluster(1) as cluster, FakeDelay("d0") as delay:
        cluster.meta.delayed_routes = delayed_routes([delay])
        delay.fault = refuse

        with pytest.raises(UsageError) as caught:
            by_client(cluster.url, [b"tea", b"milk", Outgoing(b"late", delay=10)])

        assert cluster.bodies(0) == 2
    assert caught.value.__notes__ == ["2 of 3 messages are confirmed"]
