"""The storage engine: what servers use to keep messages and facts.

It puts the parts together and holds the order between them: a batch is queued, written, indexed,
then confirmed; the message log is synced before any fact that names its messages.

All methods belong to one thread, except those that say otherwise. Work that waits for the disk
is handed out as a job: ``begin_…`` here, ``run`` in any thread, ``finish_…`` here.
"""

from collections import deque
from collections.abc import Callable, Iterator
from typing import cast

import google_crc32c

from pulque.errors import CorruptionError, StorageFullError
from pulque.model.actions import Action
from pulque.model.batch import BatchHeader
from pulque.model.names import PartitionName
from pulque.model.positions import ActionOffset, ConsumeSequence, MessageOffset, StartCount
from pulque.model.record import ENVELOPE_SIZE, read_envelope
from pulque.storage import message_log
from pulque.storage.action_log import ActionLog
from pulque.storage.checkpoint import Checkpoints
from pulque.storage.consume_log import ConsumeLogs, Span
from pulque.storage.files import Buffer, FileSystem
from pulque.storage.identity import Identity
from pulque.storage.index import OpenIndex
from pulque.storage.jobs import CheckpointJob, IndexJob, RemovalJob
from pulque.storage.listener import Listener
from pulque.storage.message_log import Appended, MessageLog, SyncJob, segment_path
from pulque.storage.options import StorageOptions
from pulque.storage.partitions import Partition, Partitions, TableRow, decode_table
from pulque.storage.reader import RecordReader
from pulque.storage.recovery import MARK_KEY, Mark, Observer, recover_message_log
from pulque.storage.segment import Segment

__all__ = ["Engine"]

_ROOM_CHECKED_EVERY = 16 * 1024 * 1024


