"""What the files of a broker hold, as ``pulque log`` prints it."""

import errno
import os
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

from pulque.cli.common.message_output import message_fields, message_line
from pulque.cli.common.output import Output, instant, print_json, print_line
from pulque.errors import PulqueError, UsageError
from pulque.model.batch import Codec, read_header
from pulque.model.message import Message, StoredBatch
from pulque.storage.checkpoint import MARK_KEY, Mark, read_checkpoint
from pulque.storage.files import FileSystem, OsFileSystem
from pulque.storage.indexes.key_file import read_heads
from pulque.storage.indexes.segment_index import Entry, SealedIndex
from pulque.storage.inspection.data_files import (
    BatchRecord,
    DataFile,
    FactRecord,
    FileKind,
    TableRecord,
    UnreadableBytes,
    data_files,
    kind_of,
    read_facts,
    read_messages,
    refuse_if_locked,
)
from pulque.storage.inspection.verification import Finding, Verified

__all__ = ["open_files", "print_file", "print_verified"]


# -- which files --------------------------------------------------------------------------------


def open_files(path: Path, *, force: bool) -> tuple[FileSystem, list[DataFile]]:
    """Return the files that a path means: a data directory, or one of its files.

    Raises:
        UsageError: It is neither.
        DataDirectoryError: A broker runs on it.
    """
    if path.is_dir():
        if not force:
            refuse_if_locked(str(path))
        files = OsFileSystem(str(path))
        return files, data_files(files)
    if not path.exists():
        raise UsageError(f"{path}: {os.strerror(errno.ENOENT)}")
    directory = path.absolute().parent
    found = kind_of(directory.name, path.name)
    if found is None:
        raise UsageError(
            f"{path} is neither a data directory nor a file of one "
            "(messages/*.log, messages/*.index, actions/*.log, checkpoints/*.checkpoint)"
        )
    if not force:
        refuse_if_locked(str(directory.parent))
    return OsFileSystem(str(directory.parent)), [found]


# -- dump ---------------------------------------------------------------------------------------


def print_file(files: FileSystem, each: DataFile, output: Output, *, with_messages: bool) -> None:
    """Print what one file holds, record by record."""
    for row in _rows_of(files, each, with_messages=with_messages):
        _print_row(each.path, row, output)


def _print_row(path: str, row: dict[str, object] | Message, output: Output) -> None:
    if isinstance(row, Message):
        if output is Output.JSON:
            print_json({"file": path, "type": "message", **message_fields(row)})
        else:
            print_line(f"    {message_line(row)}")
    elif output is Output.JSON:
        print_json({"file": path, **row})
    else:
        words = (f"{name}={value}" for name, value in row.items() if name != "type")
        print_line(f"{path} {row['type']} {' '.join(words)}")


def _rows_of(
    files: FileSystem, each: DataFile, *, with_messages: bool
) -> Iterator[dict[str, object] | Message]:
    match each.kind:
        case FileKind.MESSAGES:
            for record in read_messages(files, each.path, each.base):
                yield from _message_rows(record, with_messages=with_messages)
        case FileKind.ACTIONS:
            yield from map(_fact_row, read_facts(files, each.path, each.base))
        case FileKind.CHECKPOINT:
            yield from _checkpoint_rows(files, each)
        case FileKind.INDEX:
            yield from _index_rows(files, each)
        case FileKind.OPEN_INDEX:
            yield from _open_index_rows(files, each)
        case FileKind.KEYS:
            yield from _keys_rows(files, each)


def _message_rows(
    record: BatchRecord | TableRecord | UnreadableBytes, *, with_messages: bool
) -> Iterator[dict[str, object] | Message]:
    match record:
        case UnreadableBytes():
            yield _damage_row(record)
        case TableRecord(envelope, rows):
            yield {
                "type": "partition_table",
                "offset": envelope.offset,
                "size": envelope.size,
                "stored_at": instant(envelope.stored_at_ms),
                "partitions": {name: sequence for _, name, sequence in rows},
            }
        case BatchRecord(envelope, partition, batch):
            header = read_header(batch)
            yield {
                "type": "batch",
                "offset": envelope.offset,
                "size": envelope.size,
                "partition": partition,
                "first_sequence": envelope.first_sequence,
                "count": envelope.count,
                "stored_at": instant(envelope.stored_at_ms),
                "codec": Codec(header.codec).name.lower(),
                "priority": header.priority,
                "producer_id": f"{header.producer_id:016x}",
                "producer_sequence": header.producer_sequence,
            }
            if with_messages:
                stored = StoredBatch(
                    batch,
                    partition=partition,
                    first_sequence=envelope.first_sequence,
                    stored_at_ms=envelope.stored_at_ms,
                )
                yield from (Message(stored, index) for index in range(len(stored)))


