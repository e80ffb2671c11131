"""A message, decoded on access from its batch.

``StoredBatch`` is one batch as a broker serves it: the bytes and their position. ``Message`` is
an index into it. A consumer that reads only bodies decodes nothing else.
"""

import json
from functools import lru_cache
from itertools import accumulate
from operator import gt
from struct import Struct
from typing import Any, NoReturn

from pulque.errors import InvalidBatchError, PulqueError
from pulque.model.batch import Flag, layout_of, read_header
from pulque.model.compression import decompress
from pulque.model.gathered import Gathered
from pulque.model.names import PartitionName, Subject, subject_of
from pulque.model.positions import ConsumeSequence

__all__ = [
    "Message",
    "PayloadError",
    "StoredBatch",
    "check_message",
    "check_messages",
    "parse_json",
    "tags_in",
    "unreadable_in",
]

# An operation on the enum itself costs more than all else in the access of a field.
_TAGS, _KEYS, _DUE = int(Flag.TAGS), int(Flag.KEYS), int(Flag.DUE)
_CREATED, _EXPIRES, _ATTEMPTS = int(Flag.CREATED), int(Flag.EXPIRES), int(Flag.ATTEMPTS)
_ORDER_KEYS, _HEADERS = int(Flag.ORDER_KEYS), int(Flag.HEADERS)
_PARTS = _KEYS | _ORDER_KEYS | _TAGS | _HEADERS


class PayloadError(PulqueError):
    """The body of a message cannot be decoded as requested."""


def parse_json(body: bytes) -> Any:
    """Parse a body as JSON, or raise ``ValueError``; NaN is not allowed."""
    return json.loads(body, parse_constant=_refuse)


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is not JSON")


class StoredBatch:
    """The messages of one stored batch.

    Args:
        data: The batch as packed by its producer; its crc has been verified.
        partition: The partition that stores it.
        first_sequence: The consume sequence of its first message.
        stored_at_ms: When the broker stored it.
    """

    __slots__ = (
        "_body_starts",
        "_columns",
        "broker_group",
        "data",
        "first_sequence",
        "group",
        "header",
        "partition",
        "places",
        "starts",
        "stored_at_ms",
        "stored_times",
    )

    def __init__(
        self,
        data: bytes,
        *,
        partition: PartitionName,
        first_sequence: ConsumeSequence,
        stored_at_ms: int,
    ) -> None:
        self.header = header = read_header(data)
        flags, count = header.flags, header.count
        if header.codec:
            start = layout_of(flags).records_start(count)
            records = decompress(data[start:], header.codec, header.records_size)
            data = data[:start] + records
        self.data = data
        self.partition = partition
        self.first_sequence = first_sequence
        self.stored_at_ms = stored_at_ms
        self.broker_group = ""
        """The broker group that has it, if known."""
        self.group = ""
        """The group that it was delivered to, if any."""
        self.places: tuple[int, ...] | None = None
        """The distance of each message from the first, if they are not consecutive."""
        self.stored_times: tuple[int, ...] | None = None
        """When each message was stored, if not all at once."""
        self._columns: dict[str, tuple[int, ...]] = {}
        self._body_starts: list[int] | None = None
        packed, size_start = _column_of(flags, count, "size")
        sizes = packed.unpack_from(data, size_start)
        self.starts = list(accumulate(sizes, initial=layout_of(flags).data_start(count)))
        if self.starts[-1] != len(data):
            raise InvalidBatchError("the sizes of a batch's messages do not add up to its data")

    def __len__(self) -> int:
        return self.header.count

    @staticmethod
    def gathered(found: Gathered, partition: PartitionName) -> "StoredBatch":
        """Return the messages of a gathered record; the crc has been verified."""
        batch = StoredBatch(
            found.batch,
            partition=partition,
            first_sequence=ConsumeSequence(found.first_sequence),
            stored_at_ms=found.stored_at_ms[0],
        )
        batch.places, batch.stored_times = found.places, found.stored_at_ms
        return batch

    def sequence_of(self, index: int) -> ConsumeSequence:
        """Return the consume sequence of one message."""
        places = self.places
        return ConsumeSequence(self.first_sequence + (index if places is None else places[index]))

    def stored_at_of(self, index: int) -> int:
        """Return when one message was stored, in milliseconds since 1970."""
        return self.stored_at_ms if self.stored_times is None else self.stored_times[index]

    def column(self, name: str) -> tuple[int, ...]:
        """Return a column of numbers, which must be present by the flags."""
        column = self._columns.get(name)
        if column is None:
            packed, start = _column_of(self.header.flags, self.header.count, name)
            column = self._columns[name] = packed.unpack_from(self.data, start)
        return column

    def body_starts(self) -> list[int]:
        """Return where each body begins: after its key, order key, tags and headers."""
        if self._body_starts is None:
            sizes = [self.column(name) for name, flag in _PART_SIZES if self.header.flags & flag]
            if sizes:
                starts = list(map(sum, zip(self.starts, *sizes, strict=False)))
                if any(map(gt, starts, self.starts[1:])):
                    raise InvalidBatchError(_TOO_LONG)
                self._body_starts = starts
            else:
                self._body_starts = self.starts
        return self._body_starts

    def id_of(self, index: int) -> bytes:
        """Return the id of one message."""
        at = layout_of(self.header.flags).column_start("id", self.header.count) + 16 * index
        return self.data[at : at + 16]

    def part(self, index: int, wanted: int) -> bytes:
        """Return the key, order key, tags or headers of one message, encoded."""
        flags = self.header.flags
        if not flags & wanted:
            return b""
        at = self.starts[index]
        for name, flag in _PART_SIZES:
            if flags & flag:
                size = self.column(name)[index]
                if at + size > self.starts[index + 1]:
                    raise InvalidBatchError(_TOO_LONG)
                if flag == wanted:
                    return self.data[at : at + size]
                at += size
        return b""


