"""Routes: the answer to "who serves this subject"."""

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
"""The logical partitions of every subject: an order key belongs to one of them for ever."""


class Role(IntEnum):
    """What a server is there for."""

    BROKER = 0
    META = 1
    DELAY = 2


class RouteKind(IntEnum):
    """What a route is wanted for."""

    REALTIME = 0
    """Who serves the subject: for sends that are due at once, and for consumers."""
    DELAYED = 1
    """Who takes sends that are due later: the delay servers."""
    LOCAL = 2
    """What the broker that is asked has itself, level and retry partitions included."""
    FOLLOWERS = 3
    """Who copies what serves the subject: where consumers say that they live, too."""
    PLACED = 4
    """All that may have messages of the subject; the host is empty where the broker is away."""


class Slots(NamedTuple):
    """A half-open range of the 1024 logical partitions."""

    start: int
    end: int


ALL_SLOTS = Slots(0, SLOTS)
ALONE = 3
"""Not 2: whoever knows only of yes and no looks at the lowest bit, or at all of them."""


class PartitionRoute(NamedTuple):
    """One partition of a subject and where its leader listens.

    The same name may exist on several broker groups: only both together name a partition.
    """

    partition: PartitionName
    broker_group: str
    host: str
    """Empty for the address that was asked at."""
    port: int
    sends: int = 1
    """Whether messages may be sent there now: 0 for no, 1 for yes, ``ALONE`` for yes where its
    broker group has no followers, while others of the subject have some. Consumers pull from it
    in any case."""
    slots: Slots = ALL_SLOTS
    """Which order keys belong there: those with ``crc32c(key) % 1024`` within."""

    @property
    def is_writable(self) -> bool:
        """Whether messages may be sent there now."""
        return self.sends > 0

    @property
    def is_alone(self) -> bool:
        """Whether what must be on several disks goes to other broker groups of the subject."""
        return self.sends == ALONE


class Route(NamedTuple):
    """All partitions of a subject, or of all subjects that a pattern covers.

    A lone broker has the plain partition of every subject, even if nothing was ever sent there; a
    pattern may cover nothing yet.
    """

    subject: Pattern
    version: int
    """Differs when the route does. Of a broker, it is that of its table of partitions."""
    partitions: tuple[PartitionRoute, ...]
    order: OrderStrategy = OrderStrategy.BEST_EFFORT
    """What a failure may do to the order of the messages."""
