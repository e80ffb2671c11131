"""The logs of a follower: copies of its leader's, byte for byte.

A follower has no state of consumption; it verifies received bytes, writes them at the same
offsets into segments of the same names, and stores copies of the leader's checkpoints. When it is
elected, an engine opens the same directory and recovers, as after any restart.

Opening checks the files. Unlike an engine's recovery, it cuts at the first damage beyond the known
durable end, whatever the marks in the records say: these describe the *leader's* disk.
The cut bytes are copied again. But a directory that is known to have had more is not whole until
it has as much again: it must not be elected meanwhile.
Its files are left alone until a leader says how to continue.

Damage in durable messages does not cut away the messages after it: perhaps no other broker has
those. Only the damaged ranges are copied again, in place.

Call all methods from one thread. Work that waits for the disk is a job.
"""

from collections.abc import Iterator
from contextlib import contextmanager, suppress

from pulque.errors import StorageError, StorageFullError, UsageError
from pulque.model.leadership import EpochStart
from pulque.model.positions import ActionOffset, MessageOffset, StartCount
from pulque.storage.checkpoint import Mark
from pulque.storage.directory.identity import DirectoryIdentity
from pulque.storage.directory.layout import (
    ACTIONS,
    DIRECTORIES,
    MESSAGES,
    read_oldest,
    segment_path,
    write_oldest,
)
from pulque.storage.disk_jobs import DiskHealth, IndexJob, RemovalJob, SyncJob, SyncPoint
from pulque.storage.events import Listener
from pulque.storage.files import Buffer, FileSystem
from pulque.storage.logs.partitions import Partitions
from pulque.storage.logs.segment import Segment
from pulque.storage.options import StorageOptions
from pulque.storage.replication.copied_checkpoints import (
    CopiedCheckpoints,
    RecoveryStart,
    read_mark,
)
from pulque.storage.replication.copied_log import CopiedLog
from pulque.storage.replication.leadership_epochs import read_epochs, write_epochs
from pulque.storage.replication.record_checks import (
    BadRange,
    MessageCheck,
    first_bad_action,
    whole_actions,
)
from pulque.storage.replication.synced_bounds import Known, read_known, write_known

__all__ = ["ReplicaLogs"]


