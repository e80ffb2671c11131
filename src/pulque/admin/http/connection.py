"""One HTTP connection, and how long a client may keep it without asking anything.

uvicorn waits for the first request of a connection for ever, and for the rest of one whose bytes
drip in. Here a request has to be whole up to its body in time, answers have to be read, and of
the connections that ask nothing the oldest goes when there are too many.
"""

import asyncio
import sys
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from pulque.admin.http.problems import problem_response
from pulque.errors import InvalidRequestError, MessageTooLargeError, PulqueError

__all__ = ["IDLE_S", "HttpConnection"]

_HEAD_S = 10.0
"""From the opening of a connection to the end of the headers of its first request."""
IDLE_S = 30.0
"""From an answer to the end of the headers of the next request."""
_STALLED_S = 30.0
"""For how long a client may leave an answer unread."""
_MOST_IDLE = 200
_REFUSED_S = 3.0
_REFUSED_BYTES = 16 * 1024 * 1024
"""What a client may still send after a request that is none, so that it reads the answer."""
_TOO_LONG = 431
_MOST_HEAD = 64 * 1024
"""Bytes of the first line and the headers of a request."""
_TOO_LARGE = 413
_MOST_CHUNKS = 500
"""Of a body: to parse one takes as long however little is in it, together about 10 ms."""


class _Requests(h11.Connection):
    """Refuses a body that comes in very many chunks."""

    def __init__(self, max_incomplete_event_size: int) -> None:
        super().__init__(h11.SERVER, max_incomplete_event_size)
        self._chunks = 0

    def next_event(self) -> h11.Event | type[h11.NEED_DATA] | type[h11.PAUSED]:
        """Return the next part of a request.

        Raises:
            RemoteProtocolError: It is none, or its body has too many chunks.
        """
        event = super().next_event()
        if isinstance(event, h11.Request):
            self._chunks = 0
        elif isinstance(event, h11.Data) and event.chunk_start:
            self._chunks += 1
            if self._chunks > _MOST_CHUNKS:
                text = f"a body has at most {_MOST_CHUNKS} chunks here; send larger ones"
                raise h11.RemoteProtocolError(text, _TOO_LARGE)
        return event


class HttpConnection(H11Protocol):
    """Closes itself when its client takes too long."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.conn = _Requests(_MOST_HEAD)
        self._late: asyncio.TimerHandle | None = None
        """Runs while the next request is waited for."""
        self._stalled: asyncio.TimerHandle | None = None
        """Runs while the client does not read."""
        self.idle_since: float | None = self.loop.time()
        """None while a request is answered."""
        self._left: int | None = None
        """How many bytes may still come, once the connection is refused."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Start the time for the first request; close the oldest idle one if there are many."""
        super().connection_made(transport)
        self._late = self.loop.call_later(_HEAD_S, self.abort)
        idle = [
            (each.idle_since, each)
            for each in self.connections
            if isinstance(each, HttpConnection) and each.idle_since is not None
        ]
        if len(idle) > _MOST_IDLE:
            min(idle, key=lambda pair: pair[0])[1].abort()

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop the clocks."""
        _cancel(self._late)
        _cancel(self._stalled)
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Take bytes in; drop them once the connection is refused."""
        if self._left is None:
            super().data_received(data)
            return
        self._left -= len(data)
        if self._left < 0:
            self.abort()

    def send_400_response(self, msg: str) -> None:
        """Answer what is no request, and close once the client has read that.

        A connection that is closed while bytes of the client are unread is reset, and the client
        never sees the answer.
        """
        if self.conn.our_state not in {h11.IDLE, h11.SEND_RESPONSE}:
            self.abort()  # an answer to this request is under way
            return
        problem, status = sys.exc_info()[1], 400
        error: PulqueError = InvalidRequestError(msg)
        hint = problem.error_status_hint if isinstance(problem, h11.RemoteProtocolError) else 400
        if hint == _TOO_LONG:
            status = _TOO_LONG
            error = InvalidRequestError("the address and the headers of a request are too long")
        elif hint == _TOO_LARGE:
            status, error = _TOO_LARGE, MessageTooLargeError(str(problem))
        answer = problem_response(error, status)
        headers = [*answer.raw_headers, (b"connection", b"close")]
        for event in (
            h11.Response(status_code=status, headers=headers),
            h11.Data(data=bytes(answer.body)),
            h11.EndOfMessage(),
        ):
            self.transport.write(self.conn.send(event) or b"")
        self.transport.write_eof()
        _cancel(self._late)
        self._left = _REFUSED_BYTES
        self._late = self.loop.call_later(_REFUSED_S, self.abort)

    def handle_events(self) -> None:
        """Stop the clock once the headers of a request are there."""
        before = self.cycle
        super().handle_events()
        if self.cycle is not before:
            self.idle_since = None
            _cancel(self._late)

    def on_response_complete(self) -> None:
        """Start the time for the next request."""
        self.idle_since = self.loop.time()
        self._late = self.loop.call_later(IDLE_S, self.abort)
        super().on_response_complete()

    def pause_writing(self) -> None:
        """Start the time that the client has to read its answer."""
        self._stalled = self.loop.call_later(_STALLED_S, self.abort)
        super().pause_writing()

    def resume_writing(self) -> None:
        """Go on writing."""
        _cancel(self._stalled)
        super().resume_writing()

    def abort(self) -> None:
        """Close at once."""
        self.idle_since = None
        self.transport.abort()


def _cancel(timer: asyncio.TimerHandle | None) -> None:
    if timer is not None:
        timer.cancel()
