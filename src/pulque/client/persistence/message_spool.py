"""What a producer was given and nobody has confirmed: kept in a file over a restart.

::

    +-----------+----------+---------+------------+---------------+
    | magic u32 | size u32 | crc u32 | number u64 | kind u8, rest |
    +-----------+----------+---------+------------+---------------+

``size`` counts what follows the crc, and the crc covers it. Numbers only grow, so that nothing
that was cut off once can come back. There are three kinds of records: a *message*, known by its
number from then on; a *note*, that messages go to a partition as one batch, under the number that
the broker knows a batch by, written before it is sent; and *done*, which names the messages that
have an outcome. What is written first is sent first, and what is noted is asked for first after a
restart.

The file is written anew when more than half of it is of no use any more. A crash may tear its end:
that is cut off. Beside it lies a file that says who sends: the id of the producer, which stays,
and its incarnation, which grows each time the spool is opened.
"""

import json
import logging
import secrets
import struct
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from struct import Struct
from typing import NamedTuple

import google_crc32c

from pulque.client.persistence.spool_directory import SpoolFile, SpoolFiles
from pulque.client.routing.targets import Delayed, Way
from pulque.errors import DataDirectoryError, SpoolFullError, StorageError
from pulque.model.batch import seed_of
from pulque.model.ids import created_at_ms_of
from pulque.model.names import PartitionName
from pulque.model.pack import BatchPacker, ProducedBy

__all__ = ["BatchNote", "KeptMessage", "SendSpool", "read_boot"]

log = logging.getLogger("pulque.client")

VERSION = 1
_MESSAGES = "messages"
_OWNER = "producer"
_MAGIC = 0x50535150  # "PQSP"
_HEAD = Struct("<III")
_NUMBER = Struct("<QB")
_MESSAGE, _NOTE, _DONE = 1, 2, 3
_PARTS = Struct("<?B16sqqHHHHI")
_BATCH = Struct("<IQqBHHI")
_COUNT = Struct("<I")
_LEAST_FILE = 1024 * 1024
"""A smaller file is not worth writing anew."""


class KeptMessage(NamedTuple):
    """One message, its parts encoded as they travel."""

    way: Way
    body: bytes
    message_id: bytes
    level: int
    key: bytes = b""
    order_key: bytes = b""
    tags: bytes = b""
    headers: bytes = b""
    expires_at_ms: int = 0
    due_at_ms: int = 0

    def encode(self) -> bytes:
        """Return it as it stands in a record."""
        is_delayed = isinstance(self.way, Delayed)
        subject = (self.way.subject if isinstance(self.way, Delayed) else self.way).encode()
        parts = (subject, self.key, self.order_key, self.tags, self.headers)
        head = _PARTS.pack(
            is_delayed,
            self.level,
            self.message_id,
            self.expires_at_ms,
            self.due_at_ms,
            *map(len, parts),
        )
        return b"".join((head, *parts, self.body))

    @classmethod
    def decode(cls, data: bytes) -> "KeptMessage":
        """Return what a record holds."""
        is_delayed, level, message_id, expires, due, *sizes = _PARTS.unpack_from(data)
        parts = []
        at = _PARTS.size
        for size in sizes:
            parts.append(data[at : at + size])
            at += size
        name, key, order_key, tags, headers = parts
        way = Delayed(name.decode()) if is_delayed else name.decode()
        return cls(way, data[at:], message_id, level, key, order_key, tags, headers, expires, due)

    def put_into(self, packer: BatchPacker, *, is_old: bool = False) -> None:
        """Add it to what is packed; an old one says when it was made, not when it is sent."""
        packer.add_encoded(
            self.body,
            key=self.key,
            order_key=self.order_key,
            tags=self.tags,
            headers=self.headers,
            expires_at_ms=self.expires_at_ms,
            created_at_ms=created_at_ms_of(self.message_id) if is_old else 0,
            due_at_ms=self.due_at_ms,
            message_id=self.message_id,
        )


