"""One connection's conversation without the connection: handshake, request ids, answers.

The shell moves the bytes::

    socket.send(session.hello())
    session.reader.received(socket.recv_into(session.reader.buffer()))
    while (answer := session.next_answer()) is not None:
        request_id, response = answer
"""

from dataclasses import replace

from pulque.errors import PulqueError, RemoteProtocolError, UnsupportedError
from pulque.wire.frame import HANDSHAKE_LIMIT, MAX_PAYLOAD, FrameReader
from pulque.wire.requests import Hello, Request, encode_request
from pulque.wire.responses import ReadBack, Response, Welcome, decode_response
from pulque.wire.versions import NEWEST, OLDEST

__all__ = ["Answer", "Session", "as_it_is", "kept_answer"]

Answer = tuple[int, Response | PulqueError]
"""The id of a request, and what the broker says to it."""

_HELLO_ID = 0
_ID_MASK = 0xFFFF_FFFF


def as_it_is(response: Response) -> Response:
    """Return an answer of which no views are kept."""
    return response


def kept_answer(response: Response) -> Response:
    """Return an answer that stays what it is when the connection goes on reading."""
    if isinstance(response, ReadBack) and isinstance(response.records, memoryview):
        return replace(response, records=bytes(response.records))
    return response


class Session:
    """The client's side of one connection. One owner at a time; not thread-safe.

    Args:
        client: What this client calls itself, for the broker's log.
    """

    def __init__(self, client: str) -> None:
        # How large answers are is the client's own choice: it has room for the next one, too.
        self.reader = FrameReader(HANDSHAKE_LIMIT, largest_kept=2 * MAX_PAYLOAD)
        self.welcome: Welcome | None = None
        self._client = client
        self._last_id = _HELLO_ID
        self.epoch = 0
        """The broker's, as of the handshake."""
        self.version = OLDEST
        """Of the protocol, as agreed in the handshake."""

    def hello(self) -> bytes:
        """Return the first frame."""
        return b"".join(encode_request(Hello(OLDEST, NEWEST, self._client), _HELLO_ID, 0))

    def ask(self, request: Request) -> tuple[int, list[bytes | memoryview]]:
        """Return the id that the answer will have, and the buffers of the frame."""
        request_id = self.next_id()
        return request_id, encode_request(request, request_id, self.epoch, self.version)

    def next_id(self) -> int:
        """Return a request id for a frame that the caller encodes."""
        # 0 is the handshake's, so that a late answer to it cannot be taken for another.
        self._last_id = request_id = (self._last_id + 1) & _ID_MASK or 1
        return request_id

    def receive_welcome(self) -> Welcome | None:
        """Return the answer to ``hello``, or None if more bytes are needed.

        Raises:
            PulqueError: The broker refused, with its reason.
        """
        answer = self.next_answer()
        if answer is None:
            return None
        response = answer[1]
        if isinstance(response, PulqueError):
            raise response
        if not isinstance(response, Welcome):
            raise RemoteProtocolError(f"{type(response).__name__} came instead of Welcome")
        if not OLDEST <= response.version <= NEWEST:
            raise UnsupportedError(f"the broker chose version {response.version} of the protocol")
        self.welcome = response
        self.reader.limit = MAX_PAYLOAD
        self.epoch = response.tenure.epoch
        self.version = response.version
        return response

    def next_answer(self) -> Answer | None:
        """Return the next answer, or None if more bytes are needed.

        Views in it are valid until the reader is given more bytes.

        Raises:
            RemoteProtocolError: The bytes are not answers.
        """
        frame = self.reader.next_frame()
        if frame is None:
            return None
        return frame.request_id, decode_response(frame)
