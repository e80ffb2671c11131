"""Choose the partition and broker of due messages."""

from collections.abc import Sequence

import google_crc32c
import numpy as np
import numpy.typing as npt

from pulque.errors import UnavailableError
from pulque.model.names import (
    DEFAULT_LEVEL,
    PartitionName,
    Subject,
    level_of,
    level_partition,
    owner_of,
    subject_of,
)
from pulque.model.routes import SLOTS, PartitionRoute
from pulque.storage.message_table import MessageTable

__all__ = ["Way", "grouped_by_target", "partition_at", "target_of_key"]


class Way:
    """What the partition of messages determines: subject, priority, group."""

    def __init__(self, partition: PartitionName) -> None:
        self.partition = partition
        self.subject: Subject = subject_of(partition)
        self.level = level_of(partition)
        self.group = owner_of(partition)
        """The group whose retries they are for; None for all groups."""


def partition_at(target: PartitionRoute, way: Way) -> PartitionName:
    if way.group is not None or way.level == DEFAULT_LEVEL:
        return target.partition
    return level_partition(subject_of(target.partition), way.level)


def target_of_key(
    partitions: Sequence[PartitionRoute], table: MessageTable, start: int, end: int
) -> tuple[PartitionRoute, int]:
    """Return the target of the first message's order key, and how many messages share it."""
    chosen = _of_slot(partitions, _slot_of(table, start))
    if not chosen.is_writable:
        raise UnavailableError(f"{chosen.partition} at {chosen.broker_group} takes no messages")
    stop = start + 1
    while stop < end and _of_slot(partitions, _slot_of(table, stop)) == chosen:
        stop += 1
    return chosen, stop


def grouped_by_target(
    partitions: Sequence[PartitionRoute], table: MessageTable
) -> npt.NDArray[np.int64]:
    """Return a stable order in which messages for one partition are adjacent."""
    slots = [_slot_of(table, row) for row in range(len(table))]
    starts = sorted(each.slots.start for each in partitions)
    return np.argsort(np.searchsorted(starts, slots, "right"), kind="stable")


def _slot_of(table: MessageTable, row: int) -> int:
    at = int(table.starts[row]) + int(table.filled("key_size")[row])
    key = bytes(table.data[at : at + int(table.columns["order_key_size"][row])])
    return int(google_crc32c.value(key)) % SLOTS


def _of_slot(partitions: Sequence[PartitionRoute], slot: int) -> PartitionRoute:
    for each in partitions:
        if each.slots.start <= slot < each.slots.end:
            return each
    raise UnavailableError(f"no partition holds the order keys of slot {slot}")
