"""The dispatch logs of a delay server: which messages were sent, cancelled or moved.

Each tick with such messages has one file beside its schedule log. It contains no messages,
only the *places* of messages in the schedule log: the offset of an entry and the index in it::

    magic "DD" | version u8 | kind u8 | size u32 | … | crc u32

Before a batch is sent to a broker for the first time, its *intent* is recorded: the number under
which the broker deduplicates it, the broker, and the messages. After the broker accepted it, that
is recorded, too. So a delay server that stopped in between sends the same batch to the same
broker again, and no message is delivered twice.
"""

from collections.abc import Iterable
from enum import IntEnum
from struct import Struct, error
from typing import Any, NamedTuple

import google_crc32c
import numpy as np
import numpy.typing as npt

from pulque.model.names import PartitionName
from pulque.storage.events import Listener
from pulque.storage.files import File, FileSystem
from pulque.storage.schedule.schedule_log import tick_name

__all__ = [
    "DispatchLog",
    "Intent",
    "Kind",
    "Noted",
    "Runs",
    "encode_intent",
    "encode_note",
    "joined_runs",
    "runs_from",
]

_HEAD = Struct("<2sBBI")
_CRC = Struct("<I")
_INTENT = Struct("<QQQHHI")
_NOTE = Struct("<QI")
_RUN = np.dtype([("place", "<u8"), ("length", "<u4")])
Runs = npt.NDArray[Any]
"""Runs of consecutive messages in one entry of the schedule log.

The *place* of the first message is the offset of its entry and its index there; the *length* is
the number of messages. There may be a million runs: they are processed as arrays.
"""
_MAGIC = b"DD"
_VERSION = 1
_LARGEST = 16 * 1024 * 1024


class Kind(IntEnum):
    """The kind of a record."""

    INTENT = 1
    """A batch is being sent to a broker."""
    DONE = 2
    """The broker accepted the batch."""
    ABANDONED = 3
    """The broker did not store the batch and never will: its messages go to another one."""
    CANCELLED = 4
    """Messages were cancelled."""
    MOVED = 5
    """Messages were rescheduled; the message log has the new time."""


def runs_from(places: Iterable[int], lengths: Iterable[int] | int = 1) -> Runs:
    """Return runs, given where they begin and how long they are."""
    starts = np.asarray(places if isinstance(places, np.ndarray) else list(places), np.uint64)
    runs = np.empty(len(starts), _RUN)
    runs["place"] = starts
    runs["length"] = lengths
    return runs


def joined_runs(several: Iterable[Runs]) -> Runs:
    """Concatenate runs."""
    return np.concatenate([np.empty(0, _RUN), *several])


class Intent(NamedTuple):
    """A batch that is being sent, or was sent, to a broker."""

    number: int
    """The number of the batch in this log."""
    sequence: int
    """The producer sequence by which the broker deduplicates it."""
    durable: int
    """The schedule log was on disk up to here."""
    broker_group: str
    partition: PartitionName
    """The partition at the broker."""
    runs: Runs


class Noted(NamedTuple):
    """The contents of a dispatch log."""

    intents: dict[int, Intent]
    """By number, without abandoned ones."""
    done: set[int]
    """The numbers of accepted batches."""
    cancelled: list[Runs]
    moved: list[Runs]
    end: int = 0
    """Where the log ends."""
    last_number: int = 0
    durable: int = 0
    """The schedule log was on disk up to here."""
    is_damaged: bool = False
    """Whether records are missing before others."""


def encode_intent(intent: Intent) -> bytes:
    """Encode the record of a batch that is about to be sent."""
    group, partition = intent.broker_group.encode(), intent.partition.encode()
    head = _INTENT.pack(
        intent.number,
        intent.sequence,
        intent.durable,
        len(group),
        len(partition),
        len(intent.runs),
    )
    return _framed(Kind.INTENT, head + group + partition + intent.runs.tobytes())


def encode_note(kind: Kind, number: int, runs: Runs | None = None) -> bytes:
    """Encode the record of the outcome of a batch, or of messages.

    Args:
        kind: The outcome.
        number: The number of the batch; for messages, up to where the schedule log was on disk.
        runs: The messages.
    """
    listed = runs_from(()) if runs is None else runs
    return _framed(kind, _NOTE.pack(number, len(listed)) + listed.tobytes())