class Engine:
    """Keeps messages and facts in one data directory."""

    def __init__(
        self,
        files: FileSystem,
        options: StorageOptions,
        listener: Listener,
        observer: Observer,
        now_ms: int,
    ) -> None:
        self._files = files
        self._options = options
        self._listener = listener
        self.identity = Identity.open(files)
        self.start_count: StartCount = self.identity.count_start(files)
        """How often this directory was opened, this time included."""
        files.make_directory(message_log.DIRECTORY)
        self._checkpoints = Checkpoints(files, listener)
        state = self._checkpoints.load()
        self._mark = Mark.decode(state)
        self._previous_actions = self._mark.action_offset
        self._saved_base = self._mark.index_base
        self.partitions = Partitions()
        self.partitions.load(state)
        observer.checkpoint_loaded(state)
        recovered = recover_message_log(files, listener, self.partitions, self._mark, observer)
        self._log = MessageLog(files, options, listener, recovered.segments)
        self._log.resume(recovered.batches, recovered.stored_at_ms)
        self._consume_logs = ConsumeLogs(files, self._log, recovered.open_index)
        self._reader = RecordReader(self._log, listener)
        self._index_saved, self._index_crc = self._saved_index(recovered.open_index)
        self.actions = ActionLog.open(files, options, listener, self._mark.action_offset)
        self._unconfirmed: deque[tuple[MessageOffset, Partition, ConsumeSequence]] = deque()
        self._confirmed: list[Partition] = []
        """Have new confirmed messages that ``write`` has not told of."""
        self.is_full = False
        """Whether sends are refused for want of room."""
        self._unchecked_bytes = _ROOM_CHECKED_EVERY
        self.records_since_checkpoint = 0
        self._begin(now_ms)

    # -- appending ---------------------------------------------------------------------------

    def partition(self, name: str) -> Partition | None:
        """Return a partition that exists."""
        return self.partitions.by_name.get(name)

    def create_partition(
        self, name: PartitionName, now_ms: int, *, from_reserve: bool = False
    ) -> Partition:
        """Return a partition, which is made if need be.

        Raises:
            StorageError: It cannot be written down.
        """
        found = self.partitions.by_name.get(name)
        if found is not None:
            return found
        if self.is_full and not from_reserve:
            raise self._full()
        if self._log.has_pending:
            self._write_pending()
        partition = self.partitions.make(name)
        self._log.append_table(partition, now_ms)
        self._log.write()
        self.partitions.put(partition)
        return partition

    def append(
        self,
        partition: Partition,
        batch: bytes,
        header: BatchHeader,
        *,
        now_ms: int,
        wants_disk: bool,
        from_reserve: bool = False,
    ) -> Appended:
        """Queue a batch; it is in the log once ``write`` has been called.

        Args:
            partition: Where to.
            batch: As packed, and verified by the caller.
            header: Its header.
            now_ms: The time.
            wants_disk: Whether it is confirmed only when it is synced.
            from_reserve: Whether it may use the last room on the disk, as retries may.

        Raises:
            StorageError: It cannot be stored.
        """
        size = ENVELOPE_SIZE + len(batch)
        self._unchecked_bytes += size
        if self._unchecked_bytes >= _ROOM_CHECKED_EVERY:
            self.check_room()
        if self.is_full and not from_reserve:
            raise self._full()
        if self._log.needs_roll(size, now_ms):
            self.roll(now_ms)
        return self._log.append(
            partition,
            batch,
            count=header.count,
            tag_union=header.tag_union,
            now_ms=now_ms,
            wants_disk=wants_disk,
        )

    def write(self) -> list[Partition]:
        """Write what is queued; return the partitions that have new confirmed messages.

        Raises:
            StorageError: Nothing that was queued is stored.
        """
        if self._log.has_pending:
            self._write_pending()
        confirmed, self._confirmed = self._confirmed, []
        return confirmed

    def _write_pending(self) -> None:
        try:
            written = self._log.write()
        except StorageFullError:
            self.check_room()
            raise
        for appended in written:
            partition, entry = appended.partition, appended.entry
            self._consume_logs.open_index.add(entry)
            self.partitions.changed.add(partition.id)
            if appended.wants_disk or partition.confirmed != entry.first_sequence:
                # Behind a batch that waits for the disk, all wait: a pull sees no gaps.
                end = ConsumeSequence(entry.first_sequence + entry.count)
                self._unconfirmed.append((appended.end, partition, end))
            else:
                partition.confirmed = ConsumeSequence(entry.first_sequence + entry.count)
                self._confirmed.append(partition)
        self.records_since_checkpoint += len(written)

    def append_action(self, action: Action) -> None:
        """Append a fact.

        Raises:
            StorageError: It is not in the log, so it did not happen.
        """
        self.actions.append(action)
        self.records_since_checkpoint += 1

    def check_room(self) -> None:
        """Look how much room there is, and refuse or accept sends accordingly."""
        self._unchecked_bytes = 0
        self.is_full = self._files.free_bytes() < self._options.reserve_bytes

    # -- syncing -----------------------------------------------------------------------------

    def begin_sync(self, *, actions: bool) -> SyncJob | None:
        """Return the work that makes written batches durable, and facts after them if asked."""
        messages = self._log.begin_sync()
        steps = [messages.run] if messages is not None else []
        if actions:
            steps += cast("list[Callable[[], None]]", self.actions.sync_steps())
        if not steps:
            return None
        return SyncJob(steps, MessageOffset(self._log.open_segment.end))

    def finish_sync(self, job: SyncJob) -> list[Partition]:
        """Take note of a sync; return the partitions that have new confirmed messages."""
        self._log.finish_sync(job)
        confirmed = []
        unconfirmed = self._unconfirmed
        while unconfirmed and unconfirmed[0][0] <= job.end:
            _, partition, end = unconfirmed.popleft()
            partition.confirmed = end
            confirmed.append(partition)
        return confirmed

    @property
    def synced(self) -> MessageOffset:
        """Messages before it survive a power cut."""
        return self._log.synced

    @property
    def end(self) -> MessageOffset:
        """Where the next record goes."""
        return self._log.end

    # -- reading -----------------------------------------------------------------------------

    def span(
        self,
        partition: Partition,
        sequence: ConsumeSequence,
        *,
        max_messages: int,
        max_bytes: int,
        end: ConsumeSequence | None = None,
        may_block: bool = True,
    ) -> Span:
        """Return which confirmed messages follow from ``sequence`` on, within the limits.

        May be called from any thread.

        Raises:
            WouldBlockError: Not ``may_block``, and the disk would have to be asked.
        """
        limit = partition.confirmed if end is None else min(end, partition.confirmed)
        return self._consume_logs.span(
            partition,
            max(sequence, partition.start),
            end=limit,
            max_messages=max_messages,
            max_bytes=max_bytes,
            may_block=may_block,
        )

    def read(self, partition: Partition, span: Span, *, may_block: bool = True) -> list[Buffer]:
        """Return the records of a span, verified, as buffers that follow each other.

        Damaged batches are reported and left out. May be called from any thread.

        Raises:
            WouldBlockError: Not ``may_block``, and the disk would have to be asked.
        """
        return self._reader.read(partition, span, may_block=may_block)

    def at_time(self, partition: Partition, at_ms: int) -> ConsumeSequence:
        """Return the first message stored at or after an instant; may read from the disk."""
        return max(self._consume_logs.at_time(partition, at_ms), partition.start)

    # -- segments ----------------------------------------------------------------------------

    @property
    def segments(self) -> list[Segment]:
        """All segments of the message log; the last one is open."""
        return self._log.segments

    def roll(self, now_ms: int) -> None:
        """Seal the open segment and begin a new one."""
        if self._log.has_pending:
            self._write_pending()
        sealed = self._log.open_segment
        index = self._consume_logs.open_index
        self._log.start_segment(self.partitions.rows(), now_ms)
        self._consume_logs.sealing[sealed.base] = index
        self._consume_logs.open_index = OpenIndex(
            {p.id: p.end for p in self.partitions.by_id.values()}
        )
        self._index_saved, self._index_crc = 0, 0
        self._listener.segment_sealed(sealed.path, sealed.end - sealed.base)

    @property
    def open_batches(self) -> int:
        """How many batches the open segment holds."""
        return self._log.batches

    def begin_index(self) -> IndexJob | None:
        """Return the work of indexing a sealed segment, if there is one without index."""
        for base, index in self._consume_logs.sealing.items():
            return IndexJob(self._files, self._log.segment_of(base), index)
        return None

    def finish_index(self, job: IndexJob) -> None:
        """Use the index file from now on."""
        del self._consume_logs.sealing[job.segment.base]

    def remove_oldest(self) -> RemovalJob:
        """Forget the oldest segment; its messages are gone. The files go when the job runs."""
        segment = self._log.remove_first()
        self._consume_logs.forget(segment.base)
        table = self._table_of(self._log.segments[0])
        for partition_id, _, sequence in table:
            partition = self.partitions.by_id.get(partition_id)
            if partition is not None and partition.start < sequence:
                partition.start = min(sequence, partition.confirmed)
                self.partitions.changed.add(partition_id)
        return RemovalJob(self._files, segment)

    # -- checkpoints -------------------------------------------------------------------------

    def replay_actions(self) -> Iterator[Action]:
        """Yield the facts since the checkpoint that was recovered from."""
        return self.actions.replay(ActionOffset(self._mark.action_offset))

    def begin_checkpoint(self, changes: dict[bytes, bytes | None]) -> CheckpointJob:
        """Return the work of writing a checkpoint of now.

        Args:
            changes: What of the caller's own state changed since the last one.
        """
        if self._log.has_pending:
            self._write_pending()
        entries = self._consume_logs.open_index.entries
        segment = self._log.open_segment
        fresh = bytes(memoryview(entries)[self._index_saved :])
        mark = Mark(
            segment.end,
            self.actions.end,
            segment.base,
            len(entries),
            google_crc32c.extend(self._index_crc, fresh),
            self._log.last_stored_at_ms,
        )
        changed: dict[bytes, bytes | None] = {
            **self.partitions.encode_changed(),
            **changes,
            MARK_KEY: mark.encode(),
        }
        self.records_since_checkpoint = 0
        saved = self._index_saved
        self._index_saved, self._index_crc = mark.index_size, mark.index_crc
        files = [s.file for s in self._log.segments[-2:]]
        directories = (message_log.DIRECTORY, "actions")
        # The changes come first: should a later step fail, the next checkpoint has them.
        steps: list[Callable[[], None]] = [lambda: self._checkpoints.update(changed)]
        steps += [f.sync for f in files]
        steps += [s.file.sync for s in self.actions.segments[-2:]]
        steps += [lambda d=d: self._files.sync_directory(d) for d in directories]  # type: ignore[misc]
        steps.append(lambda: self._save_index(segment.base, saved, fresh))
        steps.append(self._checkpoints.write)
        return CheckpointJob(steps, mark)

    def abandon_checkpoint(self) -> None:
        """Take note that a checkpoint could not be written, for want of room."""
        self._index_saved, self._index_crc = 0, 0

    def finish_checkpoint(self, job: CheckpointJob) -> None:
        """Drop what only an older checkpoint needed."""
        self.actions.remove_before(ActionOffset(self._previous_actions))
        self._previous_actions = job.mark.action_offset
        if job.mark.index_base != self._saved_base:
            path = segment_path(self._saved_base, "open")
            if self._files.exists(path):
                self._files.remove(path)
            self._saved_base = job.mark.index_base

    def close(self) -> None:
        """Close all files; nothing is written."""
        self._consume_logs.close()
        self.actions.close()
        for segment in self._log.segments:
            segment.file.close()

    # -- inside ------------------------------------------------------------------------------

    def _full(self) -> StorageFullError:
        return StorageFullError(
            f"less than {self._options.reserve_bytes} bytes are free on the disk; "
            "what is stored can still be pulled and settled"
        )

    def _begin(self, now_ms: int) -> None:
        """Make what was recovered durable, and open a segment if there is none."""
        if not self._log.segments or self._log.end < self._mark.message_offset:
            self._log.end = MessageOffset(max(self._log.end, self._mark.message_offset))
            if self._log.segments:
                sealed = self._log.open_segment
                self._consume_logs.sealing[sealed.base] = self._consume_logs.open_index
            self._log.start_segment(self.partitions.rows(), now_ms)
            self._consume_logs.open_index = OpenIndex({})
            self._index_saved, self._index_crc = 0, 0
        if self.actions.needs_roll():
            self.actions.end = ActionOffset(max(self.actions.end, self._mark.action_offset))
            self.actions.start_segment(())
        self._log.open_segment.file.sync()
        job = self.begin_sync(actions=True)
        if job is not None:
            job.run()
            self._log.finish_sync(job)
        self._log.synced = MessageOffset(self._log.open_segment.end)
        for partition in self.partitions.by_id.values():
            partition.confirmed = partition.end
        self.check_room()

    def _saved_index(self, index: OpenIndex) -> tuple[int, int]:
        mark = self._mark
        if self._log.segments and mark.index_base == self._log.open_segment.base:
            prefix = bytes(memoryview(index.entries)[: mark.index_size])
            if google_crc32c.value(prefix) == mark.index_crc:
                return mark.index_size, mark.index_crc
        return 0, 0

    def _save_index(self, base: int, at: int, fresh: bytes) -> None:
        if not fresh:
            return
        file = self._files.open(segment_path(base, "open"), create=True)
        try:
            file.write([fresh], at)
            file.sync()
        finally:
            file.close()
        self._files.sync_directory(message_log.DIRECTORY)

    def _table_of(self, segment: Segment) -> list[TableRow]:
        head = read_envelope(segment.read(segment.base, ENVELOPE_SIZE))
        if isinstance(head, str):
            raise CorruptionError(segment.path, segment.base, head)
        content = segment.read(segment.base + ENVELOPE_SIZE, head.size - ENVELOPE_SIZE)
        rows = decode_table(content)
        if rows is None:
            raise CorruptionError(segment.path, segment.base, "the partition table is damaged")
        return rows