class BatchNote(NamedTuple):
    """Messages that go to a partition as one batch."""

    place: str
    partition: PartitionName
    incarnation: int
    number: int
    """What the broker knows the batch by."""
    created_at_ms: int
    level: int
    messages: tuple[int, ...]

    def encode(self) -> bytes:
        """Return it as it stands in a record."""
        place, partition = self.place.encode(), self.partition.encode()
        count = len(self.messages)
        head = _BATCH.pack(
            self.incarnation,
            self.number,
            self.created_at_ms,
            self.level,
            len(place),
            len(partition),
            count,
        )
        return b"".join((head, place, partition, Struct(f"<{count}Q").pack(*self.messages)))

    @classmethod
    def decode(cls, data: bytes) -> "BatchNote":
        """Return what a record holds."""
        incarnation, number, created, level, place, partition, count = _BATCH.unpack_from(data)
        at = _BATCH.size
        return cls(
            data[at : at + place].decode(),
            PartitionName(data[at + place : at + place + partition].decode()),
            incarnation,
            number,
            created,
            level,
            Struct(f"<{count}Q").unpack_from(data, at + place + partition),
        )


class SendSpool:
    """The spool of one producer, which has it for itself. Guarded by the producer's lock.

    Args:
        files: Where it is; locked until ``close``.
        limit: How many bytes may be kept before nothing more is.
        is_synced: Whether what is kept must survive a power cut, not only a killed process.
        now_ms: The clock on the wall.
        boot: Names the time since the machine was started; empty if nobody knows.

    Raises:
        DataDirectoryError: Another producer has it, or it is of another version.
        StorageError: It cannot be read or written.
    """

    def __init__(
        self,
        files: SpoolFiles,
        *,
        limit: int,
        is_synced: bool,
        now_ms: Callable[[], int],
        boot: str = "",
    ) -> None:
        self._files = files
        self._limit = limit
        self._is_synced = is_synced
        self.used = 0
        """Bytes of what is kept."""
        self.error: StorageError | None = None
        """Why it takes nothing more: nobody knows what the disk has of the last record."""
        self._places: dict[int, tuple[int, int]] = {}
        """By number: where in the file a message that is kept lies, and its size."""
        self._noted: dict[int, BatchNote] = {}
        """By number: the batch that a message goes in, as said last."""
        self._end = 0
        self._last = 0
        files.lock()
        try:
            self.producer_id, self.incarnation, self.may_be_doubled = self._register(now_ms, boot)
            self._file: SpoolFile = files.open(_MESSAGES, create=True)
            files.sync_directory("")
            self._read()
        except BaseException:
            files.unlock()
            raise

    def close(self) -> None:
        """Let others have it."""
        self._file.close()
        self._files.unlock()

    # ── what was left ──────────────────────────────────────────────────────────────────────

    def messages(self) -> list[tuple[int, KeptMessage]]:
        """Return all messages that are kept, in the order in which they came, by number."""
        return [(number, self._message(number)) for number in sorted(self._places)]

    def notes(self) -> list[BatchNote]:
        """Return the batches of which nobody knows whether they are stored, the oldest first."""
        found: dict[tuple[str, str, int, int], BatchNote] = {}
        for number in sorted(self._noted):
            note = self._noted[number]
            rest = tuple(each for each in note.messages if self._noted.get(each) is note)
            found[note[:4]] = note._replace(messages=rest)
        return sorted(found.values(), key=lambda note: (note.incarnation, note.number))

    def pack(self, note: BatchNote) -> bytes:
        """Return a batch as it was sent."""
        packer = BatchPacker()
        ids = b""
        for number in note.messages:
            message = self._message(number)
            message.put_into(packer)
            ids += message.message_id
        return packer.encode(
            seed=seed_of(note.partition),
            ids=ids,
            created_at_ms=note.created_at_ms,
            produced_by=ProducedBy(self.producer_id, note.incarnation, note.number, named=True),
            priority=note.level,
        )

    def way_of(self, note: BatchNote) -> Way:
        """Return the way of a batch's messages."""
        return self._message(note.messages[0]).way

    def free(self, note: BatchNote) -> None:
        """Take in that a batch is not stored, and never will be: its messages go anew."""
        for number in note.messages:
            self._noted.pop(number, None)

    # ── what comes and goes ────────────────────────────────────────────────────────────────

    @property
    def is_full(self) -> bool:
        """Whether nothing more is taken in."""
        return self.used > self._limit

    def keep(self, message: KeptMessage) -> int:
        """Keep a message, and return its number.

        Raises:
            SpoolFullError: Too much is kept already.
            StorageError: The disk failed.
        """
        if self.is_full:
            raise SpoolFullError(
                f"{self.used} bytes wait in the spool, and spool_limit is {self._limit}: the "
                "brokers take less than is sent, or are away"
            )
        at = self._end
        number = self._append(_MESSAGE, message.encode())
        self._places[number] = at, self._end - at
        self.used += self._end - at
        return number

    def note(self, note: BatchNote) -> None:
        """Write down which batch messages go in; it may be sent after that."""
        self._append(_NOTE, note.encode())
        for number in note.messages:
            self._noted[number] = note
        self.settle()

    def done(self, numbers: Sequence[int]) -> None:
        """Forget messages that have an outcome."""
        self._append(_DONE, _encode_numbers(numbers))
        self._forget(numbers)
        if self._end >= _LEAST_FILE and 2 * self.used <= self._end:
            self._write_anew()

    def settle(self) -> None:
        """Make all so far survive what it has to survive."""
        if self._is_synced:
            self._guarded(self._file.sync)

    def sync(self) -> None:
        """Make all so far survive a power cut, in any case."""
        self._guarded(self._file.sync)

    # ── underneath ─────────────────────────────────────────────────────────────────────────

    def _append(self, kind: int, payload: bytes) -> int:
        number = self._last + 1
        record = _record(number, kind, payload)
        self._guarded(lambda: self._file.write([record], self._end))
        self._end += len(record)
        self._last = number
        return number

    def _guarded(self, act: Callable[[], object]) -> None:
        if self.error is not None:
            raise self.error.with_traceback(None)
        try:
            act()
        except StorageError as error:
            self.error = error
            raise

    def _forget(self, numbers: Iterable[int]) -> None:
        for number in numbers:
            _, size = self._places.pop(number, (0, 0))
            self.used -= size
            self._noted.pop(number, None)

    def _message(self, number: int) -> KeptMessage:
        at, size = self._places[number]
        before = _HEAD.size + _NUMBER.size
        return KeptMessage.decode(self._file.read(size - before, at + before))

    def _read(self) -> None:
        data = self._file.read(self._file.size(), 0)
        at = 0
        while (found := _decode(data, at)) is not None and found[0] > self._last:
            number, kind, payload, end = found
            try:
                self._take_in(number, kind, payload, at, end)
            except (struct.error, ValueError, IndexError) as error:
                raise DataDirectoryError(f"record {number} of the spool: {error}") from None
            self._last = number
            at = end
        if at < len(data):
            log.warning("the torn end of a spool is cut off: bytes=%d", len(data) - at)
            self._file.truncate(at)
        # What was read counts from now on, whether the power fails or not.
        self._file.sync()
        self._end = at

    def _take_in(self, number: int, kind: int, payload: bytes, at: int, end: int) -> None:
        if kind == _MESSAGE:
            KeptMessage.decode(payload)
            self._places[number] = at, end - at
            self.used += end - at
        elif kind == _NOTE:
            note = BatchNote.decode(payload)
            for each in note.messages:
                if each in self._places:
                    self._noted[each] = note
        elif kind == _DONE:
            self._forget(_decode_numbers(payload))
        else:
            raise ValueError(f"kind {kind} is unknown; this is version {VERSION}")

    def _write_anew(self) -> None:
        """Put what is kept into another file, and that in place of this one."""
        self._guarded(self._replace)

    def _replace(self) -> None:
        name = f"{_MESSAGES}.new"
        file = self._files.open(name, create=True)
        file.truncate(0)
        places: dict[int, tuple[int, int]] = {}
        end = 0
        for number in sorted(self._places):
            at, size = self._places[number]
            file.write([self._file.read(size, at)], end)
            places[number] = end, size
            end += size
        for note in self.notes():
            self._last += 1
            end += file.write([_record(self._last, _NOTE, note.encode())], end)
        file.sync()
        self._files.rename(name, _MESSAGES)
        self._files.sync_directory("")
        self._file.close()
        self._file, self._places, self._end = file, places, end

    def _register(self, now_ms: Callable[[], int], boot: str) -> tuple[int, int, bool]:
        """Return the producer's id, a new incarnation, and whether the last one's end is lost."""
        producer_id, last, was_synced, last_boot = secrets.randbits(64) | 1, 0, True, boot
        if self._files.exists(_OWNER):
            producer_id, last, was_synced, last_boot = self._read_owner()
        incarnation = max(last + 1, now_ms() // 1000)
        text = json.dumps(
            {
                "version": VERSION,
                "producer_id": producer_id,
                "incarnation": incarnation,
                "synced": self._is_synced,
                "boot": boot,
            }
        ).encode()
        file = self._files.open(f"{_OWNER}.new", create=True)
        file.truncate(0)
        file.write([b"%08x\n%s\n" % (google_crc32c.value(text), text)], 0)
        file.sync()
        file.close()
        self._files.rename(f"{_OWNER}.new", _OWNER)
        self._files.sync_directory("")
        return producer_id, incarnation, not was_synced and boot != last_boot

    def _read_owner(self) -> tuple[int, int, bool, str]:
        file = self._files.open(_OWNER)
        crc, _, text = file.read(file.size(), 0).removesuffix(b"\n").partition(b"\n")
        file.close()
        if crc != b"%08x" % google_crc32c.value(text):
            raise DataDirectoryError(
                "the file 'producer' of the spool is damaged: move the folder away; what is in it "
                "may be stored or not"
            )
        found = json.loads(text)
        if found["version"] != VERSION:
            raise DataDirectoryError(
                f"the spool has version {found['version']}; this is version {VERSION}"
            )
        return found["producer_id"], found["incarnation"], found["synced"], found["boot"]


def read_boot() -> str:
    """Return what names the time since the machine was started; empty if nobody knows."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except OSError:
        return ""


def _record(number: int, kind: int, payload: bytes) -> bytes:
    rest = _NUMBER.pack(number, kind) + payload
    return _HEAD.pack(_MAGIC, len(rest), google_crc32c.value(rest)) + rest


def _decode(data: bytes, at: int) -> tuple[int, int, bytes, int] | None:
    """Return number, kind, payload and end of the record at an offset, if it is whole."""
    start = at + _HEAD.size
    if start + _NUMBER.size > len(data):
        return None
    magic, size, crc = _HEAD.unpack_from(data, at)
    end = start + size
    if magic != _MAGIC or size < _NUMBER.size or end > len(data):
        return None
    if google_crc32c.value(data[start:end]) != crc:
        return None
    number, kind = _NUMBER.unpack_from(data, start)
    return number, kind, data[start + _NUMBER.size : end], end


def _encode_numbers(numbers: Sequence[int]) -> bytes:
    return _COUNT.pack(len(numbers)) + Struct(f"<{len(numbers)}Q").pack(*numbers)


def _decode_numbers(payload: bytes) -> tuple[int, ...]:
    (count,) = _COUNT.unpack_from(payload)
    return Struct(f"<{count}Q").unpack_from(payload, _COUNT.size)
