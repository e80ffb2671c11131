"""Which partitions a subscription covers, and which of them are new to a client.

Every partition is listed under each pattern that covers its subject, so that neither a route nor
a new partition has to look at all the others. The partitions of a group's retries are listed for
that group alone; where messages wait, and where dead letters lie, nobody subscribes to.

The table has a version: the number of the newest partition. Whoever knows a version of the table
has to look only at the end of a list to see what it does not know.
"""

from collections.abc import Iterable, Iterator

from pulque.model.names import (
    Group,
    PartitionName,
    Pattern,
    is_pattern,
    is_retry,
    owner_of,
    patterns_of,
    subject_of,
)
from pulque.storage.logs.partitions import Partition

__all__ = ["PartitionCoverage", "Place", "places_of"]

Place = tuple[Pattern, Group | None]
"""What is subscribed to, and for which group; None stands for all."""


def places_of(partition: PartitionName) -> list[Place]:
    """Return where a partition is listed."""
    owner = owner_of(partition)
    if owner is not None and not is_retry(partition):
        return []
    return [(pattern, owner) for pattern in patterns_of(subject_of(partition))]


class PartitionCoverage:
    """The partitions of one broker, by what covers them."""

    def __init__(self, partitions: Iterable[Partition]) -> None:
        self._listed: dict[Place, list[Partition]] = {}
        self.version = 0
        """The number of the newest partition."""
        for partition in sorted(partitions, key=lambda each: each.id):
            self.add(partition)

    def add(self, partition: Partition) -> list[Place]:
        """List a new partition; return where."""
        places = places_of(partition.name)
        for place in places:
            self._listed.setdefault(place, []).append(partition)
        self.version = partition.id
        return places

    def covered(self, pattern: Pattern, group: Group | None) -> list[PartitionName]:
        """Return the partitions that a subscription covers; of one subject, the plain one first.

        Args:
            pattern: What is subscribed to. One subject has its plain partition, even if nothing
                was ever sent there.
            group: Whose retries belong to it; None for nobody's.
        """
        found = [each.name for each in self._listed.get((pattern, None), ())]
        if not is_pattern(pattern):
            plain = PartitionName(pattern)
            found = [plain, *(name for name in found if name != plain)]
        if group is not None:
            found += [each.name for each in self._listed.get((pattern, group), ())]
        return found

    def newer(self, pattern: Pattern, group: Group, version: int) -> Iterator[PartitionName]:
        """Yield the partitions that a subscription covers and a version does not know."""
        for place in ((pattern, None), (pattern, group)):
            for partition in reversed(self._listed.get(place, ())):
                if partition.id <= version:
                    break
                yield partition.name

    def differs(self, pattern: Pattern, group: Group | None, version: int) -> bool:
        """Whether what a subscription covers is not what a version of the table knows."""
        if version > self.version:
            # It is that of another broker, or of a directory that is gone.
            return True
        return any(
            listed and listed[-1].id > version
            for listed in (self._listed.get((pattern, each)) for each in {None, group})
        )
