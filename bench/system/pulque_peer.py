"""Pulque as a peer among peers: its broker, and clients in the way its users write them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from typing import Literal

import pulque
from bench.broker import BrokerProcess
from bench.measure import Gate
from bench.peers.peer import Clients, batches

__all__ = ["PulqueClients", "PulquePeer", "check_confirmed"]

_GROUP = "group"
_CONSUMER = "bench"


def check_confirmed(sent: list[pulque.PendingSends]) -> None:
    """Raise what went wrong with any of these messages; each must have its outcome.

    Messages of a batch share their outcome, so that looking at each batch is enough.
    """
    for some in sent:
        for batch in some.batches:
            assert batch.is_done
            if batch.error is not None:
                raise batch.error


@dataclass(slots=True)
class PulqueClients:
    """Clients of a broker. Each ``prepare`` goes on to the next subject, which is empty.

    Attributes:
        url: Where the broker is.
        acks: When a send counts as confirmed.
        one_by_one: Whether the producer is handed single messages instead of lists.
        subjects: How many subjects were prepared.
    """

    url: str
    acks: Literal["disk", "memory"]
    one_by_one: bool
    subjects: int = 0

    @property
    def subject(self) -> str:
        """The subject of the next run."""
        return f"bench-{self.subjects}"

    def prepare(self) -> None:
        """Go on to a new subject; its group is new with it."""
        self.subjects += 1

    def produce(self, gate: Gate, *, count: int, size: int, batch: int) -> None:
        """Hand bodies to a producer; return when each one is confirmed."""
        bodies = batches(count=count, size=size, batch=batch)
        subject = self.subject
        with self._connected() as client, client.producer(max_batch=batch) as producer:
            gate()
            if self.one_by_one:
                send = producer.send
                promises = [send(subject, body) for some in bodies for body in some]
                producer.flush()
                for promise in promises:
                    if (error := promise.exception()) is not None:
                        raise error
            else:
                sent = [producer.send_many(subject, some) for some in bodies]
                producer.flush()
                check_confirmed(sent)

    def consume(self, gate: Gate, *, count: int) -> int:
        """Iterate over a consumer, look at each body, ack each message."""
        total_bytes = 0
        left = count
        with (
            self._connected() as client,
            client.consumer(self.subject, group=_GROUP, consumer_id=_CONSUMER) as consumer,
        ):
            gate()
            for message in consumer:
                total_bytes += len(message.body)
                message.ack()
                left -= 1
                if not left:
                    break
        # Closing the consumer settled the last messages.
        return total_bytes

    def sync_latency(self, gate: Gate, *, count: int, size: int) -> list[float]:
        """One ``client.send`` at a time."""
        times_us = []
        subject = self.subject
        with self._connected() as client:
            client.send(subject, b"first")
            gate()
            for (body,) in batches(count=count, size=size, batch=1):
                begin = perf_counter()
                client.send(subject, body)
                times_us.append(1e6 * (perf_counter() - begin))
        return times_us

    @contextmanager
    def _connected(self) -> Iterator[pulque.Client]:
        with pulque.connect(self.url, name="bench", acks=self.acks) as client:
            yield client


class PulquePeer:
    """This broker with its own blocking client."""

    def __init__(
        self, acks: Literal["disk", "memory"], rate_hint: int, *, one_by_one: bool = False
    ) -> None:
        self.name = f"Pulque, acks={acks}" + (", one by one" if one_by_one else "")
        self.rate_hint = rate_hint
        self._acks = acks
        self._one_by_one = one_by_one
        self._broker: BrokerProcess | None = None

    def available(self) -> str | None:
        """It is always here."""
        return None

    def version(self) -> str:
        """Of broker and client, which are one."""
        return f"pulque {pulque.__version__}"

    def start(self, directory: Path) -> Clients:
        """Start a broker with its default settings."""
        self._broker = BrokerProcess(directory / "broker")
        return PulqueClients(self._broker.url, self._acks, self._one_by_one)

    def stop(self) -> None:
        """End it."""
        if self._broker is not None:
            self._broker.stop()
            self._broker = None

    def pids(self) -> list[int]:
        """The one process."""
        return [] if self._broker is None else [self._broker.pid]
