"""The message log: every batch of every partition, in order of arrival. The truth.

Appends are queued and written together, so that many small sends of one turn of the event loop
cost one system call. No other state changes until ``write`` succeeds; if the disk is full
the queue is dropped as a whole, the file is cut back, and no sequence is used up.

Syncing happens in steps, so that a thread can wait for the disk while the log continues:
``sync_steps`` (here), the steps (in the thread), ``finish_sync`` (here).
"""

from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Callable
from operator import attrgetter
from typing import Any

from pulque.errors import StorageError
from pulque.model.positions import ConsumeSequence, MessageOffset, PartitionId
from pulque.model.record import (
    ENVELOPE_SIZE,
    Envelope,
    RecordType,
    pack_batch_envelope,
    pack_envelope,
)
from pulque.storage.directory.layout import MESSAGES, segment_path
from pulque.storage.disk_jobs import SyncJob
from pulque.storage.events import Listener
from pulque.storage.files import Buffer, FileSystem
from pulque.storage.indexes.segment_index import Entry
from pulque.storage.logs.partitions import Partition, TableRow, encode_table
from pulque.storage.logs.segment import Segment
from pulque.storage.options import StorageOptions

__all__ = ["DIRECTORY", "Appended", "MessageLog", "SyncJob", "segment_path"]

DIRECTORY = MESSAGES
_base = attrgetter("base")
_new_entry = tuple.__new__
"""A named tuple's own constructor takes keywords, which would double the cost."""


class Appended:
    """A batch that is queued or written."""

    __slots__ = (
        "batch",
        "end",
        "entry",
        "envelope",
        "is_written",
        "partition",
        "remark",
        "waiting",
        "wants_disk",
    )

    def __init__(
        self,
        partition: Partition,
        entry: Entry,
        envelope: bytes,
        batch: bytes,
        end: MessageOffset,
        wants_disk: bool,  # noqa: FBT001
    ) -> None:
        self.partition = partition
        self.entry = entry
        self.envelope = envelope
        self.batch = batch
        self.wants_disk = wants_disk
        """Whether it is confirmed only once it is synced."""
        self.end = end
        """The offset after it."""
        self.is_written = False
        """Whether it is in the log. If not after ``write``, it never will be."""
        self.waiting: list[Any] = []
        """The requests that wait for it; used by the caller of ``append``."""
        self.remark: Any = None
        """A note of the caller of ``append``."""


class TailCache:
    """The newest records in memory, by offset. Read from any thread, written by one."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._most = max(limit // 1024, 64)
        self._size = 0
        self._records: OrderedDict[int, tuple[bytes, bytes]] = OrderedDict()

    def put(self, written: list[Appended]) -> None:
        """Add written records; evict the oldest."""
        records = self._records
        for appended in written:
            batch = appended.batch
            records[appended.entry.offset] = (appended.envelope, batch)
            self._size += len(batch)
        while self._size > self._limit or len(records) > self._most:
            self._size -= len(records.popitem(last=False)[1][1])

    def get(self, offset: int) -> tuple[bytes, bytes] | None:
        """Return a record's envelope and batch, if cached."""
        return self._records.get(offset)


