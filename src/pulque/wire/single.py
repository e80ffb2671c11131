"""The short way for a send of one batch, and its usual answer.

Both give what ``Send`` and ``Sent`` give, which a test compares, at a quarter of the cost
(``bench/micro/client.py``): a client that sends one message at a time does little else.
"""

from functools import lru_cache
from struct import Struct
from typing import NamedTuple

from pulque.errors import LocalProtocolError
from pulque.wire.codec import Writer
from pulque.wire.frame import FRAME_MAGIC, MAX_PAYLOAD, Frame
from pulque.wire.requests import VERSION, Opcode
from pulque.wire.responses import ANSWER

__all__ = ["SingleStored", "encode_single_send", "read_single_stored"]

_START = Struct("<HBBIIIBIH")
"""The header of the frame, then acks, timeout and the number of batches."""
_PAYLOAD_START = 7
_U32 = Struct("<I")
_ANSWER = Struct("<HH?QqH")
_SEND = int(Opcode.SEND)
_SENT = int(Opcode.SEND | ANSWER)


class SingleStored(NamedTuple):
    """The only batch of a send is stored."""

    is_duplicate: bool
    first_sequence: int
    stored_at_ms: int


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


def read_single_stored(frame: Frame) -> SingleStored | None:
    """Return the good news of a frame; None for any other, to be decoded the long way."""
    if frame.opcode != _SENT or frame.version != VERSION or len(frame.payload) != _ANSWER.size:
        return None
    outcomes, code, is_duplicate, first, stored_at_ms, text = _ANSWER.unpack(frame.payload)
    if outcomes != 1 or code or text:
        return None
    return SingleStored(is_duplicate, first, stored_at_ms)
