"""Keeping an archive in shape: fewer and larger files, nothing older than wanted.

Both are commits to the table like any other: readers see the table before or after, and runs of
the archive at the same time are not disturbed. Files that the table does not name any more are
removed later, when nobody can be reading them.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import date, timedelta
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from pulque.errors import StorageError
from pulque.pipeline.lake.consumer_facts import CONSUMPTION
from pulque.pipeline.lake.file_writer import WritableTree
from pulque.pipeline.lake.table import MESSAGES, QUARANTINE, Table, TableKind

if TYPE_CHECKING:
    from deltalake import DeltaTable, WriterProperties

__all__ = ["Compacted", "Expired", "compact", "expire", "sweep"]

_FILE_BYTES = 256 * 1024 * 1024
_ROW_GROUP_ROWS = 131_072
_FALSE_POSITIVES = 0.01
_LOG_NAME_DIGITS = 20


@dataclass(frozen=True, slots=True)
class Compacted:
    """How many files became how many."""

    files_before: int
    files_after: int
    rows: int


@dataclass(frozen=True, slots=True)
class Expired:
    """What went."""

    files: int
    rows: int
    segments: int
    """Copies of whole segments."""


def compact(lake: str, *, file_bytes: int = _FILE_BYTES) -> Compacted:
    """Put the small files of each part of the tables together.

    Raises:
        StorageError: It cannot be done; the table is as it was.
    """
    total = Compacted(0, 0, 0)
    for table in _tables(lake):
        before, _ = _counted(table.open())
        with _telling(lake):
            table.open().optimize.compact(
                target_size=file_bytes, writer_properties=_how_to_write(table.kind)
            )
        after, rows = _counted(table.open())
        total = Compacted(
            total.files_before + before, total.files_after + after, total.rows + rows
        )
    return total


def _tables(lake: str) -> list[Table]:
    """Return the tables that a lake has; that of messages in any case."""
    others = (Table(lake, CONSUMPTION), Table(lake, QUARANTINE))
    return [Table(lake, MESSAGES), *(each for each in others if each.exists())]


@contextmanager
def _telling(lake: str) -> Iterator[None]:
    from deltalake.exceptions import DeltaError

    try:
        yield
    except (DeltaError, OSError) as error:
        raise StorageError(f"{lake}: {error}") from error


def _counted(table: "DeltaTable") -> tuple[int, int]:
    files = pa.table(table.get_add_actions(flatten=True))
    return files.num_rows, sum(files.column("num_records").to_pylist())


def _how_to_write(kind: TableKind) -> "WriterProperties":
    from deltalake import BloomFilterProperties, ColumnProperties, WriterProperties

    bloom = BloomFilterProperties(True, fpp=_FALSE_POSITIVES, ndv=_ROW_GROUP_ROWS)
    looked_up = ColumnProperties(dictionary_enabled=False, bloom_filter_properties=bloom)
    columns = {
        "message_id": looked_up,
        "key": looked_up,
        "body": ColumnProperties(dictionary_enabled=False),
    }
    return WriterProperties(
        compression="ZSTD",
        compression_level=1,
        max_row_group_size=_ROW_GROUP_ROWS,
        column_properties={
            name: chosen for name, chosen in columns.items() if name in kind.schema.names
        },
    )


def expire(lake: str, before: date) -> Expired:
    """Let go of all that was stored or done before a day, and of segments with only such.

    Raises:
        StorageError: It cannot be done; the table is as it was.
    """
    files = rows = 0
    for table in _tables(lake):
        had_files, had_rows = _counted(table.open())
        with _telling(lake):
            table.open().delete(f"day < '{before:%Y-%m-%d}'")
        has_files, has_rows = _counted(table.open())
        files, rows = files + had_files - has_files, rows + had_rows - has_rows
    segments = _expire_segments(WritableTree(lake), _files_of_segments(lake))
    return Expired(files, rows, segments)


def _files_of_segments(lake: str) -> list[dict[str, Any]]:
    """Return the files with messages, also those with messages that nobody can decode."""
    tables = [each for each in _tables(lake) if each.kind is not CONSUMPTION]
    files: list[dict[str, Any]] = []
    for table in tables:
        files += pa.table(table.open().get_add_actions(flatten=True)).to_pylist()
    return files


def _expire_segments(tree: WritableTree, files: Sequence[Mapping[str, Any]]) -> int:
    """Remove the copies of segments that come before all that a broker has in the tables."""
    removed = 0
    for broker in tree.directories("raw"):
        firsts = [_first_segment(each, broker) for each in files]
        held = [each for each in firsts if each is not None]
        for name in tree.names(f"raw/{broker}"):
            base = name[:_LOG_NAME_DIGITS]
            # Without any file left nothing is known of what came last: it stays.
            if held and base.isdigit() and int(base) < min(held):
                tree.remove(f"raw/{broker}/{name}")
                removed += name.endswith(".log")
    return removed


def _first_segment(file: Mapping[str, Any], broker: str) -> int | None:
    """Return the first segment that a file may have messages of, if it may have any."""
    low, high = file.get("min.broker"), file.get("max.broker")
    first = file.get("min.segment")
    if low is None or high is None or first is None:
        return 0  # it does not say
    return int(first) if low <= broker <= high else None


def sweep(lake: str, unused_for: timedelta) -> int:
    """Remove files that the tables do not name, and did not for so long.

    Raises:
        StorageError: It cannot be done.
    """
    # Rather an hour late: a run of the archive commits files when all are written.
    hours = max(math.ceil(unused_for / timedelta(hours=1)), 0)
    removed = 0
    for table in _tables(lake):
        with _telling(lake):
            found = table.open().vacuum(
                hours, dry_run=False, enforce_retention_duration=False, full=True
            )
        removed += len(found)
    return removed
