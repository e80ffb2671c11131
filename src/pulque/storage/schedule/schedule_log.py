"""The schedule logs of a delay server: messages with contents, by the tick of their due time.

Each tick has one file, named by its beginning in UTC, ``20261116T0900Z.log``. It
contains entries, each with messages of one partition::

    magic "DS" | version u8 | closes u8 | size u32 | offset u64 | tick i64 | replayed u64
    | first due i64 | last due i64 | count u16 | name size u16 | crc u32 | name | a batch

``crc`` covers all before it and the name; the batch has a crc of its own, seeded with the name.
``offset`` is the entry's own offset and ``tick`` that of the file name: in a renamed file, or at
another offset, the crc does not match.

The entries are made by replaying the message log. Each step of the replay adds its entries to a
tick with one write, and the last of them *closes* the step: it has the offset up to which the
message log is replayed into this tick. After a crash an unclosed rest is cut away and replayed
again, and closed steps are not: so nothing is doubled, whichever writes survived.
"""

from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from functools import lru_cache
from struct import Struct
from typing import NamedTuple

import google_crc32c

from pulque.errors import StorageError
from pulque.model.batch import seed_of, verify_crc
from pulque.model.names import PartitionName
from pulque.storage.events import Listener
from pulque.storage.files import Buffer, File, FileSystem

__all__ = [
    "ENTRY_SIZE",
    "SCHEDULE",
    "ScheduleEntry",
    "TickFile",
    "encode_entry",
    "tick_name",
    "tick_named",
]

SCHEDULE = "schedule"
_HEAD = Struct("<2sBBIQqQqqHH")
_CRC = Struct("<I")
ENTRY_SIZE = _HEAD.size + _CRC.size
_MAGIC = b"DS"
_VERSION = 1
_WINDOW = 4 * 1024 * 1024
_FORM = "%Y%m%dT%H%MZ"


class ScheduleEntry(NamedTuple):
    """Some messages of a tick, and their place."""

    offset: int
    size: int
    partition: PartitionName
    count: int  # type: ignore[assignment]  # nobody counts in this tuple
    first_due_ms: int
    last_due_ms: int
    replayed: int
    """Up to where the message log is replayed into this tick; 0 if the step continues."""
    batch: bytes
    """Empty if only the heads of entries are read."""


