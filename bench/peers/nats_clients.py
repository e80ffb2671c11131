"""Load on NATS JetStream: many sends in flight, a durable queue subscription, an ack each.

Of the client's JetStream calls these were the fastest in single runs with nats-py 2.16. ``gather``
over ``publish`` had about half the rate of ``publish_async``. A pull consumer's ``fetch`` costs a
timer and a task per message, and had about a fifth of the rate of a subscription with a callback,
with ack-all hardly more. uvloop helped ``fetch`` and little else.

Faster than any of them, and not used: a plain ``publish`` with a reply subject of one's own and a
callback that counts the confirmations, about twice the rate of ``publish_async``. It goes round
the JetStream interface, and does not tell which message a refusal belongs to.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from time import perf_counter
from typing import Any

import nats
from nats.js.api import AckPolicy, ConsumerConfig, StorageType, StreamConfig

from bench.measure import Gate
from bench.peers.peer import batches

__all__ = ["NatsClients"]

_STREAM = "bench"
_SUBJECT = "bench.messages"
_GROUP = "group"
_SENDS_IN_FLIGHT = 4000
_ACKS_PENDING = 5000
_CONSUME_LIMIT_S = 60


@dataclass(frozen=True, slots=True)
class NatsClients:
    """Clients of the NATS server on this loopback port."""

    port: int

    def prepare(self) -> None:
        """Delete the stream with its consumers, and make it again."""
        asyncio.run(self._prepare())

    def produce(self, gate: Gate, *, count: int, size: int, batch: int) -> None:
        """Send with a window of unconfirmed messages; wait for the confirmation of each."""
        asyncio.run(self._produce(gate, count=count, size=size, batch=batch))

    def consume(self, gate: Gate, *, count: int) -> int:
        """Take them in a callback, as one of a durable group, and ack each."""
        return asyncio.run(self._consume(gate, count))

    def sync_latency(self, gate: Gate, *, count: int, size: int) -> list[float]:
        """One at a time, awaited."""
        return asyncio.run(self._sync_latency(gate, count, size))

    async def _prepare(self) -> None:
        async with self._connected() as stream:
            if await _exists(stream):
                await stream.delete_stream(_STREAM)
            await stream.add_stream(
                StreamConfig(name=_STREAM, subjects=[_SUBJECT], storage=StorageType.FILE)
            )

    async def _produce(self, gate: Gate, *, count: int, size: int, batch: int) -> None:
        bodies = batches(count=count, size=size, batch=batch)
        async with self._connected() as stream:
            gate()
            confirmations = [
                await stream.publish_async(_SUBJECT, body) for some in bodies for body in some
            ]
            await stream.publish_async_completed()
            for confirmation in confirmations:
                confirmation.result()

    async def _consume(self, gate: Gate, count: int) -> int:
        tally = _Tally(count)
        async with self._connected() as stream, asyncio.timeout(_CONSUME_LIMIT_S):
            gate()
            await stream.subscribe(
                _SUBJECT,
                queue=_GROUP,
                stream=_STREAM,
                cb=tally.take,
                manual_ack=True,
                config=ConsumerConfig(
                    ack_policy=AckPolicy.EXPLICIT, max_ack_pending=_ACKS_PENDING
                ),
            )
            await tally.complete.wait()
        return tally.total_bytes

    async def _sync_latency(self, gate: Gate, count: int, size: int) -> list[float]:
        times_us = []
        async with self._connected() as stream:
            gate()
            for (body,) in batches(count=count, size=size, batch=1):
                begin = perf_counter()
                await stream.publish(_SUBJECT, body)
                times_us.append(1e6 * (perf_counter() - begin))
        return times_us

    @asynccontextmanager
    async def _connected(self) -> AsyncIterator[Any]:
        client: Any = await nats.connect(f"nats://127.0.0.1:{self.port}")
        try:
            yield client.jetstream(publish_async_max_pending=_SENDS_IN_FLIGHT)
            # The answer to a flush comes after all that was sent before it, acks included.
            await client.flush()
        finally:
            await client.close()


class _Tally:
    """Counts what a subscription is given, and acks it."""

    def __init__(self, count: int) -> None:
        self.left = count
        self.total_bytes = 0
        self.complete = asyncio.Event()

    async def take(self, message: Any) -> None:
        self.total_bytes += len(message.data)
        await message.ack()
        self.left -= 1
        if not self.left:
            self.complete.set()


async def _exists(stream: Any) -> bool:
    return _STREAM in [info.config.name for info in await stream.streams_info()]
