"""Gather the messages that match a filter into records to serve.

The columns of all matches of a run are copied in one step; matches of many runs become
one gathered record. A batch of which most messages match is served whole, and so is one that is
compressed, or whose records cannot be split.
"""

from dataclasses import dataclass, replace
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from pulque.model.batch import HEADER, MAX_COUNT, Flag, layout_of, seal
from pulque.model.gathered import pack_gathered
from pulque.storage.files import Buffer
from pulque.storage.reading.batch_runs import HEAD_SIZE, BatchRun, Bits, Marks, Numbers, Rows

__all__ = ["Gathering", "Matches", "matches_of"]

_MOST_BYTES = 1024 * 1024
"""The size of one gathered record."""
_CREATED, _NAMED = int(Flag.CREATED), int(Flag.NAMED_PRODUCER)
_SIZES = np.dtype("<u4")
_TIMES = np.dtype("<i8")
_EXTRA = 12
"""Bytes per message in a gathered record: its place and its store time."""


@dataclass(frozen=True, slots=True)
class Matches:
    """Messages of a run that may match, in order."""

    run: BatchRun
    which: Numbers
    """The batch of each."""
    index: Numbers
    """Its index in the batch."""
    sizes: Numbers
    """The size of its data."""
    begins: Numbers
    """Where its data begins in the run."""
    is_whole: Marks
    """Whether its batch is served whole."""

    def __len__(self) -> int:
        return len(self.which)

    @property
    def sequences(self) -> Numbers:
        """The sequence of each."""
        return self.run.first_sequences[self.which] + self.index

    @property
    def costs(self) -> Numbers:
        """About how many bytes each adds to the answer."""
        is_first = np.ones(len(self), np.bool_)
        is_first[1:] = self.which[1:] != self.which[:-1]
        wholes = np.where(is_first, self.run.sizes[self.which], 0)
        return np.where(self.is_whole, wholes, self.sizes + self.run.widths[self.which] + _EXTRA)

    def part(self, start: int, end: int) -> "Matches":
        """Return some of them."""
        return Matches(
            self.run,
            self.which[start:end],
            self.index[start:end],
            self.sizes[start:end],
            self.begins[start:end],
            self.is_whole[start:end],
        )


def matches_of(run: BatchRun, which: Numbers, index: Numbers) -> Matches:
    """Return where messages lie in a run, and how to serve them.

    Args:
        run: Has their batches.
        which: For each message the number of its batch, ascending.
        index: For each message its place in there, ascending.
    """
    batches, place = np.unique(which, return_inverse=True)
    counts = run.counts[batches]
    is_whole = run.is_compressed[batches] | (2 * np.bincount(place) > counts)
    edges, totals = _totals(run, batches, counts)
    data_at = HEAD_SIZE + counts * run.widths[batches]
    # Nobody looked at the sizes when it was stored: its producer may have packed nonsense.
    is_whole |= data_at + totals[edges[1:]] - totals[edges[:-1]] != run.sizes[batches]
    at = edges[:-1][place] + index
    begins = (run.starts[batches] + data_at - totals[edges[:-1]])[place] + totals[at]
    return Matches(run, which, index, totals[at + 1] - totals[at], begins, is_whole[place])


def _totals(run: BatchRun, batches: Numbers, counts: Numbers) -> tuple[Numbers, Numbers]:
    """Return where the sizes of each batch begin and end in a row, and the running total."""
    data = run.data
    begins = run.starts[batches] + HEAD_SIZE
    columns = [
        data[begin:end]
        for begin, end in zip(begins.tolist(), (begins + 4 * counts).tolist(), strict=True)
    ]
    sizes = np.frombuffer(b"".join(columns), _SIZES)
    edges = np.zeros(len(counts) + 1, np.int64)
    np.cumsum(counts, out=edges[1:])
    totals = np.zeros(len(sizes) + 1, np.int64)
    np.cumsum(sizes, out=totals[1:])
    return edges, totals


class _Part(NamedTuple):
    """Messages of one run whose batches have the same columns."""

    rows: Rows
    sequences: Numbers
    stored: Numbers
    created: Numbers
    data: bytes


