"""Read adjacent batches at once, and decode their columns.

A run is worked on column by column: the envelopes and headers of all its batches are one table,
their tag bits one array. Only the checksums are made batch by batch.
"""

import time
from functools import lru_cache
from typing import NamedTuple

import google_crc32c
import numpy as np

from pulque.model.batch import HEADER_SIZE, Codec, Flag, layout_of
from pulque.model.checksum import before_crc
from pulque.model.record import ENVELOPE_SIZE, read_envelope
from pulque.storage.indexes.consume_log import Piece
from pulque.storage.indexes.segment_index import Entry, Table
from pulque.storage.logs.partitions import Partition
from pulque.storage.reading.damaged_batches import Damages
from pulque.storage.reading.read_ahead import Loaded
from pulque.storage.reading.record_reader import problem_with

__all__ = [
    "HEAD_SIZE",
    "BatchRun",
    "Bits",
    "Marks",
    "Numbers",
    "Rows",
    "read_run",
]

Bits = np.ndarray[tuple[int], np.dtype[np.uint64]]
Numbers = np.ndarray[tuple[int], np.dtype[np.int64]]
Marks = np.ndarray[tuple[int], np.dtype[np.bool_]]
Rows = np.ndarray[tuple[int, int], np.dtype[np.uint8]]

HEAD_SIZE = ENVELOPE_SIZE + HEADER_SIZE
_BATCHES_AT_ONCE = 128
"""Batches to verify before other threads get a turn."""
_TAG_BITS = np.dtype("<u8")
_HAS_TAGS = int(Flag.TAGS)
_ALL_FLAGS = sum(Flag)
_CRC_AT = ENVELOPE_SIZE - 4
_REPEATED = ("offset", "size", "partition", "first_sequence", "count")
_HEAD_TYPE = np.dtype(
    {
        "names": [*_REPEATED, "crc", "batch_crc", "flags", "codec", "priority", "created_at_ms"],
        "formats": [
            *("<u8", "<u4", "<u4", "<u8", "<u4", "<u4"),
            *("<u4", "<u2", "u1", "u1", "<i8"),
        ],
        "offsets": [8, 4, 28, 32, 48, _CRC_AT, *[ENVELOPE_SIZE + at for at in (0, 4, 6, 7, 36)]],
        "itemsize": HEAD_SIZE,
    }
)
"""The fields of an envelope that the index repeats, the checksums, and the column layout."""


class BatchRun(NamedTuple):
    """Batches in memory, each of them verified."""

    data: memoryview
    """Valid until the next run is read."""
    entries: Table
    heads: Table
    """Fields of their envelopes and headers."""
    starts: Numbers
    """Where their records begin in the data."""
    sizes: Numbers
    """Of their records."""
    counts: Numbers
    first_sequences: Numbers
    flags: Numbers
    is_compressed: Marks
    priorities: Numbers
    widths: Numbers
    """What the columns of a message take up."""

    @property
    def first_sequence(self) -> int:
        """Where it begins."""
        return int(self.first_sequences[0])

    @property
    def end(self) -> int:
        """The sequence after its last message."""
        return int(self.first_sequences[-1] + self.counts[-1])

    def only(self, chosen: Marks) -> "BatchRun":
        """Return a run of some of them."""
        return _run(self.data, self.entries[chosen], self.starts[chosen])

    def tag_bits(self) -> tuple[Bits, Numbers]:
        """Return the tag bits of all messages, and where those of each batch begin and end.

        A batch without tags has none.
        """
        counts = np.where(self.flags & _HAS_TAGS, self.counts, 0)
        # Only the sizes come before them, see ``pulque.model.batch.COLUMNS``.
        begins = self.starts + HEAD_SIZE + 4 * counts
        data = self.data
        columns = [
            data[begin:end]
            for begin, end in zip(begins.tolist(), (begins + 8 * counts).tolist(), strict=True)
        ]
        edges = np.zeros(len(counts) + 1, np.int64)
        np.cumsum(counts, out=edges[1:])
        return np.frombuffer(b"".join(columns), _TAG_BITS), edges


