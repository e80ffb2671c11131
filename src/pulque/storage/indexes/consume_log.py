"""Consume logs: map the consume sequences of a partition to batches.

A consume log is logical. Its newest entries are those of the open segment, in memory; older ones
are in the index files of sealed segments, of which the most recently used are kept open.
"""

from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sized
from threading import Lock
from typing import NamedTuple, TypeVar

from pulque.errors import CorruptionError
from pulque.model.positions import ConsumeSequence, MessageOffset, PartitionId
from pulque.storage.events import Listener
from pulque.storage.files import FileSystem, WouldBlockError
from pulque.storage.indexes.index_rebuild import entries_of
from pulque.storage.indexes.segment_index import NO_ENTRIES, Entry, OpenIndex, SealedIndex, Table
from pulque.storage.logs.message_log import MessageLog, segment_path
from pulque.storage.logs.partitions import Partition
from pulque.storage.logs.segment import Segment
from pulque.storage.reading.damaged_batches import Hole

__all__ = ["ConsumeLogs", "Piece", "Span"]

_INDEXES_KEPT = 32
_ENTRIES_AT_FIRST = 2  # most pulls end within two batches
_ENTRIES_AT_ONCE = 512
_Found = TypeVar("_Found")
_Some = TypeVar("_Some", bound=Sized)


class Piece(NamedTuple):
    """A range of messages of one stored batch."""

    entry: Entry
    start: int
    end: int

    @property
    def is_whole(self) -> bool:
        """Whether it is the whole batch."""
        return self.start == 0 and self.end == self.entry.count


class Span(NamedTuple):
    """Consecutive messages of a partition, except for holes that corruption left."""

    first_sequence: ConsumeSequence
    end: ConsumeSequence
    pieces: list[Piece]
    holes: tuple[Hole, ...] = ()
    """Missing sequences before or between them, which no index has."""

    @property
    def length(self) -> int:
        """How many sequences it covers."""
        return self.end - self.first_sequence


