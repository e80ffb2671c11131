"""Load on Redis Streams: XADD in pipelines, XREADGROUP and XACK in batches."""

from __future__ import annotations

from dataclasses import dataclass
from time import perf_counter
from typing import Any

import redis

from bench.measure import Gate
from bench.peers.peer import batches

__all__ = ["RedisClients"]

_STREAM = "bench"
_GROUP = "group"
_FIELD = b"body"
_READ_COUNT = 1000
_BLOCK_MS = 5000


@dataclass(frozen=True, slots=True)
class RedisClients:
    """Clients of the Redis server on this loopback port."""

    port: int

    def prepare(self) -> None:
        """Delete the stream, and make its group."""
        with self._connect() as client:
            client.delete(_STREAM)
            client.xgroup_create(_STREAM, _GROUP, id="0", mkstream=True)

    def produce(self, gate: Gate, *, count: int, size: int, batch: int) -> None:
        """XADD in pipelines of ``batch``; the answer of each XADD is its confirmation."""
        bodies = batches(count=count, size=size, batch=batch)
        with self._connect() as client:
            client.ping()
            gate()
            for some in bodies:
                with client.pipeline(transaction=False) as pipeline:
                    for body in some:
                        pipeline.xadd(_STREAM, {_FIELD: body})
                    pipeline.execute()

    def consume(self, gate: Gate, *, count: int) -> int:
        """XREADGROUP up to a thousand, and one XACK for all of them."""
        taken = total_bytes = 0
        with self._connect() as client:
            client.ping()
            gate()
            while taken < count:
                answer = client.xreadgroup(
                    _GROUP, "consumer", {_STREAM: ">"}, count=_READ_COUNT, block=_BLOCK_MS
                )
                ids = []
                for message_id, fields in _entries(answer):
                    total_bytes += len(fields[_FIELD])
                    ids.append(message_id)
                if not ids:
                    raise TimeoutError(f"{count - taken} messages short")
                client.xack(_STREAM, _GROUP, *ids)
                taken += len(ids)
        return total_bytes

    def sync_latency(self, gate: Gate, *, count: int, size: int) -> list[float]:
        """One XADD at a time."""
        times_us = []
        with self._connect() as client:
            client.ping()
            gate()
            for (body,) in batches(count=count, size=size, batch=1):
                begin = perf_counter()
                client.xadd(_STREAM, {_FIELD: body})
                times_us.append(1e6 * (perf_counter() - begin))
        return times_us

    def _connect(self) -> Any:
        return redis.Redis(host="127.0.0.1", port=self.port, protocol=3)


def _entries(answer: Any) -> Any:
    """The (id, fields) pairs of the one stream asked for."""
    return next(iter(answer.values()))[0] if answer else []