@lru_cache(maxsize=4096)
def _column_of(flags: int, count: int, name: str) -> tuple[Struct, int]:
    """Return the format of a column, and where it begins."""
    layout = layout_of(flags)
    code = next(column.code for column in layout.columns if column.name == name)
    return Struct(f"<{count}{code}"), layout.column_start(name, count)


_TOO_LONG = "key, order key, tags and headers of a message are longer than the message"
_PART_SIZES = (
    ("key_size", _KEYS),
    ("order_key_size", _ORDER_KEYS),
    ("tags_size", _TAGS),
    ("headers_size", _HEADERS),
)


class Message:
    """One stored message. Its fields are decoded on access."""

    __slots__ = ("_batch", "_index")

    def __init__(self, batch: StoredBatch, index: int) -> None:
        self._batch = batch
        self._index = index

    @property
    def id(self) -> str:
        """The message id: 32 hexadecimal digits, ordered by time."""
        return self._batch.id_of(self._index).hex()

    @property
    def body(self) -> bytes:
        """The body, as the producer sent it."""
        batch = self._batch
        index = self._index
        starts = batch._body_starts  # noqa: SLF001  # the hot path of every consumer
        if starts is None:
            starts = batch.body_starts()
        return batch.data[starts[index] : batch.starts[index + 1]]

    def json(self) -> Any:
        """Return the body parsed as JSON.

        Raises:
            PayloadError: The body is not JSON.
        """
        try:
            return parse_json(self.body)
        except (ValueError, RecursionError) as problem:
            raise PayloadError(f"the body of {self.id} is no JSON: {problem}") from problem

    @property
    def subject(self) -> Subject:
        """The subject it was sent to, also for a retry."""
        return subject_of(self._batch.partition)

    @property
    def partition(self) -> PartitionName:
        """The partition that it was read from."""
        return self._batch.partition

    @property
    def broker_group(self) -> str:
        """The broker group that stores it; empty if unknown."""
        return self._batch.broker_group

    @property
    def group(self) -> str:
        """The group that it was delivered to; empty for a message that was read without one."""
        return self._batch.group

    @property
    def sequence(self) -> ConsumeSequence:
        """Its number in that partition."""
        return self._batch.sequence_of(self._index)

    @property
    def key(self) -> str | None:
        """The key that it was sent with."""
        return _text(self._batch.part(self._index, _KEYS)) or None

    @property
    def order_key(self) -> str | None:
        """The order key that it was sent with."""
        return _text(self._batch.part(self._index, _ORDER_KEYS)) or None

    @property
    def tags(self) -> tuple[str, ...]:
        """The tags that it was sent with."""
        return tags_in(self._batch.part(self._index, _TAGS))

    @property
    def headers(self) -> dict[str, str]:
        """The headers that it was sent with; those of the system begin with ``pulque.``."""
        encoded = self._batch.part(self._index, _HEADERS)
        if not encoded:
            return {}
        texts = _text(encoded).split("\0")
        names = texts[::2]
        if len(texts) % 2 or not all(names):
            raise InvalidBatchError("a header of a message has no name, or no value")
        return dict(zip(names, texts[1::2], strict=True))

    @property
    def attempt(self) -> int:
        """The number of this delivery to the group, from 1."""
        if not self._batch.header.flags & _ATTEMPTS:
            return 1
        return self._batch.column("attempt")[self._index]

    @property
    def priority(self) -> int:
        """0 to 9, higher first."""
        return self._batch.header.priority

    @property
    def created_at_ms(self) -> int:
        """When the producer created it."""
        header = self._batch.header
        if header.flags & _CREATED:
            # 0 stands for a message as old as its batch.
            return self._batch.column("created_at_ms")[self._index] or header.created_at_ms
        return header.created_at_ms

    @property
    def expires_at_ms(self) -> int:
        """When it expires; 0 for never."""
        if self._batch.header.flags & _EXPIRES:
            return self._batch.column("expires_at_ms")[self._index]
        return 0

    @property
    def due_at_ms(self) -> int:
        """When it is due; 0 for at once."""
        if self._batch.header.flags & _DUE:
            return self._batch.column("due_at_ms")[self._index]
        return 0

    @property
    def stored_at_ms(self) -> int:
        """When the broker stored it."""
        return self._batch.stored_at_of(self._index)

    def source(self) -> tuple[StoredBatch, int]:
        """Return its batch, and its index there."""
        return self._batch, self._index

    def __repr__(self) -> str:
        return (
            f"<{type(self).__name__} {self.id} {self.partition}/{self.sequence} "
            f"attempt={self.attempt} {len(self.body)} bytes>"
        )


