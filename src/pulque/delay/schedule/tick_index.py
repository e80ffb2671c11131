"""The index of a tick in memory: due time, id and state of each message.

A *row* is the number of a message in the order of the schedule log. Contents stay on disk: an
index costs 29 bytes per message. Ticks that have begun, or begin soon, have one, and those that
a request asks about.

Rows that are due soon are also in a wheel of 0.1 s, the same one that brokers use for
retries.
"""

from collections.abc import Iterable, Mapping, Sequence
from enum import IntEnum
from itertools import islice, pairwise
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from pulque.model.names import PartitionName
from pulque.model.positions import ConsumeSequence, PartitionId
from pulque.rules.schedule import TICK_MS, Schedule
from pulque.storage.message_ids import ID_TYPE
from pulque.storage.message_table import columns_before_data
from pulque.storage.schedule.dispatch_log import Noted, Runs, joined_runs, runs_from
from pulque.storage.schedule.schedule_log import ScheduleEntry

__all__ = ["Block", "RowPlaces", "RowState", "Rows", "TickIndex", "offset_of"]

Rows = npt.NDArray[Any]
"""Row numbers."""
_INDEX_BITS = 14
"""An entry has at most 10,000 messages."""
_INDEX_MASK = (1 << _INDEX_BITS) - 1
_LEAST_ROOM = 64
"""Rows that a table has memory for from the beginning."""
_WIDTH = 64
"""About the memory of a message beside its bytes."""
_AT_ONCE = 64
"""Entries that are in memory at once while an index is loaded."""


class RowState(IntEnum):
    """The state of a message."""

    WAITING = 0
    NEAR = 1
    """It waits in the wheel."""
    STUCK = 2
    """Brokers refuse it; it waits for a retry, much later."""
    TAKEN = 3
    """It is being sent to a broker."""
    DONE = 4
    CANCELLED = 5
    MOVED = 6
    """It was rescheduled."""
    LOST = 7
    """It can no longer be read."""


def offset_of(place: int) -> int:
    """Return the offset of the entry of a place."""
    return place >> _INDEX_BITS


class Block(NamedTuple):
    """The index rows of consecutive entries of a schedule log."""

    offsets: list[int]
    sizes: list[int]
    counts: list[int]
    partitions: list[PartitionName]
    dues_ms: Rows
    ids: Rows
    lengths: Rows

    @classmethod
    def of(cls, entries: Sequence[ScheduleEntry]) -> "Block":
        """Return the rows of entries that were read."""
        columns = [columns_before_data(entry.batch)[1] for entry in entries]
        return cls(
            [entry.offset for entry in entries],
            [entry.size for entry in entries],
            [entry.count for entry in entries],
            [entry.partition for entry in entries],
            np.concatenate([each["due_at_ms"] for each in columns]),
            np.concatenate([each["id"] for each in columns]),
            np.concatenate([each["size"] for each in columns]),
        )


class RowPlaces(NamedTuple):
    """The places of messages, by entry."""

    entries: list[tuple[int, int]]
    """Offset and size of each."""
    within: list[Rows]
    """For each entry, the indexes of its messages."""
    order: Rows
    """For each message, its number among all of these."""


