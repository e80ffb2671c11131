"""What may be a body: bytes and text as they are, all else as JSON with its content type."""

import asyncio
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import pydantic
import pytest

import pulque
from pulque import aio
from pulque.errors import UsageError
from pulque.testing.broker import InProcessBroker


@dataclass
class Order:
    number: int


class Item(pydantic.BaseModel):
    name: str


BODIES: list[tuple[Any, bytes, dict[str, str]]] = [
    (b"tea", b"tea", {}),
    (bytearray(b"tea"), b"tea", {}),
    ("thé", "thé".encode(), {}),
    ({"n": [1, None]}, b'{"n": [1, null]}', {"content-type": "application/json"}),
    ([Order(1)], b'[{"number": 1}]', {"content-type": "application/json"}),
    (Item(name="tea"), b'{"name":"tea"}', {"content-type": "application/json"}),
    (17, b"17", {"content-type": "application/json"}),
]


def by_send(url: str, bodies: Sequence[Any], **parts: Any) -> None:
    with pulque.connect(url) as client:
        for body in bodies:
            client.send("orders", body, **parts)


def by_send_many(url: str, bodies: Sequence[Any], **parts: Any) -> None:
    with pulque.connect(url) as client:
        client.send_many("orders", [pulque.Outgoing(each, **parts) for each in bodies])


def by_send_many_bare(url: str, bodies: Sequence[Any], **parts: Any) -> None:
    with pulque.connect(url) as client:
        client.send_many("orders", bodies if not parts else [])


def by_producer(url: str, bodies: Sequence[Any], **parts: Any) -> None:
    with pulque.connect(url) as client, client.producer() as producer:
        for body in bodies:
            producer.send("orders", body, **parts)


def by_producer_many(url: str, bodies: Sequence[Any], **parts: Any) -> None:
    with pulque.connect(url) as client, client.producer() as producer:
        producer.send_many("orders", [pulque.Outgoing(each, **parts) for each in bodies])


def by_asyncio(url: str, bodies: Sequence[Any], **parts: Any) -> None:
    async def main() -> None:
        async with aio.connect(url) as client:
            for body in bodies:
                await client.send("orders", body, **parts)

    asyncio.run(main())


def by_asyncio_many(url: str, bodies: Sequence[Any], **parts: Any) -> None:
    async def main() -> None:
        async with aio.connect(url) as client:
            await client.send_many("orders", [pulque.Outgoing(each, **parts) for each in bodies])

    asyncio.run(main())


SENDERS = [by_send, by_send_many, by_producer, by_producer_many, by_asyncio, by_asyncio_many]
Sender = Callable[..., None]


@pytest.mark.parametrize("send", [*SENDERS, by_send_many_bare], ids=lambda send: send.__name__)
def test_every_way_to_send_takes_the_same_bodies(
    pulque_broker: InProcessBroker, pulque_client: pulque.Client, send: Sender
) -> None:
    send(pulque_broker.url, [body for body, _, _ in BODIES])

    consumer = pulque_client.consumer("orders", group="g")
    found = consumer.pull(timeout=10)
    assert [(each.body, each.headers) for each in found] == [
        (body, headers) for _, body, headers in BODIES
    ]
    assert found[3].json() == {"n": [1, None]}


@pytest.mark.parametrize("send", SENDERS, ids=lambda send: send.__name__)
def test_a_content_type_of_the_sender_stays(
    pulque_broker: InProcessBroker, pulque_client: pulque.Client, send: Sender
) -> None:
    send(pulque_broker.url, [{"n": 1}], headers={"content-type": "application/x", "a": "b"})

    (found,) = pulque_client.consumer("orders", group="g").pull(timeout=10)
    assert found.headers == {"content-type": "application/x", "a": "b"}


def by_producer_with_spool(url: str, bodies: Sequence[Any], **parts: Any) -> None:
    with (
        tempfile.TemporaryDirectory() as spool,
        pulque.connect(url) as client,
        client.producer(spool=spool) as producer,
    ):
        for body in bodies:
            producer.send("orders", body, **parts)


def by_asyncio_producer_with_spool(url: str, bodies: Sequence[Any], **parts: Any) -> None:
    async def main(spool: str) -> None:
        async with aio.connect(url) as client, client.producer(spool=spool) as producer:
            for body in bodies:
                _ = await producer.send("orders", body, **parts)

    with tempfile.TemporaryDirectory() as spool:
        asyncio.run(main(spool))


@pytest.mark.parametrize(
    "send",
    [*SENDERS, by_producer_with_spool, by_asyncio_producer_with_spool],
    ids=lambda send: send.__name__,
)
def test_tags_of_a_generator_come_with_the_first_message_of_a_subject(
    pulque_broker: InProcessBroker, pulque_client: pulque.Client, send: Sender
) -> None:
    send(pulque_broker.url, [b"tea"], tags=(tag for tag in ("hot", "green")))

    (found,) = pulque_client.consumer("orders", group="g").pull(timeout=10)
    assert found.tags == ("hot", "green")


def test_a_message_with_tags_of_a_generator_can_be_sent_twice(
    pulque_client: pulque.Client,
) -> None:
    message = pulque.Outgoing(b"tea", tags=(tag for tag in ("hot", "green")))
    pulque_client.send_many("orders", [message])
    pulque_client.send_many("orders", [message])

    found = [each.tags for each in pulque_client.consumer("orders", group="g").pull(timeout=10)]
    assert found == [("hot", "green")] * 2


def test_a_body_that_is_no_json_is_named(pulque_client: pulque.Client) -> None:
    with pytest.raises(UsageError, match="a object cannot be sent"):
        pulque_client.send("orders", object())
    with pytest.raises(UsageError, match="messages is one str"):
        pulque_client.send_many("orders", "tea")
    with pulque_client.producer() as producer, pytest.raises(UsageError, match="one bytes"):
        producer.send_many("orders", b"tea")

    pulque_client.send("orders", b"{")
    (found,) = pulque_client.consumer("orders", group="g").pull(timeout=10)
    with pytest.raises(pulque.PayloadError, match="is no JSON"):
        found.json()
