"""A client that is dropped without ``close`` is closed by itself, with a ``ResourceWarning``."""

import asyncio
import gc
import threading
import time
import warnings
import weakref
from collections.abc import Callable

import pytest

import pulque
from pulque import aio
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


def find(client: pulque.Client) -> Callable[[], object]:
    messages = client.messages
    return lambda: [each.body for each in messages.find("orders")]


def look_at_dead_letters(client: pulque.Client) -> Callable[[], object]:
    dead = client.dead("orders", "kitchen")
    return lambda: [each.body for each in dead.list()]


def look_at_delayed(client: pulque.Client) -> Callable[[], object]:
    delayed = client.delayed("orders")
    return lambda: [each.subject for each in delayed.next()]


def tail(client: pulque.Client) -> Callable[[], object]:
    messages = client.tail("orders", start="earliest")
    return lambda: next(messages).body


def pull(client: pulque.Client) -> Callable[[], object]:
    consumer = client.consumer("orders", group="kitchen")
    return lambda: [each.body for each in consumer.pull(1, timeout=PATIENCE)]


def pull_in_order(client: pulque.Client) -> Callable[[], object]:
    consumer = client.consumer("orders", group="kitchen", ordered=True)
    return lambda: [each.body for each in consumer.pull(1, timeout=PATIENCE)]


def iterate(client: pulque.Client) -> Callable[[], object]:
    messages = iter(client.consumer("orders", group="kitchen"))
    return lambda: next(messages).body


def send(client: pulque.Client) -> Callable[[], object]:
    producer = client.producer()
    return lambda: producer.send("orders", b"two").result(PATIENCE).sequence


def wait_for_outcome(client: pulque.Client) -> Callable[[], object]:
    pending = client.producer(linger=60).send("orders", b"two")
    return lambda: pending.result(PATIENCE).sequence


@pytest.mark.parametrize(
    ("make", "found"),
    [
        (find, [b"one"]),
        (look_at_dead_letters, []),
        (look_at_delayed, []),
        (tail, b"one"),
        (pull, [b"one"]),
        (pull_in_order, [b"one"]),
        (iterate, b"one"),
        (send, 1),
        (wait_for_outcome, 1),
    ],
)
def test_what_a_client_hands_out_works_while_it_is_held(
    pulque_broker: InProcessBroker,
    make: Callable[[pulque.Client], Callable[[], object]],
    found: object,
) -> None:
    """Only what is held counts: a program need not keep the client beside it."""
    with pulque.connect(pulque_broker.url) as other:
        other.send("orders", b"one")

    def use(url: str) -> None:
        act = make(pulque.connect(url))
        gc.collect()
        assert act() == found

    with pytest.warns(ResourceWarning, match="unclosed client"):
        drop(use, pulque_broker.url)


async def test_what_an_asyncio_client_finds_messages_with_keeps_the_client(
    pulque_broker: InProcessBroker, pulque_client: pulque.Client
) -> None:
    pulque_client.send("orders", b"one")
    client = aio.connect(pulque_broker.url)
    known, messages = weakref.ref(client), client.messages
    del client
    gc.collect()

    assert [each.body for each in await messages.find("orders")] == [b"one"]
    kept = known()
    assert kept is not None
    await kept.close()


def test_a_dropped_asyncio_client_ends_with_its_event_loop(
    pulque_broker: InProcessBroker,
) -> None:
    async def use() -> None:
        client = await aio.connect(pulque_broker.url, name="shop")
        await client.send("orders", b"one")
        for message in await client.consumer("orders", group="kitchen").pull(1, timeout=PATIENCE):
            message.ack()
        assert [each.body for each in await client.read("orders")] == [b"one"]

    with pulque.connect(pulque_broker.url) as other:
        other.send("warm", b"up")
    before = connections(pulque_broker)

    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        asyncio.run(use())
        gc.collect()

    assert any("unclosed transport" in str(each.message) for each in warned)
    wait_until(lambda: connections(pulque_broker) == before)


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
