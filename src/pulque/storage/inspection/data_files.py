"""Read the files of a data directory without a broker; write nothing.

A file's records are yielded in order; for bytes that are not a record, a ``UnreadableBytes`` has
their end and the problem, and the walk continues after it. The readers are those of recovery, so
the result is what a broker would see.
"""

import errno
import fcntl
import os
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple

from pulque.errors import DataDirectoryError
from pulque.model.actions import Action
from pulque.model.batch import HEADER_SIZE, seed_of, verify_crc
from pulque.model.names import PartitionName
from pulque.model.positions import ActionOffset, MessageOffset, PartitionId
from pulque.model.record import Envelope, RecordType
from pulque.storage import checkpoint
from pulque.storage.files import FileSystem
from pulque.storage.logs import action_log, message_log
from pulque.storage.logs.action_log import decode_action, walk_actions
from pulque.storage.logs.partitions import TableRow, decode_table
from pulque.storage.logs.segment import DamagedBytes, next_record, open_segment, walk

__all__ = [
    "BatchRecord",
    "DataFile",
    "FactRecord",
    "FileKind",
    "TableRecord",
    "UnreadableBytes",
    "data_files",
    "kind_of",
    "read_facts",
    "read_messages",
    "refuse_if_locked",
]


class FileKind(StrEnum):
    """The kind of a file in a data directory."""

    MESSAGES = "messages"
    INDEX = "index"
    OPEN_INDEX = "open_index"
    KEYS = "keys"
    ACTIONS = "actions"
    CHECKPOINT = "checkpoint"


_KINDS = {
    (message_log.DIRECTORY, "log"): FileKind.MESSAGES,
    (message_log.DIRECTORY, "index"): FileKind.INDEX,
    (message_log.DIRECTORY, "open"): FileKind.OPEN_INDEX,
    (message_log.DIRECTORY, "keys"): FileKind.KEYS,
    (action_log.DIRECTORY, "log"): FileKind.ACTIONS,
    (checkpoint.DIRECTORY, "checkpoint"): FileKind.CHECKPOINT,
}


class DataFile(NamedTuple):
    """One file, by its path in the data directory."""

    path: str
    kind: FileKind
    base: int
    """The number in its name: an offset, or a checkpoint's ordinal."""


@dataclass(frozen=True, slots=True)
class UnreadableBytes:
    """Damaged bytes."""

    offset: int
    """In the log for a segment, in the file for all others."""
    size: int
    reason: str


@dataclass(frozen=True, slots=True)
class BatchRecord:
    """A batch in the message log; its crc matches."""

    envelope: Envelope
    partition: PartitionName
    batch: bytes


@dataclass(frozen=True, slots=True)
class TableRecord:
    """A table of partitions in the message log."""

    envelope: Envelope
    rows: list[TableRow]


@dataclass(frozen=True, slots=True)
class FactRecord:
    """A fact in the action log."""

    offset: ActionOffset
    size: int
    action: Action


def kind_of(directory: str, name: str) -> DataFile | None:
    """Return a file's kind by its directory's name and its own, or None for a foreign file."""
    stem, _, suffix = name.partition(".")
    kind = _KINDS.get((directory, suffix))
    if kind is None or not (stem.isascii() and stem.isdigit()):
        return None
    return DataFile(f"{directory}/{name}", kind, int(stem))


def data_files(files: FileSystem) -> list[DataFile]:
    """Return all non-empty files of a data directory, in order.

    Raises:
        DataDirectoryError: This is not a data directory.
    """
    if not files.exists("format.json"):
        raise DataDirectoryError(
            "there is no format.json, so it is not a data directory of Pulque"
        )
    found = []
    for directory in (message_log.DIRECTORY, action_log.DIRECTORY, checkpoint.DIRECTORY):
        if files.exists(directory):
            found += [kind_of(directory, name) for name in files.list(directory)]
    return [each for each in found if each is not None]


def refuse_if_locked(directory: str) -> None:
    """Raise if a broker runs on a data directory.

    Raises:
        DataDirectoryError: A broker runs on it.
    """
    try:
        descriptor = os.open(f"{directory}/lock", os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    except OSError as error:
        if error.errno == errno.ENOENT:
            return
        raise DataDirectoryError(f"{directory}/lock: {error.strerror}") from None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        holder = os.pread(descriptor, 100, 0).decode(errors="replace").strip()
        raise DataDirectoryError(
            f"{directory} is in use by process {holder or 'unknown'}: stop it first; with --force "
            "it is read all the same, and what is being written may look damaged"
        ) from None
    finally:
        os.close(descriptor)


def read_messages(
    files: FileSystem,
    path: str,
    base: int,
    names: dict[PartitionId, PartitionName] | None = None,
) -> Iterator[BatchRecord | TableRecord | UnreadableBytes]:
    """Yield the records of a segment of the message log.

    Args:
        files: The data directory.
        path: The segment's file.
        base: Where it begins in the log.
        names: Partitions of earlier segments; those of this one are added.
    """
    names = {} if names is None else names
    with closing(files.open(path, writable=False)) as file:
        segment = open_segment(path, file, base)
        offset = segment.base
        while offset < segment.end:
            for item in walk(segment, MessageOffset(offset)):
                if isinstance(item, DamagedBytes):
                    after = next_record(segment, MessageOffset(item.offset + 1))
                    end = segment.end if after is None else int(after.offset)
                    yield UnreadableBytes(item.offset, end - item.offset, item.reason)
                    offset = end
                    break
                record = _record(*item, names)
                if isinstance(record, TableRecord):
                    names.update((row[0], row[1]) for row in record.rows)
                yield record
                offset = item[0].offset + item[0].size


def read_facts(files: FileSystem, path: str, base: int) -> Iterator[FactRecord | UnreadableBytes]:
    """Yield the facts of a segment of the action log."""
    with closing(files.open(path, writable=False)) as file:
        data = file.read(file.size(), 0)
    for at, size, fact in walk_actions(data, base):
        if fact is None:
            yield UnreadableBytes(base + at, size, "facts cannot be read")
            continue
        try:
            yield FactRecord(ActionOffset(base + at), size, decode_action(fact))
        except ValueError as problem:
            yield UnreadableBytes(base + at, size, str(problem))


def _record(
    envelope: Envelope, content: bytes, names: dict[PartitionId, PartitionName]
) -> BatchRecord | TableRecord | UnreadableBytes:
    problem = ""
    if envelope.type is RecordType.PARTITION_TABLE:
        rows = decode_table(content)
        if rows is not None:
            return TableRecord(envelope, rows)
        problem = "the partition table's crc does not match"
    elif envelope.partition not in names:
        problem = f"partition {envelope.partition} is in no table"
    elif len(content) >= HEADER_SIZE and verify_crc(content, seed_of(names[envelope.partition])):
        return BatchRecord(envelope, names[envelope.partition], content)
    else:
        problem = "the batch's crc does not match"
    return UnreadableBytes(envelope.offset, envelope.size, problem)