class ConsumeLogs:
    """The consume logs of all partitions.

    One thread changes them; ``span`` and ``at_time`` may be called from any.
    """

    def __init__(
        self,
        files: FileSystem,
        log: MessageLog,
        listener: Listener,
        fresh: dict[int, OpenIndex],
    ) -> None:
        self._files = files
        self._log = log
        self._listener = listener
        self._fresh = fresh
        """Indexes in memory, by base: sealed segments without a file, and the open one."""
        self._missing = [
            segment.base
            for segment in log.segments
            if segment.base not in fresh and not files.exists(segment_path(segment.base, "index"))
        ]
        self.open_index = OpenIndex({})
        """Entries of the open segment."""
        self._sealed: OrderedDict[int, SealedIndex] = OrderedDict()
        self._lock = Lock()
        """Guards the line above, and is never held while a file is read."""
        self._rebuilding = Lock()

    def put(self, base: int, index: OpenIndex) -> None:
        """Add the index of a new segment."""
        self._fresh[base] = index

    def unwritten(self) -> tuple[Segment, OpenIndex | None] | None:
        """Return a sealed segment that has no index file, with its entries if they are known."""
        for base in [*self._fresh, *self._missing]:
            segment = self._log.segment_of(base)
            if segment is None or segment.base != base:
                self.forget(base)
            elif base != self._log.open_segment.base:
                return segment, self._fresh.get(base)
        return None

    def span(
        self,
        partition: Partition,
        sequence: ConsumeSequence,
        *,
        end: ConsumeSequence,
        max_messages: int,
        max_bytes: int,
        may_block: bool = True,
    ) -> Span:
        """Return the messages from ``sequence`` on, before ``end``, within the limits.

        At least one message is returned if there is one, however large. Only the first batch of
        a span may be cut: the next span then begins with whole batches, which cost
        nothing to serve. A hole is skipped: the span begins at the first message after it.

        Raises:
            WouldBlockError: An index file would have to be read from the disk.
        """
        pieces: list[Piece] = []
        holes: tuple[Hole, ...] = ()
        first = at = sequence
        messages, room = max_messages, max_bytes
        at_once = _ENTRIES_AT_FIRST
        while messages > 0 and at < end:
            limit = min(messages, at_once)
            entries = self._entries(partition.id, at, limit, may_block=may_block)
            # What lies before an entry behind the end is a hole, too.
            entries = [each for each in entries if each.first_sequence < end]
            at_once = min(at_once * 4, _ENTRIES_AT_ONCE)
            if not entries:
                holes += (Hole(at, end),)
                break
            for entry in entries:
                piece = _piece(entry, at, end, messages, room, is_first=not pieces)
                if piece is None or (pieces and piece.end - piece.start < entry.count):
                    return Span(first, at, pieces, holes)
                if entry.first_sequence > at:
                    holes += (Hole(at, entry.first_sequence),)
                if not pieces:
                    first = ConsumeSequence(entry.first_sequence + piece.start)
                pieces.append(piece)
                at = ConsumeSequence(entry.first_sequence + piece.end)
                messages = first + max_messages - at
                room -= entry.size * (piece.end - piece.start) // entry.count
                if piece.end < entry.count or messages <= 0 or room <= 0 or at >= end:
                    return Span(first, at, pieces, holes)
        return Span(first, at, pieces, holes)

    def at_time(self, partition: Partition, at_ms: int) -> ConsumeSequence:
        """Return the first message stored at or after an instant, or the end."""
        segments = self._log.segments
        times = (i for i, segment in enumerate(segments) if segment.opened_at_ms >= at_ms)
        first = max(next(times, len(segments)) - 1, 0)
        while first > 0 and not segments[first].opened_at_ms:
            first -= 1
        for segment in segments[first:]:
            found = self._look(segment, lambda index: index.find_time(partition.id, at_ms))
            if found is not None:
                return min(found.first_sequence, partition.confirmed)
        return partition.confirmed

    def starts(
        self, segment: Segment, partitions: Iterable[PartitionId]
    ) -> list[tuple[PartitionId, ConsumeSequence]]:
        """Return the next sequences of the known partitions when a segment began."""

        def look(index: OpenIndex | SealedIndex) -> list[tuple[PartitionId, ConsumeSequence]]:
            found = ((partition, index.start_of(partition)) for partition in partitions)
            return [(partition, start) for partition, start in found if start is not None]

        return self._look(segment, look)

    def forget(self, base: int) -> None:
        """Drop a segment's index from memory: it has a file now, or was removed."""
        self._fresh.pop(base, None)
        if base in self._missing:
            self._missing.remove(base)
        with self._lock:
            self._sealed.pop(base, None)

    def close(self) -> None:
        with self._lock:
            for index in self._sealed.values():
                index.close()
            self._sealed.clear()

    def _entries(
        self, partition: PartitionId, sequence: ConsumeSequence, limit: int, *, may_block: bool
    ) -> list[Entry]:
        open_index = self.open_index
        first = open_index.first_of(partition)
        if first is not None and first <= sequence:
            return open_index.find(partition, sequence, limit)

        def find(index: OpenIndex | SealedIndex) -> list[Entry]:
            if isinstance(index, OpenIndex):
                return index.find(partition, sequence, limit)
            return index.find(partition, sequence, limit, may_block=may_block)

        found = self._first_found(partition, sequence, find, may_block=may_block)
        return [] if found is None else found

    def table(
        self, partition: PartitionId, sequence: ConsumeSequence, limit: int, *, may_block: bool
    ) -> Table:
        """Return up to ``limit`` entries from the one that has ``sequence`` on, in columns.

        They are of one segment, and there may be more behind them.

        Raises:
            WouldBlockError: An index file would have to be read from the disk.
        """
        open_index = self.open_index
        first = open_index.first_of(partition)
        if first is not None and first <= sequence:
            return open_index.table(partition, sequence, limit)

        def find(index: OpenIndex | SealedIndex) -> Table:
            if isinstance(index, OpenIndex):
                return index.table(partition, sequence, limit)
            return index.table(partition, sequence, limit, may_block=may_block)

        found = self._first_found(partition, sequence, find, may_block=may_block)
        return NO_ENTRIES if found is None else found

    def _first_found(
        self,
        partition: PartitionId,
        sequence: ConsumeSequence,
        find: Callable[[OpenIndex | SealedIndex], _Some],
        *,
        may_block: bool,
    ) -> _Some | None:
        """Look from the segment on that was begun at or before the sequence."""
        segments = self._log.segments

        def begins_after(segment: Segment) -> bool:
            return self._look(
                segment,
                lambda index: _begins_after(index, partition, sequence),
                may_block=may_block,
            )

        first = bisect_left(segments, True, lo=1, key=begins_after) - 1
        for segment in segments[first:]:
            found = self._look(segment, find, may_block=may_block)
            if len(found):
                return found
        return None

    def _look(
        self,
        segment: Segment,
        look: Callable[[OpenIndex | SealedIndex], _Found],
        *,
        may_block: bool = True,
    ) -> _Found:
        """Return the result of ``look`` on a segment's index, which is rebuilt if needed."""
        index = self._index(segment, may_block=may_block)
        if index is not None:
            try:
                return look(index)
            except CorruptionError:
                with self._lock:
                    self._sealed.pop(segment.base, None)
        if not may_block:
            raise WouldBlockError
        return look(self._rebuilt(segment))

    def _index(self, segment: Segment, *, may_block: bool) -> OpenIndex | SealedIndex | None:
        """Return a segment's index, or None if it is missing or damaged."""
        base = segment.base
        fresh = self._fresh.get(base)
        if fresh is not None:
            return fresh
        with self._lock:
            index = self._sealed.get(base)
            if index is not None:
                self._sealed.move_to_end(base)
                return index
        if not may_block:
            raise WouldBlockError
        index = self._open(segment)
        if index is not None:
            with self._lock:
                self._sealed[base] = index
                if len(self._sealed) > _INDEXES_KEPT:
                    # Another thread may be reading it: it is closed when nobody has it any more.
                    self._sealed.popitem(last=False)
        return index

    def _rebuilt(self, segment: Segment) -> OpenIndex:
        """Rebuild the index; it is used from memory until its file is written."""
        base = segment.base
        with self._rebuilding:
            index = self._fresh.get(base)
            if index is None:
                if self._log.segment_of(base) is not segment:
                    return OpenIndex({})  # retention has removed it meanwhile
                index = entries_of(segment, segment.end, self._listener)
                self._listener.index_rebuilt(segment_path(base, "index"), len(index))
                self._fresh[base] = index
        return index

    def _open(self, segment: Segment) -> SealedIndex | None:
        path = segment_path(segment.base, "index")
        try:
            file = self._files.open(path, writable=False)
            return SealedIndex(file, path, MessageOffset(segment.base), MessageOffset(segment.end))
        except (FileNotFoundError, CorruptionError):
            return None


def _begins_after(
    index: OpenIndex | SealedIndex, partition: PartitionId, sequence: ConsumeSequence
) -> bool:
    """Return whether a segment has nothing of a partition that is as old as ``sequence``."""
    start = index.start_of(partition)
    if start is None:
        # A whole table that does not have it: the partition was made later.
        return not index.is_complete
    return start > sequence


def _piece(
    entry: Entry,
    sequence: ConsumeSequence,
    end: ConsumeSequence,
    messages: int,
    room: int,
    *,
    is_first: bool,
) -> Piece | None:
    """Return the wanted part of a batch, or None if no message of it fits the limits."""
    start = max(sequence - entry.first_sequence, 0)
    # One message always fits, or a large one would never be handed out.
    fitting = max(room * entry.count // entry.size, int(is_first))
    stop = min(start + min(messages, fitting), entry.count, end - entry.first_sequence)
    return Piece(entry, start, stop) if stop > start else None
