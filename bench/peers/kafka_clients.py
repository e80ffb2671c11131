"""Load on Kafka: sends with a delivery callback each, reads of many, a commit per read.

``produce_batch`` needs a little less CPU than ``produce`` in a loop. A larger send buffer was
slower in two runs of two; a smaller ``batch.size`` was slower once and faster once, so it stays as
it is.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from time import perf_counter
from typing import Any

from confluent_kafka import Consumer, KafkaException, Producer
from confluent_kafka.admin import AdminClient
from confluent_kafka.cimpl import NewTopic

from bench.measure import Gate
from bench.peers.peer import batches

__all__ = ["KafkaClients"]

_TOPIC = "bench"
_LIMIT_S = 30.0
_CONSUME_COUNT = 1000
_SENDS_IN_FLIGHT = 90_000  # a little below the default size of the client's buffer


@dataclass(frozen=True, slots=True)
class KafkaClients:
    """Clients of the Kafka broker on this loopback port."""

    port: int

    def wait_until_ready(self) -> None:
        """Return when the broker answers; its port listens a little before."""
        self._admin().list_topics(timeout=_LIMIT_S)

    def prepare(self) -> None:
        """Delete the topic and the group, and make the topic of one partition."""
        admin = self._admin()
        if _TOPIC in admin.list_topics(timeout=_LIMIT_S).topics:
            admin.delete_topics([_TOPIC])[_TOPIC].result(_LIMIT_S)
            _wait_until_gone(admin)
        admin.create_topics([NewTopic(_TOPIC, 1, 1)])[_TOPIC].result(_LIMIT_S)

    def produce(self, gate: Gate, *, count: int, size: int, batch: int) -> None:
        """Send with a callback for every message; return when each was called without error."""
        producer = self._producer(linger_ms=5)
        tally = _Tally()
        gate()
        for some in batches(count=count, size=size, batch=batch):
            while len(producer) > _SENDS_IN_FLIGHT:
                producer.poll(0.01)
            messages = [{"value": body} for body in some]
            if producer.produce_batch(_TOPIC, messages, on_delivery=tally.confirm) != len(some):
                raise RuntimeError("the client did not take all messages")
            producer.poll(0)
        producer.flush(_LIMIT_S)
        if tally.confirmed != count:
            raise TimeoutError(f"{count - tally.confirmed} messages were not confirmed")

    def consume(self, gate: Gate, *, count: int) -> int:
        """Read up to a thousand, and commit what was read."""
        consumer, messages = self._joined_consumer()
        gate()
        taken = total_bytes = 0
        while True:
            for message in messages:
                total_bytes += len(_body(message))
            taken += len(messages)
            if messages:
                consumer.commit(message=messages[-1], asynchronous=taken < count)
            if taken == count:
                return total_bytes
            messages = consumer.consume(min(_CONSUME_COUNT, count - taken), timeout=_LIMIT_S)
            if not messages:
                raise TimeoutError(f"{count - taken} messages short")

    def sync_latency(self, gate: Gate, *, count: int, size: int) -> list[float]:
        """One at a time, without waiting for company."""
        times_us = []
        producer = self._producer(linger_ms=0)
        tally = _Tally()
        gate()
        for (body,) in batches(count=count, size=size, batch=1):
            begin = perf_counter()
            producer.produce(_TOPIC, body, on_delivery=tally.confirm)
            producer.flush(_LIMIT_S)
            times_us.append(1e6 * (perf_counter() - begin))
        return times_us

    def _admin(self) -> Any:
        return AdminClient(self._settings())

    def _producer(self, *, linger_ms: int) -> Any:
        producer: Any = Producer({**self._settings(), "acks": "all", "linger.ms": linger_ms})
        producer.list_topics(_TOPIC, timeout=_LIMIT_S)
        return producer

    def _joined_consumer(self) -> tuple[Any, list[Any]]:
        """A consumer that has its partition and its place in it, and what it was given by then.

        Finding the place takes it some tenths of a second, which are not the broker's rate. It
        reads ahead meanwhile (up to 100,000 messages), which is to Kafka's advantage.
        """
        consumer: Any = Consumer(
            {
                **self._settings(),
                "group.id": f"group-{time.time_ns()}",
                "auto.offset.reset": "earliest",
                "enable.auto.commit": False,
                # By default a full buffer stops fetching for a whole second.
                "fetch.queue.backoff.ms": 10,
            }
        )
        consumer.subscribe([_TOPIC])
        deadline = time.monotonic() + _LIMIT_S
        messages = consumer.consume(1, timeout=0.05)
        while not consumer.assignment():
            if time.monotonic() > deadline:
                raise TimeoutError("the group gave out no partition")
            messages += consumer.consume(1, timeout=0.05)
        return consumer, messages or consumer.consume(1, timeout=0.5)

    def _settings(self) -> dict[str, Any]:
        return {"bootstrap.servers": f"127.0.0.1:{self.port}", "log_level": 4}


class _Tally:
    """Counts confirmations."""

    def __init__(self) -> None:
        self.confirmed = 0

    def confirm(self, error: Any, _message: Any) -> None:
        if error is not None:
            raise KafkaException(error)
        self.confirmed += 1


def _body(message: Any) -> bytes:
    if message.error() is not None:
        raise KafkaException(message.error())
    value: bytes = message.value()
    return value


def _wait_until_gone(admin: Any) -> None:
    deadline = time.monotonic() + _LIMIT_S
    while _TOPIC in admin.list_topics(timeout=_LIMIT_S).topics:
        if time.monotonic() > deadline:
            raise TimeoutError("the topic is still there")
        time.sleep(0.1)
