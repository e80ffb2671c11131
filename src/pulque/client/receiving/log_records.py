"""Records of the message log as a broker serves them, turned into batches of messages.

A run of messages is ``count`` from ``first_sequence`` on; the records may begin before it and
end after it, and leave out messages that are not stored any more: retention took them, or the
disk damaged them. Every batch is checked against its crc before anybody sees a body.
"""

from collections.abc import Iterator
from functools import lru_cache
from struct import Struct
from typing import NamedTuple

from google_crc32c import value

from pulque.errors import CorruptionError, InvalidBatchError, RemoteProtocolError
from pulque.model.batch import (
    HEADER,
    HEADER_SIZE,
    MAX_RECORDS_SIZE,
    UNKNOWN_FLAGS,
    BatchHeader,
    layout_of,
    seed_of,
    verify_crc,
)
from pulque.model.checksum import crc_after_crc
from pulque.model.gathered import Gathered, read_gathered
from pulque.model.names import PartitionName
from pulque.model.positions import ConsumeSequence
from pulque.model.record import (
    ENVELOPE_SIZE,
    MAGIC,
    VERSION,
    Envelope,
    RecordType,
    read_envelope,
)

__all__ = [
    "Served",
    "Single",
    "read_gathered_record",
    "read_record",
    "read_single",
    "split_records",
]


_HEAD = Struct("<HBBI24xQqII")
"""What of an envelope a client needs: see ``pulque.model.record``."""
_SIZE = Struct("<I")
_SINGLE_SIZE = ENVELOPE_SIZE + HEADER_SIZE + _SIZE.size
_BATCH = int(RecordType.BATCH)
_CRC_AT = ENVELOPE_SIZE - 4
_MOST_PRIORITY = 9


Single = tuple[bytes, BatchHeader, ConsumeSequence, int, int, int]
"""A batch of one message, its header, its sequence, when it was stored, where in the batch its own
data begins, and the size of its record. A bare tuple, as there are many of them."""


class Served(NamedTuple):
    """One batch of a run: messages ``start..end`` of it belong to the run."""

    data: bytes
    envelope: Envelope
    start: int
    end: int


def split_records(
    records: bytes | memoryview,
    *,
    partition: PartitionName,
    first_sequence: int,
    count: int,
) -> Iterator[Served]:
    """Return the batches of a run, in order, each checked and clipped to the run.

    Raises:
        CorruptionError: A batch is not what its producer packed.
        RemoteProtocolError: The records are out of order, or of another run.
    """
    at = 0
    expected = first_sequence
    last = first_sequence + count
    while at < len(records) and expected < last:
        served = read_record(records, at, partition, expected, last)
        yield served
        at += served.envelope.size
        expected = served.envelope.first_sequence + served.end


def read_record(
    records: bytes | memoryview, at: int, partition: PartitionName, expected: int, last: int
) -> Served:
    """Return the batch at ``at``, checked, and clipped to messages ``expected..last``.

    Raises:
        CorruptionError: It is not what its producer packed.
        RemoteProtocolError: It is out of order, or of another run.
    """
    envelope = read_envelope(bytes(records[at : at + ENVELOPE_SIZE]))
    if isinstance(envelope, str):
        raise RemoteProtocolError(f"a record of {partition} cannot be read: {envelope}")
    data = bytes(records[at + ENVELOPE_SIZE : at + envelope.size])
    if len(data) + ENVELOPE_SIZE != envelope.size or not verify_crc(data, seed_of(partition)):
        raise CorruptionError(
            partition, envelope.offset, "the crc of a batch does not match its bytes"
        )
    first = envelope.first_sequence
    start, end = max(expected, first), min(last, first + envelope.count)
    if start >= end:
        raise RemoteProtocolError(
            f"messages {first} to {first + envelope.count} of {partition} came, and "
            f"{expected} to {last} were announced"
        )
    return Served(data, envelope, start - first, end - first)


def read_gathered_record(
    records: bytes, at: int, partition: PartitionName, expected: int, last: int
) -> Gathered:
    """Return the gathered record at ``at``, checked: all its messages belong to the run.

    Raises:
        CorruptionError: Its batch is not what the broker packed.
        RemoteProtocolError: It cannot be read, is out of order, or of another run.
    """
    found = read_gathered(records, at)
    if isinstance(found, str):
        raise RemoteProtocolError(f"a gathered record of {partition} cannot be read: {found}")
    first = found.first_sequence
    if not expected <= first <= first + found.places[-1] < last:
        raise RemoteProtocolError(
            f"messages {first} to {first + found.places[-1] + 1} of {partition} came, and "
            f"{expected} to {last} were announced"
        )
    if not verify_crc(found.batch, seed_of(partition)):
        raise CorruptionError(partition, 0, "the crc of a gathered batch does not match its bytes")
    return found


def read_single(records: bytes, at: int, seed: int) -> Single | None:
    """Return the record at ``at`` if it is of one message and in order: the short way.

    A broker cuts such records out of its batches for those who want few messages of many, and
    has stored them for those who send one at a time. It checks what ``read_record`` and
    ``StoredBatch`` check; whatever is not plain is left to them, and to their errors.
    """
    if len(records) - at < _SINGLE_SIZE:
        return None
    magic, kind, version, size, first, stored_at_ms, count, crc = _HEAD.unpack_from(records, at)
    header = BatchHeader._make(HEADER.unpack_from(records, at + ENVELOPE_SIZE))
    batch_crc, flags, codec, priority, batch_count, records_size, _, _, _, _, _ = header
    if count != 1 or batch_count != 1 or codec or priority > _MOST_PRIORITY:
        return None
    if kind != _BATCH or version != VERSION or magic != MAGIC:
        return None
    data = records[at + ENVELOPE_SIZE : at + size]
    data_start, record_width = _widths(flags)
    (data_size,) = _SIZE.unpack_from(records, at + ENVELOPE_SIZE + HEADER_SIZE)
    if (
        len(data) + ENVELOPE_SIZE != size
        or data_start + data_size != len(data)
        or record_width + data_size != records_size
        or value(records[at : at + _CRC_AT]) != crc
        or crc_after_crc(data, seed) != batch_crc
    ):
        return None
    return data, header, first, stored_at_ms, data_start, size


@lru_cache(maxsize=1024)
def _widths(flags: int) -> tuple[int, int]:
    """Return where the data of a single message begins, and how wide its records' columns are."""
    if flags & UNKNOWN_FLAGS:
        return MAX_RECORDS_SIZE, 0  # nothing is that long
    layout = layout_of(flags)
    return layout.data_start(1), layout.record_width


def check_count(found: int, announced: int) -> None:
    """Raise ``InvalidBatchError`` unless a batch holds what its envelope announced."""
    if found != announced:
        raise InvalidBatchError(f"a batch of {found} messages was announced as one of {announced}")
