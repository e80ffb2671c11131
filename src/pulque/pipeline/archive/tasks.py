"""What a task of the archive does: copy a segment, or write the rows of a stretch of it.

A task never fails because of what it finds: it reports it, and leaves nothing behind. What it
writes has a name that was drawn for this attempt, and counts only when the driver says so; a task
that Spark runs twice does no harm.
"""

import json
import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Any

import numpy as np
import pyarrow as pa

from pulque.errors import CorruptionError, InvalidBatchError, PulqueError, StorageError
from pulque.model.names import PartitionName, subject_of
from pulque.model.record import ENVELOPE_SIZE
from pulque.pipeline.archive.totals import Tally, tally_of, tally_of_entries
from pulque.pipeline.columns import ALL_COLUMNS
from pulque.pipeline.filesystem import Tree
from pulque.pipeline.lake.consumer_facts import (
    CONSUMPTION,
    Row,
    UnknownPartitionError,
    rows_of_facts,
)
from pulque.pipeline.lake.file_writer import WritableTree, crc_of
from pulque.pipeline.lake.parquet_writer import Part, PartWriter, WrittenRows
from pulque.pipeline.lake.table import MESSAGES, QUARANTINE, TableFile, bucket_of, statistic
from pulque.pipeline.reading.batch_decoder import BatchPlace, UndecodableBatch, decode_readable
from pulque.pipeline.reading.segment_map import SegmentFile
from pulque.pipeline.reading.stored_log import SegmentStretch, read_stretch
from pulque.storage.indexes.segment_index import ENTRY_TYPE

__all__ = [
    "CopyDone",
    "CopyWork",
    "FactsWork",
    "NotDone",
    "NotYet",
    "Report",
    "RowsDone",
    "RowsWork",
    "Work",
    "do_work",
    "raw_directory",
    "report_from_json",
    "report_to_json",
]

_DAY_MS = 86_400_000
_BYTES_AT_ONCE = 16 * 1024 * 1024
"""What is read in one go is dealt to the buckets, and each bucket's part is decoded by itself."""
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


@dataclass(frozen=True, slots=True)
class CopyWork:
    """Copy a segment and its index as they are."""

    lake: str
    broker: str
    segment: SegmentFile


@dataclass(frozen=True, slots=True)
class RowsWork:
    """Write the messages of a stretch as rows."""

    lake: str
    broker: str
    stretch: SegmentStretch
    ordinal: int
    """Of the stretch in its segment."""

    @property
    def segment(self) -> SegmentFile:
        """The segment that the stretch is of."""
        return self.stretch.segment


@dataclass(frozen=True, slots=True)
class FactsWork:
    """Write the facts of a segment of the action log as rows."""

    lake: str
    broker: str
    segment: SegmentFile
    names: Mapping[int, PartitionName]
    """Of partitions, by id."""


Work = CopyWork | RowsWork | FactsWork


@dataclass(frozen=True, slots=True)
class CopyDone:
    """A segment was copied, or was there already.

    Attributes:
        base: Of the segment.
        staged: Each file's name for now, and the one that it shall have.
    """

    base: int
    staged: tuple[tuple[str, str], ...]


@dataclass(frozen=True, slots=True)
class RowsDone:
    """Rows were written.

    Attributes:
        base: Of the segment.
        files: What they were written to.
        read: What the messages of the stretch add up to.
        written: What the rows in the files add up to.
        quarantined: What batches were written to that cannot be decoded.
        unreadable: What their messages add up to, as far as the index tells.
    """

    base: int
    files: tuple[TableFile, ...]
    read: Tally
    written: Tally
    quarantined: tuple[TableFile, ...] = ()
    unreadable: Tally = field(default_factory=Tally)


@dataclass(frozen=True, slots=True)
class NotDone:
    """It could not be done, and nothing is left of it.

    Attributes:
        base: Of the segment.
        reason: What was found, and where.
        is_damage: Whether the segment is to blame, so that trying again is of no use.
    """

    base: int
    reason: str
    is_damage: bool


@dataclass(frozen=True, slots=True)
class NotYet:
    """It can be done when another segment of the message log is sealed."""

    base: int


Report = CopyDone | RowsDone | NotDone | NotYet


def report_to_json(report: Report) -> str:
    """Return a report as a task sends it to the driver."""
    return json.dumps({"kind": type(report).__name__, **asdict(report)}, default=statistic)