def check_messages(batch: StoredBatch) -> None:
    """Check that every part of every message can be decoded.

    Raises:
        InvalidBatchError: A part cannot be decoded.
    """
    batch.body_starts()
    for index in range(len(batch)):
        check_message(Message(batch, index))


def check_message(message: Message) -> None:
    """Check that every part of a message can be decoded.

    Raises:
        InvalidBatchError: A part cannot be decoded.
    """
    message.body, message.key, message.order_key, message.tags, message.headers  # noqa: B018


def unreadable_in(batch: StoredBatch, start: int, end: int) -> dict[int, str]:
    """Return the indices in ``start..end`` of messages that cannot be decoded, with the reasons.

    A batch without keys, tags and headers costs nothing, one with ASCII texts little.
    """
    flags = batch.header.flags
    if not flags & _PARTS:
        return {}
    try:
        bodies = batch.body_starts()
    except InvalidBatchError as error:  # then no message has a body
        return dict.fromkeys(range(start, end), str(error))
    data, starts = batch.data, batch.starts
    texts = b"".join([data[starts[i] : bodies[i]] for i in range(start, end)])
    if texts.isascii() and (not flags & _HEADERS or _are_headers(batch, bodies, start, end)):
        return {}
    found: dict[int, str] = {}
    for index in range(start, end):
        try:
            check_message(Message(batch, index))
        except InvalidBatchError as error:
            found[index] = str(error)
    return found


def _are_headers(batch: StoredBatch, bodies: list[int], start: int, end: int) -> bool:
    """Return whether all headers of messages ``start..end`` are names with values."""
    data, sizes = batch.data, batch.column("headers_size")
    for encoded in {data[bodies[i] - sizes[i] : bodies[i]] for i in range(start, end)}:
        texts = encoded.split(b"\0") if encoded else ()
        if len(texts) % 2 or not all(texts[::2]):
            return False
    return True


def tags_in(encoded: bytes) -> tuple[str, ...]:
    """Unpack tags."""
    return tuple(_text(encoded).split("\0")) if encoded else ()


def _text(encoded: bytes) -> str:
    try:
        return encoded.decode()
    except UnicodeDecodeError as problem:
        raise InvalidBatchError(f"a text in a message is not UTF-8: {problem}") from None
