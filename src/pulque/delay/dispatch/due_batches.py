"""Due messages, the batches made of them, and the lanes in which they wait."""

from collections import deque
from dataclasses import dataclass

import numpy as np

from pulque.delay.dispatch.targets import Way
from pulque.delay.schedule.tick_index import Rows, TickIndex
from pulque.model.names import PartitionName
from pulque.storage.message_table import MessageTable
from pulque.storage.schedule.dispatch_log import Intent

__all__ = ["Delivery", "Item", "Parcel", "PartitionBacklog"]


@dataclass(frozen=True, slots=True)
class Delivery:
    """The options of delivery to brokers."""

    name: str
    """The delay server's name."""
    producer_id: int
    """The producer id by which brokers deduplicate it."""
    batch_messages: int
    batch_bytes: int
    patience_ms: int


@dataclass(frozen=True, slots=True)
class Item:
    """Due messages of one tick."""

    index: TickIndex
    rows: Rows
    intent: Intent | None = None
    """The intent, if they were in flight when the server stopped."""


@dataclass(frozen=True, slots=True)
class Parcel:
    """One batch whose intent is recorded, and which may be sent."""

    index: TickIndex
    rows: Rows
    """Its messages."""
    table: MessageTable
    start: int
    end: int
    """Messages ``start..end`` of the table."""
    intent: Intent


class PartitionBacklog(Way):
    """The due messages of one partition, in order."""

    def __init__(self, partition: PartitionName) -> None:
        super().__init__(partition)
        self.items: deque[Item] = deque()
        self.is_working = False
        self.turn = 0

    def next_item(self, most_bytes: int) -> Item:
        """Remove and return the next item: of one tick, and merged if many are due."""
        first = self.items.popleft()
        if first.intent is not None:
            return first
        rows, size = [first.rows], first.index.bytes_of(first.rows)
        while self.items and self.items[0].index is first.index and self.items[0].intent is None:
            size += first.index.bytes_of(self.items[0].rows)
            if size > most_bytes:
                break
            rows.append(self.items.popleft().rows)
        return first if len(rows) == 1 else Item(first.index, np.concatenate(rows))