class ReplicaLogs:
    """Both logs of a follower, and the leader's checkpoints."""

    def __init__(self, files: FileSystem, options: StorageOptions, listener: Listener) -> None:
        self._files = files
        # More than a leader needs to take messages: it should not be full at once.
        self._room_needed = options.reserve_bytes + options.reserve_bytes // 2
        self._listener = listener
        self._health = DiskHealth()
        self.identity = DirectoryIdentity.open(files)
        for directory in DIRECTORIES:
            files.make_directory(directory)
        self.start_count: StartCount = self.identity.count_start(files)
        """The number of starts on this directory, this one included."""
        self.epochs = read_epochs(files)
        """The ends of the logs when each leadership began; the oldest first."""
        self._checkpoints = CopiedCheckpoints(files, listener)
        self._check = MessageCheck()
        self._messages = CopiedLog(files, MESSAGES, listener)
        self._actions = CopiedLog(files, ACTIONS, listener)
        self._unindexed = {
            segment.base
            for segment in self._messages.segments
            if not files.exists(segment_path(segment.base, "index"))
        }
        self._indexing: Segment | None = None
        self._known = read_known(files)
        self._has_hidden = True
        """Whether some bytes may be hidden."""
        self._mending = MessageCheck()
        self.has_holes = False
        """Whether durable messages are damaged, with others after them."""
        self._judge()

    def has_room(self) -> bool:
        """Return whether a leader on this disk would have lasting room for messages."""
        return self._files.free_bytes() >= self._room_needed

    # -- what is here ------------------------------------------------------------------------

    @property
    def is_whole(self) -> bool:
        """Whether everything that was known to be durable is still here."""
        return (
            not self.has_holes
            and self.message_end >= self._known.messages
            and self.action_end >= self._known.actions
        )

    @property
    def is_empty(self) -> bool:
        """Whether there are no messages."""
        return not self._messages.segments

    @property
    def message_end(self) -> MessageOffset:
        """Where the next record of the message log goes."""
        return MessageOffset(self._messages.end)

    @property
    def message_oldest(self) -> MessageOffset:
        """Where the message log begins."""
        return MessageOffset(self._messages.begin)

    @property
    def action_end(self) -> ActionOffset:
        """Where the next fact goes."""
        return ActionOffset(self._actions.end)

    @property
    def message_synced(self) -> MessageOffset:
        """Messages before it survive a power cut."""
        return MessageOffset(self._messages.synced)

    @property
    def action_synced(self) -> ActionOffset:
        """Facts before it survive a power cut."""
        return ActionOffset(self._actions.synced)

    @property
    def checkpoint(self) -> int:
        """The number of the newest usable checkpoint, 0 if there is none."""
        return self._checkpoints.newest

    # -- copying -----------------------------------------------------------------------------

    def take_epochs(self, epochs: tuple[EpochStart, ...]) -> None:
        """Record the leader's epochs durably."""
        write_epochs(self._files, epochs)
        self.epochs = epochs

    def append_messages(self, base: int, offset: int, data: Buffer) -> None:
        """Append bytes of the leader's message log, without an incomplete last record.

        Args:
            base: The base of their segment.
            offset: Where they begin: the end of the log, or the beginning of a first segment.
            data: The bytes.

        Raises:
            CorruptionError: A record is damaged; nothing is stored.
            UsageError: The bytes do not follow the log.
            StorageError: The log is unchanged.
        """
        self._health.check()
        log, content = self._messages, bytes(data)
        is_new = log.begins_segment(base, offset)
        self._carry_out()
        whole = self._check.whole(content, base, offset)
        if not whole.size:
            return
        with self._noting():
            if not is_new:
                log.append(memoryview(content)[: whole.size])
            else:
                self._begin_segment(base, memoryview(content)[: whole.size])
        self._check.keep(whole, is_new=is_new)

    def append_actions(self, base: int, offset: int, data: Buffer) -> None:
        """Append bytes of the leader's action log, without an incomplete last record.

        Args:
            base: The base of their segment.
            offset: Where they begin; behind the end of the log if the leader's has a hole.
            data: The bytes.

        Raises:
            CorruptionError: A record is damaged; nothing is stored.
            UsageError: The bytes do not follow the log.
            StorageError: The log is unchanged.
        """
        self._health.check()
        log, content = self._actions, bytes(data)
        is_new = log.begins_segment(base, offset)
        self._carry_out()
        size = whole_actions(content, base, offset)
        with self._noting():
            if not is_new:
                log.append(memoryview(content)[:size])
            elif size or not content:
                # Also a segment without any fact: it says how far the log reaches.
                log.start_segment(base, memoryview(content)[:size])

    def cut(self, messages: int, actions: int) -> None:
        """Drop everything from these offsets on, durably: it was never confirmed."""
        self._health.check()
        ends = (min(messages, self.message_end), min(actions, self.action_end))
        self._lower_known(*ends)
        self._checkpoints.hide_beyond(*ends)
        self._messages.hide(ends[0])
        self._actions.hide(ends[1])
        self._has_hidden = True
        self._carry_out()

    def empty(self) -> None:
        """Drop both logs and all checkpoints, durably; the logs may begin anywhere afterwards.

        The directory is not whole until it has as much as it had.
        """
        self._health.check()
        self._known = self._known.joined(self.message_synced, self.action_synced)
        with self._noting():
            write_known(self._files, self._known, is_durable=True)
        self._checkpoints.hide_all()
        self._messages.hide_all()
        self._actions.hide_all()
        self._has_hidden = True
        self._carry_out()

    # -- mending -----------------------------------------------------------------------------

    def find_damage(self) -> list[BadRange]:
        """Read the whole message log; return its damaged ranges. From any thread."""
        check = MessageCheck(forgets=False)
        found = list(check.bad_ranges(self._messages.segments, 0))
        self._mending = check
        return found

    def drop_damaged_actions(self) -> None:
        """Cut the action log at its first damage, durably; it is copied again from there."""
        self._health.check()
        bad = first_bad_action(self._actions.segments, self._actions.begin, self._known.actions)
        if bad is not None:
            self._known = self._known.joined(self.message_synced, self.action_synced)
            with self._noting():
                write_known(self._files, self._known, is_durable=True)
            self._checkpoints.hide_beyond(self.message_end, bad)
            self._actions.hide(bad)
            self._has_hidden = True
            self._carry_out()

    def drop_indexes(self) -> None:
        """Drop all indexes; they are rebuilt."""
        for segment in self._messages.segments[:-1]:
            with self._noting():
                self._messages.remove_beside(segment)
            self._unindexed.add(segment.base)
        self._indexing = None

    def segment_end(self, offset: int) -> int:
        """Return the end of the message segment with an offset; 0 if there is none."""
        segments = self._messages.segments
        return next((each.end for each in segments if each.base <= offset < each.end), 0)

    def mend(self, base: int, offset: int, data: Buffer) -> int:
        """Overwrite damaged bytes with the leader's, durably; return where they end.

        After a power cut meanwhile, damaged bytes are still damaged. An incomplete record is left
        out, and so are bytes beyond the end of the segment here. Waits for the disk.

        Args:
            base: The base of their segment.
            offset: Where they begin.
            data: The bytes.

        Raises:
            CorruptionError: A received record is damaged, too; nothing is changed.
            UsageError: There is no such segment here, or no complete record.
            StorageError: The disk failed.
        """
        self._health.check()
        found = next((each for each in self._messages.segments if each.base == base), None)
        content = bytes(data) if found is None else bytes(data)[: found.end - offset]
        whole = self._mending.whole(content, base, offset)
        if found is None or not whole.size:
            raise UsageError(f"{len(content)} bytes at {offset} of segment {base} mend nothing")
        with self._noting():
            # First what was made of the damaged bytes: nothing would tell later that it is wrong.
            self._messages.remove_beside(found)
            found.file.write((memoryview(content)[: whole.size],), offset - base)
            found.file.sync()
        for check in (self._mending, self._check):  # what is copied next may need a mended table
            check.keep(whole, is_new=False)
        self._unindexed.add(base)
        if self._indexing is found:
            self._indexing = None
        return offset + whole.size

    # -- syncing -----------------------------------------------------------------------------

    def begin_sync(self) -> SyncJob | None:
        """Return a job that makes all records durable, messages before their facts."""
        self._health.check()
        steps = self._messages.sync_steps() + self._actions.sync_steps()
        return SyncJob(self._health, steps, self._sync_point()) if steps else None

    def finish_sync(self, job: SyncJob) -> None:
        """Record a finished sync."""
        if not job.is_done:
            raise UsageError("the sync has not run to its end, so it means nothing")
        messages, actions = job.point
        self._messages.finish_sync(messages)
        if actions is not None:
            self._actions.finish_sync(actions)

    def note_synced(self) -> None:
        """Record the durable ends, for the check at the next start."""
        known = self._known.joined(self.message_synced, self.action_synced)
        # It is only a lower bound: on a full disk the old one serves.
        with suppress(StorageFullError):
            if known != self._known:
                write_known(self._files, known, is_durable=False)
                self._known = known

    def settle_known(self) -> None:
        """Record that this directory has all that the leader has; more than that does not count.

        It was never confirmed, or the leader would have it.
        """
        if not self.is_whole:
            known = Known(self.message_synced, self.action_synced)
            with self._noting():
                write_known(self._files, known, is_durable=True)
            self._known = known

    # -- checkpoints and segments ------------------------------------------------------------

    def put_checkpoint(self, number: int, data: Buffer) -> None:
        """Store a checkpoint of the leader durably; remove files that only older ones needed.

        Syncs both logs up to it first. Waits for the disk.

        Raises:
            CorruptionError: The checkpoint is damaged.
            UsageError: The logs do not reach to it, or begin after it.
            StorageError: The checkpoint could not be written.
        """
        self._health.check()
        mark = read_mark(number, bytes(data))
        if not self._has(mark) or self._actions.begin > mark.action_offset:
            raise UsageError(
                f"checkpoint {number} is of offsets {mark.message_offset} and "
                f"{mark.action_offset}, and the logs end at {self.message_end} and "
                f"{self.action_end}; the action log begins at {self._actions.begin}"
            )
        if self.message_synced < mark.message_offset or self.action_synced < mark.action_offset:
            self._sync_now()
        self._carry_out()
        self._checkpoints.put(number, bytes(data), mark)
        unneeded = self._checkpoints.unneeded_actions()
        while len(self._actions.segments) > 1 and self._actions.segments[0].end <= unneeded:
            self._files.remove(self._actions.forget_first().path)

    def remove_before(self, oldest: int) -> None:
        """Remove segments of messages that end at or before an offset; the open one stays."""
        self._carry_out()
        log = self._messages
        while len(log.segments) > 1 and log.segments[0].end <= oldest:
            following = log.segments[1].base
            if log.synced <= following:
                break  # the next segment's table keeps the numbering: it must be durable first
            segment = log.forget_first()
            self._unindexed.discard(segment.base)
            if segment is self._indexing:
                self._indexing = None
            nothing = SyncJob(self._health, [], self._sync_point())
            RemovalJob(self._files, segment, following, nothing).run()

    def begin_index(self) -> IndexJob | None:
        """Return a job that indexes a sealed segment, if one has no index."""
        for segment in self._messages.segments[:-1]:
            if segment.base in self._unindexed:
                self._indexing = segment
                path = segment_path(segment.base, "index")
                return IndexJob(self._files, path, segment, None, self._listener)
        return None

    def finish_index(self, job: IndexJob) -> None:
        """Record a written index."""
        if job.segment is self._indexing:
            self._unindexed.discard(job.segment.base)
            return
        # The segment was cut meanwhile, or removed: the index is of what it was.
        path = segment_path(job.segment.base, "index")
        if self._files.exists(path):
            self._files.remove(path)

    def close(self) -> None:
        """Close all files; nothing is written."""
        self._messages.close()
        self._actions.close()

    # -- judging -----------------------------------------------------------------------------

    def _judge(self) -> None:
        """Hide bytes after the first damage, and checkpoints beyond the ends of the logs."""
        start = self._checkpoints.start()
        if start is not None:
            mark = start.mark
            self._known = self._known.joined(mark.message_offset, mark.action_offset)
        while True:
            self._hide_damage(start)
            if start is None or self._has(start.mark):
                break
            self._checkpoints.hide_beyond(self.message_end, self.action_end)
            start = self._checkpoints.start()
        if self.is_empty:
            # Facts of messages that are gone are nothing to build on.
            self._actions.hide_all()
        self._messages.synced = min(self.message_end, self._known.messages)
        self._actions.synced = min(self.action_end, self._known.actions)
        if self.is_whole:
            self._carry_out()
        else:
            # For the next start: what is gone by then was there.
            write_known(self._files, self._known, is_durable=True)

    def _hide_damage(self, start: RecoveryStart | None) -> None:
        mark, partitions = start or RecoveryStart(Mark(), Partitions())
        self._check.begin(partitions.by_id.values())
        cut: int | None = None
        for bad in self._check.bad_ranges(self._messages.segments, mark.message_offset):
            if bad.offset >= self._known.messages or bad.end >= self.message_end:
                cut = bad.offset
                break
            self.has_holes = True
        oldest = read_oldest(self._files)
        if oldest is not None and not self.is_empty and oldest < self._messages.begin:
            self._messages.hide_all()
        elif cut is not None:
            self._messages.hide(cut)
        damaged = first_bad_action(self._actions.segments, mark.action_offset, self._known.actions)
        if start is not None and self._actions.begin > mark.action_offset:
            self._actions.hide_all()
        elif damaged is not None:
            self._actions.hide(damaged)

    def _has(self, mark: Mark) -> bool:
        return mark.message_offset <= self.message_end and mark.action_offset <= self.action_end

    # -- inside ------------------------------------------------------------------------------

    def _begin_segment(self, base: int, content: Buffer) -> None:
        log = self._messages
        if not log.segments:
            # Before the segment: else a start would miss all that came before it.
            write_oldest(self._files, base)
        log.start_segment(base, content)
        self._unindexed.add(base)
        for sealed in log.segments[-2:-1]:
            self._listener.segment_sealed(sealed.path, sealed.end - sealed.base)

    def _carry_out(self) -> None:
        """Remove hidden bytes durably."""
        if not self._has_hidden:
            return
        self._has_hidden, self._indexing = False, None
        with self._noting():
            # Checkpoints first: one that reaches behind the logs would mean that they lost it.
            # Then facts, as they are of messages.
            for part in (self._checkpoints, self._actions, self._messages):
                part.carry_out()
        segments = self._messages.segments
        self._unindexed &= {segment.base for segment in segments}
        self._unindexed |= {segment.base for segment in segments[-1:]}

    def _lower_known(self, messages: int, actions: int) -> None:
        """Lower the known durable ends to what the leader says was confirmed.

        A log that has lost bytes keeps its end: the cut does not restore them.
        """
        known = self._known
        if known.messages <= self.message_end:
            known = known._replace(messages=min(known.messages, messages))
        if known.actions <= self.action_end:
            known = known._replace(actions=min(known.actions, actions))
        if known != self._known:
            with self._noting():
                write_known(self._files, known, is_durable=True)
            self._known = known

    def _sync_now(self) -> None:
        job = self.begin_sync()
        if job is not None:
            job.run()
            self.finish_sync(job)

    def _sync_point(self) -> SyncPoint:
        messages, names = self._messages.sync_point
        actions, action_names = self._actions.sync_point
        return (MessageOffset(messages), names), (ActionOffset(actions), action_names)

    @contextmanager
    def _noting(self) -> Iterator[None]:
        """Record disk failures, which are final."""
        try:
            yield
        except StorageError as problem:
            self._health.note(problem)
            raise
