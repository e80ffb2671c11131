"""Messages of many batches as one table of columns, to be sorted, cut and packed again.

All operations work on whole columns: there is no work per message, except for copying the bytes
of messages that are not adjacent. A table holds messages of one partition.
"""

from collections.abc import Sequence
from math import prod
from struct import Struct
from typing import Any

import google_crc32c
import numpy as np
import numpy.typing as npt

from pulque.errors import InvalidBatchError
from pulque.model.batch import (
    HEADER,
    HEADER_SIZE,
    BatchHeader,
    Codec,
    Column,
    Flag,
    layout_of,
    read_header,
)
from pulque.model.compression import decompress
from pulque.model.pack import NOBODY, ProducedBy
from pulque.storage.files import Buffer
from pulque.storage.message_ids import ID_TYPE

__all__ = ["MessageTable", "Scratch", "columns_before_data"]

_Ints = npt.NDArray[Any]
_DUE = int(Flag.DUE)
_CREATED = int(Flag.CREATED)
_NAMED = int(Flag.NAMED_PRODUCER)
_BYTE = np.dtype(np.uint8)
_TYPES: dict[str, np.dtype[Any]] = {
    "size": np.dtype("<u4"),
    "tag_bits": np.dtype("<u8"),
    "key_hash": np.dtype("<u4"),
    "due_at_ms": np.dtype("<i8"),
    "created_at_ms": np.dtype("<i8"),
    "expires_at_ms": np.dtype("<i8"),
    "attempt": np.dtype("<u2"),
    "key_size": np.dtype("<u2"),
    "order_key_size": np.dtype("<u2"),
    "tags_size": np.dtype("<u2"),
    "headers_size": np.dtype("<u4"),
}
_CRC = Struct("<I")
_ALIGNED = 64
_WIDTH = 64
"""About the bytes of a message's columns."""
_DEFAULTS = {"key_hash": google_crc32c.value(b""), "attempt": 1}


