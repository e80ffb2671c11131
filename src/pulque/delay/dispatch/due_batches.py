"""What goes to brokers: messages that are due, the batches made of them, and the way they take."""

from collections import deque
from dataclasses import dataclass

import numpy as np

from pulque.delay.dispatch.targets import Way
from pulque.delay.schedule.tick_index import Rows, TickIndex
from pulque.model.names import PartitionName
from pulque.storage.message_table import MessageTable
from pulque.storage.schedule.dispatch_log import Intent

__all__ = ["Delivery", "Item", "Lane", "Parcel"]


@dataclass(frozen=True, slots=True)
class Delivery:
    """How messages go to brokers."""

    name: str
    """The delay server's."""
    producer_id: int
    """What brokers know it by."""
    batch_messages: int
    batch_bytes: int
    patience_ms: int


@dataclass(frozen=True, slots=True)
class Item:
    """Messages of one tick that are due."""

    index: TickIndex
    rows: Rows
    intent: Intent | None = None
    """If they were on their way when the server stopped."""


@dataclass(frozen=True, slots=True)
class Parcel:
    """One batch that is written down, and may be sent."""

    index: TickIndex
    rows: Rows
    """What is in it."""
    table: MessageTable
    start: int
    end: int
    """Messages ``start..end`` of the table."""
    intent: Intent


class Lane(Way):
    """All that goes to one partition, in order."""

    def __init__(self, partition: PartitionName) -> None:
        super().__init__(partition)
        self.items: deque[Item] = deque()
        self.is_working = False
        self.turn = 0

    def next_item(self, most_bytes: int) -> Item:
        """Take out what comes next: of one tick, and together if much has become due."""
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
