"""Batches that a broker stores and nobody can decode."""

import secrets
import socket
from collections.abc import Sequence

from pulque.client.connection.url import parse_url
from pulque.model.batch import Codec, layout_of, read_header, seal, seed_of
from pulque.model.compression import compress
from pulque.model.ids import RANDOM_BITS, IdSource
from pulque.model.pack import BatchPacker
from pulque.wire.frame import FrameReader
from pulque.wire.requests import Acks, Hello, Request, Send, encode_request
from pulque.wire.responses import Sent, decode_response

__all__ = ["BODIES", "lying", "odd", "send_batches", "torn", "with_part"]

BODIES = [b"x" * 100, b"y" * 100, b"z" * 100]


def torn(
    partition: str, codec: Codec = Codec.ZSTD, bodies: Sequence[bytes] = BODIES, tag: str = ""
) -> bytes:
    """Return a batch that does not decompress, behind the header of its frame."""
    good, start = _packed(partition, codec, bodies, tag)
    spoilt = good[4 : start + 20] + bytes(byte ^ 0xFF for byte in good[start + 20 :])
    return seal(spoilt, seed_of(partition))


def lying(partition: str, due_at_ms: int = 0) -> bytes:
    """Return a compressed batch with a message whose tags are longer than the message."""
    good, start = _packed(partition, Codec.NONE, BODIES, "red", due_at_ms)
    at = layout_of(read_header(good).flags).column_start("tags_size", 3)
    records = good[start : at + 2] + b"\xff\xff" + good[at + 4 :]
    head = good[4:6] + bytes([Codec.ZSTD]) + good[7:start]
    return seal(head + compress(records, Codec.ZSTD), seed_of(partition))


def _packed(
    partition: str, codec: Codec, bodies: Sequence[bytes], tag: str, due_at_ms: int = 0
) -> tuple[bytes, int]:
    """Return a good batch, and where its records begin."""
    packer = BatchPacker()
    for body in bodies:
        packer.add(body, tags=(tag,) if tag else (), due_at_ms=due_at_ms)
    ids = _ids(len(bodies))
    good = packer.encode(seed=seed_of(partition), ids=ids, created_at_ms=1, codec=codec)
    return good, layout_of(read_header(good).flags).records_start(len(bodies))


def odd(partition: str) -> bytes:
    """Return a batch whose second message has a header without a value, whose third no text."""
    packer = BatchPacker()
    packer.add(b"good 1", headers={"a": "b"})
    packer.add_encoded(b"odd 2", headers=b"name without a value")
    packer.add_encoded(b"odd 3", key=b"\xff\xfe")
    packer.add(b"good 4", key="ünïcode")
    return packer.encode(seed=seed_of(partition), ids=_ids(4), created_at_ms=1)


def _ids(count: int) -> bytes:
    return IdSource(secrets.randbits(RANDOM_BITS)).many(1, count)


def with_part(partition: str, **part: bytes) -> bytes:
    """Return a batch of a message with a part that is stored as it is given."""
    packer = BatchPacker()
    packer.add_encoded(b"odd", **part)  # type: ignore[arg-type]  # parts are bytes
    return packer.encode(seed=seed_of(partition), ids=_ids(1), created_at_ms=1)


def send_batches(url: str, partition: str, *batches: bytes) -> list[str]:
    """Send batches as they are; return the name of each outcome."""
    names = []
    with socket.create_connection(parse_url(url)[0], timeout=20) as connection:
        reader = FrameReader()
        sends = [Send(Acks.DISK, 9, ((partition, batch),)) for batch in batches]
        requests: list[Request] = [Hello(1, 1, "raw"), *sends]
        for number, request in enumerate(requests, 1):
            connection.sendall(b"".join(encode_request(request, number, 0)))
            while (frame := reader.next_frame()) is None:
                received = connection.recv_into(reader.buffer())
                assert received, "the broker closed the connection"
                reader.received(received)
            answer = decode_response(frame._replace(payload=memoryview(bytes(frame.payload))))
            if isinstance(answer, Sent):
                names.append(answer.outcomes[0].code.name)
    return names
