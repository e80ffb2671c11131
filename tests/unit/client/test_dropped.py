"""A client that is dropped without ``close`` is closed by itself, with a ``ResourceWarning``."""

import gc
import threading
import time
from collections.abc import Callable

import pytest

import pulque
from pulque.testing.broker import InProcessBroker

PATIENCE = 20.0


def drop(make: Callable[[str], None], url: str) -> None:
    make(url)
    gc.collect()


def drop_client(url: str) -> None:
    pulque.connect(url, name="shop").send("orders", b"one")


def drop_producer(url: str) -> None:
    pulque.connect(url, name="shop").producer(linger=60).send("orders", b"one")


def drop_consumer(url: str) -> None:
    client = pulque.connect(url, name="shop")
    client.send("orders", b"one")
    for message in client.consumer("orders", group="kitchen").pull(1, timeout=PATIENCE):
        message.ack()


def drop_iterator(url: str) -> None:
    client = pulque.connect(url, name="shop")
    client.send("orders", b"one")
    for message in client.consumer("orders", group="kitchen"):
        message.ack()
        break


def drop_consumer_in_order(url: str) -> None:
    client = pulque.connect(url, name="shop")
    client.send("orders", b"one")
    consumer = client.consumer("orders", group="kitchen", ordered=True)
    for message in consumer.pull(1, timeout=PATIENCE):
        message.ack()


@pytest.mark.parametrize(
    "make",
    [drop_client, drop_producer, drop_consumer, drop_iterator, drop_consumer_in_order],
    ids=lambda each: each.__name__,
)
def test_a_dropped_client_warns_and_leaves_no_thread_and_no_socket(
    pulque_broker: InProcessBroker, make: Callable[[str], None]
) -> None:
    with pulque.connect(pulque_broker.url) as other:
        other.send("warm", b"up")  # whatever the broker starts when it is first used
    before = client_threads(), connections(pulque_broker)

    with pytest.warns(ResourceWarning, match="unclosed client shop"):
        drop(make, pulque_broker.url)

    wait_until(lambda: (client_threads(), connections(pulque_broker)) == before)
    with pulque.connect(pulque_broker.url) as other:
        assert [each.body for each in other.read("orders")] == [b"one"]
        if "consumer" in make.__name__ or "iterator" in make.__name__:
            (state,) = other.groups("orders")
            assert state.lag == 0, "what was acked was not settled"


def test_a_consumer_keeps_its_client(pulque_broker: InProcessBroker) -> None:
    def consume(url: str) -> None:
        consumer = pulque.connect(url).consumer("orders", group="kitchen")
        with pulque.connect(url) as other:
            other.send("orders", b"one")
        gc.collect()
        (message,) = consumer.pull(1, timeout=PATIENCE)
        found.append(message.body)

    found: list[bytes] = []
    with pytest.warns(ResourceWarning, match="unclosed client"):
        drop(consume, pulque_broker.url)
    assert found == [b"one"]


def client_threads() -> int:
    parts = ("attendant", "beats", "closer", "keeper", "opener", "producer", "routes")
    names = {f"pulque-{part}" for part in parts}
    return sum(each.name in names for each in threading.enumerate())


def connections(broker: InProcessBroker) -> int:
    with pulque.connect(broker.url) as client:
        return int(client.status()["connections"])


def wait_until(condition: Callable[[], bool]) -> None:
    deadline, clock = time.monotonic() + PATIENCE, threading.Event()
    while not condition():
        assert time.monotonic() < deadline
        clock.wait(0.01)
