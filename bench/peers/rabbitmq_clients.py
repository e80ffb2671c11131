"""Load on RabbitMQ: sends with a window of confirms, deliveries with a prefetch and joint acks.

The producer and the consumer run on pika's ``SelectConnection``, in the way of pika's own example
of an asynchronous publisher: its ``BlockingConnection`` waits for each confirmation.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import chain, islice
from time import perf_counter
from typing import Any

import pika

from bench.measure import Gate
from bench.peers.peer import batches

__all__ = ["RabbitClients"]

_QUEUE = "bench"
_SENDS_IN_FLIGHT = 2000
_PREFETCH = 2000
_ACK_EVERY = 500
_ARGUMENTS: dict[str, dict[str, Any]] = {
    "quorum": {"x-queue-type": "quorum"},
    # Against the first version, in two runs each: sends faster and confirms sooner, consumes a
    # little slower, end to end the same.
    "classic": {"x-queue-type": "classic", "x-queue-version": 2},
}


@dataclass(frozen=True, slots=True)
class RabbitClients:
    """Clients of the RabbitMQ server on this loopback port."""

    port: int
    kind: str

    def prepare(self) -> None:
        """Delete the queue and declare it."""
        with pika.BlockingConnection(self._parameters()) as connection:
            channel: Any = connection.channel()
            channel.queue_delete(_QUEUE)
            channel.queue_declare(_QUEUE, durable=True, arguments=_ARGUMENTS[self.kind])

    def produce(self, gate: Gate, *, count: int, size: int, batch: int) -> None:
        """Send with a window of unconfirmed messages; end with the last confirmation."""
        bodies = chain.from_iterable(batches(count=count, size=size, batch=batch))
        _serve(self._parameters(), lambda channel: _Producer(channel, bodies, count).begin(gate))

    def consume(self, gate: Gate, *, count: int) -> int:
        """Take deliveries in a callback; ack some hundreds together."""
        consumers: list[_Consumer] = []

        def begin(channel: Any) -> None:
            consumers.append(_Consumer(channel, count))
            consumers[0].begin(gate)

        _serve(self._parameters(), begin)
        return consumers[0].total_bytes

    def sync_latency(self, gate: Gate, *, count: int, size: int) -> list[float]:
        """One at a time: the blocking channel returns when the message is confirmed."""
        times_us = []
        with pika.BlockingConnection(self._parameters()) as connection:
            channel: Any = connection.channel()
            channel.confirm_delivery()
            persistent = _persistent()
            gate()
            for (body,) in batches(count=count, size=size, batch=1):
                begin = perf_counter()
                channel.basic_publish("", _QUEUE, body, persistent)
                times_us.append(1e6 * (perf_counter() - begin))
        return times_us

    def _parameters(self) -> Any:
        return pika.ConnectionParameters("127.0.0.1", self.port)


class _Producer:
    """Keeps the window full, and closes the connection when all is confirmed."""

    def __init__(self, channel: Any, bodies: Iterator[bytes], count: int) -> None:
        self._channel = channel
        self._bodies = bodies
        self._count = count
        self._sent = 0
        self._confirmed = _Confirmed()
        self._persistent = _persistent()

    def begin(self, gate: Gate) -> None:
        def on_ready(_frame: Any) -> None:
            gate()
            self._fill()

        self._channel.confirm_delivery(self._on_confirm, callback=on_ready)

    def _fill(self) -> None:
        room = _SENDS_IN_FLIGHT - (self._sent - self._confirmed.count)
        send, persistent = self._channel.basic_publish, self._persistent
        for body in islice(self._bodies, room):
            send("", _QUEUE, body, persistent)
            self._sent += 1

    def _on_confirm(self, frame: Any) -> None:
        method = frame.method
        if method.NAME != "Basic.Ack":
            raise RuntimeError(f"message {method.delivery_tag} was refused")
        self._confirmed.add(method.delivery_tag, multiple=method.multiple)
        if self._confirmed.count == self._count:
            self._channel.connection.close()
        elif self._sent - self._confirmed.count <= _SENDS_IN_FLIGHT // 2:
            self._fill()


class _Confirmed:
    """Which messages are confirmed: all up to one, and some that came early."""

    def __init__(self) -> None:
        self._all_up_to = 0
        self._early: set[int] = set()

    @property
    def count(self) -> int:
        return self._all_up_to + len(self._early)

    def add(self, tag: int, *, multiple: bool) -> None:
        if multiple:
            self._all_up_to = max(self._all_up_to, tag)
            self._early = {early for early in self._early if early > self._all_up_to}
        else:
            self._early.add(tag)
        while self._all_up_to + 1 in self._early:
            self._all_up_to += 1
            self._early.remove(self._all_up_to)


class _Consumer:
    """Counts deliveries, acks them in groups, and closes the connection after the last."""

    def __init__(self, channel: Any, count: int) -> None:
        self._channel = channel
        self._left = count
        self.total_bytes = 0

    def begin(self, gate: Gate) -> None:
        def on_ready(_frame: Any) -> None:
            gate()
            self._channel.basic_consume(_QUEUE, self._on_delivery)

        self._channel.basic_qos(prefetch_count=_PREFETCH, callback=on_ready)

    def _on_delivery(self, channel: Any, method: Any, _properties: Any, body: bytes) -> None:
        self.total_bytes += len(body)
        self._left -= 1
        if self._left % _ACK_EVERY == 0:
            channel.basic_ack(method.delivery_tag, multiple=True)
            if self._left == 0:
                channel.connection.close()


def _persistent() -> Any:
    return pika.BasicProperties(delivery_mode=2)


def _serve(parameters: Any, begin: Callable[[Any], None]) -> None:
    """Open a connection and a channel, hand it to ``begin``, and run until it is closed."""
    failures: list[BaseException] = []

    def on_open(connection: Any) -> None:
        connection.channel(on_open_callback=begin)

    def on_closed(connection: Any, reason: BaseException) -> None:
        if not isinstance(reason, pika.exceptions.ConnectionClosedByClient):
            failures.append(reason)
        connection.ioloop.stop()

    connection: Any = pika.SelectConnection(
        parameters,
        on_open_callback=on_open,
        on_open_error_callback=on_closed,
        on_close_callback=on_closed,
    )
    connection.ioloop.start()
    if failures:
        raise failures[0]
