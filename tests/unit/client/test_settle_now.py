"""``Consumer.settle``: what was acked and nacked is told to the broker now."""

import pytest

import pulque
import pulque.aio
from pulque.errors import UnavailableError
from pulque.testing.broker import InProcessBroker


def numbers(client: pulque.Client) -> dict[str, int]:
    status = client.status()
    return {"settled": status["deliveries_settled"], "nacked": status["deliveries_nacked"]}


def test_the_broker_knows_when_it_returns(pulque_client: pulque.Client) -> None:
    pulque_client.send_many("orders", [b"1", b"2", b"3"])
    with pulque_client.consumer("orders", group="kitchen") as consumer:
        first, second, third = consumer.pull(timeout=10)
        first.ack()
        second.nack("no milk")

        consumer.settle()

        assert numbers(pulque_client) == {"settled": 2, "nacked": 1}
        assert not third.is_abandoned


def test_what_comes_after_an_open_message_waits_for_it(pulque_client: pulque.Client) -> None:
    pulque_client.send_many("orders", [b"1", b"2"])
    with pulque_client.consumer("orders", group="kitchen") as consumer:
        first, second = consumer.pull(timeout=10)
        second.ack()
        consumer.settle()
        assert numbers(pulque_client)["settled"] == 0

        first.ack()
        consumer.settle()
        assert numbers(pulque_client)["settled"] == 2


def test_with_nothing_to_tell_it_returns(pulque_client: pulque.Client) -> None:
    with pulque_client.consumer("orders", group="kitchen") as consumer:
        consumer.settle()


def test_it_survives_a_broker_that_comes_back(
    pulque_broker: InProcessBroker, pulque_client: pulque.Client
) -> None:
    pulque_client.send("orders", b"1")
    with pulque_client.consumer("orders", group="kitchen") as consumer:
        (message,) = consumer.pull(timeout=10)
        pulque_broker.kill()
        message.ack()
        pulque_broker.restart()

        consumer.settle()

        assert numbers(pulque_client)["settled"] == 1


def test_it_says_that_nobody_answers(pulque_broker: InProcessBroker) -> None:
    with pulque.connect(pulque_broker.url, timeout=0.3) as client:
        client.send("orders", b"1")
        consumer = client.consumer("orders", group="kitchen")
        (message,) = consumer.pull(timeout=10)
        pulque_broker.kill()
        message.ack()

        with pytest.raises(UnavailableError):
            consumer.settle(timeout=0.3)


async def test_the_twin_for_asyncio(
    pulque_broker: InProcessBroker, pulque_aio_client: pulque.aio.Client
) -> None:
    await pulque_aio_client.send("orders", b"1")
    async with pulque_aio_client.consumer("orders", group="kitchen") as consumer:
        (message,) = await consumer.pull(timeout=10)
        pulque_broker.kill()
        message.ack()
        with pytest.raises(UnavailableError):
            await consumer.settle(timeout=0.3)
        pulque_broker.restart()

        await consumer.settle()

        assert (await pulque_aio_client.status())["deliveries_settled"] == 1
