"""Pulls without an answer, and the lines that they stand in.

A pull that waits is an object in dictionaries: no task, no thread, one timer. It stands in the
line of every partition that it names, and is listed under all that it covers, so that neither a
message nor a new partition has to look at those whom it does not concern.
"""

import asyncio
from collections.abc import Callable, Container, Iterable, Iterator
from dataclasses import dataclass, field
from itertools import islice
from typing import TypeVar

from pulque.broker.cluster.partition_coverage import Place
from pulque.errors import PulqueError
from pulque.model.names import ConsumerId, Group, Pattern
from pulque.net.server import Work
from pulque.wire.requests import Pull
from pulque.wire.responses import Pulled

__all__ = ["Lines", "WaitingPull", "WholePull"]

K = TypeVar("K")
_AT_ONCE = 16


@dataclass(eq=False, slots=True)
class WaitingPull:
    """A pull that has not been answered."""

    request: Pull
    group: Group
    consumer: ConsumerId
    answer: "Callable[[Pulled], None]"
    """Takes the answer; of a part, the answer to the whole."""
    refuse: "Callable[[PulqueError], None]"
    owner: object
    """Whose connection it came over."""
    asked_at: float
    """When it came, in the event loop's time."""
    until: float
    """When it must be answered."""
    timer: asyncio.TimerHandle | None = None
    """Set while it stands in line."""
    is_over: bool = False
    """It was answered, or its connection is gone."""
    is_at_limit: bool = False
    """It waits until its consumer settles something."""
    routes_version: int = 0
    """Up to this version of the table it was looked for partitions that it does not name …"""
    routes_changed: bool = False
    """… and whether there are any."""
    cold_tries: int = 0
    """How often a thread read for it."""
    whole: "WholePull | None" = None
    """The pull that this is a part of, if it is."""


@dataclass(eq=False, slots=True)
class WholePull:
    """A pull that is handled in parts."""

    request: Pull
    answer: "Callable[[Pulled], None]"
    refuse: "Callable[[PulqueError], None]"
    go_on: Callable[[Work], None]
    """Takes the steps of an answer that is given later."""
    named: frozenset[str]
    """The partitions that it names."""
    places: dict[WaitingPull, list[int]] = field(default_factory=dict)
    """Its parts, each with where its partitions stand in the request."""
    favoured: int | None = None
    """The level that it begins with, where that is not the highest."""
    is_begun: bool = False
    """All parts were tried once."""
    found: tuple[WaitingPull, Pulled] | None = None
    """Which part answers for the whole, and what."""

    @property
    def head(self) -> WaitingPull:
        """The first part: it alone stands for what the pull covers."""
        return next(iter(self.places))

    def let_go(self) -> None:
        """Forget the parts, once all are ended: they refer to this pull, and it to them.

        Ten thousand names would else be freed by the next full garbage collection only.
        """
        self.places.clear()
        self.found = None


class Lines:
    """All pulls without an answer, in line or not."""

    def __init__(self) -> None:
        self._by_partition: dict[str, dict[Group, dict[WaitingPull, None]]] = {}
        """By name, as a partition may come into being while a pull waits for it."""
        self._by_place: dict[Place, dict[WaitingPull, None]] = {}
        self._by_owner: dict[object, dict[WaitingPull, None]] = {}
        self._by_consumer: dict[tuple[Group, ConsumerId], dict[WaitingPull, None]] = {}
        self.waiting = 0
        """How many stand in line."""

    def add(self, waiting: WaitingPull) -> None:
        """Take note of a pull that came."""
        self._by_owner.setdefault(waiting.owner, {})[waiting] = None
        consumer = (waiting.group, waiting.consumer)
        self._by_consumer.setdefault(consumer, {})[waiting] = None

    def end(self, waiting: WaitingPull) -> None:
        """Forget a pull."""
        waiting.is_over = True
        self.leave(waiting)
        _take_out(self._by_owner, waiting.owner, waiting)
        _take_out(self._by_consumer, (waiting.group, waiting.consumer), waiting)

    def enter(self, waiting: WaitingPull, timer: asyncio.TimerHandle) -> None:
        """Have a pull stand in line."""
        waiting.timer = timer
        self.waiting += _stands_for_pull(waiting)
        for wanted in waiting.request.wanted:
            groups = self._by_partition.setdefault(wanted.partition, {})
            groups.setdefault(waiting.group, {})[waiting] = None
        for place in _places_of(waiting):
            self._by_place.setdefault(place, {})[waiting] = None

    def leave(self, waiting: WaitingPull) -> None:
        """Have it stand in line no more."""
        if waiting.timer is None:
            return
        waiting.timer.cancel()
        waiting.timer = None
        self.waiting -= _stands_for_pull(waiting)
        for wanted in waiting.request.wanted:
            groups = self._by_partition.get(wanted.partition)
            if groups is not None:
                _take_out(groups, waiting.group, waiting)
                if not groups:
                    del self._by_partition[wanted.partition]
        for place in _places_of(waiting):
            _take_out(self._by_place, place, waiting)

    def groups_of(self, partition: str) -> list[Group]:
        """Return the groups of those in line for a partition."""
        return list(self._by_partition.get(partition, ()))

    def some_of(self, partition: str, group: Group, after: int) -> list[WaitingPull]:
        """Return the next few of a group in line for a partition, in the order they came.

        Only a few, as most messages are taken by the first, however long the line is.
        """
        line = self._by_partition.get(partition, {}).get(group, {})
        return list(islice(line, after, after + _AT_ONCE))

    def of_owner(self, owner: object) -> list[WaitingPull]:
        """Return the pulls of a connection."""
        return list(self._by_owner.get(owner, ()))

    def of_consumer(self, group: Group, consumer: ConsumerId) -> list[WaitingPull]:
        """Return the pulls of a consumer."""
        return list(self._by_consumer.get((group, consumer), ()))

    def not_naming(self, partition: str, places: Iterable[Place]) -> list[WaitingPull]:
        """Return those in line that cover a partition, and do not name it."""
        found = {
            waiting: None
            for place in places
            for waiting in self._by_place.get(place, ())
            if partition not in _named(waiting)
        }
        return list(found)


def _stands_for_pull(waiting: WaitingPull) -> bool:
    """Whether this is to be counted: of the parts of a pull, one is."""
    return waiting.whole is None or waiting.whole.head is waiting


def _named(waiting: WaitingPull) -> Container[str]:
    if waiting.whole is not None:
        return waiting.whole.named
    return [each.partition for each in waiting.request.wanted]


def _places_of(waiting: WaitingPull) -> Iterator[Place]:
    """Yield what a pull covers: for all, and for its group."""
    for pattern in waiting.request.covers:
        yield Pattern(pattern), None
        yield Pattern(pattern), waiting.group


def _take_out(listed: dict[K, dict[WaitingPull, None]], key: K, waiting: WaitingPull) -> None:
    found = listed.get(key)
    if found is not None:
        found.pop(waiting, None)
        if not found:
            del listed[key]
