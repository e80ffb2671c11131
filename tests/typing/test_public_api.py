"""What users' type checkers must accept, and what they must refuse.

``make check`` reads this file; nothing in it runs. A line that must be refused carries the code
of its error: if the checker starts to accept it, the remark is unused, and that is an error.
"""

from datetime import UTC, datetime
from typing import Any, assert_type, cast

import pulque
from pulque import aio


def sends(client: pulque.Client) -> None:
    receipt = client.send(
        "orders",
        b"tea",
        key="k",
        order_key="o",
        tags=["hot"],
        headers={"a": "b"},
        expires_at=datetime.now(UTC),
        timeout=1,
    )
    assert_type(receipt, pulque.Receipt)
    assert_type(receipt.id, str)
    assert_type(receipt.position, pulque.Position)
    many: list[bytes | pulque.Outgoing] = [b"tea", pulque.Outgoing(b"milk", key="k")]
    assert_type(client.send_many("orders", many), list[pulque.Receipt])
    client.send_many("orders", [b"only", b"bodies"])

    client.send("orders", "text")
    client.send("orders")  # type: ignore[call-arg]
    client.send("orders", b"tea", colour="red")  # type: ignore[call-arg]
    client.send("orders", b"tea", headers={"a": 1})  # type: ignore[dict-item]


def produces(client: pulque.Client) -> None:
    with client.producer(acks="memory", linger=0.01, compression="lz4") as producer:
        assert_type(producer, pulque.Producer)
        pending = producer.send("orders", b"tea", key="k", tags=("hot",))
        assert_type(pending, pulque.PendingSend)
        assert_type(pending.result(1.0), pulque.Receipt)
        assert_type(pending.exception(), pulque.PulqueError | None)
        pending.add_done_callback(lambda done: done.result())
        pendings = producer.send_many("orders", [b"a", b"b"])
        assert_type(pendings[0], pulque.PendingSend)
        assert_type(pendings.result(), list[pulque.Receipt])
        producer.flush(timeout=1)

        producer.send("orders", b"tea", colour="red")  # type: ignore[call-arg]
        producer.send("orders", b"tea", key=1)  # type: ignore[arg-type]
    client.producer(acks="maybe")  # type: ignore[arg-type]
    client.producer(compression="gzip")  # type: ignore[arg-type]


def consumes(client: pulque.Client) -> None:
    with client.consumer("orders", group="kitchen", start="latest") as consumer:
        assert_type(consumer, pulque.Consumer)
        for message in consumer:
            assert_type(message, pulque.ReceivedMessage)
            assert_type(message.body, bytes)
            assert_type(message.key, str | None)
            assert_type(message.headers, dict[str, str])
            message.ack()
            message.nack("reason", delay=1.5)
            message.body = b""  # type: ignore[misc]
        assert_type(consumer.pull(10, timeout=1), list[pulque.ReceivedMessage])
        consumer.ack_all(consumer.pull())
    client.consumer("orders", start=datetime.now(UTC), retry=pulque.RetryPolicy([1, 5]))
    client.consumer("orders", mode="twice")  # type: ignore[arg-type]
    client.consumer("orders", "kitchen", start="now")  # type: ignore[arg-type]


def looks(client: pulque.Client) -> None:
    assert_type(client.read("orders", 3), list[pulque.Message])
    assert_type(client.status(), dict[str, Any])
    for message in client.tail("orders"):
        assert_type(message, pulque.Message)
        message.ack()  # type: ignore[attr-defined]
    assert_type(client.positions("orders")[0].at, pulque.ConsumeSequence | None)


async def awaits() -> None:
    async with aio.connect() as client:
        _ = assert_type(client, aio.Client)
        assert_type(await client.send("orders", b"tea", key="k"), pulque.Receipt)
        async with client.producer() as producer:
            pending = await producer.send("orders", b"tea")
            _ = assert_type(pending, aio.PendingSend)
            assert_type(await pending, pulque.Receipt)
            assert_type(await (await producer.send_many("s", [b"x"])), list[pulque.Receipt])
        async with client.consumer("orders", group="kitchen") as consumer:
            async for message in consumer:
                assert_type(message, pulque.ReceivedMessage)
            assert_type(await consumer.pull(), list[pulque.ReceivedMessage])
        async for seen in client.tail("orders"):
            assert_type(seen, pulque.Message)

        await client.send("orders", "text")


async def handles() -> None:
    app = pulque.App("pulque://127.0.0.1:7450", grace=5)

    @app.subscribe(
        "order.*", group="g", concurrency=8, tags=["vip"], retry=pulque.RetryPolicy([1])
    )
    async def handle(message: pulque.ReceivedMessage, order: dict[str, int]) -> int:
        raise pulque.Retry("later", delay=1)

    _ = assert_type(await handle(cast("pulque.ReceivedMessage", None), {}), int)

    @app.subscribe_batch("orders", group="g", max_messages=10, max_wait=0.1)
    def handle_many(messages: list[pulque.ReceivedMessage]) -> None:
        raise pulque.BatchFailed({messages[0]: "poison", 1: ValueError("x")})

    handle_many([1])  # type: ignore[list-item]
    assert_type(await app.send("orders", {"a": 1}, key="k"), pulque.Receipt)
    assert_type(app.send_blocking("orders", b"x"), pulque.Receipt)
    _ = assert_type(app.client, aio.Client)
    async with app as same:
        _ = assert_type(same, pulque.App)

    app.subscribe("orders", group="g", ack="never")  # type: ignore[arg-type]
    app.subscribe("orders", group="g", colour="red")  # type: ignore[call-arg]
    await app.send("orders", b"", colour="red")  # type: ignore[call-arg]


def test_this_file_is_read_by_the_type_checker_and_not_run() -> None:
    assert callable(awaits)