class TickIndex:
    """The messages of one tick. Grows with the tick's schedule log.

    An index that was made to find a single message has only the entries that may contain it.
    """

    def __init__(self, tick: int) -> None:
        self.tick = tick
        self.end = 0
        """Up to where it covers the schedule log."""
        self.names: list[PartitionName] = []
        self.wheel = Schedule()
        self.near_ms = 0
        """Messages due before this are in the wheel."""
        self._numbers: dict[PartitionName, int] = {}
        self._rows = GrowingColumns(due_ms="i8", id=(ID_TYPE, 2), state="u1", length="u4")
        self._entries = GrowingColumns(offset="i8", size="u4", first="i8", owner="i8")

    @property
    def count(self) -> int:
        """The number of rows."""
        return self._rows.count

    @property
    def lengths(self) -> Rows:
        """The size of each message: keys, tags, headers and body."""
        return self._rows["length"]

    @property
    def due_ms(self) -> Rows:
        """When each message is due."""
        return self._rows["due_ms"]

    @property
    def states(self) -> Rows:
        """The state of each message."""
        return self._rows["state"]

    @property
    def ids(self) -> Rows:
        """The id of each message, as two numbers."""
        return self._rows["id"]

    def add(self, entries: Iterable[ScheduleEntry]) -> None:
        """Add the next entries; skip those that are already here."""
        missing = (entry for entry in entries if entry.offset >= self.end)
        while some := list(islice(missing, _AT_ONCE)):
            self.extend(Block.of(some))

    def extend(self, block: Block) -> bool:
        """Add the next entries, unless they are already here.

        Returns:
            Whether some messages are due soon.
        """
        if block.offsets[0] < self.end:
            return False
        first = self.count
        counts = np.array(block.counts)
        ends = np.cumsum(counts)
        owners = [self._number_of(each) for each in block.partitions]
        entries = {
            "offset": block.offsets,
            "size": block.sizes,
            "first": ends - counts + first,
            "owner": owners,
        }
        rows = {
            "due_ms": block.dues_ms,
            "id": block.ids,
            "state": RowState.WAITING,
            "length": block.lengths,
        }
        self._entries.extend(entries, len(counts))
        self._rows.extend(rows, int(ends[-1]))
        self.end = block.offsets[-1] + block.sizes[-1]
        return self._approach(first) if self.near_ms else False

    def _number_of(self, name: PartitionName) -> int:
        number = self._numbers.get(name)
        if number is None:
            number = self._numbers[name] = len(self.names)
            self.names.append(name)
        return number

    # -- the wheel ---------------------------------------------------------------------------

    def approach(self, until_ms: int) -> None:
        """Put messages due before an instant into the wheel."""
        self.near_ms = max(self.near_ms, until_ms)
        self._approach(0)

    def _approach(self, first: int) -> bool:
        states, dues = self.states[first:], self.due_ms[first:]
        rows = np.flatnonzero((states == RowState.WAITING) & (dues < self.near_ms)) + first
        if not len(rows):
            return False
        self.mark(rows, RowState.NEAR)
        slots = -(-self.due_ms[rows] // TICK_MS)
        owners = self.owners_of(rows)
        order = np.lexsort((rows, slots, owners))
        rows, slots, owners = rows[order], slots[order], owners[order]
        changes = (slots[1:] != slots[:-1]) | (owners[1:] != owners[:-1])
        edges = [0, *(np.flatnonzero(changes) + 1).tolist(), len(rows)]
        for start, end in pairwise(edges):
            self.wheel.extend(
                PartitionId(int(owners[start])),
                int(slots[start]) * TICK_MS,
                [ConsumeSequence(row) for row in rows[start:end].tolist()],
            )
        return True

    def take(self, now_ms: int) -> tuple[PartitionName, Rows] | None:
        """Return messages of one partition that are due, in the order of their due times."""
        while (due := self.wheel.take(now_ms, 1 << 40)) is not None:
            rows = np.array(due.sequences, np.int64)
            rows = rows[self.states[rows] == RowState.NEAR]
            if len(rows):
                self.mark(rows, RowState.TAKEN)
                order = np.argsort(self.due_ms[rows], kind="stable")
                return self.names[due.partition], rows[order]
        return None

    # -- what became of them -----------------------------------------------------------------

    def mark(self, rows: Rows, state: RowState) -> None:
        """Set the state of messages."""
        self.states[rows] = state

    def give_back(self, rows: Rows) -> None:
        """Release taken messages, so that they can be taken again."""
        self.mark(rows, RowState.WAITING)
        self.approach(self.near_ms)

    def apply(self, noted: Noted) -> None:
        """Apply a dispatch log; messages of batches without an outcome count as taken."""
        for number, intent in noted.intents.items():
            state = RowState.DONE if number in noted.done else RowState.TAKEN
            self.mark(self.rows_of(intent.runs), state)
        self.mark(self.rows_of(joined_runs(noted.cancelled)), RowState.CANCELLED)
        self.mark(self.rows_of(joined_runs(noted.moved)), RowState.MOVED)

    @property
    def is_over(self) -> bool:
        """Whether no message waits or is being sent."""
        return not bool((self.states <= RowState.TAKEN).any())

    @property
    def coming(self) -> int:
        """The number of messages that wait for their due time or are being sent."""
        states = self.states
        return int(np.count_nonzero((states <= RowState.TAKEN) & (states != RowState.STUCK)))

    def is_coming_by(self, due_ms: int) -> bool:
        """Return whether messages due by then wait or are being sent."""
        states = self.states
        is_coming = (states <= RowState.TAKEN) & (states != RowState.STUCK)
        return bool((is_coming & (self.due_ms <= due_ms)).any())

    @property
    def waiting(self) -> Rows:
        """The rows that are not dispatched, being sent, cancelled or rescheduled."""
        return np.flatnonzero(self.states <= RowState.STUCK)

    # -- places ------------------------------------------------------------------------------

    def _entries_of(self, rows: Rows) -> Rows:
        return np.searchsorted(self._entries["first"], rows, "right") - 1

    def partition_of(self, row: int) -> PartitionName:
        """Return the partition of a message."""
        return self.names[int(self.owners_of(np.array([row]))[0])]

    def owners_of(self, rows: Rows) -> Rows:
        """Return the numbers of the partitions of messages."""
        return self._entries["owner"][self._entries_of(rows)]

    def offsets_of(self, rows: Rows) -> Rows:
        """Return the offsets of the entries of messages."""
        return self._entries["offset"][self._entries_of(rows)]

    def bytes_of(self, rows: Rows) -> int:
        """Return about the memory that messages need."""
        return int(self.lengths[rows].sum()) + len(rows) * _WIDTH

    def where(self, rows: Rows) -> RowPlaces:
        """Return the places of messages, by entry."""
        entries = self._entries_of(rows)
        by_entry = np.argsort(entries, kind="stable")
        sorted_entries = entries[by_entry]
        edges = np.flatnonzero(sorted_entries[1:] != sorted_entries[:-1]) + 1
        wanted = sorted_entries[np.concatenate(([0], edges))]
        within = np.split(rows[by_entry] - self._entries["first"][sorted_entries], edges)
        offsets, sizes = self._entries["offset"][wanted], self._entries["size"][wanted]
        order = np.empty(len(rows), np.int64)
        order[by_entry] = np.arange(len(rows))
        places = list(zip(offsets.tolist(), sizes.tolist(), strict=True))
        return RowPlaces(places, within, order)

    def runs_of(self, rows: Rows) -> Runs:
        """Return the places of messages as runs, in their order."""
        entries = self._entries_of(rows)
        within = rows - self._entries["first"][entries]
        places = (self._entries["offset"][entries] << _INDEX_BITS) | within
        breaks = (rows[1:] != rows[:-1] + 1) | (entries[1:] != entries[:-1])
        starts = np.concatenate(([0], np.flatnonzero(breaks) + 1))
        return runs_from(places[starts], np.diff(np.append(starts, len(rows))))

    def place_of(self, row: int) -> int:
        """Return the place of a message."""
        return int(self.runs_of(np.array([row]))["place"][0])

    def rows_of(self, runs: Runs) -> Rows:
        """Return the rows at places, in their order; of places that are damaged, none."""
        places, lengths = runs["place"].astype(np.int64), runs["length"].astype(np.int64)
        offsets = self._entries["offset"]
        if not len(places) or not len(offsets):
            return np.zeros(0, np.int64)
        entries = np.minimum(np.searchsorted(offsets, places >> _INDEX_BITS), len(offsets) - 1)
        is_there = offsets[entries] == places >> _INDEX_BITS
        starts = (self._entries["first"][entries] + (places & _INDEX_MASK))[is_there]
        lengths = lengths[is_there]
        before = np.cumsum(lengths) - lengths
        rows = np.repeat(starts - before, lengths) + np.arange(int(lengths.sum()))
        return rows[rows < self.count]

    def find(self, message_id: bytes) -> Rows:
        """Return the rows of an id: several if it was moved within the tick."""
        low, high = np.frombuffer(message_id, ID_TYPE)
        ids = self.ids
        return np.flatnonzero((ids[:, 0] == low) & (ids[:, 1] == high))

    @property
    def memory(self) -> int:
        """About its memory in bytes."""
        return self._rows.room * 29 + self._entries.room * 28


class GrowingColumns:
    """A table of numbers, by column: to add rows costs what is added.

    Args:
        columns: The type of each; with a shape if a row has several numbers.
    """

    def __init__(self, **columns: npt.DTypeLike) -> None:
        types = {name: np.dtype(each) for name, each in columns.items()}
        self._columns = {
            name: np.empty((_LEAST_ROOM, *each.shape), each.base) for name, each in types.items()
        }
        self.count = 0
        """How many rows there are."""

    def __getitem__(self, name: str) -> Rows:
        """Return a column. What is written to it stays, until the next rows are added."""
        return self._columns[name][: self.count]

    def extend(self, rows: Mapping[str, Any], count: int) -> None:
        """Add rows: the numbers of each column, or one for all rows."""
        end = self.count + count
        if end > self.room:
            self._widen(max(end, self.room * 2))
        for name, column in self._columns.items():
            column[self.count : end] = rows[name]
        self.count = end

    def _widen(self, room: int) -> None:
        for name, column in self._columns.items():
            made = np.empty((room, *column.shape[1:]), column.dtype)
            made[: self.count] = column[: self.count]
            self._columns[name] = made

    @property
    def room(self) -> int:
        """How many rows it has memory for."""
        return len(next(iter(self._columns.values())))
