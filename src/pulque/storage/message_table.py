"""Messages of many batches as one table of columns, to be sorted, cut and packed again.

What is done here is done to whole columns: there is no work per message, but for the bytes of
those that do not lie beside each other. A table holds messages of one partition.
"""

from collections.abc import Sequence
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
    Flag,
    layout_of,
    read_header,
    seal,
)
from pulque.model.compression import decompress
from pulque.model.pack import NOBODY, ProducedBy

__all__ = ["ID_TYPE", "MessageTable", "columns_before_data"]

ID_TYPE = np.dtype("<u8")
"""An id is two of them: half as dear to compare as sixteen bytes."""
_Ints = npt.NDArray[Any]
_DUE = int(Flag.DUE)
_CREATED = int(Flag.CREATED)
_NAMED = int(Flag.NAMED_PRODUCER)
_TYPES = {
    "size": "<u4",
    "tag_bits": "<u8",
    "key_hash": "<u4",
    "due_at_ms": "<i8",
    "created_at_ms": "<i8",
    "expires_at_ms": "<i8",
    "attempt": "<u2",
    "key_size": "<u2",
    "order_key_size": "<u2",
    "tags_size": "<u2",
    "headers_size": "<u4",
}
_DEFAULTS = {"key_hash": google_crc32c.value(b""), "attempt": 1}


class MessageTable:
    """Messages of one partition and one priority."""

    __slots__ = ("columns", "created_at_ms", "data", "flags", "priority", "starts", "tag_union")

    def __init__(
        self,
        header: BatchHeader,
        columns: dict[str, _Ints],
        data: bytes | memoryview,
        starts: _Ints | None = None,
    ) -> None:
        self.flags = header.flags & ~_NAMED
        self.priority = header.priority
        self.created_at_ms = header.created_at_ms
        self.tag_union = header.tag_union
        self.columns = columns
        """By name; ``id`` has two numbers for each message."""
        self.data = data
        if starts is None:
            starts = np.zeros(len(columns["size"]) + 1, np.int64)
            np.cumsum(columns["size"], out=starts[1:])
        self.starts = starts
        """Where the data of each message begins, and where that of the last one ends."""

    def __len__(self) -> int:
        return len(self.columns["size"])

    @classmethod
    def of(cls, batches: Sequence[bytes]) -> "MessageTable":
        """Return the messages of verified batches, in their order.

        Raises:
            InvalidBatchError: The records of one do not decompress, or do not add up.
        """
        tables = [_opened(batch) for batch in batches]
        return tables[0] if len(tables) == 1 else cls._joined(tables)

    @classmethod
    def _joined(cls, tables: list["MessageTable"]) -> "MessageTable":
        first = tables[0]
        flags = 0
        union = 0
        for table in tables:
            flags |= table.flags
            union |= table.tag_union
        if any(table.created_at_ms != first.created_at_ms for table in tables):
            flags |= _CREATED
        names = [column.name for column in layout_of(flags).columns]
        columns = {name: np.concatenate([t.filled(name) for t in tables]) for name in names}
        header = BatchHeader(
            0, flags, 0, first.priority, 1, 0, 0, 0, 0, first.created_at_ms, union
        )
        return cls(header, columns, b"".join([table.data for table in tables]))

    def filled(self, name: str) -> _Ints:
        """Return a column, made of what stands for nothing if there is none."""
        found = self.columns.get(name)
        if name == "created_at_ms":
            if found is None:
                return np.full(len(self), self.created_at_ms, np.int64)
            # 0 stands for a message as old as its batch.
            return np.where(found == 0, self.created_at_ms, found)
        if found is None:
            return np.full(len(self), _DEFAULTS.get(name, 0), _TYPES[name])
        return found

    def taken(self, order: _Ints) -> "MessageTable":
        """Return some of the messages, in an order of their own."""
        # Not column[order]: of columns of two dimensions that makes a copy in another order.
        columns = {name: column.take(order, axis=0) for name, column in self.columns.items()}
        header = BatchHeader(
            0, self.flags, 0, self.priority, 1, 0, 0, 0, 0, self.created_at_ms, self.tag_union
        )
        return MessageTable(header, columns, self._data_of(order))

    def _data_of(self, order: _Ints) -> bytes | memoryview:
        count = len(order)
        if not count:
            return b""
        breaks = np.flatnonzero(order[1:] != order[:-1] + 1) + 1
        firsts = order[np.concatenate(([0], breaks))]
        lasts = order[np.concatenate((breaks - 1, [count - 1]))]
        starts, ends = self.starts[firsts], self.starts[lasts + 1]
        view = memoryview(self.data)
        if len(firsts) == 1:
            return view[int(starts[0]) : int(ends[0])]
        sizes = self.columns["size"]
        size = int(sizes[0])
        if len(firsts) > count // 4 and size and bool((sizes == size).all()):
            rows = np.frombuffer(view, np.uint8).reshape(-1, size)
            return rows.take(order, axis=0).data.cast("B")
        pieces = zip(starts.tolist(), ends.tolist(), strict=True)
        return b"".join([view[start:end] for start, end in pieces])

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
        flags = self.flags if has_due else self.flags & ~_DUE
        if produced_by.named:
            flags |= _NAMED
        layout = layout_of(flags)
        columns = [self.columns[column.name][start:end].tobytes() for column in layout.columns]
        first, last = int(self.starts[start]), int(self.starts[end])
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
        )
        return seal(b"".join([header[4:], *columns, self.data[first:last]]), seed)

    def pieces(self, start: int, end: int, *, most: int, most_bytes: int) -> list[tuple[int, int]]:
        """Cut messages ``start..end`` into pieces that are neither too many nor too large.

        One that is too large by itself is a piece of its own.
        """
        width = 64  # about what the columns of a message take
        found = []
        is_small = int(self.starts[end]) - int(self.starts[start]) <= most_bytes
        if is_small and start < end <= start + min(most, max(most_bytes // width, 1)):
            return [(start, end)]
        while start < end:
            limit = int(self.starts[start]) + most_bytes
            stop = int(np.searchsorted(self.starts[start : end + 1], limit, "right")) - 1 + start
            stop = min(
                max(stop, start + 1), start + most, start + max(most_bytes // width, 1), end
            )
            found.append((start, stop))
            start = stop
        return found


def columns_before_data(batch: bytes) -> tuple[BatchHeader, dict[str, _Ints], int]:
    """Return the header and the columns of an uncompressed batch, and where its data begins."""
    header = read_header(batch)
    if header.codec:
        raise InvalidBatchError("the columns of a compressed batch cannot be looked at")
    layout = layout_of(header.flags)
    count = header.count
    columns: dict[str, _Ints] = {}
    for column in layout.columns:
        at = layout.column_start(column.name, count)
        if column.name == "id":
            columns["id"] = np.frombuffer(batch, ID_TYPE, 2 * count, at).reshape(count, 2)
        else:
            columns[column.name] = np.frombuffer(batch, _TYPES[column.name], count, at)
    return header, columns, layout.data_start(count)


def _opened(batch: bytes) -> MessageTable:
    header = read_header(batch)
    if header.codec:
        start = layout_of(header.flags).records_start(header.count)
        records = decompress(batch[start:], header.codec, header.records_size)
        plain = header._replace(codec=int(Codec.NONE))
        batch = HEADER.pack(*plain) + batch[HEADER_SIZE:start] + records
    header, columns, start = columns_before_data(batch)
    table = MessageTable(header, columns, memoryview(batch)[start:])
    if int(table.starts[-1]) != len(table.data):
        raise InvalidBatchError("the sizes of a batch's messages do not add up to its data")
    return table
