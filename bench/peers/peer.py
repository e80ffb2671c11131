"""What a peer is to the bench: a server it can start, and clients that put load on it."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from bench.measure import Gate

__all__ = ["Clients", "Peer", "Unavailable", "batches"]

_DISTINCT_BODIES = 1000


class Clients(Protocol):
    """The client side of a running peer, in the way its Python users write it.

    Picklable, so that a worker process can take it along; every method opens its own connection.
    ``prepare`` aside, each one is a worker for ``bench.measure.run`` once its numbers are bound.
    """

    def prepare(self) -> None:
        """Make the stream and its group afresh, empty."""

    def produce(self, gate: Gate, *, count: int, size: int, batch: int) -> None:
        """Send so many messages, pipelined; return when every one is confirmed.

        Args:
            gate: Called when connected.
            count: How many messages.
            size: Bytes of each body.
            batch: How many are handed over together, where the client has such a thing.
        """

    def consume(self, gate: Gate, *, count: int) -> int:
        """Take so many messages as a consumer of the group, ack them; bytes of all bodies."""

    def sync_latency(self, gate: Gate, *, count: int, size: int) -> list[float]:
        """Send one at a time, each confirmed before the next; microseconds of each."""


class Peer(Protocol):
    """Another message queue, for comparison.

    Attributes:
        name: As the table shows it.
        rate_hint: Messages per second to expect end to end; runs are made a few seconds long.
    """

    name: str
    rate_hint: int

    def available(self) -> str | None:
        """Install what is missing; the reason if it cannot be had, else nothing."""

    def version(self) -> str:
        """Of the server and of the Python client."""

    def start(self, directory: Path) -> Clients:
        """Start the server with its data in ``directory``; return when it serves."""

    def stop(self) -> None:
        """End what ``start`` started; does nothing if that is nothing."""

    def pids(self) -> list[int]:
        """The server's processes, to measure their CPU and memory."""


@dataclass(frozen=True, slots=True)
class Unavailable:
    """A peer that cannot be had, and why."""

    name: str
    reason: str


def batches(*, count: int, size: int, batch: int) -> Iterator[list[bytes]]:
    """Bodies of ``size`` bytes, ``count`` in all, in lists of ``batch``; the last may be shorter.

    The same messages for every peer: a thousand distinct random bodies, over and over, so that
    making them costs nothing while the clock runs.
    """
    source = random.Random(size)
    pool = itertools.cycle([source.randbytes(size) for _ in range(_DISTINCT_BODIES)])
    return _batches(pool, count, batch)


def _batches(bodies: Iterator[bytes], count: int, batch: int) -> Iterator[list[bytes]]:
    for start in range(0, count, batch):
        yield list(itertools.islice(bodies, min(batch, count - start)))