def report_from_json(text: str) -> Report:
    """Return the report that a task sent."""
    fields = json.loads(text)
    match fields.pop("kind"):
        case "CopyDone":
            return CopyDone(fields["base"], tuple((a, b) for a, b in fields["staged"]))
        case "RowsDone":
            return RowsDone(
                fields["base"],
                files=_files_of(fields["files"]),
                read=Tally(**fields["read"]),
                written=Tally(**fields["written"]),
                quarantined=_files_of(fields["quarantined"]),
                unreadable=Tally(**fields["unreadable"]),
            )
        case "NotDone":
            return NotDone(**fields)
        case _:
            return NotYet(**fields)


def _files_of(found: Sequence[dict[str, Any]]) -> tuple[TableFile, ...]:
    return tuple(
        TableFile(**{**each, "partition": tuple((a, b) for a, b in each["partition"])})
        for each in found
    )


def raw_directory(broker: str) -> str:
    """Return where a broker's segments are copied to in a lake."""
    return f"raw/{broker}"


def do_work(work: Work) -> Report:
    """Do what a task is for."""
    try:
        return _DOERS[type(work)](work)
    except (CorruptionError, InvalidBatchError) as error:
        return NotDone(work.segment.base, _named(work.segment, error), is_damage=True)
    except UnknownPartitionError:
        return NotYet(work.segment.base)
    except (PulqueError, OSError, pa.ArrowException) as error:
        return NotDone(work.segment.base, _named(work.segment, error), is_damage=False)


def _named(segment: SegmentFile, error: Exception) -> str:
    text = str(error)
    return text if segment.path in text else f"{segment.path}: {text}"


# ── whole files ────────────────────────────────────────────────────────────────────────────


def _copy(work: CopyWork) -> CopyDone:
    source, lake = Tree(work.segment.where), WritableTree(work.lake)
    directory, _, name = work.segment.path.rpartition("/")
    index = f"{name.removesuffix('.log')}.index"
    staged = []
    for each in (name, index):
        if each == index and index not in source.names(directory):
            continue  # it is derived, and perhaps still being written
        path = f"{directory}/{each}" if directory else each
        to = f"{raw_directory(work.broker)}/{each}"
        if lake.size(to) is None:
            staged.append((_copy_one(source, path, lake, to), to))
        elif each == name and crc_of(lake, to) != crc_of(source, path):
            raise StorageError(
                f"{lake.where}/{to} is there already and differs from {path}: was it archived by "
                "another broker of the same name, or is the copy damaged?"
            )
    return CopyDone(work.segment.base, tuple(staged))


def _copy_one(source: Tree, path: str, lake: WritableTree, to: str) -> str:
    directory, _, name = to.rpartition("/")
    staged = f"{directory}/.{name}.{secrets.token_hex(6)}"
    crc = lake.copy(source, path, staged)
    if crc_of(lake, staged) != crc:
        lake.remove(staged)
        raise StorageError(f"{lake.where}/{to}: what was written reads differently")
    return staged


# ── rows ───────────────────────────────────────────────────────────────────────────────────


def _write_rows(work: RowsWork) -> RowsDone:
    lake = WritableTree(work.lake)
    name = f"{work.broker}-{work.segment.base:020d}-{work.ordinal:03d}"
    writer = PartWriter(lake, MESSAGES, name)
    beside = PartWriter(lake, QUARANTINE, name)
    read = written = Tally()
    unreadable: list[UndecodableBatch] = []
    try:
        stretch = work.stretch
        for placed in read_stretch(stretch, must_be_whole=True, bytes_at_once=_BYTES_AT_ONCE):
            unreadable += placed.unreadable
            for part, some in _parted(placed):
                batches, bad = decode_readable(some, ALL_COLUMNS)
                unreadable += bad
                for rows in batches:
                    read += tally_of(rows)
                    writer.add(part, _with_origin(rows, work))
        files = []
        for part, path in writer.finish():
            found = WrittenRows(lake, MESSAGES, part, path)
            written = sum(map(tally_of, found.batches()), written)
            files.append(found.described())
        left = _quarantine(work, unreadable, beside)
        quarantined = [
            WrittenRows(lake, QUARANTINE, part, path).described() for part, path in beside.finish()
        ]
    except BaseException:
        writer.abandon()
        beside.abandon()
        raise
    if read != written:
        writer.abandon()
        beside.abandon()
        raise StorageError(f"the rows written add up to {written}, the messages to {read}")
    return RowsDone(work.segment.base, tuple(files), read, written, tuple(quarantined), left)


