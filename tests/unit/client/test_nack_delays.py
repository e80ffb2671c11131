"""A delay that cannot be is refused where it is asked for, not when the broker is told."""

from datetime import timedelta
from typing import Any

import pytest

import pulque
from pulque.errors import UsageError
from tests.unit.client.fake_broker import FakeBroker


@pytest.mark.parametrize(
    ("delay", "delay_ms"),
    [
        (None, -1),
        (0, 0),
        (0.0004, 1),
        (1.5, 1500),
        (timedelta(minutes=1), 60_000),
        (timedelta(0), 0),
        (3600, 3_600_000),
    ],
)
def test_a_delay_is_told_in_milliseconds_and_rounded_up(
    broker: FakeBroker, client: pulque.Client, delay: Any, delay_ms: int
) -> None:
    client.send("orders", b"x")

    with client.consumer("orders", "kitchen") as consumer:
        (message,) = consumer.pull(1)
        message.nack("no", delay=delay)

    assert broker.nacked == [("orders", 0, "no", delay_ms)]


@pytest.mark.parametrize(
    "delay",
    [
        -1,
        -0.001,
        float("nan"),
        float("inf"),
        float("-inf"),
        3600.001,
        10**400,
        timedelta(seconds=-1),
        timedelta(days=999_999_999),
        True,
        "1",
        b"1",
        [1],
    ],
)
def test_a_delay_that_cannot_be_is_refused_and_the_message_is_still_open(
    broker: FakeBroker, client: pulque.Client, delay: Any
) -> None:
    client.send("orders", b"x")

    with client.consumer("orders", "kitchen") as consumer:
        (message,) = consumer.pull(1)
        with pytest.raises(UsageError, match="0 to 3600 seconds are allowed"):
            message.nack("no", delay=delay)
        message.ack()

    assert broker.acked == [("orders", 0)]
    assert broker.nacked == []


def test_a_delay_that_the_broker_no_longer_allows_is_cut_when_it_is_told(
    broker: FakeBroker, client: pulque.Client
) -> None:
    client.send_many("orders", [b"x"] * 2)

    with client.consumer("orders", "kitchen") as consumer:
        messages = consumer.pull(2)
        messages[1].nack("no", delay=3000)
        broker.max_delay_ms = 60_000
        broker.drop_all()
        consumer.pull(1, timeout=0.5)
        messages[0].ack()

    assert broker.nacked == [("orders", 1, "no", 60_000)]
