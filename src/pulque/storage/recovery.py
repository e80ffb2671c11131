"""From files to a log that can be appended to: cut the torn tail, replay, verify.

The walk begins at the checkpoint's offset and ends at the end of the last segment. Bytes that
are no record are one of two things:

- a *torn tail*: they were never promised to anybody. The log is cut there.
- *corruption*: a record after them says that the log was synced beyond them. The range is
  reported and passed over; everything before and after stays readable, and numbering goes on.

The same judgement serves every segment, as a later segment is always synced after an earlier.
"""

from collections.abc import Iterator
from struct import Struct
from typing import NamedTuple, Protocol

import google_crc32c

from pulque.model.batch import HEADER, BatchHeader, verify_crc
from pulque.model.positions import ConsumeSequence, MessageOffset, PartitionId
from pulque.model.record import ENVELOPE_SIZE, Envelope, RecordType, read_envelope
from pulque.storage.files import FileSystem
from pulque.storage.index import Entry, OpenIndex, write_sealed_index
from pulque.storage.listener import Listener
from pulque.storage.message_log import DIRECTORY, segment_path
from pulque.storage.partitions import Partition, Partitions, decode_table
from pulque.storage.segment import Damage, Segment, next_record, walk

__all__ = ["Mark", "Observer", "RecoveredLog", "recover_message_log"]

_MARK = Struct("<QQQQIq")
MARK_KEY = b"mark"


class Observer(Protocol):
    """Sees the checkpoint, then every batch that was stored since, in order."""

    def checkpoint_loaded(self, state: dict[bytes, bytes]) -> None:
        """Take in the state that the replay starts from; empty if there is no checkpoint."""

    def batch_stored(self, partition: Partition, entry: Entry, batch: bytes) -> None:
        """Take in one batch, as after a live append."""


class Mark(NamedTuple):
    """How far a checkpoint reaches. Everything before its offsets was on disk by then."""

    message_offset: int = 0
    action_offset: int = 0
    index_base: int = 0
    """The segment whose entries were being collected …"""
    index_size: int = 0
    """… how many bytes of them are in its ``.open`` file …"""
    index_crc: int = 0
    """… and their CRC-32C."""
    stored_at_ms: int = 0
    """The store time of the newest batch."""

    def encode(self) -> bytes:
        """Return the mark as a checkpoint keeps it."""
        return _MARK.pack(*self)

    @classmethod
    def decode(cls, state: dict[bytes, bytes]) -> "Mark":
        """Return the mark of a checkpoint; all zero if there is none."""
        data = state.get(MARK_KEY)
        return cls() if data is None else cls._make(_MARK.unpack(data))


class RecoveredLog(NamedTuple):
    """What recovery found."""

    segments: list[Segment]
    open_index: OpenIndex
    batches: int
    """In the last segment."""
    stored_at_ms: int


