"""What tasks of the audit do: read the log's own account, and follow the facts of groups.

Both take and give Arrow batches. The log is read by its indexes and the headers of its batches,
with numpy; facts come sorted, so that a task holds those of one group and partition at a time,
and of these only what consumers held.
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from pulque.errors import CorruptionError
from pulque.model.batch import HEADER_SIZE
from pulque.model.names import Group, PartitionName, is_broadcast, owner_of
from pulque.model.record import ENVELOPE_SIZE
from pulque.pipeline.audit.ledger import Break, Fact, FateSpan, Ledger, MessageFate, Turn
from pulque.pipeline.filesystem import Tree
from pulque.pipeline.reading.segment_map import SegmentFile, SegmentMap, map_segment

__all__ = ["BATCHES", "FATES", "HOUR_US", "fates_of", "read_log"]

HOUR_US = 3_600_000_000
_BYTES_AT_ONCE = 16 * 1024 * 1024
_ROWS_AT_ONCE = 8192
_HEADER = np.dtype(
    {
        "names": ["producer", "incarnation", "number"],
        "formats": ["<i8", "<u4", "<u8"],
        "offsets": [16, 24, 28],
        "itemsize": HEADER_SIZE,
    }
)

BATCHES = pa.schema(
    [
        ("broker", pa.string()),
        ("segment", pa.int64()),
        ("partition", pa.string()),
        ("hour", pa.int64()),
        ("first", pa.int64()),
        ("end", pa.int64()),
        ("producer", pa.int64()),
        ("incarnation", pa.int64()),
        ("number", pa.int64()),
        ("damage", pa.string()),
    ]
)
"""One row for each batch of the log, as its index and header tell; of a segment that cannot be
read one row, with what is wrong."""

FATES = pa.schema(
    [
        ("broker", pa.string()),
        ("partition", pa.string()),
        ("group", pa.string()),
        ("kind", pa.string()),
        ("state", pa.string()),
        ("hour", pa.int64()),
        ("first", pa.int64()),
        ("end", pa.int64()),
        ("at", pa.int64()),
        ("consumer", pa.string()),
        ("is_filtered", pa.bool_()),
        ("is_current", pa.bool_()),
        ("are_pulls", pa.bool_()),
    ]
)
"""What became of messages: ``count`` rows add up (``end`` messages), the others name ranges."""


# ── the log's own account ──────────────────────────────────────────────────────────────────


def read_log(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Yield the batches of segments: rows of ``where``, ``path``, ``base`` and ``broker``."""
    for batch in batches:
        for row in batch.to_pylist():
            segment = SegmentFile(row["where"], row["path"], row["base"])
            try:
                found = map_segment(segment)
            except CorruptionError as error:
                told = {"broker": row["broker"], "segment": segment.base, "damage": str(error)}
                yield pa.RecordBatch.from_pylist([told], BATCHES)
            else:
                yield from _batches_of(found, row["broker"])


def _batches_of(found: SegmentMap, broker: str) -> Iterator[pa.RecordBatch]:
    segment, entries = found.segment, found.entries
    if not len(entries):
        return
    # A partition is unknown if the table that names it is damaged.
    last = max(*found.names, int(entries["partition"].max()))
    names = pa.array([found.names.get(each, "") for each in range(last + 1)])
    file = Tree(segment.where).open(segment.path)
    try:
        chunks = (entries["offset"].astype(np.int64) - segment.base) // _BYTES_AT_ONCE
        for part in np.split(entries, np.flatnonzero(np.diff(chunks)) + 1):
            begin = int(part["offset"][0])
            size = int(part["offset"][-1]) - begin + ENVELOPE_SIZE + HEADER_SIZE
            data = file.read(size, begin - segment.base)
            yield _described(part, _headers(data, part, begin), names, segment.base, broker)
    finally:
        file.close()


def _headers(data: bytes, entries: npt.NDArray[np.void], begin: int) -> npt.NDArray[np.void]:
    starts = entries["offset"].astype(np.int64) - begin + ENVELOPE_SIZE
    views = np.ndarray((len(data) - HEADER_SIZE + 1,), f"V{HEADER_SIZE}", data, strides=(1,))
    return views[starts].view(_HEADER)


