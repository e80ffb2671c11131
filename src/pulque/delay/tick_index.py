"""What a tick holds, in memory: for each message its due time, its id and what became of it.

A *row* counts the messages of a tick in the order of its schedule log. Contents stay on disk: an
index costs 29 bytes for each message. The coming tick has one, and those that somebody asks about.

The rows that are due soon are also in a wheel of a tenth of a second, the same one that a broker's
retries wait in.
"""

from collections.abc import Iterable, Sequence
from enum import IntEnum
from itertools import accumulate, islice, pairwise
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from pulque.model.names import PartitionName
from pulque.model.positions import ConsumeSequence, PartitionId
from pulque.rules.schedule import TICK_MS, Schedule
from pulque.storage.dispatch_log import Noted, Run
from pulque.storage.message_table import ID_TYPE, columns_before_data
from pulque.storage.schedule_log import Entry

__all__ = ["Block", "RowState", "Rows", "TickIndex", "offset_of"]

Rows = npt.NDArray[Any]
"""Row numbers."""
_INDEX_BITS = 14
"""An entry has at most 10,000 messages."""
_INDEX_MASK = (1 << _INDEX_BITS) - 1
_LEAST_ROWS = 64
_AT_ONCE = 64
"""Entries that are in memory at once while an index is loaded."""


class RowState(IntEnum):
    """What became of a message."""

    WAITING = 0
    NEAR = 1
    """It waits in the wheel."""
    STUCK = 2
    """Brokers refuse it; it waits to be tried again, much later."""
    TAKEN = 3
    """It is on its way to a broker."""
    DONE = 4
    CANCELLED = 5
    MOVED = 6
    """It was moved to another time."""
    LOST = 7
    """It cannot be read any more."""


def offset_of(place: int) -> int:
    """Return where the entry lies that a place is in."""
    return place >> _INDEX_BITS


class Block(NamedTuple):
    """Entries that follow each other in a schedule log, as an index takes them in."""

    offsets: list[int]
    sizes: list[int]
    counts: list[int]
    partitions: list[PartitionName]
    dues_ms: Rows
    ids: Rows
    lengths: Rows

    @classmethod
    def of(cls, entries: Sequence[Entry]) -> "Block":
        """Return entries that were read."""
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


