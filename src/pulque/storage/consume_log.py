"""Consume logs: per partition, from consume sequence to the batch that holds it.

A consume log is logical. Its newest entries are those of the open segment, in memory; older ones
are in the index files of sealed segments, of which the most recently used are kept open.
"""

from collections import OrderedDict
from threading import Lock
from typing import NamedTuple

from pulque.errors import CorruptionError
from pulque.model.positions import ConsumeSequence, MessageOffset, PartitionId
from pulque.storage.files import FileSystem
from pulque.storage.index import Entry, OpenIndex, SealedIndex
from pulque.storage.message_log import MessageLog, segment_path
from pulque.storage.partitions import Partition

__all__ = ["ConsumeLogs", "Piece", "Span"]

_INDEXES_KEPT = 32
_ENTRIES_AT_FIRST = 2  # most pulls end within two batches
_ENTRIES_AT_ONCE = 512


class Piece(NamedTuple):
    """Some messages of one stored batch."""

    entry: Entry
    start: int
    end: int

    @property
    def is_whole(self) -> bool:
        """Whether they are all of it."""
        return self.start == 0 and self.end == self.entry.count


class Span(NamedTuple):
    """Messages of a partition that follow each other, but for holes that corruption left."""

    first_sequence: ConsumeSequence
    end: ConsumeSequence
    pieces: list[Piece]

    @property
    def length(self) -> int:
        """How many sequences it covers."""
        return self.end - self.first_sequence


class ConsumeLogs:
    """The consume logs of all partitions."""

    def __init__(self, files: FileSystem, log: MessageLog, open_index: OpenIndex) -> None:
        self._files = files
        self._log = log
        self.open_index = open_index
        """Entries of the open segment."""
        self.sealing: dict[int, OpenIndex] = {}
        """Entries of sealed segments whose index file is not written yet, by base."""
        self._sealed: OrderedDict[int, SealedIndex] = OrderedDict()
        self._lock = Lock()

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
        a span may be cut: whoever goes on from its end then begins with whole batches, which cost
        nothing to hand out. A hole is passed over: the span begins at the first message after it.

        Raises:
            WouldBlockError: An index file would have to be read from the disk.
        """
        pieces: list[Piece] = []
        first = at = sequence
        messages, room = max_messages, max_bytes
        at_once = _ENTRIES_AT_FIRST
        while messages > 0 and at < end:
            entries = self._entries(partition.id, at, min(messages, at_once), may_block=may_block)
            at_once = min(at_once * 4, _ENTRIES_AT_ONCE)
            if not entries:
                break
            for entry in entries:
                piece = _piece(entry, at, end, messages, room if pieces else max(room, 1))
                if piece is None or (pieces and piece.end - piece.start < entry.count):
                    return Span(first, at, pieces)
                if not pieces:
                    first = ConsumeSequence(entry.first_sequence + piece.start)
                pieces.append(piece)
                at = ConsumeSequence(entry.first_sequence + piece.end)
                messages = first + max_messages - at
                room -= entry.size * (piece.end - piece.start) // entry.count
                if messages <= 0 or room <= 0 or at >= end:
                    return Span(first, at, pieces)
        return Span(first, at, pieces)

    def at_time(self, partition: Partition, at_ms: int) -> ConsumeSequence:
        """Return the first message stored at or after an instant, or the end."""
        segments = self._log.segments
        after = next((i for i, s in enumerate(segments) if s.opened_at_ms > at_ms), len(segments))
        for segment in segments[max(after - 1, 0) :]:
            found = self._index(segment.base).find_time(partition.id, at_ms)
            if found is not None:
                return min(found.first_sequence, partition.confirmed)
        return partition.confirmed

    def forget(self, base: int) -> None:
        """Drop the index of a segment that was removed."""
        with self._lock:
            self._sealed.pop(base, None)

    def close(self) -> None:
        for index in self._sealed.values():
            index.close()

    def _entries(
        self, partition: PartitionId, sequence: ConsumeSequence, limit: int, *, may_block: bool
    ) -> list[Entry]:
        start = self.open_index.start_of(partition)
        if start is not None and start <= sequence:
            return self.open_index.find(partition, sequence, limit)
        return self._sealed_entries(partition, sequence, limit, may_block=may_block)

    def _sealed_entries(
        self, partition: PartitionId, sequence: ConsumeSequence, limit: int, *, may_block: bool
    ) -> list[Entry]:
        """Look from the segment on that was begun at or before the sequence."""
        segments = self._log.segments
        low, high = 0, len(segments) - 1
        while low < high:
            middle = (low + high + 1) // 2
            start = self._start_of(segments[middle].base, partition)
            if start is not None and start <= sequence:
                low = middle
            else:
                high = middle - 1
        for segment in segments[low:]:
            index = self._index(segment.base)
            if isinstance(index, OpenIndex):
                found = index.find(partition, sequence, limit)
            else:
                found = index.find(partition, sequence, limit, may_block=may_block)
            if found:
                return found
        return []

    def _start_of(self, base: int, partition: PartitionId) -> ConsumeSequence | None:
        index = self._index(base)
        if isinstance(index, OpenIndex):
            return index.starts.get(partition, index.start_of(partition))
        return index.start_of(partition)

    def _index(self, base: int) -> OpenIndex | SealedIndex:
        if base == self._log.open_segment.base:
            return self.open_index
        if (sealing := self.sealing.get(base)) is not None:
            return sealing
        with self._lock:
            return self._sealed_index(base)

    def _sealed_index(self, base: int) -> SealedIndex:
        index = self._sealed.get(base)
        if index is None:
            path = segment_path(base, "index")
            try:
                file = self._files.open(path, writable=False)
            except FileNotFoundError:
                raise CorruptionError(
                    path, 0, "the index is missing; a restart makes it"
                ) from None
            index = self._sealed[base] = SealedIndex(file, path, MessageOffset(base))
            if len(self._sealed) > _INDEXES_KEPT:
                # Another thread may be reading it: it is closed when nobody has it any more.
                self._sealed.popitem(last=False)
        else:
            self._sealed.move_to_end(base)
        return index


def _piece(
    entry: Entry, sequence: ConsumeSequence, end: ConsumeSequence, messages: int, room: int
) -> Piece | None:
    """Return what of a batch is wanted, or None if nothing of it fits."""
    if entry.first_sequence >= end or room <= 0:
        return None
    start = max(sequence - entry.first_sequence, 0)
    stop = min(start + messages, entry.count, end - entry.first_sequence)
    fitting = max(room * entry.count // entry.size, 1)
    return Piece(entry, start, min(stop, start + fitting))
