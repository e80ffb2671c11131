"""Where a subject's messages go: its partitions, and which of them a message belongs to."""

from collections.abc import Iterator

import google_crc32c

from pulque.errors import RemoteProtocolError
from pulque.model.batch import seed_of
from pulque.model.names import (
    DEFAULT_LEVEL,
    PartitionName,
    level_of,
    level_partition,
    owner_of,
    subject_of,
)
from pulque.model.routes import Route
from pulque.wire.responses import Response, Routed

__all__ = ["Target", "Targets", "targets_of"]

ORDER_RANGES = 1024
"""Order keys are dealt to this many ranges, and ranges to partitions."""


class Target:
    """One partition that messages are sent to."""

    __slots__ = ("broker_group", "level", "partition", "seed")

    def __init__(self, partition: PartitionName, broker_group: str) -> None:
        self.partition = partition
        self.broker_group = broker_group
        self.seed = seed_of(partition)
        self.level = level_of(partition)


def targets_of(response: Response) -> "Targets":
    """Return the partitions that the answer to a request for a route names."""
    if not isinstance(response, Routed):
        raise RemoteProtocolError(f"a request for a route got {response!r}")
    return Targets(response.route)


class Targets:
    """The partitions of one subject, or of all that a pattern covers.

    Not thread-safe; a wrong turn is harmless. Messages of one priority with the same order key
    always go to the same partition; the others take turns.
    """

    __slots__ = ("_levels", "_plain", "_turn", "all", "version")

    def __init__(self, route: Route) -> None:
        self.all = tuple(Target(each.partition, each.broker_group) for each in route.partitions)
        """Those of the subject, the plain one first, then those of the group's retries."""
        self.version = route.version
        self._plain = tuple(each for each in self.all if _is_plain(each.partition))
        self._levels = {DEFAULT_LEVEL: self._plain}
        self._turn = 0

    def __iter__(self) -> Iterator[Target]:
        return iter(self.all)

    def pick(self, order_key: str | None, level: int = DEFAULT_LEVEL) -> Target:
        """Return the partition for the next message."""
        targets = self._plain if level == DEFAULT_LEVEL else self.of_level(level)
        if len(targets) == 1:
            return targets[0]
        if order_key:
            place: int = google_crc32c.value(order_key.encode()) % ORDER_RANGES
            return targets[place * len(targets) // ORDER_RANGES]
        self._turn = (self._turn + 1) % len(targets)
        return targets[self._turn]

    def of_level(self, level: int) -> tuple[Target, ...]:
        """Return the partitions for messages of one priority; the first message makes them."""
        found = self._levels.get(level)
        if found is None:
            found = self._levels[level] = tuple(
                Target(level_partition(subject_of(each.partition), level), each.broker_group)
                for each in self._plain
            )
        return found


def _is_plain(partition: PartitionName) -> bool:
    return owner_of(partition) is None and level_of(partition) == DEFAULT_LEVEL