def recover_message_log(
    files: FileSystem,
    listener: Listener,
    partitions: Partitions,
    mark: Mark,
    observer: Observer,
) -> RecoveredLog:
    """Bring the message log into a state that can be appended to and read."""
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
        self._stored_at_ms = mark.stored_at_ms

    def run(self) -> RecoveredLog:
        self._open_segments()
        open_index = OpenIndex({})
        at = 0
        while at < len(self._segments):
            segment = self._segments[at]
            is_last = at == len(self._segments) - 1
            if segment.end <= self._mark.message_offset and not is_last:
                self._ensure_sealed_index(segment)
            else:
                open_index = self._replay_segment(at)
                # The replay may have cut the log here and removed what came after.
                if at < len(self._segments) - 1:
                    self._write_index(segment, open_index)
            at += 1
        self._report_missing_end()
        return RecoveredLog(self._segments, open_index, len(open_index), self._stored_at_ms)

    def _open_segments(self) -> None:
        for name in self._files.list(DIRECTORY):
            stem, _, suffix = name.partition(".")
            if suffix == "log":
                path = f"{DIRECTORY}/{name}"
                file = self._files.open(path)
                segment = Segment(path, file, int(stem), int(stem) + file.size())
                head = read_envelope(segment.read(segment.base, ENVELOPE_SIZE))
                if isinstance(head, Envelope):
                    segment.opened_at_ms = head.stored_at_ms
                self._segments.append(segment)
            elif suffix.endswith("tmp"):
                self._files.remove(f"{DIRECTORY}/{name}")
        self._drop_empty_last()
        for before, after in zip(self._segments, self._segments[1:], strict=False):
            self._check_seam(before, after)

    def _drop_empty_last(self) -> None:
        """Remove a last segment whose very first record did not make it to the disk."""
        while self._segments and self._segments[-1].base >= self._mark.message_offset:
            last = self._segments[-1]
            first = next(iter(walk(last, MessageOffset(last.base))), None)
            if first is not None and not isinstance(first, Damage):
                return
            if next_record(last, MessageOffset(last.base)) is not None:
                return
            last.file.close()
            self._files.remove(last.path)
            self._listener.tail_cut(last.path, last.base, last.end - last.base)
            self._segments.pop()

    def _check_seam(self, before: Segment, after: Segment) -> None:
        if before.end > after.base:
            self._listener.corruption_found(
                before.path, after.base, before.end - after.base, "the next segment begins earlier"
            )
            before.end = after.base
        elif before.end < after.base and before.end < self._mark.message_offset:
            self._listener.corruption_found(
                before.path, before.end, after.base - before.end, "the log ends before its time"
            )

    def _ensure_sealed_index(self, segment: Segment) -> None:
        path = segment_path(segment.base, "index")
        if self._files.exists(path):
            return
        self._write_index(segment, self._index_of(segment, segment.end))
        self._listener.index_rebuilt(path, 0)

    def _index_of(self, segment: Segment, end: int) -> OpenIndex:
        """Return the entries of a segment up to ``end``, from its ``.open`` file or by a walk."""
        index = OpenIndex(self._starts_of(segment))
        if end <= segment.base:
            return index
        mark = self._mark
        path = segment_path(segment.base, "open")
        if mark.index_base == segment.base and end == mark.message_offset:
            entries = self._read_open(path)
            if entries is not None:
                index.load(entries)
                return index
            self._listener.index_rebuilt(path, 0)
        for envelope, _ in self._walk_past_damage(segment, segment.base, end):
            if envelope.type is RecordType.BATCH:
                index.add(self._entry(envelope, segment))
        return index

    def _read_open(self, path: str) -> bytes | None:
        if not self._files.exists(path):
            return None if self._mark.index_size else b""
        file = self._files.open(path, writable=False)
        try:
            entries = file.read(self._mark.index_size, 0)
        finally:
            file.close()
        is_whole = len(entries) == self._mark.index_size
        return (
            entries if is_whole and google_crc32c.value(entries) == self._mark.index_crc else None
        )

    def _entry(self, envelope: Envelope, segment: Segment) -> Entry:
        head = segment.read(envelope.offset + ENVELOPE_SIZE, HEADER.size)
        header = BatchHeader._make(HEADER.unpack(head))
        return _entry_of(envelope, header)

    def _starts_of(self, segment: Segment) -> dict[PartitionId, ConsumeSequence]:
        first = next(iter(walk(segment, MessageOffset(segment.base))), None)
        if first is None or isinstance(first, Damage):
            return {}
        rows = decode_table(first[1]) or []
        return {partition_id: sequence for partition_id, _, sequence in rows}

    def _replay_segment(self, at: int) -> OpenIndex:
        """Walk a segment from the mark on; apply records, cut or pass over what is damaged."""
        segment = self._segments[at]
        start = min(max(self._mark.message_offset, segment.base), segment.end)
        index = self._index_of(segment, start)
        offset = start
        while offset < segment.end:
            for item in walk(segment, MessageOffset(offset)):
                if isinstance(item, Damage):
                    resume = self._judge(at, item)
                    if resume is None:
                        self._cut(at, item.offset)
                        return index
                    offset = resume
                    break
                envelope, content = item
                problem = self._apply(envelope, content, index)
                if problem is not None:
                    damage = Damage(envelope.offset, problem)
                    if self._judge(at, damage, skip=envelope.size) is None:
                        self._cut(at, envelope.offset)
                        return index
                    self._pass_over(envelope)
                offset = envelope.offset + envelope.size
            else:
                break
        return index

    def _apply(self, envelope: Envelope, content: bytes, index: OpenIndex) -> str | None:
        """Take in one record; return what is wrong with it, if anything."""
        if envelope.type is RecordType.PARTITION_TABLE:
            rows = decode_table(content)
            if rows is None:
                return "the partition table's crc does not match"
            self._partitions.take_rows(rows)
            return None
        partition = self._partitions.by_id.get(envelope.partition)
        if partition is None:
            return f"partition {envelope.partition} is in no table"
        if len(content) < HEADER.size or not verify_crc(content, partition.seed):
            return "the batch's crc does not match"
        entry = _entry_of(envelope, BatchHeader._make(HEADER.unpack_from(content)))
        partition.end = ConsumeSequence(entry.first_sequence + entry.count)
        self._partitions.changed.add(partition.id)
        self._stored_at_ms = max(self._stored_at_ms, entry.stored_at_ms)
        index.add(entry)
        self._observer.batch_stored(partition, entry, content)
        return None

    def _pass_over(self, envelope: Envelope) -> None:
        """Keep the numbering of a partition that has a quarantined batch."""
        partition = self._partitions.by_id.get(envelope.partition)
        if envelope.type is RecordType.BATCH and partition is not None:
            end = ConsumeSequence(envelope.first_sequence + envelope.count)
            partition.end = max(partition.end, end)
            self._partitions.changed.add(partition.id)

    def _judge(self, at: int, damage: Damage, skip: int = 1) -> int | None:
        """Return where to go on after corruption, or None if the damage is a torn tail."""
        after = self._next_valid(at, damage.offset + skip)
        if after is None:
            return None
        segment_at, first = after
        if not any(e.synced > damage.offset for e in self._envelopes(segment_at, first.offset)):
            return None
        segment = self._segments[at]
        # Where the rest of this segment is unreadable, the walk goes on in the next one.
        resume = min(int(first.offset), segment.end)
        self._listener.corruption_found(
            segment.path, damage.offset, resume - damage.offset, damage.reason
        )
        return resume

    def _next_valid(self, at: int, offset: int) -> tuple[int, Envelope] | None:
        for i in range(at, len(self._segments)):
            segment = self._segments[i]
            found = next_record(segment, MessageOffset(max(offset, segment.base)))
            if found is not None:
                return i, found
        return None

    def _envelopes(self, at: int, offset: int) -> Iterator[Envelope]:
        for i in range(at, len(self._segments)):
            segment = self._segments[i]
            start = max(offset, segment.base)
            for envelope, _ in self._walk_past_damage(segment, start, segment.end):
                yield envelope

    @staticmethod
    def _walk_past_damage(
        segment: Segment, start: int, end: int
    ) -> Iterator[tuple[Envelope, bytes]]:
        offset = start
        while offset < end:
            for item in walk(segment, MessageOffset(offset)):
                if isinstance(item, Damage):
                    found = next_record(segment, MessageOffset(item.offset + 1))
                    if found is None:
                        return
                    offset = found.offset
                    break
                if item[0].offset >= end:
                    return
                yield item
            else:
                return

    def _cut(self, at: int, offset: MessageOffset) -> None:
        segment = self._segments[at]
        lost = self._segments[-1].end - offset
        for later in self._segments[at + 1 :]:
            later.file.close()
            self._files.remove(later.path)
            index = segment_path(later.base, "index")
            if self._files.exists(index):
                self._files.remove(index)
        del self._segments[at + 1 :]
        segment.file.truncate(offset - segment.base)
        segment.file.sync()
        self._files.sync_directory(DIRECTORY)
        segment.end = offset
        self._listener.tail_cut(segment.path, offset, lost)

    def _write_index(self, segment: Segment, index: OpenIndex) -> None:
        path = segment_path(segment.base, "index")
        write_sealed_index(
            self._files,
            path,
            base=MessageOffset(segment.base),
            end=MessageOffset(segment.end),
            starts=index.starts.items(),
            entries=bytes(index.entries),
        )

    def _report_missing_end(self) -> None:
        """Say so if the log ends before what was on disk at the checkpoint."""
        end = self._segments[-1].end if self._segments else 0
        missing = self._mark.message_offset - end
        if missing > 0:
            path = self._segments[-1].path if self._segments else DIRECTORY
            self._listener.corruption_found(path, end, missing, "the end of the log is missing")


def _entry_of(envelope: Envelope, header: BatchHeader) -> Entry:
    return Entry(
        envelope.partition,
        envelope.count,
        envelope.first_sequence,
        envelope.offset,
        envelope.size,
        envelope.stored_at_ms,
        header.tag_union,
    )