class TickIndex:
    """The messages of one tick. Grows as the schedule log of the tick does.

    One that was made to find a single message has only the entries that it may be in.
    """

    def __init__(self, tick: int) -> None:
        self.tick = tick
        self.end = 0
        """How much of the schedule log is in it."""
        self.count = 0
        """How many rows there are."""
        self.names: list[PartitionName] = []
        self.wheel = Schedule()
        self.near_ms = 0
        """What is due before this is in the wheel."""
        self._numbers: dict[PartitionName, int] = {}
        self._offsets: list[int] = []
        self._sizes: list[int] = []
        self._firsts: list[int] = []
        self._owners: list[int] = []
        self._due = np.zeros(_LEAST_ROWS, np.int64)
        self._ids = np.zeros((_LEAST_ROWS, 2), ID_TYPE)
        self._state = np.zeros(_LEAST_ROWS, np.uint8)
        self._lengths = np.zeros(_LEAST_ROWS, np.uint32)

    @property
    def lengths(self) -> Rows:
        """How many bytes each message has: keys, tags, headers and body."""
        return self._lengths[: self.count]

    @property
    def due_ms(self) -> Rows:
        """When each message is due."""
        return self._due[: self.count]

    @property
    def states(self) -> Rows:
        """What became of each message."""
        return self._state[: self.count]

    @property
    def ids(self) -> Rows:
        """The id of each message, as two numbers."""
        return self._ids[: self.count]

    def add(self, entries: Iterable[Entry]) -> None:
        """Take in entries that follow what is here; what is here already is passed over."""
        missing = (entry for entry in entries if entry.offset >= self.end)
        while some := list(islice(missing, _AT_ONCE)):
            self.extend(Block.of(some))

    def extend(self, block: Block) -> None:
        """Take in entries that follow what is here, unless they are here already."""
        first, count = self.count, sum(block.counts)
        if block.offsets[0] < self.end:
            return
        self._make_room(first + count)
        rows = slice(first, first + count)
        self._due[rows] = block.dues_ms
        self._ids[rows] = block.ids
        self._state[rows] = RowState.WAITING
        self._lengths[rows] = block.lengths
        self._offsets += block.offsets
        self._sizes += block.sizes
        self._firsts += accumulate(block.counts[:-1], initial=first)
        self._owners += [self._number_of(each) for each in block.partitions]
        self.count = first + count
        self.end = block.offsets[-1] + block.sizes[-1]
        if self.near_ms:
            self._approach(first)

    def _number_of(self, name: PartitionName) -> int:
        number = self._numbers.get(name)
        if number is None:
            number = self._numbers[name] = len(self.names)
            self.names.append(name)
        return number

    def _make_room(self, count: int) -> None:
        room = len(self._due)
        if count <= room:
            return
        more = max(count, room * 2)
        self._due = _widened(self._due, more, self.count)
        self._ids = _widened(self._ids, more, self.count)
        self._state = _widened(self._state, more, self.count)
        self._lengths = _widened(self._lengths, more, self.count)

    # -- the wheel ---------------------------------------------------------------------------

    def approach(self, until_ms: int) -> None:
        """Put into the wheel what is due before an instant."""
        self.near_ms = max(self.near_ms, until_ms)
        self._approach(0)

    def _approach(self, first: int) -> None:
        states, dues = self.states[first:], self.due_ms[first:]
        rows = np.flatnonzero((states == RowState.WAITING) & (dues < self.near_ms)) + first
        if not len(rows):
            return
        self._state[rows] = RowState.NEAR
        slots = -(-self._due[rows] // TICK_MS)
        owners = np.asarray(self._owners)[self._entries_of(rows)]
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

    def take(self, now_ms: int) -> tuple[PartitionName, Rows] | None:
        """Return messages of one partition that are due, in the order of their due times."""
        while (due := self.wheel.take(now_ms, 1 << 40)) is not None:
            rows = np.array(due.sequences, np.int64)
            rows = rows[self._state[rows] == RowState.NEAR]
            if len(rows):
                self._state[rows] = RowState.TAKEN
                order = np.argsort(self._due[rows], kind="stable")
                return self.names[due.partition], rows[order]
        return None

    # -- what became of them -----------------------------------------------------------------

    def mark(self, rows: Rows, state: RowState) -> None:
        """Take note of what became of messages."""
        self._state[rows] = state

    def give_back(self, rows: Rows) -> None:
        """Let messages that were taken be taken again."""
        self._state[rows] = RowState.WAITING
        self.approach(self.near_ms)

    def apply(self, noted: Noted) -> None:
        """Take in what a dispatch log says; batches whose outcome is open count as taken."""
        for number, intent in noted.intents.items():
            state = RowState.DONE if number in noted.done else RowState.TAKEN
            self.mark(self.rows_of(intent.runs), state)
        self.mark(self.rows_of(noted.cancelled), RowState.CANCELLED)
        self.mark(self.rows_of(noted.moved), RowState.MOVED)

    @property
    def is_over(self) -> bool:
        """Whether nothing here waits, or is on its way."""
        return not bool((self.states <= RowState.TAKEN).any())

    @property
    def waiting(self) -> Rows:
        """The rows that are neither dispatched nor on their way, nor taken back."""
        return np.flatnonzero(self.states <= RowState.STUCK)

    # -- places ------------------------------------------------------------------------------

    def _entries_of(self, rows: Rows) -> Rows:
        return np.searchsorted(np.asarray(self._firsts), rows, "right") - 1

    def partition_of(self, row: int) -> PartitionName:
        """Return where a message is to go."""
        return self.names[self._owners[int(self._entries_of(np.array([row]))[0])]]

    def owners_of(self, rows: Rows) -> Rows:
        """Return the numbers of the partitions that messages are to go to."""
        return np.asarray(self._owners, np.int64)[self._entries_of(rows)]

    def offsets_of(self, rows: Rows) -> Rows:
        """Return where the entries lie that hold messages."""
        return np.asarray(self._offsets, np.int64)[self._entries_of(rows)]

    def where(self, rows: Rows) -> tuple[list[tuple[int, int]], Rows]:
        """Return the entries that hold messages, and where in all their messages each one is.

        Returns:
            Offset and size of each entry, and for each row its index in the messages of these
            entries in a row.
        """
        entries = self._entries_of(rows)
        wanted, inverse = np.unique(entries, return_inverse=True)
        firsts = np.asarray(self._firsts)
        counts = np.append(firsts[1:], self.count)[wanted] - firsts[wanted]
        before = np.concatenate(([0], np.cumsum(counts)[:-1]))
        index = before[inverse] + rows - firsts[entries]
        places = [(self._offsets[i], self._sizes[i]) for i in wanted.tolist()]
        return places, index

    def runs_of(self, rows: Rows) -> tuple[Run, ...]:
        """Return the places of messages, in their order."""
        entries = self._entries_of(rows)
        places = (self.offsets_of(rows) << _INDEX_BITS) | (
            rows - np.asarray(self._firsts)[entries]
        )
        breaks = (rows[1:] != rows[:-1] + 1) | (entries[1:] != entries[:-1])
        starts = np.concatenate(([0], np.flatnonzero(breaks) + 1))
        lengths = np.diff(np.append(starts, len(rows)))
        pairs = zip(places[starts].tolist(), lengths.tolist(), strict=True)
        return tuple([Run(place, length) for place, length in pairs])

    def rows_of(self, runs: Sequence[Run]) -> Rows:
        """Return the rows at places, in their order; of places that are damaged, none."""
        firsts = dict(zip(self._offsets, self._firsts, strict=True))
        found = []
        for place, length in runs:
            first = firsts.get(place >> _INDEX_BITS)
            if first is not None:
                start = first + (place & _INDEX_MASK)
                found.append(np.arange(start, min(start + length, self.count)))
        return np.concatenate(found) if found else np.zeros(0, np.int64)

    def find(self, message_id: bytes) -> Rows:
        """Return the rows of an id: several if it was moved within the tick."""
        low, high = np.frombuffer(message_id, ID_TYPE)
        ids = self.ids
        return np.flatnonzero((ids[:, 0] == low) & (ids[:, 1] == high))

    @property
    def memory(self) -> int:
        """About how many bytes it takes."""
        return len(self._due) * 29 + len(self._offsets) * 64


def _widened(column: Rows, room: int, count: int) -> Rows:
    """Return a column with more room; what lies beyond ``count`` is left as it comes."""
    made = np.empty((room, *column.shape[1:]), column.dtype)
    made[:count] = column[:count]
    return made
