"""Routes: the answer to "who serves this subject"."""

from typing import NamedTuple

from pulque.model.names import PartitionName, Subject

__all__ = ["PartitionRoute", "Route"]


class PartitionRoute(NamedTuple):
    """One partition of a subject and where its leader listens."""

    partition: PartitionName
    broker_group: str
    host: str
    port: int


class Route(NamedTuple):
    """All partitions of a subject; never empty."""

    subject: Subject
    version: int
    partitions: tuple[PartitionRoute, ...]