class Gathering:
    """Turns matches into records.

    Args:
        seed: The CRC seed of the partition.
    """

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._buffers: list[Buffer] = []
        self._size = 0
        self._kind = (-1, -1)
        """Flags and priority of the messages that are gathered and not packed yet."""
        self._parts: list[_Part] = []
        self._count = 0
        self._open_size = 0

    @property
    def size(self) -> int:
        """About how many bytes there are."""
        return self._size + self._open_size

    def add(self, matches: Matches) -> None:
        """Append matches."""
        run, which = matches.run, matches.which
        kinds = run.flags[which] << 4 | run.priorities[which]
        kinds = np.where(matches.is_whole, -1 - which, kinds)
        cuts = (np.flatnonzero(kinds[1:] != kinds[:-1]) + 1).tolist()
        for start, end in zip([0, *cuts], [*cuts, len(which)], strict=True):
            if matches.is_whole[start]:
                self._add_whole(run, int(which[start]))
            else:
                self._gather(matches.part(start, end))

    def buffers(self) -> tuple[Buffer, ...]:
        """Return the records of all added matches."""
        self._pack()
        return tuple(self._buffers)

    def _add_whole(self, run: BatchRun, batch: int) -> None:
        self._pack()
        at = int(run.starts[batch])
        record = bytes(run.data[at : at + int(run.sizes[batch])])
        self._buffers.append(record)
        self._size += len(record)

    def _gather(self, matches: Matches) -> None:
        """Copy messages of batches that have the same columns."""
        run, which = matches.run, matches.which
        kind = int(run.flags[which[0]]), int(run.priorities[which[0]])
        for start in range(0, len(matches), MAX_COUNT):
            some = matches.part(start, start + MAX_COUNT)
            is_full = self._count + len(some) > MAX_COUNT or self._open_size > _MOST_BYTES
            if kind != self._kind or is_full:
                self._pack()
                self._kind = kind
            part = _part(some, kind[0])
            if part is None:
                self.add(replace(some, is_whole=np.ones(len(some), np.bool_)))
                continue
            self._parts.append(part)
            self._count += len(some)
            self._open_size += len(part.data) + len(some) * (part.rows.shape[1] + _EXTRA)

    def _pack(self) -> None:
        """Pack the gathered messages into a record."""
        if not self._parts:
            return
        parts, self._parts = self._parts, []
        rows, sequences, stored, created = (
            np.concatenate([part[i] for part in parts]) for i in range(4)
        )
        data = b"".join([part.data for part in parts])
        batch = _batch(rows, created, data, *self._kind, self._seed)
        first = int(sequences[0])
        places = (sequences - first).astype("<u4").tobytes()
        record = pack_gathered(
            first, len(rows), places, stored.astype(_TIMES, copy=False).tobytes(), batch
        )
        self._buffers.append(record)
        self._size += len(record)
        self._count = self._open_size = 0


def _part(matches: Matches, flags: int) -> _Part | None:
    """Copy messages, or return None if what comes before a body is longer than a message."""
    run, which = matches.run, matches.which
    rows = _rows(run, which, matches.index, flags)
    if (_before_bodies(rows, flags) > matches.sizes).any():
        return None
    created = run.heads["created_at_ms"][which].astype(np.int64)
    if flags & _CREATED:
        at, _ = _spots(flags)["created_at_ms"]
        own = rows[:, at : at + 8].copy().view(_TIMES)[:, 0]
        created = np.where(own, own, created)  # 0 stands for as old as its batch
    data, ends = run.data, matches.begins + matches.sizes
    bodies = [
        data[begin:end] for begin, end in zip(matches.begins.tolist(), ends.tolist(), strict=True)
    ]
    stored = run.entries["stored_at_ms"][which].astype(np.int64)
    return _Part(rows, matches.sequences, stored, created, b"".join(bodies))


def _before_bodies(rows: Rows, flags: int) -> Numbers:
    """Return how much the key, order key, tags and headers of each message take up."""
    sizes = np.zeros(len(rows), np.int64)
    for name, (at, width) in _spots(flags).items():
        if name.endswith("_size"):
            sizes += rows[:, at : at + width].copy().view(f"<u{width}")[:, 0]
    return sizes


def _rows(run: BatchRun, which: Numbers, index: Numbers, flags: int) -> Rows:
    """Return what the columns say of messages, a row for each."""
    fixed, by_count, by_index = _columns_of(flags)
    places = run.starts[which][:, None] + fixed
    places += run.counts[which][:, None] * by_count
    places += index[:, None] * by_index
    rows: Rows = np.frombuffer(run.data, np.uint8)[places]
    return rows


def _batch(
    rows: Rows, created: Numbers, data: bytes, flags: int, priority: int, seed: int
) -> bytes:
    """Return a batch of messages from many batches, without a producer identity."""
    out = (flags | _CREATED) & ~_NAMED
    layout, spots = layout_of(out), _spots(flags)
    columns = []
    for column in layout.columns:
        if column.name == "created_at_ms":
            columns.append(created.astype(_TIMES, copy=False).tobytes())
        else:
            at, width = spots[column.name]
            columns.append(rows[:, at : at + width].tobytes())
    bits: Bits = (
        np.frombuffer(columns[1], np.uint64) if flags & Flag.TAGS else np.zeros(1, np.uint64)
    )
    union = int(np.bitwise_or.reduce(bits))
    count = len(rows)
    records_size = count * layout.record_width + len(data)
    header = HEADER.pack(0, out, 0, priority, count, records_size, 0, 0, 0, 0, union)
    return seal(b"".join((header[4:], *columns, data)), seed)


@lru_cache(maxsize=1024)
def _spots(flags: int) -> dict[str, tuple[int, int]]:
    """Return offset and width of each column in a row."""
    spots, at = {}, 0
    for column in layout_of(flags).columns:
        spots[column.name] = at, column.width
        at += column.width
    return spots


@lru_cache(maxsize=1024)
def _columns_of(flags: int) -> tuple[Numbers, Numbers, Numbers]:
    """Return the places of the bytes of a message's columns.

    Returns:
        For each byte where it would be in the record if the batch were of no messages, and how
        far it moves with each that the batch has, and with each that comes before this one.
    """
    layout = layout_of(flags)
    widths = [column.width for column in layout.columns]
    fixed = HEAD_SIZE + np.concatenate([np.arange(width) for width in widths])
    by_count = np.repeat([layout.before[column.name] for column in layout.columns], widths)
    return fixed, by_count, np.repeat(widths, widths)
