"""Who is connected, since when, from where, and what its consumers hold."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import islice

from pulque.clock import Clock
from pulque.errors import InvalidRequestError
from pulque.model.names import (
    ConsumerId,
    Group,
    PartitionName,
    Pattern,
    Subject,
    patterns_of,
    subject_of,
)
from pulque.net.server import AcceptedConnection
from pulque.rules.consumption import Consumption
from pulque.storage.logs.partitions import Partitions
from pulque.wire.clients import ConnectedClient, ConnectedConsumer
from pulque.wire.requests import Clients, Pull
from pulque.wire.responses import ClientsListed

__all__ = ["ClientTable"]

_MOST_CLIENTS = 1000
_MOST_ROWS = 1000
"""Consumers and their subjects of one connection; what comes after them is not listed."""
_MOST_VISITS = 50_000
"""Subscriptions that one page may look at; then it ends, and another one follows."""

_Key = tuple[Group, ConsumerId]


@dataclass(slots=True)
class _Client:
    """One connection."""

    connection: AcceptedConnection
    name: str
    connected_at_ms: int
    consumers: dict[_Key, dict[Pattern, None]] = field(default_factory=dict)
    """What is pulled over it: for whom, and from which subjects and patterns."""

    @property
    def is_full(self) -> bool:
        """Whether no more is taken note of."""
        return sum(map(len, self.consumers.values())) >= _MOST_ROWS


class ClientTable:
    """All connections that shook hands, by their number."""

    def __init__(self, consumption: Consumption, partitions: Partitions, clock: Clock) -> None:
        self._consumption = consumption
        self._partitions = partitions
        self._clock = clock
        self._clients: dict[int, _Client] = {}
        """In the order of their numbers."""
        self._numbers: dict[AcceptedConnection, int] = {}
        self._last = 0

    def __len__(self) -> int:
        return len(self._clients)

    def greeted(self, connection: AcceptedConnection, name: str) -> None:
        """Take in a new client."""
        self._last += 1
        age_ms = self._clock.monotonic_ms() - connection.opened_at_ms
        client = _Client(connection, name, self._clock.now_ms() - age_ms)
        self._clients[self._last] = client
        self._numbers[connection] = self._last

    def closed(self, connection: AcceptedConnection) -> None:
        """Forget a client."""
        number = self._numbers.pop(connection, None)
        if number is not None:
            del self._clients[number]

    def subscribed(self, connection: AcceptedConnection, key: _Key, subject: Pattern) -> None:
        """Take note of what a consumer wants."""
        client = self._clients.get(self._numbers.get(connection, 0))
        if client is not None and not client.is_full:
            client.consumers.setdefault(key, {})[subject] = None

    def pulled(self, connection: AcceptedConnection, request: Pull) -> None:
        """Take note of a consumer that pulls without having subscribed here."""
        key = (Group(request.group), ConsumerId(request.consumer))
        if key not in self._clients[self._numbers[connection]].consumers:
            wanted = (subject_of(PartitionName(each.partition)) for each in request.wanted)
            for subject in islice(request.covers or wanted, _MOST_ROWS):
                self.subscribed(connection, key, Pattern(subject))

    def left(self, connection: AcceptedConnection, key: _Key) -> None:
        """Forget a consumer that leaves."""
        self._clients[self._numbers[connection]].consumers.pop(key, None)

    def listed(self, request: Clients) -> ClientsListed:
        """Return one page.

        Raises:
            InvalidRequestError: It would be an empty one.
        """
        if not 1 <= request.max_clients <= _MOST_CLIENTS:
            raise InvalidRequestError(
                f"{request.max_clients} clients on a page; 1 to {_MOST_CLIENTS} are allowed"
            )
        later = [number for number in self._clients if number > request.after]
        rows: list[ConnectedClient] = []
        visits = 0
        for number in islice(later, request.max_clients):
            client = self._clients[number]
            visits += sum(
                1 + len(self._consumption.subscriptions_of(*key)) for key in client.consumers
            )
            if rows and visits > _MOST_VISITS:
                break
            rows.append(self._row(number, client))
        return ClientsListed(tuple(rows), len(self._clients), len(rows) < len(later))

    def _held(self, key: _Key) -> list[tuple[Subject, int]]:
        """Return what a consumer has unsettled, in each partition that it has anything of."""
        by_id = self._partitions.by_id
        return [
            (subject_of(by_id[each.partition].name), each.held_count)
            for each in self._consumption.subscriptions_of(*key)
        ]

    def _row(self, number: int, client: _Client) -> ConnectedClient:
        consumers: list[ConnectedConsumer] = []
        for key, subjects in client.consumers.items():
            group, consumer = key
            held = _held_by_subject(self._held(key), subjects)
            consumers += (
                ConnectedConsumer(consumer, group, subject, held.get(subject, 0))
                for subject in subjects
            )
        return ConnectedClient(
            number,
            client.name,
            client.connection.peer,
            client.connected_at_ms,
            client.connection.silent_ms,
            tuple(consumers),
        )


def _held_by_subject(
    held: Iterable[tuple[Subject, int]], subjects: dict[Pattern, None]
) -> dict[Pattern, int]:
    """Count what is held under the first subject or pattern that covers it."""
    counts: dict[Pattern, int] = {}
    for subject, count in held:
        if count:
            covering = next((p for p in patterns_of(subject) if p in subjects), None)
            if covering is not None:
                counts[covering] = counts.get(covering, 0) + count
    return counts
