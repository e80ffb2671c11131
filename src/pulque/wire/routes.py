"""Routes on the wire: asking for one, and waiting for one to change."""

from typing import Annotated, NamedTuple

from pulque.model.names import PartitionName, Pattern
from pulque.model.ordered import OrderStrategy
from pulque.model.routes import PartitionRoute, RouteKind, Slots
from pulque.model.routes import Route as RouteOf
from pulque.wire.kinds import U8, U16, U32, U64, describe, many
from pulque.wire.opcodes import Opcode
from pulque.wire.packet import Packet, Response, packet

__all__ = [
    "MAX_WATCHED",
    "WATCHED",
    "ChangedRoute",
    "KnownRoute",
    "Route",
    "Routed",
    "Watch",
    "Watched",
]

MAX_WATCHED = 10_000
"""How many routes one watch may name, where a server does not say otherwise."""
WATCHED = "routes in a watch"
describe(Slots, start=U16, end=U16)
describe(
    PartitionRoute,
    partition=PartitionName,
    broker_group=str,
    host=str,
    port=U16,
    sends=U8,
    slots=Slots,
)
describe(
    RouteOf,
    subject=Pattern,
    version=U64,
    order=OrderStrategy,
    partitions=tuple[PartitionRoute, ...],
)


@packet(Opcode.ROUTE)
class Route(Packet):
    """Who serves this subject, or all subjects of a pattern?"""

    subject: str
    """A subject; with a group also a pattern: ``order.*`` or ``*``."""
    group: str = ""
    """Whose retries are to be pulled, too; empty for a producer, who may create the subject."""
    kind: RouteKind = RouteKind.REALTIME
    """What the route is wanted for."""


@packet(Opcode.ROUTE)
class Routed(Response):
    """The answer to ``Route``."""

    route: RouteOf


class KnownRoute(NamedTuple):
    """A route that a client has, and wants to hear about if it changes."""

    kind: RouteKind
    subject: str
    """A subject, or a pattern."""
    group: str
    """As it was asked for."""
    version: U64
    """Of the route that the client has."""


@packet(Opcode.WATCH)
class Watch(Packet):
    """Tell me when one of these routes differs from what I know; it also says that I live."""

    client: str
    """The client's id: the same in every watch of one process."""
    application: str
    """What the client belongs to, for people."""
    known: Annotated[tuple[KnownRoute, ...], many(WATCHED, most=MAX_WATCHED)]
    wait_ms: U32
    """Answer after this time at the latest, with nothing."""


class ChangedRoute(NamedTuple):
    """A route as it is now, and what it was asked for as."""

    kind: RouteKind
    group: str
    route: RouteOf


@packet(Opcode.WATCH)
class Watched(Response):
    """The answer to ``Watch``: the routes that differ; none if the time was up."""

    changed: tuple[ChangedRoute, ...]
