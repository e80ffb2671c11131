"""Typed numbers: an offset counts bytes, a sequence counts messages.

The type checker refuses one where the other belongs. All ranges are half-open ``start..end``,
except where the names are ``first`` and ``last``.
"""

from typing import NamedTuple, NewType

__all__ = [
    "ActionOffset",
    "ConsumeSequence",
    "Epoch",
    "MessageOffset",
    "PartitionId",
    "Position",
    "PullSequence",
    "StartCount",
    "Tenure",
]

MessageOffset = NewType("MessageOffset", int)
"""Byte position of a record in the message log."""

ActionOffset = NewType("ActionOffset", int)
"""Byte position of a fact in the action log."""

ConsumeSequence = NewType("ConsumeSequence", int)
"""Ordinal of a message in its partition, from 0, without gaps: the key of the consume log."""

PullSequence = NewType("PullSequence", int)
"""Ordinal of a delivery to one consumer, from 0, without gaps: the key of its pull log."""

PartitionId = NewType("PartitionId", int)
"""The number that stands for a partition's name in the logs of one broker."""

Epoch = NewType("Epoch", int)
"""Counts the leaderships of a broker group; 0 where there is no authority."""

StartCount = NewType("StartCount", int)
"""Counts the starts of one broker on its data directory."""


class Tenure(NamedTuple):
    """The epoch and the start of the broker that made a delivery."""

    epoch: Epoch
    start: StartCount


class Position(NamedTuple):
    """Where a stored message lies: broker group, partition and consume sequence."""

    broker_group: str
    partition: str
    sequence: ConsumeSequence
