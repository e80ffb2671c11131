"""Records of the message log, as a broker serves or a file holds them, placed for ``decode``.

Per batch one look at the envelope and one checksum; a compressed batch is opened and put at the
end of the buffer.
"""

from collections.abc import Generator, Iterator

import numpy as np

from pulque.errors import CorruptionError, InvalidBatchError
from pulque.model.batch import Codec, layout_of, read_header, seed_of, verify_crc
from pulque.model.compression import decompress
from pulque.model.names import PartitionName
from pulque.model.record import ENVELOPE_SIZE, Envelope, RecordType, read_envelope
from pulque.pipeline.reading.batch_decoder import PLACE, BatchPlace, UndecodableBatch
from pulque.pipeline.reading.ranges import Range

__all__ = ["Placer", "place_served"]

_Place = tuple[int, int, int, int, int, int]


class Placer:
    """Takes batches in one by one, and gives them out together."""

    def __init__(self) -> None:
        self._data = bytearray()
        self._places: list[_Place] = []
        self._names: dict[PartitionName, int] = {}
        self._unreadable: list[UndecodableBatch] = []
        self.messages = 0
        """How many of them count so far."""

    @property
    def is_empty(self) -> bool:
        """Whether nothing came so far."""
        return not self.messages and not self._unreadable

    @property
    def size(self) -> int:
        """How many bytes it holds."""
        return len(self._data)

    def add(self, batch: bytes, envelope: Envelope, wanted: Range) -> None:
        """Take in a verified batch; of its messages those of the range count.

        One that cannot be decoded is only named.
        """
        first = envelope.first_sequence
        begin, end = max(wanted.first - first, 0), min(wanted.end - first, envelope.count)
        if begin >= end:
            return
        try:
            plain = _decompressed(batch, envelope)
        except InvalidBatchError as error:
            self._unreadable.append(UndecodableBatch(wanted.partition, first, str(error)))
            return
        name = self._names.setdefault(wanted.partition, len(self._names))
        self._places.append((len(self._data), name, begin, end, first, envelope.stored_at_ms))
        for part in plain:
            self._data += part
        self.messages += end - begin

    def take(self) -> BatchPlace:
        """Return what came so far, and begin anew."""
        places, names = np.array(self._places, PLACE), tuple(self._names)
        placed = BatchPlace(bytes(self._data), places, names, tuple(self._unreadable))
        self._data, self._places, self._names = bytearray(), [], {}
        self._unreadable = []
        self.messages = 0
        return placed


def _decompressed(batch: bytes, envelope: Envelope) -> tuple[bytes, ...]:
    """Return a batch without its compression, in parts.

    Raises:
        InvalidBatchError: Its producer packed nonsense.
    """
    header = read_header(batch)
    if header.count != envelope.count:
        raise InvalidBatchError(
            f"a batch of {header.count} messages was announced as one of {envelope.count}"
        )
    if header.codec == Codec.NONE:
        return (batch,)
    start = layout_of(header.flags).records_start(header.count)
    return batch[:start], decompress(batch[start:], header.codec, header.records_size)


def place_served(
    placer: Placer, records: bytes, wanted: Range, *, source: str, most_bytes: int
) -> Generator[BatchPlace, None, int]:
    """Take in records that a broker served; return how many wanted messages they have.

    What comes to so many bytes once it is decompressed is yielded, and not held any more.

    Raises:
        CorruptionError: A batch is not what its producer packed.
    """
    seed = seed_of(wanted.partition)
    count = 0
    for envelope, batch in _walk(records, source):
        if not verify_crc(batch, seed):
            raise CorruptionError(source, envelope.offset, "a batch's crc does not match")
        placer.add(batch, envelope, wanted)
        after = min(envelope.first_sequence + envelope.count, wanted.end)
        count += max(after - max(envelope.first_sequence, wanted.first), 0)
        if placer.size >= most_bytes:
            yield placer.take()
    return count


def _walk(records: bytes, source: str) -> Iterator[tuple[Envelope, bytes]]:
    at = 0
    while at < len(records):
        envelope = read_envelope(records, at)
        if isinstance(envelope, str) or at + envelope.size > len(records):
            raise CorruptionError(source, at, f"a record cannot be read: {envelope}")
        if envelope.type is RecordType.BATCH:
            yield envelope, records[at + ENVELOPE_SIZE : at + envelope.size]
        at += envelope.size
