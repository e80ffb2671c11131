"""Handlers that fail in every way, on connections that break: each message is done, and once."""

import asyncio
import contextlib
import random
import threading
import time
from collections import defaultdict

import pulque
from pulque.testing.broker import InProcessBroker
from tests.unit.app.conftest import until

COUNT = 300
AT_ONCE = pulque.RetryPolicy([0], jitter=0)


class Work:
    """Decides how an attempt ends, and remembers how all of them ended."""

    def __init__(self, seed: int, ways: tuple[str, ...]) -> None:
        self._seed = seed
        self._ways = ways
        self.attempts: defaultdict[bytes, list[int]] = defaultdict(list)
        self.done: defaultdict[bytes, int] = defaultdict(int)
        self._lock = threading.Lock()

    def way(self, message: pulque.ReceivedMessage) -> str:
        """Return how this attempt is to end; the fifth ends well."""
        draw = random.Random(f"{self._seed} {message.body!r} {message.attempt}")
        way = "well" if message.attempt >= 5 else draw.choice(self._ways)
        with self._lock:
            self.attempts[message.body].append(message.attempt)
        return way

    def finish(self, message: pulque.ReceivedMessage) -> None:
        with self._lock:
            self.done[message.body] += 1


async def storm(app: pulque.App, work: Work, broker: InProcessBroker, seed: int) -> None:
    """Run it to the end, with connections that break now and then."""
    draw = random.Random(seed)
    async with app:
        for number in range(COUNT):
            await app.send("orders", b"%d" % number)
            if draw.random() < 0.02:
                broker.disconnect_all()
        for _ in range(5):
            await asyncio.sleep(draw.random() * 0.05)
            broker.disconnect_all()
        await until(lambda: len(work.done) == COUNT)
    expected = {b"%d" % number for number in range(COUNT)}
    assert set(work.done) == expected
    assert {body: count for body, count in work.done.items() if count != 1} == {}
    for seen in work.attempts.values():
        assert seen == list(range(1, len(seen) + 1))
    assert await asyncio.to_thread(left, broker) == []


def left(broker: InProcessBroker) -> list[bytes]:
    with (
        pulque.connect(broker.url, name="looks") as client,
        client.consumer("orders", "g", consumer_id="looks") as consumer,
    ):
        return [message.body for message in consumer.pull(timeout=0.3)]


async def test_async_calls(pulque_broker: InProcessBroker, seed: int) -> None:
    work = Work(seed, ("well", "well", "raises", "hangs", "nacks", "retries"))
    app = pulque.App()

    @app.subscribe("orders", group="g", concurrency=16, timeout=0.5, retry=AT_ONCE)
    async def handle(message: pulque.ReceivedMessage) -> None:
        match work.way(message):
            case "raises":
                raise ValueError("by chance")
            case "retries":
                raise pulque.Retry("by chance", delay=0)
            case "nacks":
                message.nack("by chance", delay=0)
                return
            case "hangs" if random.Random(message.body).random() < 0.1:
                await asyncio.sleep(60)
            case _:
                await asyncio.sleep(0.002)
        work.finish(message)

    await storm(app, work, pulque_broker, seed)


async def test_calls_in_threads_within_middleware(
    pulque_broker: InProcessBroker, seed: int
) -> None:
    work = Work(seed, ("well", "well", "raises", "swallowed"))
    app = pulque.App()

    @app.middleware
    async def swallow(message: pulque.ReceivedMessage, call_next) -> None:  # type: ignore[no-untyped-def]
        with contextlib.suppress(KeyError):
            await call_next()

    @app.subscribe("orders", group="g", concurrency=8, retry=AT_ONCE)
    def handle(message: pulque.ReceivedMessage) -> None:
        match work.way(message):
            case "raises":
                raise ValueError("by chance")
            case "swallowed":
                work.finish(message)
                raise KeyError("by chance")
            case _:
                time.sleep(0.001)
        work.finish(message)

    await storm(app, work, pulque_broker, seed)


async def test_batches(pulque_broker: InProcessBroker, seed: int) -> None:
    work = Work(seed, ("well", "well", "well", "fails"))
    app = pulque.App()

    @app.subscribe_batch(
        "orders", group="g", max_messages=20, max_wait=0.01, concurrency=3, retry=AT_ONCE
    )
    async def handle(messages: list[pulque.ReceivedMessage]) -> None:
        failed: dict[pulque.ReceivedMessage | int, str | BaseException] = {}
        for place, message in enumerate(messages):
            if work.way(message) == "fails":
                failed[place if place % 2 else message] = ValueError("by chance")
            else:
                work.finish(message)
        await asyncio.sleep(0.002)
        if failed:
            raise pulque.BatchFailed(failed)

    await storm(app, work, pulque_broker, seed)


async def test_manual_acks(pulque_broker: InProcessBroker, seed: int) -> None:
    work = Work(seed, ("well", "well", "raises", "nacks"))
    draw = random.Random(seed)
    app = pulque.App()

    @app.subscribe("orders", group="g", concurrency=4, ack="manual", retry=AT_ONCE)
    def handle(message: pulque.ReceivedMessage) -> None:
        match work.way(message):
            case "raises":
                raise ValueError("by chance")
            case "nacks":
                threading.Timer(draw.random() * 0.02, message.nack).start()
            case _:
                work.finish(message)
                threading.Timer(draw.random() * 0.02, message.ack).start()

    await storm(app, work, pulque_broker, seed)


async def test_what_is_rejected_is_a_dead_letter_at_once(pulque_broker: InProcessBroker) -> None:
    app = pulque.App()
    attempts: list[tuple[bytes, int]] = []

    @app.subscribe("orders", group="g", retry=AT_ONCE)
    async def handle(message: pulque.ReceivedMessage) -> None:
        attempts.append((message.body, message.attempt))
        if message.body == b"bad":
            raise pulque.Reject("there is no such order")
        if message.body == b"worse":
            message.reject("nor this one")

    async with app:
        for body in (b"bad", b"worse", b"good"):
            await app.send("orders", body)
        await until(lambda: len(attempts) == 3)
        dead: list[pulque.Message] = []
        while len(dead) < 2:
            dead = await app.client.read("orders", partition="%dead%orders%g", timeout=5)
        # Attempts that there should not be would come before this one.
        await app.send("orders", b"last")
        await until(lambda: (b"last", 1) in attempts)

    assert attempts == [(b"bad", 1), (b"worse", 1), (b"good", 1), (b"last", 1)]
    assert [message.body for message in dead] == [b"bad", b"worse"]
    assert dead[0].headers["pulque.dead"] == "rejected"
    assert [message.headers["pulque.reason"] for message in dead] == [
        "there is no such order",
        "nor this one",
    ]
