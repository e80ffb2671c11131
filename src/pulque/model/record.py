"""The envelope of a record in the message log, and what a broker hands out with a batch.

::

    +-------+------+---------+------+--------+--------+-------+-----------+----------+
    | magic | type | version | size | offset | synced | epoch | partition | first    |
    | u16   | u8   | u8      | u32  | u64    | u64    | u32   | id u32    | seq. u64 |
    +-------+------+---------+------+--------+--------+-------+-----------+----------+
    | stored at ms i64 | count u32 | crc u32 | then the batch, or a partition table  |
    +------------------+-----------+---------+---------------------------------------+

``size`` counts the whole record. ``crc`` is CRC-32C over the envelope before it; what follows
has a crc of its own. ``offset`` repeats where the record lies, so that bytes of a log inside a
message's body can never be taken for the log itself. ``synced`` is how far the log was known to
be on disk when the record was appended: damage found below that mark by a later record is
corruption, not a torn tail, and is never cut away.
"""

from enum import IntEnum
from struct import Struct
from typing import NamedTuple

import google_crc32c

from pulque.model.positions import ConsumeSequence, Epoch, MessageOffset, PartitionId

__all__ = [
    "ENVELOPE_SIZE",
    "MAGIC",
    "VERSION",
    "Envelope",
    "RecordType",
    "cut_envelope",
    "has_own_crc",
    "pack_batch_envelope",
    "pack_envelope",
    "read_envelope",
]

MAGIC = 0x4C50  # "PL" on disk
VERSION = 1
_FIELDS = Struct("<HBBIQQIIQqI")
_CRC = Struct("<I")
_ENVELOPE = Struct("<HBBIQQIIQqII")
ENVELOPE_SIZE = _ENVELOPE.size


class RecordType(IntEnum):
    """The kind of a record: a batch or a partition table."""

    BATCH = 1
    PARTITION_TABLE = 2


_BATCH = int(RecordType.BATCH)
_TYPES = {int(each): each for each in RecordType}


class Envelope(NamedTuple):
    """What the leader writes before a batch."""

    type: RecordType
    size: int
    offset: MessageOffset
    synced: MessageOffset
    epoch: Epoch
    partition: PartitionId
    first_sequence: ConsumeSequence
    stored_at_ms: int
    count: int  # type: ignore[assignment]  # nobody counts in this tuple


def pack_envelope(envelope: Envelope) -> bytes:
    """Return the bytes of an envelope."""
    kind, *rest = envelope
    fields = _FIELDS.pack(MAGIC, kind, VERSION, *rest)
    return fields + _CRC.pack(google_crc32c.value(fields))


def has_own_crc(head: bytes) -> bool:
    """Return whether an envelope is intact."""
    crc: int = _CRC.unpack_from(head, _FIELDS.size)[0]
    return bool(google_crc32c.value(head[: _FIELDS.size]) == crc)


def cut_envelope(head: bytes, size: int, skipped: int, count: int) -> bytes:
    """Return a verified envelope for a part of its batch.

    Args:
        head: The envelope of the whole batch.
        size: Of the part's record.
        skipped: How many messages of the batch come before the part.
        count: How many messages the part has.
    """
    magic, kind, version, _, offset, synced, epoch, partition, first, at_ms, _, _ = (
        _ENVELOPE.unpack(head)
    )
    fields = _FIELDS.pack(
        magic, kind, version, size, offset, synced, epoch, partition, first + skipped, at_ms, count
    )
    return fields + _CRC.pack(google_crc32c.value(fields))


def pack_batch_envelope(  # noqa: PLR0913, PLR0917  # its fields, in order
    size: int,
    offset: int,
    synced: int,
    epoch: int,
    partition: int,
    first_sequence: int,
    stored_at_ms: int,
    count: int,
) -> bytes:
    """Return the bytes of a batch's envelope: as ``pack_envelope``, without the tuple."""
    fields = _FIELDS.pack(
        MAGIC,
        _BATCH,
        VERSION,
        size,
        offset,
        synced,
        epoch,
        partition,
        first_sequence,
        stored_at_ms,
        count,
    )
    return fields + _CRC.pack(google_crc32c.value(fields))


def read_envelope(data: bytes, at: int = 0) -> Envelope | str:
    """Return the envelope at ``at``, or a text that describes what is wrong with it.

    The caller has to check its ``offset``: in a served slice it does not match.
    """
    if len(data) - at < ENVELOPE_SIZE:
        return f"{len(data) - at} bytes left, an envelope has {ENVELOPE_SIZE}"
    magic, kind, version, size, *fields, crc = _ENVELOPE.unpack_from(data, at)
    if magic != MAGIC:
        return f"magic {magic:#06x} is not {MAGIC:#06x}"
    if google_crc32c.value(data[at : at + ENVELOPE_SIZE - 4]) != crc:
        return "the envelope's crc does not match"
    if version != VERSION or kind not in _TYPES:
        return f"version {version} or type {kind} is unknown (this is version {VERSION})"
    if size < ENVELOPE_SIZE:
        return f"size {size} is smaller than the envelope"
    return Envelope._make((_TYPES[kind], size, *fields))
