"""Order strategies of subjects, and the allotment of their partitions."""

from enum import IntEnum
from typing import NamedTuple

from pulque.model.names import PartitionName

__all__ = ["Allotted", "ConsumeStrategy", "OrderStrategy"]


class OrderStrategy(IntEnum):
    """How a failure may affect the order of a subject's messages."""

    BEST_EFFORT = 0
    """After a failure other messages may overtake: a failed send goes to another partition, a
    failed delivery to the retry partition."""
    STRICT = 1
    """A message that fails is retried in place; messages of its key behind it wait."""


class ConsumeStrategy(IntEnum):
    """How the partitions of a subject are shared among the consumers of a group."""

    SHARED = 0
    """Every consumer pulls from every partition."""
    EXCLUSIVE = 1
    """Each partition belongs to one consumer at a time."""


class Allotted(NamedTuple):
    """One partition that is allotted to a consumer, and its address."""

    broker_group: str
    partition: PartitionName
    host: str
    """Empty for the address of the server that answered."""
    port: int