def _framed(kind: Kind, payload: bytes) -> bytes:
    head = _HEAD.pack(_MAGIC, _VERSION, kind, _HEAD.size + len(payload) + _CRC.size)
    return head + payload + _CRC.pack(google_crc32c.value(head + payload))


class DispatchLog:
    """The dispatch log of one tick. Used by one thread at a time."""

    def __init__(self, files: FileSystem, tick: int, listener: Listener) -> None:
        self._files = files
        self._listener = listener
        self.path = tick_name(tick, "dispatch")

    def exists(self) -> bool:
        """Return whether the tick has a dispatch log."""
        return self._files.exists(self.path)

    def load(self, *, is_quiet: bool = False) -> Noted:
        """Read the log. Cut a torn end away; report damage before it.

        Args:
            is_quiet: Whether to cut and report nothing: another thread may be writing.
        """
        if not self.exists():
            return Noted({}, set(), [], [])
        file = self._files.open(self.path)
        try:
            return self._load(file, is_quiet=is_quiet)
        finally:
            file.close()

    def append(self, data: bytes, at: int) -> int:
        """Append records; return the new end.

        Raises:
            StorageError: The records may be written in part, and do not count.
        """
        file = self._files.open(self.path, create=True)
        try:
            return at + file.write([data], at)
        finally:
            file.close()

    def sync(self) -> None:
        """Make written records durable, except for the file's name."""
        file = self._files.open(self.path)
        try:
            file.sync()
        finally:
            file.close()

    def _load(self, file: File, *, is_quiet: bool) -> Noted:
        data = file.read(file.size(), 0)
        noted = Noted({}, set(), [], [])
        at = end = durable = 0
        is_damaged = False
        while at < len(data):
            size = _whole(data, at)
            found = self._take_in(data[at : at + size], noted) if size else None
            if found is None:
                at += 1
                at = data.find(_MAGIC, at)
                if at < 0:
                    break
                continue
            is_damaged = is_damaged or at > end
            if at > end and not is_quiet:
                self._listener.corruption_found(self.path, end, at - end, "there is no record")
            durable = max(durable, found)
            at = end = at + size
        if end < len(data) and not is_quiet:
            self._listener.tail_cut(self.path, end, len(data) - end)
            file.truncate(end)
            file.sync()
        last = max(noted.intents, default=0)
        last = max(last, max(noted.done, default=0))
        return noted._replace(end=end, last_number=last, durable=durable, is_damaged=is_damaged)

    @staticmethod
    def _take_in(record: bytes, noted: Noted) -> int | None:
        """Apply a record; return its durable end of the schedule log, None if it is invalid."""
        try:
            kind = Kind(_HEAD.unpack_from(record)[2])
            payload = record[_HEAD.size : -_CRC.size]
            if kind is Kind.INTENT:
                intent = _decode_intent(payload)
                noted.intents[intent.number] = intent
                return intent.durable
            number, count = _NOTE.unpack_from(payload)
            runs = _decode_runs(payload, _NOTE.size, count)
        except (ValueError, error):
            return None
        if kind is Kind.DONE:
            noted.done.add(number)
            return 0
        if kind is Kind.ABANDONED:
            noted.intents.pop(number, None)
            return 0
        (noted.cancelled if kind is Kind.CANCELLED else noted.moved).append(runs)
        return int(number)


def _whole(data: bytes, at: int) -> int:
    """Return the size of the record at an offset, or 0 if there is no intact one."""
    if len(data) - at < _HEAD.size:
        return 0
    magic, version, _, size = _HEAD.unpack_from(data, at)
    if magic != _MAGIC or version != _VERSION or not _HEAD.size < size <= _LARGEST:
        return 0
    if at + size > len(data):
        return 0
    crc = google_crc32c.value(data[at : at + size - _CRC.size])
    return size if crc == _CRC.unpack_from(data, at + size - _CRC.size)[0] else 0


def _decode_intent(payload: bytes) -> Intent:
    number, sequence, durable, group_size, name_size, count = _INTENT.unpack_from(payload)
    at = _INTENT.size
    group = payload[at : at + group_size].decode()
    at += group_size
    partition = PartitionName(payload[at : at + name_size].decode())
    runs = _decode_runs(payload, at + name_size, count)
    return Intent(number, sequence, durable, group, partition, runs)


def _decode_runs(payload: bytes, at: int, count: int) -> Runs:
    if len(payload) != at + count * _RUN.itemsize:
        raise ValueError(f"{count} runs do not fit")
    return np.frombuffer(payload, _RUN, count, at)
