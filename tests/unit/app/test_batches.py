"""Batch handlers get lists; of a batch, only what failed is retried."""

from collections.abc import Callable
from dataclasses import dataclass

import pytest

import pulque
from tests.unit.app.conftest import running, until
from tests.unit.client.fake_broker import FakeBroker

Send = Callable[..., None]


@dataclass
class Order:
    number: int


def numbered(count: int) -> list[bytes]:
    return [b'{"number": %d}' % number for number in range(count)]


async def test_a_batch_is_as_large_as_allowed_and_waits_no_longer_than_told(
    broker: FakeBroker, app: pulque.App, send: Send
) -> None:
    sizes: list[int] = []

    @app.subscribe_batch("orders", group="g", max_messages=10, max_wait=0.2)
    async def handle(messages: list[pulque.ReceivedMessage]) -> None:
        sizes.append(len(messages))

    send(*numbered(25))
    async with running(app):
        await until(lambda: len(broker.acked) == 25)

    assert sizes == [10, 10, 5]


async def test_a_batch_waits_for_more_messages(
    broker: FakeBroker, app: pulque.App, send: Send
) -> None:
    sizes: list[int] = []

    @app.subscribe_batch("orders", group="g", max_messages=3, max_wait=60)
    def handle(messages: list[pulque.ReceivedMessage]) -> None:
        sizes.append(len(messages))

    def is_handed_out(count: int) -> bool:
        return any(len(log.held) == count for log in broker.pull_logs.values())

    send(b"one")
    async with running(app):
        await until(lambda: is_handed_out(1))
        send(b"two")
        await until(lambda: is_handed_out(2))
        assert not sizes
        send(b"three")
        await until(lambda: len(broker.acked) == 3)

    assert sizes == [3]


async def test_a_poison_message_in_a_batch_is_retried_alone(
    broker: FakeBroker, app: pulque.App, send: Send
) -> None:
    @app.subscribe_batch("orders", group="g", max_messages=6, max_wait=60)
    async def handle(messages: list[pulque.ReceivedMessage]) -> None:
        raise pulque.BatchFailed(
            {
                messages[1]: "poison",
                messages[3]: ValueError("no such table"),
                messages[4]: pulque.Retry("later", delay=7),
            }
        )

    send(*numbered(6))
    async with running(app):
        await until(lambda: len(broker.settled) == 6)

    assert [sequence for _, sequence in broker.acked] == [0, 2, 5]
    assert broker.nacked == [
        ("orders", 1, "poison", -1),
        ("orders", 3, "ValueError: no such table", -1),
        ("orders", 4, "later", 7000),
    ]


async def test_payloads_are_named_by_their_place_and_bad_ones_fail_alone(
    broker: FakeBroker, app: pulque.App, send: Send
) -> None:
    got: list[int] = []

    @app.subscribe_batch("orders", group="g", max_messages=5, max_wait=60)
    def handle(orders: list[Order]) -> None:
        got.extend(order.number for order in orders)
        raise pulque.BatchFailed({2: "the third of the list"})

    send(b'{"number": 0}', b"garbage", b'{"number": 2}', b'{"number": "x"}', b'{"number": 4}')
    async with running(app):
        await until(lambda: len(broker.settled) == 5)

    assert got == [0, 2, 4]
    assert [sequence for _, sequence in broker.acked] == [0, 2]
    reasons = {sequence: reason for _, sequence, reason, _ in broker.nacked}
    assert reasons.keys() == {1, 3, 4}
    assert reasons[1].startswith("PayloadError: the body is no Order")
    assert "Expected `int`, got `str`" in reasons[3]
    assert reasons[4] == "the third of the list"


async def test_a_batch_of_garbage_calls_nobody(
    broker: FakeBroker, app: pulque.App, send: Send
) -> None:
    called = False

    @app.subscribe_batch("orders", group="g", max_messages=2, max_wait=60)
    async def handle(orders: list[Order], messages: list[pulque.ReceivedMessage]) -> None:
        nonlocal called
        called = True

    send(b"garbage", b"more of it")
    async with running(app):
        await until(lambda: len(broker.nacked) == 2)

    assert not called


@pytest.mark.parametrize("which", [7, -1, "no message"])
async def test_naming_what_is_not_there_fails_the_whole_batch(
    broker: FakeBroker, app: pulque.App, send: Send, which: int
) -> None:
    @app.subscribe_batch("orders", group="g", max_messages=2, max_wait=60)
    async def handle(_: list[pulque.ReceivedMessage]) -> None:
        raise pulque.BatchFailed({which: "?"})

    send(b"one", b"two")
    async with running(app):
        await until(lambda: len(broker.nacked) == 2)

    assert all("not in the batch of 2" in reason for _, _, reason, _ in broker.nacked)


async def test_an_error_nacks_all_that_the_handler_did_not_settle(
    broker: FakeBroker, app: pulque.App, send: Send
) -> None:
    @app.subscribe_batch("orders", group="g", max_messages=3, max_wait=60)
    async def handle(messages: list[pulque.ReceivedMessage]) -> None:
        messages[0].ack()
        messages[1].nack("by hand")
        raise ValueError("then it broke")

    send(b"one", b"two", b"three")
    async with running(app):
        await until(lambda: len(broker.settled) == 3)

    assert broker.acked == [("orders", 0)]
    assert [reason for _, _, reason, _ in broker.nacked] == [
        "by hand",
        "ValueError: then it broke",
    ]
