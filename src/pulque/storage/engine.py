"""The storage engine: stores messages and facts for servers.

It combines the logs and indexes and keeps their order: a batch is queued, written, indexed,
then confirmed; the message log is synced before any fact that names its messages.

Call all methods from one thread, except where stated. Work that waits for the disk
is a job: ``begin_…`` here, ``run`` in any thread, ``finish_…`` here.
"""

from collections import deque
from collections.abc import Iterator
from functools import partial

from pulque.errors import CorruptionError, StorageError, StorageFullError, UsageError
from pulque.model.actions import Action
from pulque.model.batch import BatchHeader
from pulque.model.names import PartitionName
from pulque.model.positions import ActionOffset, ConsumeSequence, MessageOffset, StartCount
from pulque.model.record import ENVELOPE_SIZE
from pulque.storage.checkpoint import MARK_KEY, Checkpoints, Mark
from pulque.storage.directory.archive_progress import read_archived
from pulque.storage.directory.disk_space import Room
from pulque.storage.directory.identity import DirectoryIdentity
from pulque.storage.directory.layout import CHECKPOINTS, DIRECTORIES, segment_path
from pulque.storage.disk_jobs import CheckpointJob, DiskHealth, IndexJob, RemovalJob, Step, SyncJob
from pulque.storage.events import Listener
from pulque.storage.files import Buffer, FileSystem
from pulque.storage.indexes.consume_log import ConsumeLogs, Span
from pulque.storage.indexes.open_entries import OpenEntries
from pulque.storage.indexes.segment_index import OpenIndex
from pulque.storage.logs.action_log import ActionLog
from pulque.storage.logs.message_log import Appended, MessageLog
from pulque.storage.logs.partitions import Partition, Partitions
from pulque.storage.logs.segment import Segment
from pulque.storage.options import StorageOptions
from pulque.storage.reading.damaged_batches import Damages
from pulque.storage.reading.record_reader import RecordReader
from pulque.storage.reading.tag_search import TagSearch
from pulque.storage.recovery import Observer, RecoveredLog, recover_message_log
from pulque.storage.replication.copy_source import Copyable

__all__ = ["Engine"]


