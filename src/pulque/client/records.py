"""Records of the message log as a broker serves them, turned into batches of messages.

A run of messages is ``count`` from ``first_sequence`` on; the records may begin before it and
end after it, and leave out messages that are not stored any more: retention took them, or the
disk damaged them. Every batch is checked against its crc before anybody sees a body.
"""

from collections.abc import Iterator
from typing import NamedTuple

from pulque.errors import CorruptionError, InvalidBatchError, RemoteProtocolError
from pulque.model.batch import seed_of, verify_crc
from pulque.model.names import PartitionName
from pulque.model.record import ENVELOPE_SIZE, Envelope, read_envelope

__all__ = ["Served", "split_records"]


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
    seed = seed_of(partition)
    at = 0
    expected = first_sequence
    last = first_sequence + count
    while at < len(records) and expected < last:
        envelope = read_envelope(bytes(records[at : at + ENVELOPE_SIZE]))
        if isinstance(envelope, str):
            raise RemoteProtocolError(f"a record of {partition} cannot be read: {envelope}")
        data = bytes(records[at + ENVELOPE_SIZE : at + envelope.size])
        at += envelope.size
        if len(data) + ENVELOPE_SIZE != envelope.size or not verify_crc(data, seed):
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
        yield Served(data, envelope, start - first, end - first)
        expected = end


def check_count(found: int, announced: int) -> None:
    """Raise ``InvalidBatchError`` unless a batch holds what its envelope announced."""
    if found != announced:
        raise InvalidBatchError(f"a batch of {found} messages was announced as one of {announced}")
