"""Routes: the answer to "who serves this subject"."""

from typing import NamedTuple

from pulque.model.names import PartitionName, Pattern

__all__ = ["PartitionRoute", "Route"]


class PartitionRoute(NamedTuple):
    """One partition of a subject and where its leader listens."""

    partition: PartitionName
    broker_group: str
    host: str
    port: int


class Route(NamedTuple):
    """All partitions of a subject, or of all subjects that a pattern covers.

    A subject has its plain partition, even if nothing was ever sent there; a pattern may cover
    nothing yet.
    """

    subject: Pattern
    version: int
    """Of the broker's table of partitions: all that are newer came after this answer."""
    partitions: tuple[PartitionRoute, ...]