class Scratch:
    """Reusable memory: allocating memory costs more than the work done in it.

    Args:
        size: The bytes to keep. Larger requests are allocated, and freed.
    """

    def __init__(self, size: int) -> None:
        self._size = size
        self._room = np.empty(0, _BYTE)
        self._used = 0

    def lend(self, count: int, dtype: np.dtype[Any]) -> _Ints:
        """Return an uninitialised array of numbers."""
        start, end = self._used, self._used + count * dtype.itemsize
        if end > self._size:
            return np.empty(count, dtype)
        if not len(self._room):
            self._room = np.empty(self._size, _BYTE)
        self._used = -(-end // _ALIGNED) * _ALIGNED
        return self._room[start:end].view(dtype)

    def clear(self) -> None:
        """Reclaim all lent memory."""
        self._used = 0


class MessageTable:
    """Messages of one partition and one priority."""

    __slots__ = (
        "_even",
        "_starts",
        "columns",
        "created_at_ms",
        "data",
        "flags",
        "priority",
        "tag_union",
    )

    def __init__(
        self, header: BatchHeader, columns: dict[str, _Ints], data: _Ints, even: int | None
    ) -> None:
        self.flags = header.flags & ~_NAMED
        self.priority = header.priority
        self.created_at_ms = header.created_at_ms
        self.tag_union = header.tag_union
        self.columns = columns
        """By name; ``id`` has two numbers for each message."""
        self.data = data
        """The bytes of all messages in a row."""
        self._even = even
        self._starts: _Ints | None = None

    def __len__(self) -> int:
        return len(self.columns["size"])

    @property
    def starts(self) -> _Ints:
        """Where the data of each message begins, and where that of the last one ends."""
        if self._starts is None:
            starts = np.zeros(len(self) + 1, np.int64)
            np.cumsum(self.columns["size"], out=starts[1:])
            self._starts = starts  # not before: another thread may look at the same table
        return self._starts

    def _start_of(self, row: int) -> int:
        return int(self.starts[row]) if self._even is None else row * self._even

    @classmethod
    def of(cls, batches: Sequence[bytes], scratch: Scratch | None = None) -> "MessageTable":
        """Return the messages of verified batches, in their order.

        Args:
            batches: Of one partition.
            scratch: Where the table is made; fresh memory if not given.

        Raises:
            InvalidBatchError: The records of one do not decompress, or do not add up.
        """
        opened = [_opened(batch) for batch in batches]
        header, columns, data = (
            _alone(*opened[0]) if len(opened) == 1 else _joined(opened, scratch or Scratch(0))
        )
        table = cls(header, columns, data, _even(columns["size"]))
        row = at = 0
        for header, batch in opened:
            row += header.count
            at += len(batch) - _data_start(header)
            if table._start_of(row) != at:
                raise InvalidBatchError(
                    "the sizes of a batch's messages do not add up to its data"
                )
        return table

    @classmethod
    def joined(cls, tables: Sequence["MessageTable"]) -> "MessageTable":
        """Return the messages of several tables of one partition, in their order."""
        first = tables[0]
        flags = union = 0
        for table in tables:
            flags |= table.flags
            union |= table.tag_union
        if any(table.created_at_ms != first.created_at_ms for table in tables):
            flags |= _CREATED
        columns = {
            column.name: np.concatenate([table.filled(column.name) for table in tables])
            for column in layout_of(flags).columns
        }
        header = BatchHeader(
            0, flags, 0, first.priority, 1, 0, 0, 0, 0, first.created_at_ms, union
        )
        data = np.concatenate([table.data for table in tables])
        return cls(header, columns, data, _even(columns["size"]))

    def check_parts(self) -> None:
        """Check that each message is as long as its parts.

        Raises:
            InvalidBatchError: The key, order key, tags and headers of one are longer.
        """
        total = np.zeros(len(self), np.int64)
        for name, column in self.columns.items():
            if name.endswith("_size"):
                total += column
        if (total > self.columns["size"]).any():
            raise InvalidBatchError(
                "key, order key, tags and headers of a message are longer than the message"
            )

    def filled(self, name: str) -> _Ints:
        """Return a column, made of what stands for nothing if there is none."""
        return _or_default(self.columns.get(name), name, len(self), self.created_at_ms)

    def taken(self, order: _Ints, scratch: Scratch | None = None) -> "MessageTable":
        """Return some of the messages, in an order of their own."""
        scratch = scratch or Scratch(0)
        columns = {name: _rows(column, order, scratch) for name, column in self.columns.items()}
        header = BatchHeader(
            0, self.flags, 0, self.priority, 1, 0, 0, 0, 0, self.created_at_ms, self.tag_union
        )
        return MessageTable(header, columns, self._data_of(order, scratch), self._even)

    def _data_of(self, order: _Ints, scratch: Scratch) -> _Ints:
        count = len(order)
        if not count or self._even == 0:
            return self.data[:0]
        first, last = int(order[0]), int(order[-1])
        if last - first == count - 1 and bool((order[1:] > order[:-1]).all()):
            return self.data[self._start_of(first) : self._start_of(last + 1)]
        if self._even is not None:
            return _rows(self.data.reshape(-1, self._even), order, scratch).reshape(-1)
        breaks = np.flatnonzero(order[1:] != order[:-1] + 1) + 1
        firsts = order[np.concatenate(([0], breaks))]
        lasts = order[np.concatenate((breaks - 1, [count - 1]))]
        view = self.data.data
        pieces = zip(self.starts[firsts].tolist(), self.starts[lasts + 1].tolist(), strict=True)
        return np.frombuffer(b"".join([view[start:end] for start, end in pieces]), _BYTE)

    def packed(
        self,
        start: int,
        end: int,
        *,
        seed: int,
        has_due: bool,
        produced_by: ProducedBy = NOBODY,
    ) -> bytes:
        """Return messages ``start..end`` as a batch.

        Args:
            start: The first of them.
            end: Comes after the last of them.
            seed: Of the partition that the batch is for.
            has_due: Whether their due times are kept.
            produced_by: Who sends it.
        """
        return b"".join(
            self.parts(start, end, seed=seed, has_due=has_due, produced_by=produced_by)
        )

    def parts(
        self,
        start: int,
        end: int,
        *,
        seed: int,
        has_due: bool,
        produced_by: ProducedBy = NOBODY,
    ) -> list[Buffer]:
        """Return what ``packed`` does, but as buffers that follow each other: no copies."""
        flags = self.flags if has_due else self.flags & ~_DUE
        if produced_by.named:
            flags |= _NAMED
        layout = layout_of(flags)
        first, last = self._start_of(start), self._start_of(end)
        count = end - start
        header = HEADER.pack(
            0,
            flags,
            Codec.NONE,
            self.priority,
            count,
            count * layout.record_width + last - first,
            produced_by.producer_id,
            produced_by.incarnation,
            produced_by.sequence,
            self.created_at_ms,
            self.tag_union,
        )[4:]
        found = [self.columns[column.name][start:end] for column in layout.columns]
        found.append(self.data[first:last])
        crc = google_crc32c.extend(seed, header)
        for each in found:
            crc = google_crc32c.extend(crc, each)
        return [_CRC.pack(crc) + header, *[each.data.cast("B") for each in found]]

    def pieces(self, start: int, end: int, *, most: int, most_bytes: int) -> list[tuple[int, int]]:
        """Cut messages ``start..end`` into pieces that are neither too many nor too large.

        One that is too large by itself is a piece of its own.
        """
        most = min(most, max(most_bytes // _WIDTH, 1))
        if self._even is not None:
            most = min(most, max(most_bytes // max(self._even, 1), 1))
            return [(at, min(at + most, end)) for at in range(start, end, most)]
        found = []
        if (
            start < end <= start + most
            and self._start_of(end) - self._start_of(start) <= most_bytes
        ):
            return [(start, end)]
        while start < end:
            limit = int(self.starts[start]) + most_bytes
            stop = int(np.searchsorted(self.starts[start : end + 1], limit, "right")) - 1 + start
            stop = min(max(stop, start + 1), start + most, end)
            found.append((start, stop))
            start = stop
        return found


def columns_before_data(batch: bytes) -> tuple[BatchHeader, dict[str, _Ints], int]:
    """Return the header and the columns of an uncompressed batch, and where its data begins."""
    header = read_header(batch)
    if header.codec:
        raise InvalidBatchError("the columns of a compressed batch cannot be looked at")
    return header, _columns(header, batch), _data_start(header)


def _columns(header: BatchHeader, batch: bytes) -> dict[str, _Ints]:
    names = layout_of(header.flags).before
    return {name: _column(header, batch, name) for name in names}


def _column(header: BatchHeader, batch: bytes, name: str) -> _Ints:
    count = header.count
    at = layout_of(header.flags).column_start(name, count)
    if name == "id":
        return np.frombuffer(batch, ID_TYPE, 2 * count, at).reshape(count, 2)
    return np.frombuffer(batch, _TYPES[name], count, at)


def _or_default(found: _Ints | None, name: str, count: int, created_at_ms: int) -> _Ints:
    """Return a column, made of what stands for nothing if there is none."""
    if name == "created_at_ms":
        if found is None:
            return np.full(count, created_at_ms, _TYPES[name])
        # 0 stands for a message as old as its batch.
        return np.where(found == 0, created_at_ms, found)
    if found is None:
        return np.full(count, _DEFAULTS.get(name, 0), _TYPES[name])
    return found


def _even(sizes: _Ints) -> int | None:
    """Return how many bytes each message has, if all have as many."""
    found = sizes.tobytes()
    is_even = found == found[: sizes.itemsize] * len(sizes)
    return int(sizes[0]) if is_even else None


_Table = tuple[BatchHeader, dict[str, _Ints], _Ints]


def _alone(header: BatchHeader, batch: bytes) -> _Table:
    return header, _columns(header, batch), np.frombuffer(batch, _BYTE, -1, _data_start(header))


def _joined(opened: list[tuple[BatchHeader, bytes]], scratch: Scratch) -> _Table:
    """Return the columns of all that batches have, and the data of all in a row."""
    first = opened[0][0]
    flags = union = count = 0
    for header, _ in opened:
        flags |= header.flags & ~_NAMED
        union |= header.tag_union
        count += header.count
    if any(header.created_at_ms != first.created_at_ms for header, _ in opened):
        flags |= _CREATED
    columns: dict[str, _Ints] = {}
    views = [memoryview(batch) for _, batch in opened]
    for column in layout_of(flags).columns:
        found = _in_a_row(_pieces_of(opened, views, column), scratch)
        is_id = column.name == "id"
        columns[column.name] = (
            found.view(ID_TYPE).reshape(count, 2) if is_id else found.view(_TYPES[column.name])
        )
    data = [view[_data_start(header) :] for view, (header, _) in zip(views, opened, strict=True)]
    header = BatchHeader(0, flags, 0, first.priority, 1, 0, 0, 0, 0, first.created_at_ms, union)
    return header, columns, _in_a_row(data, scratch)


def _pieces_of(
    opened: list[tuple[BatchHeader, bytes]], views: list[memoryview], column: Column
) -> list[memoryview]:
    """Return a column of each batch as bytes. Most are cut alike: then that is found out once."""
    _, flags, _, _, count, *_ = opened[0][0]
    at = layout_of(flags).before.get(column.name)
    is_alike = all(header[1] == flags and header[4] == count for header, _ in opened)
    if at is None or not is_alike or column.name == "created_at_ms":
        return [_bytes_of(*each, column) for each in opened]
    start = HEADER_SIZE + count * at
    end = start + count * column.width
    return [view[start:end] for view in views]


def _bytes_of(header: BatchHeader, batch: bytes, column: Column) -> memoryview:
    """Return a column of a batch as bytes, made of what stands for nothing if there is none."""
    name, count, before = column.name, header.count, layout_of(header.flags).before
    if name in before and name != "created_at_ms":
        at = HEADER_SIZE + count * before[name]
        return memoryview(batch)[at : at + count * column.width]
    found = _column(header, batch, name) if name in before else None
    return _or_default(found, name, count, header.created_at_ms).data.cast("B")


def _in_a_row(pieces: Sequence[memoryview], scratch: Scratch) -> _Ints:
    # Not by numpy: between any two pieces it would let other threads go first.
    out = scratch.lend(sum(map(len, pieces)), _BYTE)
    view = out.data
    at = 0
    for piece in pieces:
        end = at + len(piece)
        view[at:end] = piece
        at = end
    return out


def _rows(column: _Ints, order: _Ints, scratch: Scratch) -> _Ints:
    # Not column[order]: of columns of two dimensions that makes a copy in another order.
    shape = (len(order), *column.shape[1:])
    out = scratch.lend(prod(shape), column.dtype).reshape(shape)
    # Every row is there; "clip" only spares a second copy, for the case that one were not.
    return column.take(order, axis=0, out=out, mode="clip")


def _data_start(header: BatchHeader) -> int:
    return layout_of(header.flags).data_start(header.count)


def _opened(batch: bytes) -> tuple[BatchHeader, bytes]:
    """Return a batch that is not compressed, and its header."""
    header = read_header(batch)
    if header.codec:
        start = layout_of(header.flags).records_start(header.count)
        records = decompress(batch[start:], header.codec, header.records_size)
        header = header._replace(codec=int(Codec.NONE))
        batch = HEADER.pack(*header) + batch[HEADER_SIZE:start] + records
    return header, batch