class MessageLog:
    """Appends to the open segment and reads from all. One writer."""

    def __init__(
        self,
        files: FileSystem,
        options: StorageOptions,
        listener: Listener,
        segments: list[Segment],
    ) -> None:
        self._files = files
        self._options = options
        self._listener = listener
        self._epoch = options.epoch
        self.segments = segments
        """In order; the last one is open."""
        self.end = MessageOffset(0)
        """Where the next record goes, the queue included."""
        self.synced = MessageOffset(0)
        """Everything before it survives a power cut."""
        self.last_stored_at_ms = 0
        self.batches = 0
        """The batches in the open segment."""
        self.cache = TailCache(options.tail_cache_bytes)
        self._pending: list[Appended] = []
        self._buffers: list[Buffer] = []
        self._names_changed = 0
        self._names_synced = 0

    def resume(self, end: MessageOffset, stored_at_ms: int, synced: int) -> None:
        """Continue after recovery; only bytes that a checkpoint covers are known to be synced."""
        self.end = end
        self.last_stored_at_ms = stored_at_ms
        self.synced = MessageOffset(synced)
        self._names_changed = 1

    @property
    def open_segment(self) -> Segment:
        """The segment that is being written."""
        return self.segments[-1]

    @property
    def has_pending(self) -> bool:
        """Whether anything waits for ``write``."""
        return bool(self._buffers)

    def needs_roll(self, size: int, now_ms: int) -> bool:
        """Return whether the open segment must be sealed before ``size`` more bytes."""
        segment, options = self.segments[-1], self._options
        return self.batches > 0 and (
            self.end - segment.base + size > options.segment_bytes
            or self.batches >= options.segment_batches
            or now_ms - segment.opened_at_ms >= options.segment_age_ms
        )

    def start_segment(self, rows: list[TableRow], now_ms: int) -> None:
        """Begin a new segment with a table of all partitions.

        Raises:
            StorageError: The log is unchanged.
        """
        base = self.end
        path = segment_path(base)
        # Never before the last batch, so that a search by time may trust it.
        opened_at_ms = max(now_ms, self.last_stored_at_ms)
        table = self._table_record(rows, opened_at_ms)
        file = self._files.open(path, create=True)
        try:
            file.truncate(0)
            file.write(table, 0)
        except StorageError:
            file.close()
            self._files.remove(path)
            # Else a power cut could bring it back, and the log has gone on in the old segment.
            self._files.sync_directory(DIRECTORY)
            raise
        self.last_stored_at_ms = opened_at_ms
        self.end = MessageOffset(base + sum(map(len, table)))
        # A new list each time: readers in other threads go on with the old one.
        self.segments = [*self.segments, Segment(path, file, base, self.end, opened_at_ms)]
        self.batches = 0
        self._names_changed += 1

    def append_table(self, partition: Partition, now_ms: int) -> None:
        """Queue the table of one new partition."""
        record = self._table_record([(partition.id, partition.name, partition.end)], now_ms)
        self._buffers.extend(record)
        self.end = MessageOffset(self.end + sum(map(len, record)))

    def append(
        self,
        partition: Partition,
        batch: bytes,
        count: int,
        tag_union: int,
        now_ms: int,
        *,
        wants_disk: bool,
    ) -> Appended:
        """Queue a batch. The partition's end moves at once, so that the next one follows it."""
        size = ENVELOPE_SIZE + len(batch)
        stored_at_ms = self.last_stored_at_ms
        if now_ms > stored_at_ms:
            stored_at_ms = self.last_stored_at_ms = now_ms
        first, offset, partition_id = partition.end, self.end, partition.id
        envelope = pack_batch_envelope(
            size, offset, self.synced, self._epoch, partition_id, first, stored_at_ms, count
        )
        entry = _new_entry(
            Entry, (partition_id, count, first, offset, size, stored_at_ms, tag_union)
        )
        end = MessageOffset(offset + size)
        appended = Appended(partition, entry, envelope, batch, end, wants_disk)
        self.end = end
        partition.end = ConsumeSequence(first + count)
        self._pending.append(appended)
        self._buffers += (envelope, batch)
        return appended

    def write(self) -> list[Appended]:
        """Write the queue and return its batches.

        Raises:
            StorageError: None of them is in the log, and the partitions are unchanged.
        """
        written, buffers = self._pending, self._buffers
        self._pending, self._buffers = [], []
        segment = self.open_segment
        try:
            segment.file.write(buffers, segment.end - segment.base)
        except StorageError:
            self._take_back(written)
            raise
        segment.end = self.end
        self.batches += len(written)
        for appended in written:
            appended.is_written = True
        self.cache.put(written)
        return written

    def sync_steps(self) -> list[Callable[[], None]]:
        """Return functions that make all written records durable; none if they are.

        Files are synced in order, and names after contents, so durable bytes have no gaps.
        """
        steps: list[Callable[[], None]] = [
            segment.file.sync for segment in self.segments if segment.end > self.synced
        ]
        if self._names_changed > self._names_synced:
            steps.append(lambda: self._files.sync_directory(DIRECTORY))
        return steps

    @property
    def sync_point(self) -> tuple[MessageOffset, int]:
        """The argument for ``finish_sync``: the end of the log when the steps were made."""
        return MessageOffset(self.open_segment.end), self._names_changed

    def finish_sync(self, point: tuple[MessageOffset, int]) -> None:
        """Record that the log is durable up to the point."""
        self.synced = max(self.synced, point[0])
        self._names_synced = max(self._names_synced, point[1])

    def segment_of(self, offset: int) -> Segment | None:
        """Return the segment that holds an offset, or None if retention has removed it.

        May be called from any thread.
        """
        segments = self.segments
        at = bisect_right(segments, offset, key=_base) - 1
        return segments[at] if at >= 0 else None

    def remove_first(self) -> Segment:
        """Drop the oldest segment; not the open one."""
        segment = self.segments[0]
        # A new list: readers in other threads go on with the old one.
        self.segments = self.segments[1:]
        self._names_changed += 1
        self._listener.segment_removed(segment.path, segment.end - segment.base)
        return segment

    def close(self) -> None:
        """Close all files."""
        for segment in self.segments:
            segment.file.close()

    def _take_back(self, lost: list[Appended]) -> None:
        segment = self.open_segment
        self.end = MessageOffset(segment.end)
        for appended in reversed(lost):
            appended.partition.end = appended.entry.first_sequence
        segment.file.truncate(segment.end - segment.base)
        # Else a power cut could bring back a batch whose sender was told that it is not stored.
        segment.file.sync()

    def _table_record(self, rows: list[TableRow], now_ms: int) -> list[bytes]:
        table = encode_table(rows)
        envelope = Envelope(
            RecordType.PARTITION_TABLE,
            ENVELOPE_SIZE + len(table),
            self.end,
            self.synced,
            self._epoch,
            PartitionId(0),
            ConsumeSequence(0),
            now_ms,
            len(rows),
        )
        return [pack_envelope(envelope), table]
