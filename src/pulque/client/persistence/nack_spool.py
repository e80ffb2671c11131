"""Nacks that no broker could be told, each with its whole message, in a file of their own.

::

    +-----------+----------+----------+---------------+-------------+------------------+
    | magic u32 | size u32 | crc u32  | head size u32 | head (JSON) | message: a batch |
    +-----------+----------+----------+---------------+-------------+------------------+

``size`` counts what follows the crc, and the crc covers it. Records are appended and synced
before anything counts on them. A crash may tear the last one: it is cut off when the file is
read. The message is a batch of one, as a retry is, so that a broker can store it as it stands.
"""

import contextlib
import json
import logging
import os
from collections.abc import Sequence
from pathlib import Path
from struct import Struct
from typing import NamedTuple, Protocol

import google_crc32c

from pulque.client.receiving.saved_positions import KeptRange
from pulque.model.batch import Flag, seed_of
from pulque.model.message import StoredBatch
from pulque.model.names import PartitionName
from pulque.model.pack import BatchPacker
from pulque.model.positions import ConsumeSequence, Epoch, StartCount, Tenure
from pulque.wire.requests import Nacked

__all__ = ["NackRefuge", "Spool", "SpooledNack", "decode_nack", "encode_nack", "pack_one"]

log = logging.getLogger("pulque.client")

SPOOL_LIMIT = 64 * 1024 * 1024
_MAGIC = 0x4B4E5150  # "PQNK"
_HEAD = Struct("<III")
_SIZE = Struct("<I")


class SpooledNack(NamedTuple):
    """One nack, and the message that it is about."""

    partition: PartitionName
    tenure: Tenure
    pull: int
    sequence: int
    stored_at_ms: int
    delay_ms: int
    reason: str
    message: bytes
    """A batch of one."""

    def as_range(self) -> KeptRange:
        """Return the delivery that it finishes."""
        nacked = (Nacked(self.pull, self.delay_ms, self.reason),)
        return KeptRange(self.tenure, self.pull, 1, self.sequence, self.stored_at_ms, nacked)

    def read_message(self) -> StoredBatch:
        """Return the message, as the batch of one that it is."""
        return StoredBatch(
            self.message,
            partition=self.partition,
            first_sequence=ConsumeSequence(self.sequence),
            stored_at_ms=self.stored_at_ms,
        )


class NackRefuge(Protocol):
    """Where nacks go that their own broker cannot be told.

    The spool is the last of them. Another broker, which appends the whole message to the group's
    retry partition, can come before it.
    """

    takes_over: bool
    """Whether what is there is retried from there: its own broker need not hear of it."""

    def put(self, nacks: Sequence[SpooledNack]) -> int:
        """Make nacks safe, in order; return how many of them are.

        Raises:
            OSError: Where they should go cannot be written; none of them is safe.
        """


class Spool:
    """The file of one consumer. Used by one thread at a time.

    Args:
        path: The file; made when there is something to write.
        limit: How large it may grow, in bytes. What does not fit is not safe.
    """

    takes_over = False

    def __init__(self, path: Path, limit: int = SPOOL_LIMIT) -> None:
        self._path = path
        self._limit = limit
        self._end = 0
        self._is_named = False
        """Whether the file's name is known to survive a power cut, as its bytes do."""

    def read(self) -> list[SpooledNack]:
        """Return all whole records, and cut off what follows them.

        Raises:
            OSError: The file cannot be read.
        """
        try:
            data = self._path.read_bytes()
        except FileNotFoundError:
            return []
        found = []
        at = 0
        while (record := decode_nack(data, at)) is not None:
            nack, at = record
            found.append(nack)
        if at < len(data):
            log.warning("torn nacks cut off: file=%s bytes=%d", self._path, len(data) - at)
            os.truncate(self._path, at)
        self._end = at
        return found

    def put(self, nacks: Sequence[SpooledNack]) -> int:
        """Append nacks and sync; return how many of them had room."""
        records = []
        end = self._end
        for nack in nacks:
            record = encode_nack(nack)
            if end + len(record) > self._limit:
                log.warning("no room for nacks: file=%s limit=%d", self._path, self._limit)
                break
            records.append(record)
            end += len(record)
        if records:
            self._append(b"".join(records))
            if not self._is_named:
                # Also of a file that was here before: its maker may have died before this.
                _sync_folder(self._path.parent)
                self._is_named = True
            self._end = end
        return len(records)

    def clear(self) -> None:
        """Forget all: a broker knows of them."""
        if self._end:
            os.truncate(self._path, 0)
            self._end = 0

    def _append(self, data: bytes) -> None:
        file = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            done = 0
            while done < len(data):
                done += os.pwrite(file, data[done:], self._end + done)
            os.fsync(file)
        except OSError:
            # What is left of it is no whole record, or one that nobody counts on.
            with contextlib.suppress(OSError):
                os.ftruncate(file, self._end)
            raise
        finally:
            os.close(file)


def pack_one(batch: StoredBatch, index: int) -> bytes:
    """Return one message of a batch as a batch of its own, with its id and its attempt."""
    flags = batch.header.flags
    packer = BatchPacker()
    start = batch.body_starts()[index]
    packer.add_encoded(
        batch.data[start : batch.starts[index + 1]],
        key=batch.part(index, Flag.KEYS),
        order_key=batch.part(index, Flag.ORDER_KEYS),
        tags=batch.part(index, Flag.TAGS),
        headers=batch.part(index, Flag.HEADERS),
        expires_at_ms=batch.column("expires_at_ms")[index] if flags & Flag.EXPIRES else 0,
        created_at_ms=batch.column("created_at_ms")[index] if flags & Flag.CREATED else 0,
        attempt=batch.column("attempt")[index] if flags & Flag.ATTEMPTS else 1,
        message_id=batch.id_of(index),
    )
    return packer.encode(
        seed=seed_of(batch.partition),
        ids=batch.id_of(index),
        created_at_ms=batch.header.created_at_ms,
        priority=batch.header.priority,
    )


def encode_nack(nack: SpooledNack) -> bytes:
    """Return a record of the file."""
    head = json.dumps(
        {
            "partition": nack.partition,
            "tenure": nack.tenure,
            "pull": nack.pull,
            "sequence": nack.sequence,
            "stored_at_ms": nack.stored_at_ms,
            "delay_ms": nack.delay_ms,
            "reason": nack.reason,
        }
    ).encode()
    payload = _SIZE.pack(len(head)) + head + nack.message
    return _HEAD.pack(_MAGIC, len(payload), google_crc32c.value(payload)) + payload


def decode_nack(data: bytes, at: int) -> tuple[SpooledNack, int] | None:
    """Return the record at an offset and where it ends, or None if there is no whole one."""
    if at + _HEAD.size + _SIZE.size > len(data):
        return None
    magic, size, crc = _HEAD.unpack_from(data, at)
    payload = data[at + _HEAD.size : at + _HEAD.size + size]
    if magic != _MAGIC or len(payload) < max(size, _SIZE.size):
        return None
    if google_crc32c.value(payload) != crc:
        return None
    (head_size,) = _SIZE.unpack_from(payload)
    told = json.loads(payload[_SIZE.size : _SIZE.size + head_size])
    epoch, start = told.pop("tenure")
    nack = SpooledNack(
        tenure=Tenure(Epoch(epoch), StartCount(start)),
        message=payload[_SIZE.size + head_size :],
        **told,
    )
    return nack, at + _HEAD.size + size


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