def _fact_row(record: FactRecord | UnreadableBytes) -> dict[str, object]:
    if isinstance(record, UnreadableBytes):
        return _damage_row(record)
    action = record.action
    return {
        "type": type(action).__name__,
        "offset": record.offset,
        "size": record.size,
        **{_name(name): _value(name, value) for name, value in asdict(action).items()},
    }


def _name(field: str) -> str:
    return field.removesuffix("_ms") if field.endswith("_at_ms") or field == "at_ms" else field


def _value(field: str, value: Any) -> object:
    return instant(value) if field == "at_ms" else value


def _checkpoint_rows(files: FileSystem, each: DataFile) -> Iterator[dict[str, object]]:
    state = read_checkpoint(files, each.path)
    if isinstance(state, str):
        yield _damage_row(UnreadableBytes(0, 0, state))
        return
    for key, value in state.items():
        if key == MARK_KEY:
            yield _mark_row(state)
        else:
            yield {"type": "value", "key": ascii(key)[1:], "value": value.hex()}


def _mark_row(state: dict[bytes, bytes]) -> dict[str, object]:
    try:
        mark = Mark.decode(state)
    except ValueError as problem:
        return _damage_row(UnreadableBytes(0, 0, str(problem)))
    return {"type": "mark", **mark._asdict(), "stored_at_ms": instant(mark.stored_at_ms)}


def _index_rows(files: FileSystem, each: DataFile) -> Iterator[dict[str, object]]:
    file = files.open(each.path, writable=False)
    try:
        index = SealedIndex(file, each.path, base=each.base)  # type: ignore[arg-type]
        entries = index.all_entries()
    except PulqueError as error:
        yield _damage_row(UnreadableBytes(getattr(error, "offset", 0), 0, str(error)))
        return
    finally:
        file.close()
    for entry in entries.tolist():
        yield _entry_row(Entry._make(entry))


def _open_index_rows(files: FileSystem, each: DataFile) -> Iterator[dict[str, object]]:
    file = files.open(each.path, writable=False)
    try:
        data = file.read(file.size(), 0)
    finally:
        file.close()
    yield {"type": "entries", "bytes": len(data)}


def _keys_rows(files: FileSystem, each: DataFile) -> Iterator[dict[str, object]]:
    file = files.open(each.path, writable=False)
    try:
        heads, problem = read_heads(file, each.base)
    finally:
        file.close()
    for head in heads:
        times = {"begun_ms": instant(head.begun_ms), "last_ms": instant(head.last_ms)}
        yield {"type": "part", **head._asdict(), **times}
    if problem:
        yield _damage_row(UnreadableBytes(sum(head.size for head in heads), 0, problem))


def _entry_row(entry: Entry) -> dict[str, object]:
    return {"type": "entry", **entry._asdict(), "stored_at_ms": instant(entry.stored_at_ms)}


def _damage_row(damage: UnreadableBytes) -> dict[str, object]:
    return {
        "type": "damage",
        "offset": damage.offset,
        "size": damage.size,
        "reason": damage.reason,
    }


# -- verify -------------------------------------------------------------------------------------


def print_verified(verified: Verified, output: Output) -> None:
    """Print what a check found."""
    if output is Output.JSON:
        print_json(_verified_fields(verified))
        return
    for finding in verified.findings:
        print_line(_finding_line(finding))
    print_line(_summary(verified))


def _verified_fields(verified: Verified) -> dict[str, object]:
    return {
        "is_damaged": bool(verified.damages),
        "files": verified.files,
        "bytes": verified.bytes,
        "batches": verified.batches,
        "messages": verified.messages,
        "facts": verified.facts,
        "findings": [
            {
                "file": finding.path,
                "offset": finding.offset,
                "size": finding.size,
                "reason": finding.reason,
                "is_torn_tail": finding.is_torn_tail,
            }
            for finding in verified.findings
        ],
    }


def _finding_line(finding: Finding) -> str:
    what = "torn tail" if finding.is_torn_tail else "damaged"
    return (
        f"{finding.path} at offset {finding.offset}: {what}, {finding.size} bytes: "
        f"{finding.reason}"
    )


def _summary(verified: Verified) -> str:
    damages = len(verified.damages)
    verdict = f"{damages} damaged ranges" if damages else "no damage"
    return (
        f"{verdict} in {verified.files} files of {verified.bytes:,} bytes: {verified.batches:,} "
        f"batches with {verified.messages:,} messages, {verified.facts:,} facts"
    )
