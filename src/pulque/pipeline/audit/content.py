"""Audit of content: each row of the table is what the log's own bytes say.

The copies of segments are decoded again, batch by batch, each verified against its crc, and Spark
hashes the rows of both sides alike. Hashes of 64 rows make one number, so that a comparison moves
about a byte for each message; only where two numbers differ are the rows themselves compared,
column by column.
"""

from collections.abc import Iterator, Sequence
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from pulque.errors import CorruptionError
from pulque.model.names import PartitionName, subject_of
from pulque.pipeline.columns import ALL_COLUMNS
from pulque.pipeline.lake.table import MESSAGES, bucket_of
from pulque.pipeline.reading.batch_decoder import decode_readable
from pulque.pipeline.reading.segment_map import SegmentFile, SegmentMap, map_segment
from pulque.pipeline.reading.stored_log import SegmentStretch, read_stretch, stretches_of

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

    from pulque.pipeline.audit.stored import Scope

__all__ = ["ContentSide", "mark"]

_PART_BYTES = 64 * 1024 * 1024
"""So much of a segment is read by one task."""
_EVERYTHING = (0, 1 << 62)
_DAY_US = 86_400_000_000

_PARTS = "where string, path string, base long, broker string, begin long, end long"
_CONTENT = pa.schema(
    [*(each for each in MESSAGES.schema if each.name != "day"), ("damage", pa.string())]
)
"""The columns of the table as the log has them; the day is that of ``stored_at``."""


def _hashed(name: str) -> str:
    """Return the arguments that let a hash tell each value of a column from every other one.

    A null leaves Spark's hash as it is, and so does an empty list; maps cannot be hashed.
    """
    kind = MESSAGES.schema.field(name).type
    if pa.types.is_map(kind):
        return f"isnull({name}), cardinality({name}), map_entries({name})"
    if pa.types.is_list(kind):
        return f"isnull({name}), cardinality({name}), {name}"
    return f"isnull({name}), {name}"


def mark() -> str:
    """Return the expression that hashes a whole row of the table."""
    return f"xxhash64({', '.join(map(_hashed, MESSAGES.schema.names))})"


_PLACE = ("broker", "partition", "sequence")
_COMPARED = tuple(name for name in MESSAGES.schema.names if name not in _PLACE)
_MARKS = f"array({', '.join(f'xxhash64({_hashed(name)})' for name in _COMPARED)})"
_NAMES = f"array({', '.join(map(repr, _COMPARED))})"
_ROWS = f"SELECT broker, partition, sequence, message_id, {_MARKS} AS marks"
_DIFFERENT = f"""
    SELECT l.broker, l.partition, if(l.damage IS NULL, 'rewritten', 'copy_damaged') AS flaw,
           l.sequence, l.message_id, 1L AS count,
           coalesce(l.damage, array_join(filter(transform({_NAMES},
               (name, at) -> if(l.marks[at] = t.marks[at], NULL, name)),
               name -> name IS NOT NULL), ', ')) AS note
    FROM ({_ROWS}, damage FROM {{copies}}) l
    JOIN ({_ROWS} FROM {{messages}}) t
    ON l.broker = t.broker AND l.partition = t.partition AND l.sequence = t.sequence
    LEFT SEMI JOIN {{words}} w
    ON l.broker = w.broker AND l.partition = w.partition AND shiftright(l.sequence, 6) = w.word
    WHERE l.damage IS NOT NULL OR l.marks != t.marks
"""


class ContentSide:
    """What the log's bytes say of each message, compared with the table.

    Args:
        spark: The session.
        scope: Which subjects.
        segments: The copies of segments, each with ``where``, ``path``, ``base``, ``broker`` and
            ``size``.
        messages: The table's rows of the scope.
        words: The table's rows, 64 to one, with the ``mark`` of them all.
    """

    def __init__(
        self,
        spark: "SparkSession",
        scope: "Scope",
        segments: Sequence[dict[str, Any]],
        *,
        messages: "DataFrame",
        words: "DataFrame",
    ) -> None:
        self._spark = spark
        self._scope = scope
        self._segments = segments
        self._messages = messages
        self._words = words

    def different(self) -> "DataFrame | None":
        """Return rows that differ from the log, and in which columns; None if there are none."""
        segments = {(row.broker, row.segment) for row in self._suspected_segments()}
        if not segments:
            return None
        some = [each for each in self._segments if (each["broker"], each["base"]) in segments]
        return self._spark.sql(
            _DIFFERENT,
            copies=self._copies(some),
            messages=self._messages,
            words=self._suspected,
        )

    @cached_property
    def _log_words(self) -> "DataFrame":
        return self._spark.sql(
            f"""SELECT broker, segment, partition, sequence >> 6 AS word,
                       bit_xor({mark()}) AS mark, bool_or(damage IS NOT NULL) AS is_damaged
                FROM {{copies}} GROUP BY broker, segment, partition, sequence >> 6""",
            copies=self._copies(self._segments),
        ).localCheckpoint()

    @cached_property
    def _suspected(self) -> "DataFrame":
        """Where the rows of the table are not those of the log, 64 to one."""
        return self._spark.sql(
            """SELECT l.broker, l.partition, l.word
               FROM (SELECT broker, partition, word, bit_xor(mark) AS mark,
                            bool_or(is_damaged) AS is_damaged
                     FROM {log} GROUP BY broker, partition, word) l
               JOIN (SELECT broker, partition, word, bit_xor(mark) AS mark
                     FROM {words} GROUP BY broker, partition, word) t
               ON l.broker = t.broker AND l.partition = t.partition AND l.word = t.word
               WHERE l.mark != t.mark OR l.is_damaged""",
            log=self._log_words,
            words=self._words,
        ).localCheckpoint()

    def _suspected_segments(self) -> list[Any]:
        found = self._log_words.join(self._suspected, ["broker", "partition", "word"], "left_semi")
        return found.select("broker", "segment").distinct().collect()

    def _copies(self, segments: Sequence[dict[str, Any]]) -> "DataFrame":
        """Return the messages of segments as rows of the table."""
        from pyspark.sql.pandas.types import from_arrow_schema

        parts = [
            (each["where"], each["path"], each["base"], each["broker"], at, at + _PART_BYTES)
            for each in segments
            for at in range(0, each["size"], _PART_BYTES)
        ]
        rows = self._spark.createDataFrame(parts, _PARTS).repartition(max(len(parts), 1))
        read = partial(_read_copies, scope=self._scope)
        found = rows.mapInArrow(read, from_arrow_schema(_CONTENT))
        return found.selectExpr(
            "*", f"date_from_unix_date(int(unix_micros(stored_at) DIV {_DAY_US})) AS day"
        )


