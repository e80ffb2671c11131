"""Read records: from memory if they are new, adjacent ones with one call.

Records from a file are verified before they are served: the envelope must match the
index, and the batch its producer's crc.
"""

from typing import cast

import numpy as np

from pulque.model.batch import HEADER_SIZE, Codec, slice_batch, verify_crc
from pulque.model.record import ENVELOPE_SIZE, Envelope, cut_envelope, read_envelope
from pulque.storage.files import Buffer
from pulque.storage.indexes.consume_log import Piece, Span
from pulque.storage.logs.message_log import MessageLog
from pulque.storage.logs.partitions import Partition
from pulque.storage.reading.damaged_batches import Damages

__all__ = ["RecordReader", "cut_piece", "problem_with"]

_WORTH_AN_ARRAY = 4096
_CODEC_AT = 6
"""The offset of the codec in a batch's header."""


class RecordReader:
    """Reads records of the message log. May be used from any thread."""

    def __init__(self, log: MessageLog, damages: Damages) -> None:
        self._log = log
        self._damages = damages

    def read(self, partition: Partition, span: Span, *, may_block: bool = True) -> list[Buffer]:
        """Return the records of a span, verified, as consecutive buffers.

        Damaged batches are reported and left out if no other broker has a copy of them. May be
        called from any thread.

        Raises:
            WouldBlockError: Not ``may_block``, and the disk would have to be asked.
            CorruptionError: Some batches are damaged, and other brokers have copies.
        """
        for hole in span.holes:
            self._damages.hole(partition, self._path_near(span), hole, may_block=may_block)
        buffers: list[Buffer] = []
        cache = self._log.cache
        pieces = span.pieces
        at = 0
        while at < len(pieces):
            piece = pieces[at]
            cached = cache.get(piece.entry.offset)
            if cached is not None:
                if piece.is_whole:
                    buffers += cached
                else:
                    buffers += cut_piece(partition, piece, *cached)
                at += 1
                continue
            stop = at + 1
            while stop < len(pieces) and _follows(pieces[stop - 1], pieces[stop]):
                stop += 1
            buffers += self._read_run(partition, pieces[at:stop], may_block=may_block)
            at = stop
        if may_block:
            self._damages.save()
        return buffers

    def _path_near(self, span: Span) -> str:
        """Return the segment that a span is in, or the last one."""
        offset = span.pieces[0].entry.offset if span.pieces else self._log.end
        return (self._log.segment_of(offset) or self._log.open_segment).path

    def _read_run(
        self, partition: Partition, pieces: list[Piece], *, may_block: bool
    ) -> list[Buffer]:
        """Read batches that lie next to each other in one go."""
        first = pieces[0].entry.offset
        size = pieces[-1].entry.offset + pieces[-1].entry.size - first
        segment = self._log.segment_of(first)
        if segment is None:
            return []  # retention has removed it meanwhile
        data = segment.read(first, max(min(size, segment.end - first), 0), may_block=may_block)
        view = memoryview(data)
        buffers: list[Buffer] = []
        for piece in pieces:
            at = piece.entry.offset - first
            end = at + piece.entry.size
            envelope = read_envelope(data, at)
            problem = problem_with(envelope, view[at + ENVELOPE_SIZE : end], piece, partition)
            if problem is not None:
                self._damages.batch(
                    partition, segment.path, piece.entry, problem, may_block=may_block
                )
            elif piece.is_whole:
                buffers.append(view[at:end])
            else:
                batch_at = at + ENVELOPE_SIZE
                buffers += cut_piece(partition, piece, data[at:batch_at], data[batch_at:end])
        return buffers


def cut_piece(
    partition: Partition, piece: Piece, head: bytes, batch: bytes
) -> tuple[bytes, bytes]:
    """Return part of a batch as a record of its own; of a compressed one, the whole."""
    if batch[_CODEC_AT] != Codec.NONE:
        return head, batch
    part = slice_batch(batch, piece.start, piece.end, partition.seed)
    size = ENVELOPE_SIZE + len(part)
    return cut_envelope(head, size, piece.start, piece.end - piece.start), part


def _follows(before: Piece, after: Piece) -> bool:
    return before.entry.offset + before.entry.size == after.entry.offset


def _summable(batch: Buffer) -> bytes:
    """Return a batch in a form that ``google_crc32c`` takes.

    It refuses views, but an array over the same bytes will do: a large batch is not copied.
    """
    if len(batch) < _WORTH_AN_ARRAY:
        return bytes(batch)
    return cast("bytes", np.frombuffer(batch, np.uint8))


def problem_with(
    envelope: Envelope | str, batch: Buffer, piece: Piece, partition: Partition
) -> str | None:
    """Return a text that describes the damage of a record, or None."""
    if isinstance(envelope, str):
        return envelope
    entry = piece.entry
    expected = (entry.offset, entry.size, partition.id, entry.first_sequence, entry.count)
    found = (envelope.offset, envelope.size, envelope.partition, envelope.first_sequence)
    if (*found, envelope.count) != expected:
        return "another record lies where the index points to"
    if len(batch) < HEADER_SIZE or not verify_crc(_summable(batch), partition.seed):
        return "the batch's crc does not match"
    return None
