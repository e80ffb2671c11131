"""Words about order: how a subject keeps it, and how a group that wants it is served."""

from enum import IntEnum
from typing import NamedTuple

from pulque.model.names import PartitionName

__all__ = ["Allotted", "ConsumeStrategy", "OrderStrategy"]


class OrderStrategy(IntEnum):
    """What a failure may do to the order of a subject's messages."""

    BEST_EFFORT = 0
    """After a failure a message may go another way, and be overtaken: to another partition when
    it is sent, to the retry partition when it is consumed."""
    STRICT = 1
    """A message that fails is tried again where it is; those behind it with its key wait."""


class ConsumeStrategy(IntEnum):
    """How the partitions of a subject are shared among the consumers of a group."""

    SHARED = 0
    """Every consumer pulls from every partition."""
    EXCLUSIVE = 1
    """Each partition belongs to one consumer at a time."""


class Allotted(NamedTuple):
    """One partition that a consumer of an exclusive group is to pull from, and where."""

    broker_group: str
    partition: PartitionName
    host: str
    """Empty for the address that was asked at."""
    port: int
