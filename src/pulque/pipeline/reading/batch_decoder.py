"""Many batches to Arrow columns at once, without a step of Python for each message.

The batches lie somewhere in one buffer; where, is known. Each fixed-width column of a batch begins
at a place that follows from its flags and its count, and is one run of bytes: where the runs of
*all* batches are is one numpy expression, and Arrow copies them out of the buffer in one go. Of
the variable parts (key, tags, headers, body) only beginnings and ends are computed; Arrow copies
them the same way.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from pulque.errors import InvalidBatchError
from pulque.model.batch import COLUMNS, HEADER_SIZE, Column, Flag, layout_of
from pulque.model.names import PartitionName, subject_of
from pulque.pipeline.columns import INSTANT, schema_of

__all__ = ["PLACE", "BatchPlace", "UndecodableBatch", "decode", "decode_readable"]

_Integers = npt.NDArray[np.int64]

PLACE = np.dtype(
    [
        ("start", "<i8"),
        ("name", "<i4"),
        ("begin", "<i4"),
        ("end", "<i4"),
        ("first_sequence", "<i8"),
        ("stored_at_ms", "<i8"),
    ]
)
"""Where a batch lies: its first byte, the ordinal of its partition's name, which of its messages
count (``begin..end``), and what its envelope says."""

_HEADER = np.dtype(
    [
        ("crc", "<u4"),
        ("flags", "<u2"),
        ("codec", "u1"),
        ("priority", "u1"),
        ("count", "<u4"),
        ("records_size", "<u4"),
        ("producer_id", "<u8"),
        ("incarnation", "<u4"),
        ("producer_sequence", "<u8"),
        ("created_at_ms", "<i8"),
        ("tag_union", "<u8"),
    ]
)
_COLUMNS = {column.name: column for column in COLUMNS}
_ORDINALS = {column.name: at for at, column in enumerate(COLUMNS)}
_TYPES = {"I": "<u4", "Q": "<u8", "q": "<i8", "H": "<u2", "16s": "V16"}
_PARTS = (
    ("key", "key_size", Flag.KEYS),
    ("order_key", "order_key_size", Flag.ORDER_KEYS),
    ("tags", "tags_size", Flag.TAGS),
    ("headers", "headers_size", Flag.HEADERS),
)
_US_PER_MS = 1000
_EARLIEST_MS, _LATEST_MS = -62_135_596_800_000, 253_402_300_799_999
"""The years 1 to 9999: what lies beyond cannot be shown by anybody."""
_HEX_PAIRS = np.frombuffer(
    np.arange(1 << 16, dtype="<u2").tobytes().hex().encode(),  # two bytes at a time
    "<u4",
)
_CONSTANT_ROWS = 65_536


class UndecodableBatch(NamedTuple):
    """A batch that its producer packed in a way that nobody can decode."""

    partition: PartitionName
    first_sequence: int
    reason: str


@dataclass(frozen=True, slots=True)
class BatchPlace:
    """Batches in a buffer, uncompressed, each verified against its crc.

    Attributes:
        data: The buffer.
        places: One ``PLACE`` for each batch, in ascending order of ``start``.
        names: The partitions that places refer to.
        unreadable: Batches that are not in the buffer, as they do not decompress.
    """

    data: bytes | bytearray | memoryview
    places: npt.NDArray[np.void]
    names: Sequence[PartitionName]
    unreadable: tuple[UndecodableBatch, ...] = ()


def decode_readable(
    placed: BatchPlace, columns: Sequence[str]
) -> tuple[list[pa.RecordBatch], list[UndecodableBatch]]:
    """Return the wanted columns of what can be decoded, in order, and the batches that cannot.

    Who decodes many batches at once does not know which of them is to blame: halves are tried
    until it stands alone.
    """
    batches: list[pa.RecordBatch] = []
    unreadable = list(placed.unreadable)
    waiting = [placed.places] if len(placed.places) else []
    while waiting:
        some = waiting.pop()
        try:
            batches.append(decode(BatchPlace(placed.data, some, placed.names), columns))
        except InvalidBatchError as error:
            if len(some) > 1:
                half = len(some) // 2
                waiting += [some[half:], some[:half]]
                continue
            name, first = placed.names[some["name"][0]], int(some["first_sequence"][0])
            unreadable.append(UndecodableBatch(name, first, str(error)))
    return batches, unreadable


def decode(placed: BatchPlace, columns: Sequence[str]) -> pa.RecordBatch:
    """Return the wanted columns of all messages that count, in order.

    Raises:
        InvalidBatchError: The sizes in a batch do not add up; its producer packed nonsense.
    """
    reading = _Reading(placed)
    arrays = [_MAKERS[name](reading) for name in columns]
    return pa.RecordBatch.from_arrays(arrays, schema=schema_of(columns))


@lru_cache(maxsize=1024)
def _widths_before(flags: int) -> tuple[int, ...]:
    """For each column there may be, how many bytes per message come before it; -1 if absent."""
    before = layout_of(flags).before
    return tuple(before.get(column.name, -1) for column in COLUMNS)


class _Reading:
    """The numbers of one decoding; each is computed once, when it is first asked for."""

    def __init__(self, placed: BatchPlace) -> None:
        self.placed = placed
        self._bytes = np.frombuffer(placed.data, np.uint8)
        places = placed.places
        heads = self._strided(np.dtype(f"V{HEADER_SIZE}"))[places["start"]].view(_HEADER)
        self.priorities = heads["priority"]
        self.created_ms = heads["created_at_ms"]
        self.counts = heads["count"].astype(np.int64)
        flags = heads["flags"]
        kinds, self._kind_of = np.unique(flags, return_inverse=True)
        self.all_flags = int(np.bitwise_or.reduce(kinds)) if len(kinds) else 0
        self._before = np.array([_widths_before(int(k)) for k in kinds], np.int64).reshape(
            len(kinds), len(COLUMNS)
        )
        layouts = [layout_of(int(kind)) for kind in kinds]
        widths = np.array([x.visible_width + x.record_width for x in layouts], np.int64)
        self._data_starts = (
            places["start"] + HEADER_SIZE + self.counts * widths[self._kind_of]
            if len(kinds)
            else np.empty(0, np.int64)
        )
        self._check_ends(heads, np.array([x.record_width for x in layouts], np.int64))

    def _check_ends(self, heads: npt.NDArray[np.void], record_widths: _Integers) -> None:
        """The data of each batch must be as long as its messages say."""
        if not len(self.counts):
            return
        firsts = self.firsts_of_batches
        ends = np.append(self._all_ends, 0)[firsts + self.counts - 1]
        sizes = ends - self._data_starts
        stated = heads["records_size"] - self.counts * record_widths[self._kind_of]
        wrong = np.flatnonzero(sizes != stated)
        if len(wrong) or ends.max() > len(self._bytes):
            raise InvalidBatchError("the sizes of a batch's messages do not add up to its data")

    # ── messages: all of the batches first, then those that count ──────────────────────────

    @cached_property
    def firsts_of_batches(self) -> _Integers:
        """The ordinal of each batch's first message among all messages."""
        firsts: _Integers = np.cumsum(self.counts) - self.counts
        return firsts

    @cached_property
    def total(self) -> int:
        """How many messages there are, whether they count or not."""
        return int(self.counts.sum())

    @cached_property
    def _locals(self) -> _Integers:
        """The ordinal of each message in its batch."""
        return np.arange(self.total) - np.repeat(self.firsts_of_batches, self.counts)

    @cached_property
    def _is_wanted(self) -> npt.NDArray[np.bool_] | None:
        """Which messages count; None if all do."""
        places = self.placed.places
        if not places["begin"].any() and (places["end"] >= self.counts).all():
            return None
        begin = np.repeat(places["begin"], self.counts)
        end = np.repeat(places["end"], self.counts)
        return (self._locals >= begin) & (self._locals < end)

    def _wanted(self, values: npt.NDArray[Any]) -> npt.NDArray[Any]:
        return values if self._is_wanted is None else values[self._is_wanted]

    @cached_property
    def count(self) -> int:
        """How many messages count."""
        return self.total if self._is_wanted is None else int(self._is_wanted.sum())

    def per_batch(self, values: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """Return a batch's value for each of its messages that counts."""
        return self._wanted(np.repeat(values, self.counts))

    @cached_property
    def sequences(self) -> _Integers:
        """The consume sequence of each message that counts."""
        origins = self.placed.places["first_sequence"] - self.firsts_of_batches
        sequences: _Integers = np.repeat(origins, self.counts)
        sequences += np.arange(self.total)
        return self._wanted(sequences)

    # ── fixed-width columns ────────────────────────────────────────────────────────────────

    def column(self, name: str, default: int = 0) -> npt.NDArray[Any]:
        """Return a column for the messages that count; the default where there is none."""
        return self._wanted(self._whole_column(name, default))

    def _whole_column(self, name: str, default: int = 0) -> npt.NDArray[Any]:
        column = _COLUMNS[name]
        total = self.total
        kind = np.dtype(_TYPES[column.code])
        if column.flag and not self.all_flags & column.flag:
            return np.full(total, default, kind)
        before = self._before[self._kind_of, _ORDINALS[name]]
        found = self._gather(column, kind, before)
        if len(found) == total:
            return found
        values = np.full(total, default, kind)
        values[np.repeat(before >= 0, self.counts)] = found
        return values

    def _gather(self, column: Column, kind: np.dtype[Any], before: _Integers) -> npt.NDArray[Any]:
        """Return a column of those batches that have it (``before`` is not negative)."""
        has_it = before >= 0
        counts = self.counts[has_it]
        starts = self.placed.places["start"][has_it] + HEADER_SIZE + counts * before[has_it]
        ends = starts + counts * column.width
        if len(ends) and ends.max() > len(self._bytes):
            raise InvalidBatchError("the columns of a batch are longer than the batch")
        return np.frombuffer(_bytes_of(self._runs(starts, ends)), kind, int(counts.sum()))

    def _strided(self, kind: np.dtype[Any]) -> npt.NDArray[Any]:
        """Return the buffer as values that begin at every byte."""
        length = max(len(self._bytes) - kind.itemsize + 1, 0)
        return np.ndarray((length,), kind, self._bytes, strides=(1,))

    # ── parts of variable size ─────────────────────────────────────────────────────────────

    @cached_property
    def _sizes(self) -> _Integers:
        return self._whole_column("size").astype(np.int64)

    @cached_property
    def _all_ends(self) -> _Integers:
        """Where the data of each message ends."""
        running = np.cumsum(self._sizes)
        before = (running - self._sizes)[self.firsts_of_batches]
        ends: _Integers = running + np.repeat(self._data_starts - before, self.counts)
        return ends

    @cached_property
    def _borders(self) -> dict[str, tuple[_Integers, _Integers]]:
        """Where each part of each message that counts begins and ends."""
        ends = self._wanted(self._all_ends)
        at = ends - self._wanted(self._sizes)
        borders = {}
        for name, size, flag in _PARTS:
            if self.all_flags & flag:
                begin, at = at, at + self.column(size)
                borders[name] = (begin, at)
        if (at > ends).any():
            raise InvalidBatchError("the parts of a message are longer than the message")
        borders["body"] = (at, ends)
        return borders

    def part(self, name: str) -> pa.Array | None:
        """Return one part of each message as bytes; None if no message has it."""
        borders = self._borders.get(name)
        if borders is None:
            return None
        return self._runs(*borders)

    def _runs(self, starts: _Integers, ends: _Integers) -> pa.Array:
        """Return runs of the buffer, in ascending order, copied out of it."""
        count = len(starts)
        if not count:
            return pa.array([], pa.binary())
        # Runs, and the gaps between them, are one long array over the buffer, without a copy.
        flat = np.empty(2 * count, np.int32)
        flat[0::2], flat[1::2] = starts, ends
        everything = pa.Array.from_buffers(
            pa.binary(), 2 * count - 1, [None, pa.py_buffer(flat), pa.py_buffer(self.placed.data)]
        )
        every_other = np.arange(0, 2 * count, 2, dtype=np.int32)
        return pc.take(everything, pa.array(every_other), boundscheck=False)

    def text(self, name: str) -> pa.Array:
        """Return one part of each message as text; null where it is empty."""
        found = self.part(name)
        if found is None:
            return pa.nulls(self.count, pa.string())
        begin, end = self._borders[name]
        text = _as_text(found)
        has_it = end > begin
        return text if has_it.all() else pc.if_else(pa.array(has_it), text, None)


def _bytes_of(found: pa.Array) -> pa.Buffer | bytes:
    """Return the values of an array of bytes that was just made, one behind the other."""
    return found.buffers()[2] or b""


def _as_text(found: pa.Array) -> pa.Array:
    content = np.frombuffer(_bytes_of(found), np.int8)
    if not len(content) or content.min() >= 0:  # nothing but ASCII
        return pa.Array.from_buffers(pa.string(), len(found), found.buffers())
    try:
        return found.cast(pa.string())
    except pa.ArrowInvalid:
        raise InvalidBatchError("a text in a message is not UTF-8") from None


# ── one maker per column ───────────────────────────────────────────────────────────────────


def _message_id(reading: _Reading) -> pa.Array:
    ids = reading.column("id")
    digits = np.take(_HEX_PAIRS, ids.view("<u2"), mode="clip")  # no index can be beyond
    offsets = np.arange(0, 32 * (len(ids) + 1), 32, dtype=np.int32)
    buffers = [None, pa.py_buffer(offsets), pa.py_buffer(digits)]
    return pa.Array.from_buffers(pa.string(), len(ids), buffers)


def _by_name(reading: _Reading, shown: Callable[[PartitionName], str]) -> pa.Array:
    if len(reading.placed.names) == 1:
        return _constant(shown(reading.placed.names[0]), reading.count)
    names = pa.array([shown(name) for name in reading.placed.names], pa.string())
    return names.take(pa.array(reading.per_batch(reading.placed.places["name"])))


def _constant(text: str, count: int) -> pa.Array:
    """Return a text so many times."""
    if count > _CONSTANT_ROWS:
        return pa.repeat(text, count)
    return _constants(text).slice(0, count)


@lru_cache(maxsize=64)
def _constants(text: str) -> pa.Array:
    return pa.repeat(text, _CONSTANT_ROWS)


def _tags(reading: _Reading) -> pa.Array:
    return pc.split_pattern(reading.text("tags"), "\0")


def _headers(reading: _Reading) -> pa.Array:
    """Names and values, parted by NULs, as a map."""
    lists = pc.split_pattern(reading.text("headers"), "\0")
    offsets = lists.offsets.to_numpy()
    if (np.diff(offsets) % 2).any():
        raise InvalidBatchError("a header of a message has no name, or no value")
    texts = lists.values
    halves = pa.array(offsets // 2, pa.int32(), mask=_null_mask(lists))
    evens = pa.array(np.arange(0, len(texts), 2))
    names = texts.take(evens)
    if pc.any(pc.equal(names, "")).as_py():
        raise InvalidBatchError("a header of a message has no name, or no value")
    return pa.MapArray.from_arrays(halves, names, texts.take(pc.add(evens, 1)))


def _null_mask(lists: pa.Array) -> npt.NDArray[np.bool_]:
    return np.append(lists.is_null().to_numpy(zero_copy_only=False), False)


def _instant(ms: npt.NDArray[Any], *, is_null: npt.NDArray[np.bool_] | None = None) -> pa.Array:
    us = np.clip(ms, _EARLIEST_MS, _LATEST_MS).astype(np.int64) * _US_PER_MS
    return pa.array(us, pa.int64(), mask=is_null).cast(INSTANT)


def _created_at(reading: _Reading) -> pa.Array:
    of_batch = reading.per_batch(reading.created_ms)
    own = reading.column("created_at_ms")
    # 0 stands for a message as old as its batch.
    return _instant(np.where(own == 0, of_batch, own))


def _expires_at(reading: _Reading) -> pa.Array:
    expires = reading.column("expires_at_ms")
    return _instant(expires, is_null=expires == 0)


_MAKERS: Mapping[str, Callable[[_Reading], pa.Array]] = {
    "message_id": _message_id,
    "subject": lambda r: _by_name(r, subject_of),
    "partition": lambda r: _by_name(r, str),
    "sequence": lambda r: pa.array(r.sequences, pa.int64()),
    "key": lambda r: r.text("key"),
    "order_key": lambda r: r.text("order_key"),
    "tags": _tags,
    "headers": _headers,
    "body": lambda r: r.part("body"),
    "created_at": _created_at,
    "stored_at": lambda r: _instant(r.per_batch(r.placed.places["stored_at_ms"])),
    "expires_at": _expires_at,
    "attempt": lambda r: pa.array(r.column("attempt", 1), pa.int32()),
    "priority": lambda r: pa.array(r.per_batch(r.priorities), pa.int32()),
}
