"""Routes: the partitions of a subject and the brokers that serve them."""

from enum import IntEnum
from typing import NamedTuple

from pulque.model.names import PartitionName, Pattern
from pulque.model.ordered import OrderStrategy

__all__ = [
    "ALL_SLOTS",
    "ALONE",
    "SLOTS",
    "PartitionRoute",
    "Role",
    "Route",
    "RouteKind",
    "Slots",
]

SLOTS = 1024
"""The logical partitions of every subject: an order key always belongs to the same one."""


class Role(IntEnum):
    """The kind of a server."""

    BROKER = 0
    META = 1
    DELAY = 2


class RouteKind(IntEnum):
    """The purpose of a route."""

    REALTIME = 0
    """The brokers that serve the subject: for immediate sends, and for consumers."""
    DELAYED = 1
    """The delay servers, for delayed sends."""
    LOCAL = 2
    """The partitions of the broker that answers, level and retry partitions included."""
    FOLLOWERS = 3
    """The followers of the subject's brokers, to which consumers also send heartbeats."""
    PLACED = 4
    """All partitions that may have messages; the host is empty if the broker is away."""


class Slots(NamedTuple):
    """A half-open range of the 1024 logical partitions."""

    start: int
    end: int


ALL_SLOTS = Slots(0, SLOTS)
ALONE = 3
"""Not 2: a peer that knows only yes and no tests the lowest bit, or all bits."""


class PartitionRoute(NamedTuple):
    """One partition of a subject and where its leader listens.

    The same name may exist on several broker groups: only both together identify a partition.
    """

    partition: PartitionName
    broker_group: str
    host: str
    """Empty for the address of the server that answered."""
    port: int
    sends: int = 1
    """Whether messages may be sent there now: 0 for no, 1 for yes, ``ALONE`` for yes where its
    broker group has no followers, while others of the subject have some. Consumers pull from it
    in any case."""
    slots: Slots = ALL_SLOTS
    """Its order keys: those with ``crc32c(key) % 1024`` in this range."""

    @property
    def is_writable(self) -> bool:
        """Whether messages may be sent there now."""
        return self.sends > 0

    @property
    def is_alone(self) -> bool:
        """Whether ``acks="replica"`` must go to other broker groups of the subject."""
        return self.sends == ALONE


class Route(NamedTuple):
    """All partitions of a subject, or of all subjects that a pattern covers.

    A lone broker has the plain partition of every subject, even before the first send; a
    pattern may cover nothing yet.
    """

    subject: Pattern
    version: int
    """Changes with the route. A broker uses the version of its table of partitions."""
    partitions: tuple[PartitionRoute, ...]
    order: OrderStrategy = OrderStrategy.BEST_EFFORT
    """The order strategy of the subject."""