@lru_cache(maxsize=65536)
def tick_name(tick: int, suffix: str = "log") -> str:
    """Return the path of a tick's file."""
    began = datetime.fromtimestamp(tick // 1000, UTC)
    return f"{SCHEDULE}/{began.strftime(_FORM)}.{suffix}"


def tick_named(name: str, suffix: str = "log") -> int | None:
    """Return the tick in a file's name, or None for a foreign name."""
    stem, _, found = name.partition(".")
    if found != suffix:
        return None
    try:
        began = datetime.strptime(stem, _FORM).replace(tzinfo=UTC)
    except ValueError:
        return None
    return int(began.timestamp()) * 1000


def encode_entry(  # noqa: PLR0913  # the fields of its head
    batch: Sequence[Buffer],
    partition: PartitionName,
    *,
    count: int,
    offset: int,
    tick: int,
    replayed: int,
    dues_ms: tuple[int, int],
) -> tuple[bytes, int]:
    """Return the head of an entry, and the size of the entry.

    Args:
        batch: The batch, in consecutive pieces.
        partition: Its partition.
        count: The number of its messages.
        offset: The offset of the entry.
        tick: The tick of the file.
        replayed: Not 0 for the entry that closes a step: up to where the log is replayed.
        dues_ms: The first and the last due time.
    """
    name = partition.encode()
    size = ENTRY_SIZE + len(name) + sum(map(len, batch))
    head = _HEAD.pack(
        _MAGIC, _VERSION, bool(replayed), size, offset, tick, replayed, *dues_ms, count, len(name)
    )
    crc = google_crc32c.extend(google_crc32c.value(head), name)
    return head + _CRC.pack(crc) + name, size


class TickFile:
    """The schedule log of one tick. One writer; reads may come from any thread."""

    def __init__(self, files: FileSystem, tick: int, listener: Listener) -> None:
        self._files = files
        self._listener = listener
        self.tick = tick
        self.path = tick_name(tick)

    def append(self, buffers: Sequence[Buffer], at: int) -> int:
        """Append entries; return the new end.

        Raises:
            StorageError: No entry was added.
        """
        file = self._files.open(self.path, create=True)
        try:
            return at + file.write(buffers, at)
        except StorageError:
            file.truncate(at)
            raise
        finally:
            file.close()

    def sync(self) -> None:
        """Make written entries durable, except for the file's name."""
        file = self._files.open(self.path)
        try:
            file.sync()
        finally:
            file.close()

    def entries(self, start: int = 0, *, end: int | None = None) -> Iterator[ScheduleEntry]:
        """Yield the verified entries from an offset on; report damage and leave it out."""
        file = self._files.open(self.path, writable=False)
        try:
            yield from self._walk(file, start, file.size() if end is None else end)
        finally:
            file.close()

    def read(self, places: Sequence[tuple[int, int]]) -> list[ScheduleEntry | None]:
        """Return verified entries by offset and size; report a damaged one, and return None."""
        file = self._files.open(self.path, writable=False)
        try:
            return [
                next(self._walk(file, offset, offset + size, window=size), None)
                for offset, size in places
            ]
        finally:
            file.close()

    def may_hold(self, message_id: bytes, start: int, end: int) -> bool:
        """Return whether the bytes of an id occur in a part of the file.

        Entries are not compressed: a byte search is many times as fast as decoding them.
        A hit may be a coincidence.
        """
        file = self._files.open(self.path, writable=False)
        try:
            while start < end:
                data = file.read(min(_WINDOW, end - start), start)
                if message_id in data:
                    return True
                if start + len(data) >= end or len(data) < _WINDOW:
                    break
                start += len(data) - len(message_id) + 1
            return False
        finally:
            file.close()

    def tick_inside(self) -> int:
        """Return the tick of the first entry; the file's own if that cannot be read."""
        file = self._files.open(self.path, writable=False)
        try:
            head = file.read(ENTRY_SIZE, 0)
            if len(head) < ENTRY_SIZE:
                return self.tick
            magic, version, *_, length = fields = _HEAD.unpack_from(head)
            crc = google_crc32c.value(head[: _HEAD.size] + file.read(length, ENTRY_SIZE))
            is_whole = crc == _CRC.unpack_from(head, _HEAD.size)[0]
            is_ours = magic == _MAGIC and version == _VERSION and is_whole
            return int(fields[5]) if is_ours else self.tick
        finally:
            file.close()

    def first_replayed(self) -> int:
        """Return up to where the message log was replayed in the first step; 0 if that is lost."""
        file = self._files.open(self.path, writable=False)
        try:
            found = self._walk(file, 0, file.size(), is_silent=True)
            return next((entry.replayed for entry in found if entry.replayed), 0)
        finally:
            file.close()

    def recover(self, start: int, durable: int) -> tuple[int, int, int]:
        """Cut away an unclosed end.

        Args:
            start: Entries before it were intact at the last checkpoint, and are not read.
            durable: Bytes before it were on disk. Damaged ones stay, as they may be
                dispatched; beyond it a power cut leaves anything, and the replay rewrites it.

        Returns:
            The new end, up to where the log is replayed, and the number of messages from
            ``start`` on.
        """
        file = self._files.open(self.path)
        try:
            size = file.size()
            end, replayed, at = start, 0, start
            count = unclosed = 0
            for entry in self._walk(file, start, size, is_silent=True):
                if entry.offset > max(at, durable):
                    break  # something is missing before it that was not on disk
                at = entry.offset + entry.size
                unclosed += entry.count
                if entry.replayed:
                    end, replayed, count = at, entry.replayed, unclosed
            if end < size:
                self._listener.tail_cut(self.path, end, size - end)
                file.truncate(end)
                file.sync()
            return end, replayed, count
        finally:
            file.close()

    def _walk(
        self,
        file: File,
        offset: int,
        end: int,
        *,
        is_silent: bool = False,
        window: int = _WINDOW,
    ) -> Iterator[ScheduleEntry]:
        view = _ScheduleWindow(file, min(window, end - offset))
        while offset < end:
            found = self._entry_at(view, offset, end)
            if isinstance(found, ScheduleEntry):
                yield found
                offset += found.size
            else:
                following = self._next(view, offset + 1, end)
                if not is_silent:
                    self._listener.corruption_found(self.path, offset, following - offset, found)
                offset = following

    def _entry_at(self, window: "_ScheduleWindow", offset: int, end: int) -> ScheduleEntry | str:
        """Return an entry, or a text that describes the damage."""
        head = window.at(offset, min(ENTRY_SIZE, end - offset))
        if len(head) < ENTRY_SIZE:
            return f"{ENTRY_SIZE - len(head)} bytes of an entry are missing"
        fields = _HEAD.unpack_from(head)
        magic, version, _, size, at, tick, replayed, first, last, count, length = fields
        if magic != _MAGIC or version != _VERSION:
            return "there is no entry"
        name = window.at(offset + ENTRY_SIZE, length)
        crc = google_crc32c.extend(google_crc32c.value(head[: _HEAD.size]), name)
        if crc != _CRC.unpack_from(head, _HEAD.size)[0]:
            return "the crc of an entry does not match"
        reason = ""
        if at != offset or tick != self.tick:
            reason = f"an entry of offset {at} of {tick_name(tick)} lies here"
        elif offset + size > end:
            reason = f"{offset + size - end} bytes of an entry are missing"
        if reason:
            return reason
        partition = PartitionName(name.decode())
        batch = window.at(offset + ENTRY_SIZE + length, size - ENTRY_SIZE - length)
        if not verify_crc(batch, seed_of(partition)):
            return f"the crc of {count} messages of {partition} does not match"
        return ScheduleEntry(offset, size, partition, count, first, last, replayed, batch)

    def _next(self, window: "_ScheduleWindow", offset: int, end: int) -> int:
        """Return where the next entry with its own offset begins, or the end."""
        while offset < end:
            data = window.at(offset, min(_WINDOW, end - offset))
            at = data.find(_MAGIC)
            while 0 <= at <= len(data) - ENTRY_SIZE:
                found = _HEAD.unpack_from(data, at)
                if found[1] == _VERSION and found[4] == offset + at and found[5] == self.tick:
                    return offset + at
                at = data.find(_MAGIC, at + 1)
            if len(data) < ENTRY_SIZE:
                break
            offset += len(data) - ENTRY_SIZE + 1
        return end


class _ScheduleWindow:
    """The part of a file that is in memory."""

    def __init__(self, file: File, size: int) -> None:
        self._file = file
        self._size = size
        self._data = b""
        self._offset = 0

    def at(self, offset: int, size: int) -> bytes:
        """Return ``size`` bytes; fewer only at the end of the file."""
        at = offset - self._offset
        if at < 0 or at + size > len(self._data):
            self._data = self._file.read(max(size, self._size), offset)
            self._offset, at = offset, 0
        return self._data[at : at + size]
