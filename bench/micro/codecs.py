"""Packing and unpacking batches, size columns, frames, checksums."""

from __future__ import annotations

import random
import zlib
from collections.abc import Iterator
from functools import partial
from struct import Struct

import google_crc32c
import numpy as np

from bench.micro.timing import Row, cpu_us
from bench.raw import packed
from pulque.errors import ErrorCode
from pulque.model.batch import HEADER_SIZE, read_header, seed_of, slice_batch, verify_crc
from pulque.model.ids import IdSource
from pulque.model.message import Message, StoredBatch
from pulque.model.names import PartitionName
from pulque.model.pack import BatchPacker
from pulque.model.positions import ConsumeSequence
from pulque.serving.columns import total_and_largest
from pulque.wire.frame import Frame, FrameReader
from pulque.wire.requests import Acks, Send, decode_request, encode_request
from pulque.wire.responses import Outcome, Sent, decode_response, encode_response

__all__ = ["checksums", "columns", "frames", "packing", "unpacking"]

_PARTITION = PartitionName("bench")
_SEED = seed_of(_PARTITION)
_RECEIVED = 256 * 1024
_RANDOM = random.Random(0)


def packing() -> Iterator[Row]:
    """What a producer does with messages."""
    ids = IdSource(1)
    for count in (1, 1000):
        what = f"ids, {count}"
        yield Row(what, cpu_us(partial(ids.many, 1_700_000_000_000, count)), count)
    for size, count in ((100, 1), (100, 10), (100, 100), (100, 1000), (1024, 1000)):
        bodies = _bodies(count, size)
        what = f"pack bodies of {size} B, batch of {count}"
        yield Row(what, cpu_us(partial(packed, _PARTITION, bodies)), count, count * size)
    bodies = _bodies(1000, 100)
    yield Row(
        "pack 100 B with key, tag and header, 1000", cpu_us(partial(_pack_full, bodies)), 1000
    )


def unpacking() -> Iterator[Row]:
    """What a broker and a consumer do with a batch."""
    for count in (1, 100, 1000):
        batch = packed(_PARTITION, _bodies(count, 100))
        check = partial(_check, batch)
        yield Row(f"check as a broker does, batch of {count}", cpu_us(check), count, len(batch))
        bodies = partial(_read_bodies, batch)
        yield Row(f"read every body, batch of {count}", cpu_us(bodies), count, len(batch))
    batch = packed(_PARTITION, _bodies(1000, 100))
    part = partial(slice_batch, batch, 250, 750, _SEED)
    yield Row("cut 500 of 1000 messages out of a batch", cpu_us(part), 500)
    full = _pack_full(_bodies(1000, 100))
    yield Row("read every field, batch of 1000", cpu_us(partial(_read_all, full)), 1000)


def columns() -> Iterator[Row]:
    """The sum and the largest of a size column: where numpy begins to pay."""
    for count in (1, 8, 16, 32, 48, 64, 128, 1000):
        batch = packed(_PARTITION, _bodies(count, 100))
        for name, work in (("struct", _by_struct), ("numpy", _by_numpy)):
            yield Row(f"{count} sizes by {name}", cpu_us(partial(work, batch, count)), count)
        chosen = partial(total_and_largest, batch, count)
        yield Row(f"{count} sizes as the broker does", cpu_us(chosen), count)


