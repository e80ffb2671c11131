"""Where a subject's messages go: its partitions, and which of them a message belongs to."""

from collections.abc import Iterator

import google_crc32c

from pulque.errors import RemoteProtocolError
from pulque.model.batch import seed_of
from pulque.model.names import PartitionName
from pulque.model.routes import Route
from pulque.wire.responses import Response, Routed

__all__ = ["Target", "Targets", "targets_of"]

ORDER_RANGES = 1024
"""Order keys are dealt to this many ranges, and ranges to partitions."""


class Target:
    """One partition that messages are sent to."""

    __slots__ = ("broker_group", "partition", "seed")

    def __init__(self, partition: PartitionName, broker_group: str) -> None:
        self.partition = partition
        self.broker_group = broker_group
        self.seed = seed_of(partition)


def targets_of(response: Response) -> "Targets":
    """Return the partitions that the answer to a request for a route names."""
    if not isinstance(response, Routed) or not response.route.partitions:
        raise RemoteProtocolError(f"a request for a route got {response!r}")
    return Targets(response.route)


class Targets:
    """The partitions of one subject. Not thread-safe; a wrong turn is harmless.

    Messages with the same order key always go to the same partition; the others take turns.
    """

    __slots__ = ("_turn", "all")

    def __init__(self, route: Route) -> None:
        self.all = tuple(Target(each.partition, each.broker_group) for each in route.partitions)
        self._turn = 0

    def __iter__(self) -> Iterator[Target]:
        return iter(self.all)

    def pick(self, order_key: str | None) -> Target:
        """Return the partition for the next message."""
        if len(self.all) == 1:
            return self.all[0]
        if order_key:
            place: int = google_crc32c.value(order_key.encode()) % ORDER_RANGES
            return self.all[place * len(self.all) // ORDER_RANGES]
        self._turn = (self._turn + 1) % len(self.all)
        return self.all[self._turn]
