"""Recover the message log: cut the torn tail, replay, verify.

The walk begins at the checkpoint's offset and ends at the end of the last segment. Bytes that
are not a record are one of two things:

- a *torn tail*: they were never confirmed. The log is cut there.
- *corruption*: the checkpoint, or a record after them, shows that the log was synced beyond them.
  The range is reported and skipped; everything before and after stays readable, and
  numbering continues.

The same rule holds for every segment, as a later segment is always synced after an earlier.
A segment whose beginning is torn is dropped as a whole, so that every segment begins with its
table.
"""

from collections.abc import Iterator
from typing import NamedTuple, Protocol

import google_crc32c

from pulque.errors import StorageFullError
from pulque.model.batch import HEADER, BatchHeader, verify_crc
from pulque.model.names import PartitionName
from pulque.model.positions import ConsumeSequence, MessageOffset, PartitionId
from pulque.model.record import ENVELOPE_SIZE, Envelope, RecordType
from pulque.storage.checkpoint import Mark
from pulque.storage.directory.layout import (
    LARGEST,
    MESSAGES,
    base_of,
    read_oldest,
    segment_path,
    write_oldest,
)
from pulque.storage.events import Listener
from pulque.storage.files import FileSystem
from pulque.storage.indexes.index_rebuild import BAD_TABLE, entries_of, entry_of
from pulque.storage.indexes.segment_index import ENTRY_SIZE, Entry, OpenIndex, write_sealed_index
from pulque.storage.logs.partitions import Partition, Partitions, TableRow, decode_table
from pulque.storage.logs.segment import DamagedBytes, Segment, open_segment, record_at, walk

__all__ = ["Observer", "RecoveredLog", "recover_message_log"]


class Observer(Protocol):
    """Sees the checkpoint, then every batch that was stored since, in order."""

    def checkpoint_loaded(self, state: dict[bytes, bytes]) -> None:
        """Load the state that the replay starts from; empty if there is no checkpoint."""

    def batch_stored(self, partition: Partition, entry: Entry, batch: bytes) -> None:
        """Apply one batch, as after a live append."""


class RecoveredLog(NamedTuple):
    """The recovered log."""

    segments: list[Segment]
    end: MessageOffset
    """Where the next record goes."""
    is_open: bool
    """Whether the last segment can be appended to; if not, a new one is due."""
    indexes: dict[int, OpenIndex]
    """By base: of the open segment, and of those whose index file could not be written."""
    stored_at_ms: int
    is_saved: bool
    """Whether the ``.open`` file of the open segment has what the checkpoint's mark says."""


def recover_message_log(
    files: FileSystem,
    listener: Listener,
    partitions: Partitions,
    mark: Mark,
    observer: Observer,
) -> RecoveredLog:
    """Recover the message log, so that it can be appended to and read."""
    return _Recovery(files, listener, partitions, mark, observer).run()


