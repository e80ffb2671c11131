"""Routes on the wire: asking for one, and waiting for one to change."""

from dataclasses import dataclass
from struct import Struct
from typing import ClassVar, NamedTuple, Self

from pulque.model.names import PartitionName, Pattern
from pulque.model.ordered import OrderStrategy
from pulque.model.routes import PartitionRoute, RouteKind, Slots
from pulque.model.routes import Route as RouteOf
from pulque.wire.codec import Reader, Writer
from pulque.wire.groups import known
from pulque.wire.opcodes import Opcode

__all__ = ["MAX_WATCHED", "ChangedRoute", "KnownRoute", "Route", "Routed", "Watch", "Watched"]

MAX_WATCHED = 10_000
"""How many routes one watch may name, where a server does not say otherwise."""

_KIND = Struct("<B")
_KINDS: dict[int, RouteKind] = {each.value: each for each in RouteKind}
_ORDER = Struct("<B")
_VERSION = Struct("<Q")
_PLACE = Struct("<HBHH")


@dataclass(frozen=True, slots=True)
class Route:
    """Who serves this subject, or all subjects of a pattern?"""

    opcode: ClassVar[Opcode] = Opcode.ROUTE

    subject: str
    """A subject; with a group also a pattern: ``order.*`` or ``*``."""
    group: str = ""
    """Whose retries are to be pulled, too; empty for a producer, who may create the subject."""
    kind: RouteKind = RouteKind.REALTIME
    """What the route is wanted for."""

    def write(self, to: Writer) -> None:
        """Append the fields."""
        to.text(self.subject)
        to.text(self.group)
        to.pack(_KIND, self.kind)

    @classmethod
    def read(cls, source: Reader) -> Self:
        """Take the fields."""
        return cls(source.text(), source.text(), _read_kind(source))


@dataclass(frozen=True, slots=True)
class Routed:
    """The answer to ``Route``."""

    opcode: ClassVar[Opcode] = Opcode.ROUTE

    route: RouteOf

    def write(self, to: Writer) -> None:
        """Append the fields."""
        _write_route(self.route, to)

    @classmethod
    def read(cls, source: Reader) -> Self:
        """Take the fields."""
        return cls(_read_route(source))


class KnownRoute(NamedTuple):
    """A route that a client has, and wants to hear about if it changes."""

    kind: RouteKind
    subject: str
    """A subject, or a pattern."""
    group: str
    """As it was asked for."""
    version: int
    """Of the route that the client has."""


@dataclass(frozen=True, slots=True)
class Watch:
    """Tell me when one of these routes differs from what I know; it also says that I live."""

    opcode: ClassVar[Opcode] = Opcode.WATCH
    _wait: ClassVar[Struct] = Struct("<I")

    client: str
    """The client's id: the same in every watch of one process."""
    application: str
    """What the client belongs to, for people."""
    known: tuple[KnownRoute, ...]
    wait_ms: int
    """Answer after this time at the latest, with nothing."""

    def write(self, to: Writer) -> None:
        """Append the fields."""
        to.text(self.client)
        to.text(self.application)
        to.count(len(self.known))
        for each in self.known:
            to.pack(_KIND, each.kind)
            to.text(each.subject)
            to.text(each.group)
            to.pack(_VERSION, each.version)
        to.pack(self._wait, self.wait_ms)

    @classmethod
    def read(cls, source: Reader, *, max_watched: int = MAX_WATCHED) -> Self:
        """Take the fields."""
        client, application = source.text(), source.text()
        count = source.count("routes in a watch", most=max_watched, least_size=13)
        rows = source.names_between(count, _KIND, _VERSION)
        listed = tuple([KnownRoute(_kind_of(each[0]), *each[1:]) for each in rows])
        return cls(client, application, listed, *source.unpack(cls._wait))


class ChangedRoute(NamedTuple):
    """A route as it is now, and what it was asked for as."""

    kind: RouteKind
    group: str
    route: RouteOf


@dataclass(frozen=True, slots=True)
class Watched:
    """The answer to ``Watch``: the routes that differ; none if the time was up."""

    opcode: ClassVar[Opcode] = Opcode.WATCH

    changed: tuple[ChangedRoute, ...]

    def write(self, to: Writer) -> None:
        """Append the fields."""
        to.count(len(self.changed))
        for each in self.changed:
            to.pack(_KIND, each.kind)
            to.text(each.group)
            _write_route(each.route, to)

    @classmethod
    def read(cls, source: Reader) -> Self:
        """Take the fields."""
        return cls(
            tuple(
                ChangedRoute(_read_kind(source), source.text(), _read_route(source))
                for _ in range(source.count())
            )
        )


def _read_kind(source: Reader) -> RouteKind:
    return _kind_of(source.unpack(_KIND)[0])


def _kind_of(number: int) -> RouteKind:
    found = _KINDS.get(number)
    return known(RouteKind, number, "a route of kind") if found is None else found


def _write_route(route: RouteOf, to: Writer) -> None:
    to.text(route.subject)
    to.pack(_VERSION, route.version)
    to.pack(_ORDER, route.order)
    to.count(len(route.partitions))
    for each in route.partitions:
        to.text(each.partition)
        to.text(each.broker_group)
        to.text(each.host)
        to.pack(_PLACE, each.port, each.sends, *each.slots)


def _read_route(source: Reader) -> RouteOf:
    subject = Pattern(source.text())
    (version,) = source.unpack(_VERSION)
    (order,) = source.unpack(_ORDER)
    partitions = tuple([_read_partition(source) for _ in range(source.count())])
    return RouteOf(subject, version, partitions, known(OrderStrategy, order, "strategy of order"))


def _read_partition(source: Reader) -> PartitionRoute:
    partition, broker_group, host = source.text(), source.text(), source.text()
    port, sends, start, end = source.unpack(_PLACE)
    slots = Slots(start, end)
    return PartitionRoute(PartitionName(partition), broker_group, host, port, sends, slots)