def read_run(
    loaded: Loaded, damages: Damages, partition: Partition, *, may_block: bool
) -> BatchRun | None:
    """Return the verified batches of a stretch; damaged ones are reported and left out.

    Returns:
        None if nothing is left.

    Raises:
        CorruptionError: Some are damaged, and other brokers have copies.
        WouldBlockError: Not ``may_block``, and new damage would have to be recorded.
    """
    (entries, _), data, segment, _ = loaded
    if segment is None:
        sizes = entries["size"].astype(np.int64)
        return _run(data, entries, np.cumsum(sizes) - sizes)
    first = int(entries[0]["offset"])
    starts = entries["offset"].astype(np.int64) - first
    is_there = (starts + entries["size"] <= len(data)) & (entries["size"] >= HEAD_SIZE)
    run = _run(data, entries[is_there], starts[is_there])
    is_good = _verified(run, partition.seed)
    if is_there.all() and is_good.all():
        return run
    for damaged in (*entries[~is_there].tolist(), *run.entries[~is_good].tolist()):
        entry = Entry._make(damaged)
        record = bytes(data[entry.offset - first :][: entry.size])
        reason = _problem(record, entry, partition)
        damages.batch(partition, segment.path, entry, reason, may_block=may_block)
    return run.only(is_good) if is_good.any() else None


def _run(data: memoryview, entries: Table, starts: Numbers) -> BatchRun:
    # Slices put together are faster here than one gathering of so many bytes by their places.
    rows = [data[start : start + HEAD_SIZE] for start in starts.tolist()]
    heads: Table = np.frombuffer(b"".join(rows), _HEAD_TYPE)
    flags = heads["flags"].astype(np.int64)
    return BatchRun(
        data,
        entries,
        heads,
        starts,
        entries["size"].astype(np.int64),
        entries["count"].astype(np.int64),
        entries["first_sequence"].astype(np.int64),
        flags,
        heads["codec"] != Codec.NONE,
        heads["priority"].astype(np.int64),
        _widths()[flags & _ALL_FLAGS],
    )


@lru_cache(maxsize=1)
def _widths() -> Numbers:
    """Return how wide all columns together are, for each combination of flags."""
    layouts = (layout_of(flags) for flags in range(_ALL_FLAGS + 1))
    return np.array([each.visible_width + each.record_width for each in layouts], np.int64)


def _verified(run: BatchRun, seed: int) -> Marks:
    """Return for each batch whether it is intact and matches the index."""
    entries, heads = run.entries, run.heads
    is_good: Marks = heads["offset"] == entries["offset"]
    for name in _REPEATED[1:]:
        is_good &= heads[name] == entries[name]
    value, extend = google_crc32c.value, google_crc32c.extend
    rows = heads.tobytes()
    is_good &= heads["crc"] == [
        value(rows[at : at + _CRC_AT]) for at in range(0, len(rows), HEAD_SIZE)
    ]
    befores = (heads["batch_crc"] ^ np.uint32(before_crc(seed))).tolist()
    # It refuses views, but an array over the same bytes will do: nothing is copied.
    data = np.frombuffer(run.data, np.uint8)
    starts, ends = (run.starts + ENVELOPE_SIZE).tolist(), (run.starts + run.sizes).tolist()
    crcs: list[int] = []
    for at in range(0, len(starts), _BATCHES_AT_ONCE):
        some = slice(at, at + _BATCHES_AT_ONCE)
        crcs += [
            extend(before, data[start:end])
            for before, start, end in zip(befores[some], starts[some], ends[some], strict=True)
        ]
        time.sleep(0)  # a thread that waits for the interpreter gets it now
    is_good &= heads["batch_crc"] == crcs
    return is_good


def _problem(record: bytes, entry: Entry, partition: Partition) -> str:
    envelope, batch = read_envelope(record[:ENVELOPE_SIZE]), record[ENVELOPE_SIZE:]
    piece = Piece(entry, 0, entry.count)
    return problem_with(envelope, batch, piece, partition) or "the record is damaged"