# ── tasks ──────────────────────────────────────────────────────────────────────────────────


def _read_copies(batches: Iterator[pa.RecordBatch], *, scope: "Scope") -> Iterator[pa.RecordBatch]:
    """Yield the messages of parts of segments; one that cannot be read has only its place."""
    for batch in batches:
        for row in batch.to_pylist():
            segment = SegmentFile(row["where"], row["path"], row["base"])
            try:
                found = map_segment(segment)
            except CorruptionError:
                continue  # the log has nothing of it, and that is a break of its own
            stretch = _stretch_of(found, scope, row["begin"], row["end"])
            if stretch is not None:
                yield from _rows_of(stretch, row["broker"])


def _stretch_of(found: SegmentMap, scope: "Scope", begin: int, end: int) -> SegmentStretch | None:
    """Return the batches that begin in a part of a segment."""
    ranges = {name: _EVERYTHING for name in found.names.values() if scope.covers(subject_of(name))}
    known = [each for each, name in found.names.items() if name in ranges]
    places = found.entries["offset"].astype(np.int64) - found.segment.base
    is_wanted = (places >= begin) & (places < end) & np.isin(found.entries["partition"], known)
    entries = found.entries[is_wanted]
    stretches = stretches_of(found, ranges, entries, np.zeros(len(entries), np.int64))
    return stretches[0] if stretches else None


def _rows_of(stretch: SegmentStretch, broker: str) -> Iterator[pa.RecordBatch]:
    damaged: list[npt.NDArray[np.void]] = []
    for placed in read_stretch(stretch, must_be_whole=False, on_damaged=damaged.append):
        # A batch that nobody can decode is not in the table of messages; the others are.
        for rows in decode_readable(placed, ALL_COLUMNS)[0]:
            yield _with_origin(rows, broker, stretch.segment.base)
    for entries in damaged:
        for entry in entries:
            name = stretch.names[int(entry["partition"])]
            yield _only_place(name, entry, broker, stretch.segment)


def _with_origin(rows: pa.RecordBatch, broker: str, base: int) -> pa.RecordBatch:
    count = rows.num_rows
    subjects = rows.column("subject").dictionary_encode()
    buckets = pa.array([bucket_of(each) for each in subjects.dictionary.to_pylist()], pa.int32())
    return pa.RecordBatch.from_arrays(
        [
            *rows.columns,
            pa.repeat(pa.scalar(broker, pa.string()), count),
            pa.repeat(pa.scalar(base, pa.int64()), count),
            buckets.take(subjects.indices),
            pa.nulls(count, pa.string()),
        ],
        schema=_CONTENT,
    )


def _only_place(
    name: PartitionName, entry: np.void, broker: str, segment: SegmentFile
) -> pa.RecordBatch:
    """Return rows for the messages of a batch that cannot be read."""
    count = int(entry["count"])
    first = int(entry["first_sequence"])
    known = {
        "partition": pa.repeat(pa.scalar(str(name), pa.string()), count),
        "sequence": pa.array(np.arange(first, first + count), pa.int64()),
        "broker": pa.repeat(pa.scalar(broker, pa.string()), count),
        "segment": pa.repeat(pa.scalar(segment.base, pa.int64()), count),
        "damage": pa.repeat(f"{segment.path} at offset {int(entry['offset'])}", count),
    }
    nothing = {each.name: pa.nulls(count, each.type) for each in _CONTENT}
    arrays = [known.get(name, nothing[name]) for name in _CONTENT.names]
    return pa.RecordBatch.from_arrays(arrays, schema=_CONTENT)