class _Recovery:
    def __init__(
        self,
        files: FileSystem,
        listener: Listener,
        partitions: Partitions,
        mark: Mark,
        observer: Observer,
    ) -> None:
        self._files = files
        self._listener = listener
        self._partitions = partitions
        self._mark = mark
        self._observer = observer
        self._segments: list[Segment] = []
        self._indexes: dict[int, OpenIndex] = {}
        self._is_open = False
        self._saved_base: int | None = None
        self._stored_at_ms = mark.stored_at_ms
        self._durable: int | None = None
        self._later_names: dict[PartitionId, PartitionName] | None = None

    def run(self) -> RecoveredLog:
        self._open_segments()
        self._check_seams()
        at = 0
        while at < len(self._segments):
            if not self._is_below_mark(at):
                self._take_in(at)
            at += 1
        end = self._segments[-1].end if self._segments else 0
        if self._segments and self._segments[-1].epoch is not None:
            # Its file may go on with older bytes, and what is written now has another epoch.
            self._is_open = False
        missing = self._mark.message_offset - end
        if missing > 0:
            self._is_open = False
            self._report(self._segments[-1:], end, missing, "the end of the log is missing")
        if not self._is_open:
            self._store_indexes()
        elif self._files.exists(path := segment_path(self._segments[-1].base, "index")):
            # It was sealed before, and the next segment did not make it to the disk.
            self._files.remove(path)
        end = max(end, self._mark.message_offset)
        return RecoveredLog(
            self._segments,
            MessageOffset(end),
            self._is_open,
            self._indexes,
            self._stored_at_ms,
            is_saved=self._is_open and self._saved_base == self._segments[-1].base,
        )

    # -- finding the segments ----------------------------------------------------------------

    def _open_segments(self) -> None:
        names = self._files.list(MESSAGES)
        for name in names:
            path = f"{MESSAGES}/{name}"
            if (base := base_of(name, "log")) is not None:
                self._segments.append(open_segment(path, self._files.open(path), base))
            elif name.endswith(".tmp") or base_of(name, "spare") is not None:
                self._files.remove(path)
        bases = {segment.base for segment in self._segments}
        for name in names:
            for suffix in ("index", "keys", "open"):
                base = base_of(name, suffix)
                if base is not None and base not in bases:
                    self._files.remove(f"{MESSAGES}/{name}")

    def _check_seams(self) -> None:
        """Report missing bytes below the mark: before, between and after segments."""
        oldest = read_oldest(self._files)
        if self._segments and oldest is not None and oldest < self._segments[0].base:
            first = self._segments[0]
            self._report([first], oldest, first.base - oldest, "segments before it are missing")
            write_oldest(self._files, first.base)
        for before, after in zip(self._segments, self._segments[1:], strict=False):
            size = after.base - before.end
            if size < 0:
                self._report([before], after.base, -size, "the next segment begins earlier")
                before.end = after.base
            elif size > 0 and after.base <= self._mark.message_offset:
                self._report([before], before.end, size, "the log ends before its time")

    def _is_below_mark(self, at: int) -> bool:
        """Return whether a segment was sealed when the checkpoint was written."""
        following = self._segments[at + 1 : at + 2]
        return bool(following) and following[0].base <= self._mark.message_offset

    # -- replaying ---------------------------------------------------------------------------

    def _take_in(self, at: int) -> None:
        """Apply the records of one segment from the mark on; the last one becomes the open one."""
        self._store_indexes()
        segment = self._segments[at]
        start = min(max(self._mark.message_offset, segment.base), segment.end)
        index = self._index_of(segment, start)
        self._is_open = self._replay(at, start, index)
        if self._is_open:
            self._indexes[segment.base] = index

    def _replay(self, at: int, start: int, index: OpenIndex) -> bool:
        """Apply a segment's records; return whether anything is left of it."""
        segment = self._segments[at]
        for item in walk(segment, MessageOffset(start)):
            if isinstance(item, DamagedBytes):
                problem, offset, end = item.reason, item.offset, item.end
            else:
                envelope, content = item
                problem = self._apply(envelope, content, index) or ""
                offset, end = envelope.offset, MessageOffset(envelope.offset + envelope.size)
            if not problem:
                continue
            if not self._was_durable(at, offset):
                return self._cut(at, offset)
            self._report([segment], offset, end - offset, problem)
            if not isinstance(item, DamagedBytes):
                self._pass_over(item[0])
        return self._check_end(at)

    def _check_end(self, at: int) -> bool:
        """Check that a segment reaches to the next one; return whether anything is left of it."""
        segment = self._segments[at]
        following = self._segments[at + 1 : at + 2]
        missing = following[0].base - segment.end if following else 0
        is_empty = segment.end == segment.base
        if (missing > 0 or is_empty) and not self._was_durable(at, segment.end):
            return self._cut(at, MessageOffset(segment.end))
        if missing > 0:
            self._report([segment], segment.end, missing, "the log ends before its time")
        return True

    def _apply(self, envelope: Envelope, content: bytes, index: OpenIndex) -> str | None:
        """Apply one record; return a text if it is damaged."""
        if envelope.type is RecordType.PARTITION_TABLE:
            rows = decode_table(content)
            if rows is None:
                return BAD_TABLE
            self._partitions.take_rows(rows)
            self._stored_at_ms = max(self._stored_at_ms, envelope.stored_at_ms)
            return None
        partition = self._partition_of(envelope)
        if partition is None:
            return f"partition {envelope.partition} is in no table"
        problem = _problem_of(envelope, content, partition)
        if problem is not None:
            return problem
        entry = entry_of(envelope, content)
        partition.end = ConsumeSequence(entry.first_sequence + entry.count)
        self._partitions.changed.add(partition.id)
        self._stored_at_ms = max(self._stored_at_ms, entry.stored_at_ms)
        index.add(entry)
        self._observer.batch_stored(partition, entry, content)
        return None

    def _partition_of(self, envelope: Envelope) -> Partition | None:
        """Return a record's partition; if its own table is damaged, a later segment knows it."""
        partition = self._partitions.by_id.get(envelope.partition)
        if partition is not None:
            return partition
        if self._later_names is None:
            self._later_names = {
                partition_id: name
                for segment in self._segments
                for partition_id, name, _ in _table_of(segment) or ()
            }
        name = self._later_names.get(envelope.partition)
        if name is not None:
            self._partitions.take_rows([(envelope.partition, name, envelope.first_sequence)])
        return self._partitions.by_id.get(envelope.partition)

    def _pass_over(self, envelope: Envelope) -> None:
        """Keep the numbering of a partition that has a quarantined batch."""
        partition = self._partitions.by_id.get(envelope.partition)
        if envelope.type is RecordType.BATCH and partition is not None:
            if envelope.first_sequence > LARGEST:
                return
            end = ConsumeSequence(envelope.first_sequence + envelope.count)
            partition.end = max(partition.end, end)
            self._partitions.changed.add(partition.id)

    # -- judging -----------------------------------------------------------------------------

    def _was_durable(self, at: int, offset: int) -> bool:
        """Return whether damage at ``offset`` is corruption, and not a torn tail."""
        if self._durable is None:
            self._durable = max(
                (synced for synced in self._synced_from(at, offset)),
                default=self._mark.message_offset,
            )
        return offset < max(self._durable, self._mark.message_offset)

    def _synced_from(self, at: int, offset: int) -> Iterator[int]:
        """Yield how far the log was on disk, as the records from ``offset`` on say."""
        for segment in self._segments[at:]:
            for item in walk(segment, MessageOffset(max(offset, segment.base))):
                if isinstance(item, DamagedBytes):
                    yield item.synced
                elif item[0].synced <= item[0].offset:
                    yield item[0].synced

    def _cut(self, at: int, offset: MessageOffset) -> bool:
        """Cut the log; return whether anything is left of the segment."""
        segment = self._segments[at]
        lost = self._segments[-1].end - offset
        kept = at + 1 if offset > segment.base else at
        for later in self._segments[kept:]:
            later.file.close()
            self._files.remove(later.path)
        for later in self._segments[at:]:
            # An index of what was cut off would be taken for that of what follows.
            for suffix in ("index", "keys", "open") if later is not segment else ("index", "keys"):
                path = segment_path(later.base, suffix)
                if self._files.exists(path):
                    self._files.remove(path)
        del self._segments[kept:]
        if kept > at and offset < segment.end:
            segment.file.truncate(offset - segment.base)
            segment.file.sync()
            segment.end = offset
        self._files.sync_directory(MESSAGES)
        self._listener.tail_cut(segment.path, offset, lost)
        return kept > at

    # -- indexes -----------------------------------------------------------------------------

    def _index_of(self, segment: Segment, end: int) -> OpenIndex:
        """Return the entries of a segment up to ``end``, from its ``.open`` file or by a walk."""
        mark = self._mark
        path = segment_path(segment.base, "open")
        entries: bytes | None = None
        if end <= segment.base:
            entries = b""
        elif mark.index_base == segment.base and end == mark.message_offset:
            entries = self._read_open(path)
            self._saved_base = None if entries is None else segment.base
        if entries is not None:
            table = _table_of(segment) if segment.has_own_table else None
            starts = {partition_id: sequence for partition_id, _, sequence in table or ()}
            index = OpenIndex(starts, is_complete=table is not None)
            index.load(entries)
            return index
        index = entries_of(segment, end, self._listener)
        self._listener.index_rebuilt(path, len(index))
        return index

    def _read_open(self, path: str) -> bytes | None:
        mark = self._mark
        if not self._files.exists(path):
            return None if mark.index_size else b""
        file = self._files.open(path, writable=False)
        try:
            entries = file.read(mark.index_size, 0)
        finally:
            file.close()
        if len(entries) < mark.index_size or len(entries) % ENTRY_SIZE:
            return None
        return entries if google_crc32c.value(entries) == mark.index_crc else None

    def _store_indexes(self) -> None:
        """Write the index files of complete segments, to free their memory."""
        for segment in self._segments:
            index = self._indexes.get(segment.base)
            if index is None:
                continue
            try:
                write_sealed_index(
                    self._files,
                    segment_path(segment.base, "index"),
                    base=MessageOffset(segment.base),
                    end=MessageOffset(segment.end),
                    index=index,
                )
            except StorageFullError:
                continue  # it serves from memory until there is room
            del self._indexes[segment.base]

    def _report(self, segments: list[Segment], offset: int, size: int, reason: str) -> None:
        path = segments[0].path if segments else MESSAGES
        self._listener.corruption_found(path, offset, size, reason)


def _problem_of(envelope: Envelope, batch: bytes, partition: Partition) -> str | None:
    """Return a text that describes the damage of a stored batch, or None."""
    if len(batch) < HEADER.size or not verify_crc(batch, partition.seed):
        return "the batch's crc does not match"
    if not partition.end <= envelope.first_sequence <= LARGEST:
        return f"sequence {envelope.first_sequence} comes after {partition.end}"
    if BatchHeader._make(HEADER.unpack_from(batch)).count != envelope.count:
        return f"the envelope's {envelope.count} messages are not those of the batch"
    return None


def _table_of(segment: Segment) -> list[TableRow] | None:
    """Return the table that a segment begins with, or None if it is damaged."""
    head = record_at(segment, segment.base)
    if head is None:
        return None
    return decode_table(segment.read(segment.base + ENVELOPE_SIZE, head.size - ENVELOPE_SIZE))
