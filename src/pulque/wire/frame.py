"""Frames: bytes in, frames out, no sockets.

::

    +-----------+-----------+------------+----------+----------------+-----------+---------+
    | magic u16 | opcode u8 | version u8 | size u32 | request id u32 | epoch u32 | payload |
    +-----------+-----------+------------+----------+----------------+-----------+---------+

``size`` counts the payload. The magic comes first in every frame, so that HTTP or TLS bytes
are known at once for what they are. Limits are checked on the header, before any allocation.

``FrameReader`` owns one buffer that the socket reads into directly. A frame's payload is a view
into it and is valid until the next call of ``buffer``: whoever keeps bytes copies them.
"""

from struct import Struct
from typing import NamedTuple

from pulque.errors import RemoteProtocolError

__all__ = [
    "FRAME_HEADER_SIZE",
    "FRAME_MAGIC",
    "HANDSHAKE_LIMIT",
    "MAX_PAYLOAD",
    "Frame",
    "FrameReader",
    "pack_frame_header",
]

FRAME_MAGIC = 0x5150  # "PQ"
HANDSHAKE_LIMIT = 8 * 1024
"""The largest payload before the handshake is done."""
MAX_PAYLOAD = 17 * 1024 * 1024
"""The largest payload afterwards: the largest batch, and room for what names it."""

_HEADER = Struct("<HBBIII")
FRAME_HEADER_SIZE = _HEADER.size
_FIRST_BUFFER = 16 * 1024
_LARGEST_BUFFER = 512 * 1024
_LARGEST_KEPT = 4 * 1024 * 1024
_HTTP = (b"GE", b"PO", b"PU", b"HE", b"DE", b"OP", b"PA", b"CO", b"TR", b"PR")
_STRANGERS = dict.fromkeys(_HTTP, "HTTP") | {b"\x16\x03": "TLS"}


class Frame(NamedTuple):
    """One frame. The payload is valid until the reader is given more bytes."""

    opcode: int
    version: int
    request_id: int
    epoch: int
    payload: memoryview


def pack_frame_header(opcode: int, version: int, size: int, request_id: int, epoch: int) -> bytes:
    """Return the header of a frame whose payload has ``size`` bytes."""
    return _HEADER.pack(FRAME_MAGIC, opcode, version, size, request_id, epoch)


class FrameReader:
    """Cuts a stream of bytes into frames.

    ::

        received = socket.recv_into(reader.buffer())
        reader.received(received)
        while (frame := reader.next_frame()) is not None:
            ...

    Args:
        limit: The largest payload that is taken in.
        largest_kept: A buffer that is larger is let go after the frame that needed it.
    """

    def __init__(self, limit: int = MAX_PAYLOAD, *, largest_kept: int = _LARGEST_KEPT) -> None:
        self.limit = limit
        self._largest_kept = largest_kept
        self._buffer = bytearray(_FIRST_BUFFER)
        self._view = memoryview(self._buffer)
        self._start = 0
        self._end = 0
        self._header: tuple[int, int, int, int, int, int] | None = None

    def __len__(self) -> int:
        """How many bytes wait to be taken."""
        return self._end - self._start

    @property
    def is_inside_frame(self) -> bool:
        """Whether a frame has begun and not ended."""
        return self._end > self._start

    @property
    def is_http(self) -> bool:
        """Whether the bytes that are there look like a request of HTTP."""
        return bytes(self._view[self._start : min(self._start + 2, self._end)]) in _HTTP

    def let_go(self) -> None:
        """Give back a buffer that grew large, if there is nothing in it."""
        if self._start == self._end and len(self._buffer) > _FIRST_BUFFER:
            self._buffer = bytearray(_FIRST_BUFFER)
            self._view = memoryview(self._buffer)
            self._start = self._end = 0

    def buffer(self) -> memoryview:
        """Return where to put the next bytes; ends the life of all payloads given out."""
        size = len(self._buffer)
        if self._start == self._end:
            self._start = self._end = 0
            if size <= self._largest_kept:
                return self._view
            # What one very large frame needed is not kept for the small ones after it.
            size = 0
        wanted = self._wanted()
        if size - self._start < wanted or self._end == size:
            self._make_room(wanted)
        return self._view[self._end :]

    def received(self, count: int) -> None:
        """Take note that ``count`` bytes were put into the buffer."""
        self._end += count

    def next_frame(self) -> Frame | None:
        """Return the next whole frame, or None if more bytes are needed.

        Raises:
            RemoteProtocolError: The bytes are not frames, or one is over the limit.
        """
        start = self._start
        available = self._end - start
        if self._header is None:
            if available < FRAME_HEADER_SIZE:
                if available >= 2:
                    self._check_magic(start)
                return None
            header = _HEADER.unpack_from(self._buffer, start)
            if header[0] != FRAME_MAGIC:
                self._check_magic(start)
            if header[3] > self.limit:
                raise RemoteProtocolError(
                    f"a frame of {header[3]} bytes; at most {self.limit} are allowed here"
                )
        else:
            header = self._header
        _, opcode, version, size, request_id, epoch = header
        start += FRAME_HEADER_SIZE
        end = start + size
        if end > self._end:
            # Only now: ``buffer`` makes room for what the header says.
            self._header = header
            return None
        self._start = end
        self._header = None
        return Frame(opcode, version, request_id, epoch, self._view[start:end])

    def _wanted(self) -> int:
        """Return the size of buffer that the frame under way should have by now.

        A large frame gets its room as its bytes come: announcing them is not enough.
        """
        whole = FRAME_HEADER_SIZE + (self._header[3] if self._header else 0)
        if whole <= _LARGEST_BUFFER:
            return whole
        return min(whole, max(2 * (self._end - self._start), _LARGEST_BUFFER))

    def _make_room(self, wanted: int) -> None:
        """Move what is there to the front of a buffer of at least the size that is wanted.

        A full buffer means that the peer sends faster than we read: a larger one takes more per
        call.
        """
        held = self._view[self._start : self._end]
        size = min(len(self._buffer), self._largest_kept)
        if self._end == size and size < _LARGEST_BUFFER:
            size *= 2
        size = max(size, wanted)
        if size != len(self._buffer):
            self._buffer = bytearray(size)
            self._view = memoryview(self._buffer)
        self._view[: len(held)] = held
        self._start, self._end = 0, len(held)

    def _check_magic(self, start: int) -> None:
        found = bytes(self._view[start : start + 2])
        if found != FRAME_MAGIC.to_bytes(2, "little"):
            stranger = _STRANGERS.get(found, "something else")
            raise RemoteProtocolError(f"this is a Pulque port, and these bytes are {stranger}")
