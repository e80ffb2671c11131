"""The short way for a send of one batch, and its usual answer, on both sides.

All give what ``Send`` and ``Sent`` give, which a test compares, at a quarter of the cost
(``bench/micro``): who sends one message at a time makes client and broker do little else.
"""

from functools import lru_cache
from struct import Struct
from typing import NamedTuple

from pulque.errors import LocalProtocolError
from pulque.wire.codec import Writer
from pulque.wire.frame import FRAME_MAGIC, MAX_PAYLOAD, Frame
from pulque.wire.requests import VERSION, Acks, Opcode
from pulque.wire.responses import ANSWER

__all__ = [
    "SingleSend",
    "SingleStored",
    "encode_single_send",
    "encode_single_stored",
    "read_single_send",
    "read_single_stored",
]

_START = Struct("<HBBIIIBIH")
"""The header of the frame, then acks, timeout and the number of batches."""
_PAYLOAD_START = 7
_U32 = Struct("<I")
_SINGLE = Struct("<BIHH")
"""Acks, timeout, the number of batches and the size of the first one's name."""
_ANSWER = Struct("<HH?QqH")
_STORED = Struct("<HBBIIIHH?QqH")
"""The header of the frame, then the answer."""
_ALL_ACKS = len(Acks)
_SEND = int(Opcode.SEND)
_new = tuple.__new__
_SENT = int(Opcode.SEND | ANSWER)


class SingleStored(NamedTuple):
    """The only batch of a send is stored."""

    is_duplicate: bool
    first_sequence: int
    stored_at_ms: int


class SingleSend(NamedTuple):
    """A send of one batch. The batch is a copy that may be kept."""

    acks: int
    timeout_ms: int
    partition: str
    batch: bytes


@lru_cache(maxsize=4096)
def _named(partition: str) -> bytes:
    name = Writer()
    name.text(partition)
    return name.join()


def encode_single_send(  # the fields of the frame, by keyword
    partition: str, batch: bytes, *, acks: int, timeout_ms: int, request_id: int, epoch: int
) -> bytes:
    """Return a whole frame that sends one batch."""
    name = _named(partition)
    size = _PAYLOAD_START + len(name) + 4 + len(batch)
    if size > MAX_PAYLOAD:
        raise LocalProtocolError(f"a frame of {size} bytes; at most {MAX_PAYLOAD} are allowed")
    start = _START.pack(FRAME_MAGIC, _SEND, VERSION, size, request_id, epoch, acks, timeout_ms, 1)
    return b"".join((start, name, _U32.pack(len(batch)), batch))


def read_single_send(frame: Frame) -> SingleSend | None:
    """Return a send of one batch; None for any other frame, or if there is anything odd."""
    opcode, version, _, _, payload = frame
    length = len(payload)
    if opcode != _SEND or version != VERSION or length < _SINGLE.size:
        return None
    acks, timeout_ms, count, name_size = _SINGLE.unpack_from(payload)
    at = _SINGLE.size + name_size
    if count != 1 or acks >= _ALL_ACKS or length < at + 4:
        return None
    if _U32.unpack_from(payload, at)[0] != length - at - 4:
        return None
    try:
        name = str(payload[_SINGLE.size : at], "utf-8")
    except UnicodeDecodeError:
        return None
    return _new(SingleSend, (acks, timeout_ms, name, bytes(payload[at + 4 :])))


def encode_single_stored(
    *, is_duplicate: bool, first_sequence: int, stored_at_ms: int, request_id: int, epoch: int
) -> bytes:
    """Return a whole frame that says that the only batch of a send is stored."""
    size = _ANSWER.size
    return _STORED.pack(
        FRAME_MAGIC,
        _SENT,
        VERSION,
        size,
        request_id,
        epoch,
        1,
        0,
        is_duplicate,
        first_sequence,
        stored_at_ms,
        0,
    )


def read_single_stored(frame: Frame) -> SingleStored | None:
    """Return the good news of a frame; None for any other, to be decoded the long way."""
    if frame.opcode != _SENT or frame.version != VERSION or len(frame.payload) != _ANSWER.size:
        return None
    outcomes, code, is_duplicate, first, stored_at_ms, text = _ANSWER.unpack(frame.payload)
    if outcomes != 1 or code or text:
        return None
    return SingleStored(is_duplicate, first, stored_at_ms)