def frames() -> Iterator[Row]:
    """Bytes to frames and back."""
    for count in (1, 100, 1000):
        batch = packed(_PARTITION, _bodies(count, 100))
        request = Send(Acks.MEMORY, 1000, ((_PARTITION, batch),))
        frame = b"".join(encode_request(request, 1, 0))
        stream = frame * max(1, 2 * _RECEIVED // len(frame))
        times = len(stream) // len(frame)
        encode = cpu_us(partial(encode_request, request, 1, 0))
        yield Row(f"encode a send of {count}", encode, count)
        read = cpu_us(partial(_read_frames, stream)) / times
        yield Row(f"cut frames of a send of {count}", read, count, len(frame))
        whole = cpu_us(partial(_decode_requests, stream)) / times
        yield Row(f"… and decode them, {count}", whole, count, len(frame))
    outcome = Outcome(ErrorCode.NONE, False, ConsumeSequence(5), 1_700_000_000_000)
    sent = Sent((outcome,))
    yield Row("encode the answer to a send", cpu_us(partial(encode_response, sent, 1, 0)))
    answer = b"".join(encode_response(sent, 1, 0))
    yield Row("read the answer to a send", cpu_us(partial(_decode_answer, answer)))


def checksums() -> Iterator[Row]:
    """CRC-32C beside zlib's CRC-32."""
    for size in (100, 1024, 128 * 1024, 1024 * 1024):
        data = _RANDOM.randbytes(size)
        for name, work in (("crc32c", google_crc32c.value), ("zlib", zlib.crc32)):
            yield Row(f"{name}, {size:,} B", cpu_us(partial(work, data)), 0, size)
    batch = packed(_PARTITION, _bodies(1000, 100))
    yield Row(
        "verify a batch of 1000", cpu_us(partial(verify_crc, batch, _SEED)), 1000, len(batch)
    )
    yield Row("read the header of a batch", cpu_us(partial(read_header, batch)))


def _bodies(count: int, size: int) -> list[bytes]:
    return [_RANDOM.randbytes(size) for _ in range(count)]


def _pack_full(bodies: list[bytes]) -> bytes:
    packer = BatchPacker()
    for number, body in enumerate(bodies):
        packer.add(body, key=f"key-{number}", tags=("red",), headers={"trace": "abc"})
    ids = IdSource(1).many(1_700_000_000_000, len(bodies))
    return packer.encode(seed=_SEED, ids=ids, created_at_ms=1_700_000_000_000)


def _check(batch: bytes) -> None:
    """Header, crc and sizes: all that a broker looks at."""
    header = read_header(batch)
    assert verify_crc(batch, _SEED)
    total_and_largest(batch, header.count)


def _stored(batch: bytes) -> StoredBatch:
    return StoredBatch(
        batch, partition=_PARTITION, first_sequence=ConsumeSequence(0), stored_at_ms=0
    )


def _read_bodies(batch: bytes) -> int:
    stored = _stored(batch)
    total = 0
    for index in range(len(stored)):
        total += len(Message(stored, index).body)
    return total


def _read_all(batch: bytes) -> None:
    stored = _stored(batch)
    for index in range(len(stored)):
        message = Message(stored, index)
        _ = (message.id, message.key, message.tags, message.headers, message.body)


def _by_struct(batch: bytes, count: int) -> tuple[int, int]:
    sizes = Struct(f"<{count}I").unpack_from(batch, HEADER_SIZE)
    return sum(sizes), max(sizes)


def _by_numpy(batch: bytes, count: int) -> tuple[int, int]:
    column = np.frombuffer(batch, "<u4", count, HEADER_SIZE)
    return int(column.sum(dtype=np.uint64)), int(column.max())


def _read_frames(stream: bytes) -> None:
    reader = FrameReader()
    for _ in _frames(reader, stream):
        pass


def _decode_requests(stream: bytes) -> None:
    reader = FrameReader()
    for frame in _frames(reader, stream):
        decode_request(frame)


def _frames(reader: FrameReader, stream: bytes) -> Iterator[Frame]:
    at = 0
    while at < len(stream):
        buffer = reader.buffer()
        some = stream[at : at + min(len(buffer), _RECEIVED)]
        buffer[: len(some)] = some
        reader.received(len(some))
        at += len(some)
        while (frame := reader.next_frame()) is not None:
            yield frame


def _decode_answer(answer: bytes) -> None:
    reader = FrameReader()
    for frame in _frames(reader, answer):
        decode_response(frame)