def _described(
    entries: npt.NDArray[np.void],
    headers: npt.NDArray[np.void],
    names: pa.Array,
    base: int,
    broker: str,
) -> pa.RecordBatch:
    count = len(entries)
    firsts = entries["first_sequence"].astype(np.int64)
    return pa.RecordBatch.from_arrays(
        [
            pa.repeat(pa.scalar(broker, pa.string()), count),
            pa.repeat(pa.scalar(base, pa.int64()), count),
            names.take(pa.array(entries["partition"].astype(np.int64))),
            pa.array(entries["stored_at_ms"] * 1000 // HOUR_US),
            pa.array(firsts),
            pa.array(firsts + entries["count"]),
            pa.array(headers["producer"]),
            pa.array(headers["incarnation"].astype(np.int64)),
            pa.array(headers["number"].astype(np.int64)),
            pa.nulls(count, pa.string()),
        ],
        schema=BATCHES,
    )


# ── what became of messages ────────────────────────────────────────────────────────────────


def fates_of(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Yield what became of messages, out of facts that are sorted by group and partition.

    Of each: whether the facts are whole, then where messages are stored, then where the group was
    set back, then the facts in the order of the log.
    """
    out: list[dict[str, Any]] = []
    current: _Account | None = None
    for batch in batches:
        for row in batch.to_pylist():
            key = (row["broker"], row["partition"], row["group"])
            if current is None or current.key != key:
                if current is not None:
                    out += current.finish()
                current = _Account(key)
            out += current.add(row)
            if len(out) >= _ROWS_AT_ONCE:
                yield pa.RecordBatch.from_pylist(out, FATES)
                out = []
    if current is not None:
        out += current.finish()
    if out:
        yield pa.RecordBatch.from_pylist(out, FATES)


class _Account:
    """One group in one partition."""

    def __init__(self, key: tuple[str, str, str]) -> None:
        self.key = key
        self._is_owned = owner_of(PartitionName(key[1])) is not None
        self._is_whole = False
        self._places: list[tuple[int, int, int]] = []
        """Hour, first and end of messages that are stored, in order."""
        self._borders: dict[int, int] = {}
        """Where each segment begins."""
        self._turns: list[Turn] = []
        self._ledger: Ledger | None = None
        self._counts: Counter[tuple[MessageFate, int]] = Counter()

    def add(self, row: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
        match row["kind"]:
            case "begin":
                self._is_whole = bool(row["start"])
            case "place":
                first, segment = row["first_sequence"], row["first_pull"]
                self._places.append((row["at"], first, first + row["count"]))
                self._borders[segment] = min(first, self._borders.get(segment, first))
            case "turn":
                self._turns.append(Turn(row["offset"], row["first_sequence"]))
            case _:
                yield from self._told(self._opened().add(_fact_of(row)))

    def finish(self) -> Iterator[dict[str, Any]]:
        yield from self._told(self._opened().finish())
        for (state, hour), count in sorted(self._counts.items()):
            yield self._row("count", state, hour=hour, end=count)

    def _opened(self) -> Ledger:
        if self._ledger is None:
            self._places.sort(key=lambda place: place[1])
            self._ledger = Ledger(
                is_direct=is_broadcast(Group(self.key[2])),
                is_whole=self._is_whole,
                turns=self._turns,
                borders=frozenset(self._borders.values()),
            )
        return self._ledger

    def _told(self, found: Iterator[FateSpan | Break]) -> Iterator[dict[str, Any]]:
        for each in found:
            if isinstance(each, Break):
                about = {"consumer": each.consumer, "are_pulls": each.are_pulls}
                yield self._row("break", each.flaw, first=each.first, end=each.end, **about)
                continue
            for hour, first, end in _stored(self._places, each.first, each.end):
                if each.is_current and not self._is_owned and each.state is not MessageFate.FAILED:
                    self._counts[each.state, hour] += end - first
                else:
                    yield self._row(
                        "span",
                        each.state,
                        hour=hour,
                        first=first,
                        end=end,
                        at=each.at,
                        consumer=each.consumer,
                        is_filtered=each.is_filtered,
                        is_current=each.is_current,
                    )

    def _row(self, kind: str, state: str, **fields: object) -> dict[str, Any]:
        broker, partition, group = self.key
        who = {"broker": broker, "partition": partition, "group": group}
        return {**who, "kind": kind, "state": str(state), **fields}


def _fact_of(row: Mapping[str, Any]) -> Fact:
    count = row["count"] or 0
    matched = row["matched"]
    return Fact(
        row["kind"],
        row["offset"],
        row["at"] or 0,
        row["consumer"] or "",
        row["first_pull"] or 0,
        row["first_sequence"] or 0,
        count,
        count if matched is None else matched,
        row["start"] or 0,
    )


def _stored(
    places: Sequence[tuple[int, int, int]], first: int, end: int
) -> Iterator[tuple[int, int, int]]:
    """Yield the stored parts of a range, by the hour."""
    low, high = 0, len(places)
    while low < high:
        middle = (low + high) // 2
        if places[middle][2] <= first:
            low = middle + 1
        else:
            high = middle
    while low < len(places) and places[low][1] < end:
        hour, begin, stop = places[low]
        yield hour, max(begin, first), min(stop, end)
        low += 1