def _quarantine(
    work: RowsWork, unreadable: Sequence[UndecodableBatch], writer: PartWriter
) -> Tally:
    """Write the bytes of batches that cannot be decoded; return what they add up to."""
    if not unreadable:
        return Tally()
    stretch, base = work.stretch, work.segment.base
    reasons = {(each.partition, each.first_sequence): each.reason for each in unreadable}
    entries = np.frombuffer(stretch.entries, ENTRY_TYPE)
    is_bad = [
        (stretch.names[int(each["partition"])], int(each["first_sequence"])) in reasons
        for each in entries
    ]
    file = Tree(work.segment.where).open(work.segment.path)
    try:
        for entry in entries[is_bad]:
            name, first = stretch.names[int(entry["partition"])], int(entry["first_sequence"])
            offset, size = int(entry["offset"]), int(entry["size"])
            stored_ms = int(entry["stored_at_ms"])
            row = {
                "subject": subject_of(name),
                "partition": name,
                "first_sequence": first,
                "count": int(entry["count"]),
                "stored_at": _EPOCH + timedelta(milliseconds=stored_ms),
                "reason": reasons[name, first],
                "raw": file.read(size - ENVELOPE_SIZE, offset - base + ENVELOPE_SIZE),
                "offset": offset,
                "broker": work.broker,
                "segment": base,
            }
            day, _ = _part(np.int64(stored_ms // _DAY_MS), np.int64(0))
            writer.add((day,), pa.RecordBatch.from_pylist([row], QUARANTINE.file_schema))
    finally:
        file.close()
    return Tally(*tally_of_entries(entries[is_bad]))


def _write_facts(work: FactsWork) -> RowsDone:
    lake = WritableTree(work.lake)
    base = work.segment.base
    by_day: dict[str, list[Row]] = {}
    for row in rows_of_facts(work.segment, work.names):
        by_day.setdefault(f"{row['at']:%Y-%m-%d}", []).append({**row, "broker": work.broker})
    writer = PartWriter(lake, CONSUMPTION, f"{work.broker}-{base:020d}")
    count = sum(map(len, by_day.values()))
    files = []
    written = 0
    try:
        for day, rows in by_day.items():
            writer.add((day,), pa.RecordBatch.from_pylist(rows, CONSUMPTION.file_schema))
        for part, path in writer.finish():
            found = WrittenRows(lake, CONSUMPTION, part, path)
            written += sum(batch.num_rows for batch in found.batches())
            files.append(found.described())
    except BaseException:
        writer.abandon()
        raise
    return RowsDone(base, tuple(files), Tally(count), Tally(written))


def _with_origin(rows: pa.RecordBatch, work: RowsWork) -> pa.RecordBatch:
    count = rows.num_rows
    origin = [
        pa.repeat(pa.scalar(work.broker, pa.string()), count),
        pa.repeat(pa.scalar(work.segment.base, pa.int64()), count),
    ]
    return pa.RecordBatch.from_arrays([*rows.columns, *origin], schema=MESSAGES.file_schema)


def _parted(placed: BatchPlace) -> Iterator[tuple[Part, BatchPlace]]:
    """Yield the batches of each day and bucket, in order."""
    places = placed.places
    if not len(places):
        return
    buckets = np.array([_bucket(name) for name in placed.names], np.int64)[places["name"]]
    keys = np.stack([places["stored_at_ms"] // _DAY_MS, buckets], axis=1)
    parts, codes = np.unique(keys, axis=0, return_inverse=True)
    for code, part in enumerate(parts):
        yield _part(*part), BatchPlace(placed.data, places[codes.ravel() == code], placed.names)


def _bucket(name: PartitionName) -> int:
    return bucket_of(subject_of(name))


def _part(day: np.int64, bucket: np.int64) -> Part:
    return f"{_EPOCH + timedelta(days=int(day)):%Y-%m-%d}", str(bucket)


_DOERS: Mapping[type[Work], Callable[[Any], Report]] = {
    CopyWork: _copy,
    RowsWork: _write_rows,
    FactsWork: _write_facts,
}
