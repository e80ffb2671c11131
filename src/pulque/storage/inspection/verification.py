"""Verify a data directory: check every crc, and compare derived files with the logs.

Two things are not damage: a *torn tail*, which was being written when the broker was killed and
which the next start cuts off, and a missing index, which the next start rebuilds.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field

import google_crc32c
import numpy as np

from pulque.errors import CorruptionError
from pulque.model.batch import HEADER, BatchHeader
from pulque.model.names import PartitionName
from pulque.model.positions import ConsumeSequence, MessageOffset, PartitionId
from pulque.storage.checkpoint import Mark, read_checkpoint
from pulque.storage.directory.layout import segment_path
from pulque.storage.files import File, FileSystem
from pulque.storage.indexes.key_file import PartHead, pack_part, read_heads
from pulque.storage.indexes.key_rows import collect
from pulque.storage.indexes.segment_index import ENTRY_SIZE, Entry, OpenIndex, SealedIndex
from pulque.storage.inspection.data_files import (
    BatchRecord,
    DataFile,
    FileKind,
    TableRecord,
    UnreadableBytes,
    read_facts,
    read_messages,
)
from pulque.storage.logs.segment import open_segment

__all__ = ["Finding", "Verified", "verify"]


@dataclass(frozen=True, slots=True)
class Finding:
    """A problem that was found."""

    path: str
    offset: int
    size: int
    reason: str
    is_torn_tail: bool = False
    """The bytes were never confirmed; the next start cuts them off."""


@dataclass(slots=True)
class Verified:
    """The verified files, and the problems found."""

    files: int = 0
    bytes: int = 0
    batches: int = 0
    messages: int = 0
    facts: int = 0
    findings: list[Finding] = field(default_factory=list)

    @property
    def damages(self) -> list[Finding]:
        """The findings that are damage."""
        return [finding for finding in self.findings if not finding.is_torn_tail]


def verify(files: FileSystem, data_files: list[DataFile]) -> Verified:
    """Check files that belong together, or a single one."""
    return _Verification(files, data_files).run()


class _Verification:
    def __init__(self, files: FileSystem, data_files: list[DataFile]) -> None:
        self._files = files
        self._all = data_files
        self._verified = Verified()
        self._mark = Mark()
        self._indexes: dict[int, OpenIndex | None] = {}
        """The entries of each walked segment by its base; None for a damaged segment."""
        self._expected: dict[PartitionName, ConsumeSequence] = {}
        self._names: dict[PartitionId, PartitionName] = {}
        self._highest_synced = 0

    def run(self) -> Verified:
        for each in self._of(FileKind.CHECKPOINT):
            self._check_checkpoint(each)
        self._check_seams(FileKind.MESSAGES)
        for each in self._of(FileKind.MESSAGES):
            self._check_messages(each)
        self._check_end()
        self._check_seams(FileKind.ACTIONS)
        for each in self._of(FileKind.ACTIONS):
            self._check_facts(each)
        for each in self._of(FileKind.INDEX):
            self._check_index(each)
        for each in self._of(FileKind.OPEN_INDEX):
            self._check_open_index(each)
        for each in self._of(FileKind.KEYS):
            self._check_keys(each)
        self._tell_torn_tails()
        return self._verified

    def _of(self, kind: FileKind) -> list[DataFile]:
        return [each for each in self._all if each.kind is kind]

    def _size(self, each: DataFile) -> int:
        file = self._files.open(each.path, writable=False)
        try:
            return file.size()
        finally:
            file.close()

    def _count(self, each: DataFile) -> None:
        self._verified.files += 1
        self._verified.bytes += self._size(each)

    def _find(self, each: DataFile, offset: int, size: int, reason: str) -> None:
        self._verified.findings.append(Finding(each.path, offset, size, reason))

    # -- the truth ---------------------------------------------------------------------------

    def _check_seams(self, kind: FileKind) -> None:
        """Check that each segment begins where the one before it ends."""
        for before, after in zip(self._of(kind), self._of(kind)[1:], strict=False):
            end = self._end(before)
            if end != after.base:
                what = "missing" if end < after.base else "too many"
                size = abs(after.base - end)
                self._find(
                    before, min(end, after.base), size, f"{size} bytes at its end are {what}"
                )

    def _end(self, each: DataFile) -> int:
        """Return where in its log a file ends."""
        if each.kind is not FileKind.MESSAGES:
            return each.base + self._size(each)
        file = self._files.open(each.path, writable=False)
        try:
            return open_segment(each.path, file, each.base).end
        finally:
            file.close()

    def _check_end(self) -> None:
        """Check that the logs reach to the checkpoint's offsets, which were durable then."""
        for last in self._of(FileKind.MESSAGES)[-1:]:
            end = self._end(last)
            missing = self._mark.message_offset - end
            if missing > 0:
                self._find(last, end, missing, "the end of the log is missing")
                self._indexes[last.base] = None

    def _check_messages(self, each: DataFile) -> None:
        self._count(each)
        index: OpenIndex | None = OpenIndex({})
        for record in read_messages(self._files, each.path, each.base, self._names):
            match record:
                case UnreadableBytes(offset, size, reason):
                    self._find(each, offset, size, reason)
                    # What follows may be numbered from anywhere.
                    self._expected.clear()
                    index = None
                case TableRecord(envelope):
                    self._highest_synced = max(self._highest_synced, envelope.synced)
                case BatchRecord(envelope, partition, batch):
                    self._highest_synced = max(self._highest_synced, envelope.synced)
                    self._check_sequence(each, record)
                    self._verified.batches += 1
                    self._verified.messages += envelope.count
                    if index is not None:
                        index.add(_entry_of(record, batch))
                    self._expected[partition] = ConsumeSequence(
                        envelope.first_sequence + envelope.count
                    )
        self._indexes[each.base] = index

    def _check_sequence(self, each: DataFile, record: BatchRecord) -> None:
        envelope = record.envelope
        expected = self._expected.get(record.partition, envelope.first_sequence)
        if envelope.first_sequence != expected:
            self._find(
                each,
                envelope.offset,
                envelope.size,
                f"{record.partition} goes on with sequence {envelope.first_sequence} "
                f"instead of {expected}",
            )
        header = BatchHeader._make(HEADER.unpack_from(record.batch))
        if header.count != envelope.count:
            self._find(
                each,
                envelope.offset,
                envelope.size,
                f"the envelope says {envelope.count} messages and the batch {header.count}",
            )

    def _check_facts(self, each: DataFile) -> None:
        self._count(each)
        for record in read_facts(self._files, each.path, each.base):
            if isinstance(record, UnreadableBytes):
                self._find(each, record.offset, record.size, record.reason)
            else:
                self._verified.facts += 1

    # -- what is derived ---------------------------------------------------------------------

    def _check_checkpoint(self, each: DataFile) -> None:
        self._count(each)
        state = read_checkpoint(self._files, each.path)
        if isinstance(state, str):
            self._find(each, 0, self._size(each), state)
            return
        try:
            self._mark = Mark.decode(state)
        except ValueError as problem:
            self._find(each, 0, self._size(each), str(problem))

    def _check_index(self, each: DataFile) -> None:
        self._count(each)
        file = self._files.open(each.path, writable=False)
        try:
            index = SealedIndex(file, each.path, MessageOffset(each.base))
            found = index.all_entries()
        except CorruptionError as error:
            self._find(each, error.offset, file.size() - error.offset, error.reason)
            return
        finally:
            file.close()
        walked = self._indexes.get(each.base)
        if walked is None:
            return
        table = np.frombuffer(bytes(walked.entries), found.dtype)
        expected = table[np.argsort(table["partition"], kind="stable")]
        start = self._size(each) - found.nbytes
        self._compare(each, start, found.tobytes(), expected.tobytes())

    def _check_open_index(self, each: DataFile) -> None:
        self._count(each)
        mark = self._mark
        if mark.index_base != each.base or not mark.index_size:
            return
        file = self._files.open(each.path, writable=False)
        try:
            entries = file.read(mark.index_size, 0)
        finally:
            file.close()
        if len(entries) < mark.index_size or google_crc32c.value(entries) != mark.index_crc:
            self._find(each, 0, mark.index_size, "the crc in the checkpoint does not match")
            return
        walked = self._indexes.get(each.base)
        if walked is not None:
            self._compare(each, 0, entries, bytes(walked.entries[: mark.index_size]))

    def _check_keys(self, each: DataFile) -> None:
        self._count(each)
        file = self._files.open(each.path, writable=False)
        try:
            heads, problem = read_heads(file, each.base)
            if problem:
                place = sum(head.size for head in heads)
                is_last = each.base == max(self._indexes, default=each.base)
                self._verified.findings.append(
                    Finding(each.path, place, file.size() - place, problem, is_torn_tail=is_last)
                )
            log = segment_path(each.base)
            if self._indexes.get(each.base) is not None and self._files.exists(log):
                self._compare_parts(each, file, heads, log)
        finally:
            file.close()

    def _compare_parts(self, each: DataFile, file: File, heads: list[PartHead], log: str) -> None:
        """Rebuild the parts of a key index, and compare them with the file."""
        opened = self._files.open(log, writable=False)
        try:
            segment = open_segment(log, opened, each.base)
            for head in heads:
                found = file.read(head.size, head.place)
                made = collect(segment, head.begin, min(head.end, segment.end), self._names.get)
                if b"".join(pack_part(each.base, made)) != found:
                    self._find(each, head.place, head.size, "a part is not what the log says")
        finally:
            opened.close()

    def _compare(self, each: DataFile, start: int, found: bytes, expected: bytes) -> None:
        if found == expected:
            return
        at = next(_differences(found, expected))
        size = start + len(found) - (start + at)
        self._find(each, start + at, max(size, 0), "an entry is not what the log says")

    # -- judgement ---------------------------------------------------------------------------

    def _tell_torn_tails(self) -> None:
        """Distinguish torn tails from damage, as recovery does."""
        last_messages = self._of(FileKind.MESSAGES)[-1:]
        last_facts = self._of(FileKind.ACTIONS)[-1:]
        findings = self._verified.findings
        for i, each in enumerate(findings):
            if last_messages and each.path == last_messages[0].path:
                durable = max(self._mark.message_offset, self._highest_synced)
            elif last_facts and each.path == last_facts[0].path:
                end = last_facts[0].base + self._size(last_facts[0])
                reaches_end = each.offset + each.size == end
                durable = self._mark.action_offset if reaches_end else end
            else:
                continue
            if each.offset >= durable:
                findings[i] = Finding(
                    each.path, each.offset, each.size, each.reason, is_torn_tail=True
                )


def _entry_of(record: BatchRecord, batch: bytes) -> Entry:
    envelope = record.envelope
    return Entry(
        envelope.partition,
        envelope.count,
        envelope.first_sequence,
        envelope.offset,
        envelope.size,
        envelope.stored_at_ms,
        BatchHeader._make(HEADER.unpack_from(batch)).tag_union,
    )


def _differences(found: bytes, expected: bytes) -> Iterator[int]:
    """Yield where entries begin that differ, or the end of the shorter if it is a beginning."""
    shorter = min(len(found), len(expected))
    for at in range(0, shorter, ENTRY_SIZE):
        if found[at : at + ENTRY_SIZE] != expected[at : at + ENTRY_SIZE]:
            yield at
    yield shorter