class Engine(Copyable):
    """Stores messages and facts in one data directory."""

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
        self._health = DiskHealth()
        self._room = Room(files, options)
        self.identity = DirectoryIdentity.open(files)
        for directory in DIRECTORIES:
            files.make_directory(directory)
        self.start_count: StartCount = self.identity.count_start(files)
        """The number of starts on this directory, this one included."""
        self.partitions = Partitions()
        self._checkpoints = Checkpoints(files, listener)
        state = self._checkpoints.load()
        self._mark = self._previous_mark = self._load(state)
        observer.checkpoint_loaded(state)
        recovered = recover_message_log(files, listener, self.partitions, self._mark, observer)
        self._log = MessageLog(files, options, listener, recovered.segments)
        self._log.resume(recovered.end, recovered.stored_at_ms, self._mark.message_offset)
        self._consume_logs = ConsumeLogs(files, self._log, listener, recovered.indexes)
        self.damages = Damages(files, self.partitions, listener, has_copies=options.is_replicated)
        self._reader = RecordReader(self._log, self.damages)
        self.search = TagSearch(self._consume_logs, self._log, self.damages)
        """Searches messages by tag."""
        self.actions = ActionLog.open(files, options, listener, self._mark.action_offset)
        self._unconfirmed: deque[tuple[MessageOffset, Partition, ConsumeSequence]] = deque()
        self._confirmed: list[Partition] = []
        """Partitions with new confirmed messages that ``write`` has not returned yet."""
        self.records_since_checkpoint = 0
        self._open_file = OpenEntries(files)
        self._begin(recovered, now_ms)

    # -- appending ---------------------------------------------------------------------------

    def partition(self, name: str) -> Partition | None:
        """Return an existing partition."""
        return self.partitions.by_name.get(name)

    def create_partition(
        self, name: PartitionName, now_ms: int, *, from_reserve: bool = False
    ) -> Partition:
        """Return a partition; create it if it does not exist.

        Raises:
            StorageError: It could not be written.
        """
        found = self.partitions.by_name.get(name)
        if found is not None:
            return found
        if self._room.is_full and not from_reserve:
            raise self._room.refuse()
        self._write_pending()
        partition = self.partitions.make(name)
        self._log.append_table(partition, now_ms)
        self._write_log()
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
            partition: The partition.
            batch: The batch, verified by the caller.
            header: Its header.
            now_ms: The time.
            wants_disk: Whether it is confirmed only when it is synced.
            from_reserve: Whether it may use the reserve of the disk, as retries may.

        Raises:
            StorageError: The batch cannot be stored.
        """
        self._health.check()
        size = ENVELOPE_SIZE + len(batch)
        room, log = self._room, self._log
        room.use(size)
        if room.is_full and not from_reserve:
            raise room.refuse()
        if log.needs_roll(size, now_ms):
            self.roll(now_ms)
        return log.append(
            partition, batch, header.count, header.tag_union, now_ms, wants_disk=wants_disk
        )

    def write(self) -> list[Partition]:
        """Write queued batches; return the partitions with new confirmed messages.

        Raises:
            StorageError: None of the queued batches is stored.
        """
        self._write_pending()
        confirmed, self._confirmed = self._confirmed, []
        return _each_once(confirmed)

    def _write_pending(self) -> None:
        self._health.check()
        if not self._log.has_pending:
            return
        written = self._write_log()
        self._consume_logs.open_index.add(*[appended.entry for appended in written])
        self.records_since_checkpoint += len(written)
        changed, unconfirmed = self.partitions.changed, self._unconfirmed
        if self._options.is_replicated:
            self._hold(written)
            return
        for appended in written:
            partition, entry = appended.partition, appended.entry
            changed.add(partition.id)
            first = entry.first_sequence
            end = ConsumeSequence(first + entry.count)
            if appended.wants_disk or partition.confirmed != first:
                # Behind a batch that waits for the disk, all wait: a pull sees no gaps.
                unconfirmed.append((appended.end, partition, end))
            else:
                partition.confirmed = end
                self._confirmed.append(partition)

    def _hold(self, written: list[Appended]) -> None:
        """Hold batches back until every in-sync broker has them."""
        for appended in written:
            partition, entry = appended.partition, appended.entry
            self.partitions.changed.add(partition.id)
            end = ConsumeSequence(entry.first_sequence + entry.count)
            self._unconfirmed.append((appended.end, partition, end))

    def append_action(self, action: Action) -> None:
        """Append a fact.

        Raises:
            StorageError: The fact is not in the log, so it did not happen.
        """
        self._health.check()
        try:
            self.actions.append(action)
        except StorageError as problem:
            if isinstance(problem, StorageFullError) and self._room.throw_ballast():
                self.append_action(action)
                return
            self._health.note(problem)
            raise
        self.records_since_checkpoint += 1

    def check_room(self) -> None:
        """Check the free space, and refuse or accept sends accordingly."""
        self._room.check()

    def promise_room(self, size: int) -> None:
        """Reserve space for bytes that will be written elsewhere for stored messages."""
        self._room.promised = size

    @property
    def is_full(self) -> bool:
        """Whether sends are refused because the disk is full."""
        return self._room.is_full

    # -- syncing -----------------------------------------------------------------------------

    def begin_sync(self, *, actions: bool) -> SyncJob | None:
        """Return a job that makes written batches durable, and facts after them if asked.

        Several jobs may run at once: each makes durable what was written when it began.
        """
        self._health.check()
        steps = self._log.sync_steps()
        if actions:
            steps += self.actions.sync_steps()
        return self._sync_job(steps, actions=actions) if steps else None

    def finish_sync(self, job: SyncJob) -> list[Partition]:
        """Record a finished sync; return the partitions with new confirmed messages."""
        if not job.is_done:
            raise UsageError("the sync has not run to its end, so it confirms nothing")
        self._log.finish_sync(job.point[0])
        if job.point[1] is not None:
            self.actions.finish_sync(job.point[1])
        return [] if self._options.is_replicated else self.confirm(job.end)

    def confirm(self, messages: MessageOffset) -> list[Partition]:
        """Confirm everything before an offset; return the partitions with new messages.

        For replicated logs: every in-sync broker has the message log up to there.
        """
        confirmed = []
        unconfirmed = self._unconfirmed
        while unconfirmed and unconfirmed[0][0] <= messages:
            _, partition, end = unconfirmed.popleft()
            partition.confirmed = max(partition.confirmed, end)
            confirmed.append(partition)
        return _each_once(confirmed)

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
        """Return the confirmed messages from ``sequence`` on, within the limits.

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
        """Return the records of a span, verified, as consecutive buffers.

        Damaged batches are reported and left out if no other broker has a copy of them. May be
        called from any thread.

        Raises:
            WouldBlockError: Not ``may_block``, and the disk would have to be asked.
            CorruptionError: Some batches are damaged, and other brokers have copies.
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
        """Seal the open segment and begin a new one.

        Raises:
            StorageError: The open segment stays open.
        """
        self._write_pending()
        sealed = self._log.open_segment
        self._start_segment(now_ms)
        self._listener.segment_sealed(sealed.path, sealed.end - sealed.base)

    @property
    def open_batches(self) -> int:
        """How many batches the open segment holds."""
        return self._log.batches

    def begin_index(self) -> IndexJob | None:
        """Return a job that indexes a sealed segment, if one has no index."""
        found = self._consume_logs.unwritten()
        if found is None:
            return None
        segment, index = found
        path = segment_path(segment.base, "index")
        return IndexJob(self._files, path, segment, index, self._listener)

    def finish_index(self, job: IndexJob) -> None:
        """Use the index file from now on."""
        self._consume_logs.forget(job.segment.base)

    def remove_oldest(self) -> RemovalJob:
        """Drop the oldest segment and its messages; return the job that removes the files.

        Raises:
            UsageError: The oldest segment is the open one.
        """
        if len(self._log.segments) < 2:
            raise UsageError("the open segment cannot be removed")
        # Starts move first: a reader in another thread must not take what is gone for a hole.
        self._raise_starts(self._log.segments[1])
        segment = self._log.remove_first()
        self._consume_logs.forget(segment.base)
        oldest = self._log.segments[0].base
        # The next segment's table keeps the numbering: it must be durable before this one goes.
        steps = self._log.sync_steps() if self._log.synced <= oldest else []
        return RemovalJob(self._files, segment, oldest, self._sync_job(steps, actions=False))

    @property
    def removable_segments(self) -> int:
        """How many segments, from the oldest on, the archive allows to remove."""
        sealed = self._log.segments[:-1]
        if not self._options.keeps_for_archive:
            return len(sealed)
        archived = read_archived(self._files).messages
        return sum(1 for segment in sealed if segment.end <= archived)

    # -- checkpoints -------------------------------------------------------------------------

    def replay_actions(self) -> Iterator[Action]:
        """Yield the facts since the checkpoint that was recovered from."""
        return self.actions.replay(ActionOffset(self._mark.action_offset))

    def begin_checkpoint(self, changes: dict[bytes, bytes | None]) -> CheckpointJob:
        """Return a job that writes a checkpoint of the present state.

        Args:
            changes: Changes of the caller's own state since the last one.
        """
        self._write_pending()
        segment = self._log.open_segment
        saving = self._open_file.save(segment.base, self._consume_logs.open_index.entries)
        mark = Mark(
            segment.end,
            self.actions.end,
            segment.base,
            saving.size,
            saving.crc,
            self._log.last_stored_at_ms,
        )
        changed: dict[bytes, bytes | None] = {
            **self.partitions.encode_changed(),
            **changes,
            MARK_KEY: mark.encode(),
        }
        self.records_since_checkpoint = 0
        # The changes come first: should anything fail, the next checkpoint has them.
        first = partial(self._checkpoints.update, changed)
        steps = self._log.sync_steps() + self.actions.sync_steps()
        sync = self._sync_job(steps, actions=True)
        return CheckpointJob(first, sync, [saving.step, self._checkpoints.write], mark)

    def abandon_checkpoint(self) -> None:
        """Record that a checkpoint could not be written because the disk is full."""
        self._open_file.begin()

    def finish_checkpoint(self, job: CheckpointJob) -> None:
        """Remove files that only older checkpoints needed."""
        before, self._previous_mark = self._previous_mark, job.mark
        unneeded = before.action_offset
        if self._options.keeps_for_archive:
            unneeded = min(unneeded, read_archived(self._files).actions)
        self.actions.remove_before(ActionOffset(unneeded))
        if job.mark.index_base != before.index_base:
            path = segment_path(before.index_base, "open")
            if self._files.exists(path):
                self._files.remove(path)

    def close(self) -> None:
        """Close all files; nothing is written."""
        for part in (self.search, self._consume_logs, self.actions, self._log):
            part.close()

    # -- inside ------------------------------------------------------------------------------

    def _load(self, state: dict[bytes, bytes]) -> Mark:
        try:
            self.partitions.load(state)
            return Mark.decode(state)
        except ValueError as problem:
            raise CorruptionError(CHECKPOINTS, 0, str(problem)) from None

    def _start_segment(self, now_ms: int) -> None:
        """Start a segment at the end of the log."""
        index = OpenIndex({p.id: p.end for p in self.partitions.by_id.values()})
        # The index comes before its segment: a reader in another thread must find it.
        base = self._log.end
        self._consume_logs.put(base, index)
        try:
            self._log.start_segment(self.partitions.rows(), now_ms)
        except StorageError as problem:
            self._consume_logs.forget(base)
            self._health.note(problem)
            raise
        self._consume_logs.open_index = index
        self._open_file.begin()

    def _go_on(self, recovered: RecoveredLog) -> None:
        """Continue with the last recovered segment."""
        index = recovered.indexes[self._log.open_segment.base]
        self._consume_logs.open_index = index
        self._log.batches = len(index)
        if recovered.is_saved:
            self._open_file.resume(self._mark)

    def _begin(self, recovered: RecoveredLog, now_ms: int) -> None:
        """Open a segment, and sync recovered data: a killed process may not have done so."""
        if recovered.is_open:
            self._go_on(recovered)
        else:
            self._start_segment(now_ms)
        if self.actions.needs_roll():
            self.actions.start_segment(())
        job = self.begin_sync(actions=True)
        if job is not None:
            job.run()
            self.finish_sync(job)
        for partition in self.partitions.by_id.values():
            partition.confirmed = partition.end
        self._raise_starts(self._log.segments[0])
        self.check_room()

    def _raise_starts(self, oldest: Segment) -> None:
        """Raise the starts of partitions to the oldest segment."""
        self.partitions.raise_starts(self._consume_logs.starts(oldest, self.partitions.by_id))

    def _write_log(self) -> list[Appended]:
        try:
            return self._log.write()
        except StorageError as problem:
            self._health.note(problem)
            if isinstance(problem, StorageFullError):
                self.check_room()
            raise

    def _sync_job(self, steps: list[Step], *, actions: bool) -> SyncJob:
        point = (self._log.sync_point, self.actions.sync_point if actions else None)
        return SyncJob(self._health, steps, point)


def _each_once(partitions: list[Partition]) -> list[Partition]:
    return list(dict.fromkeys(partitions)) if len(partitions) > 1 else partitions
