"""Keeping an archive in shape: fewer and larger files, nothing older than wanted.

Both are commits to the table like any other: readers see the table before or after, and runs of
the archive at the same time are not disturbed. Files that the table does not name any more are
removed later, when nobody can be reading them.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import date, timedelta
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from pulque.errors import StorageError
from pulque.pipeline.lake import MESSAGES, Table
from pulque.pipeline.lake_files import WritableTree

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
    """Put the small files of each day and bucket together.

    Raises:
        StorageError: It cannot be done; the table is as it was.
    """
    from deltalake.exceptions import DeltaError

    table = Table(lake, MESSAGES).open()
    before, rows = _counted(table)
    try:
        table.optimize.compact(target_size=file_bytes, writer_properties=_how_to_write())
    except (DeltaError, OSError) as error:
        raise StorageError(f"{lake}: {error}") from error
    after, rows = _counted(Table(lake, MESSAGES).open())
    return Compacted(before, after, rows)


def _counted(table: "DeltaTable") -> tuple[int, int]:
    files = pa.table(table.get_add_actions(flatten=True))
    return files.num_rows, sum(files.column("num_records").to_pylist())


def _how_to_write() -> "WriterProperties":
    from deltalake import BloomFilterProperties, ColumnProperties, WriterProperties

    bloom = BloomFilterProperties(True, fpp=_FALSE_POSITIVES, ndv=_ROW_GROUP_ROWS)
    looked_up = ColumnProperties(dictionary_enabled=False, bloom_filter_properties=bloom)
    return WriterProperties(
        compression="ZSTD",
        compression_level=1,
        max_row_group_size=_ROW_GROUP_ROWS,
        column_properties={
            "message_id": looked_up,
            "key": looked_up,
            "body": ColumnProperties(dictionary_enabled=False),
        },
    )


def expire(lake: str, before: date) -> Expired:
    """Let go of all messages that were stored before a day, and of segments with only such.

    Raises:
        StorageError: It cannot be done; the table is as it was.
    """
    from deltalake.exceptions import DeltaError

    files, rows = _counted(Table(lake, MESSAGES).open())
    table = Table(lake, MESSAGES).open()
    try:
        table.delete(f"day < '{before:%Y-%m-%d}'")
    except (DeltaError, OSError) as error:
        raise StorageError(f"{lake}: {error}") from error
    left = Table(lake, MESSAGES).open()
    files_left, rows_left = _counted(left)
    segments = _expire_segments(WritableTree(lake), left)
    return Expired(files - files_left, rows - rows_left, segments)


def _expire_segments(tree: WritableTree, table: "DeltaTable") -> int:
    """Remove the copies of segments that come before all that a broker has in the table."""
    files = pa.table(table.get_add_actions(flatten=True)).to_pylist()
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
    """Remove files that the table does not name, and did not for so long.

    Raises:
        StorageError: It cannot be done.
    """
    from deltalake.exceptions import DeltaError

    table = Table(lake, MESSAGES).open()
    hours = max(int(unused_for.total_seconds() // 3600), 0)
    try:
        removed = table.vacuum(hours, dry_run=False, enforce_retention_duration=False, full=True)
    except (DeltaError, OSError) as error:
        raise StorageError(f"{lake}: {error}") from error
    return len(removed)
