"""Accepting connections, reading frames, writing answers.

A connection is a protocol of asyncio, not a task: a thousand idle ones cost memory and nothing
else. Bytes go from the socket into the frame reader's own buffer. What a slow or dead client can
cost is bounded: while it does not read its answers we do not read its requests, and past a limit
it is cut off; a frame that has begun must end in time.
"""

import asyncio
import socket
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Protocol, cast

from pulque.clock import Clock
from pulque.errors import OverloadedError, ProtocolError, PulqueError
from pulque.wire.frame import HANDSHAKE_LIMIT, Frame, FrameReader
from pulque.wire.responses import encode_error

__all__ = ["Connection", "ConnectionLimits", "FrameServer", "Handler"]

_HIGH_WATER = 1024 * 1024
_SWEEP_EVERY_S = 1.0
_STALLED_MS = 30_000
_WORTH_JOINING = 16 * 1024
_LAST_ANSWERS_S = 1.0


@dataclass(frozen=True, slots=True)
class ConnectionLimits:
    """What one client may cost."""

    max_connections: int
    max_payload: int
    send_buffer: int
    """Answers that wait for the client to read them, in bytes; past it, it is cut off."""
    handshake_ms: int
    frame_ms: int
    idle_ms: int


class Handler(Protocol):
    """What a server does with frames."""

    def handle(self, connection: "Connection", frame: Frame) -> None:
        """Answer a frame, now or later. The payload must be copied to be kept.

        Raises:
            ProtocolError: The connection is to be closed, after an answer that says why.
        """

    def closed(self, connection: "Connection") -> None:
        """Forget what was waiting for this connection."""


class Connection(asyncio.BufferedProtocol):
    """One client."""

    def __init__(self, server: "FrameServer") -> None:
        self._server = server
        self._reader = FrameReader(HANDSHAKE_LIMIT)
        self._transport: asyncio.Transport | None = None
        self.opened_at_ms = server.clock.monotonic_ms()
        self.peer = "?"
        self.is_welcome = False
        """Whether the handshake is done."""
        self.waiting = 0
        """Requests that are held until a message arrives."""
        self._answers: list[bytes | memoryview] = []
        self._active_at_ms = self.opened_at_ms
        self._frame_began_at_ms: int | None = None
        self._stalled_at_ms: int | None = None

    def welcome(self) -> None:
        """Take note that the handshake is done, and allow larger frames."""
        self.is_welcome = True
        self._reader.limit = self._server.limits.max_payload

    def send(self, buffers: "list[bytes | memoryview]") -> None:
        """Write an answer; a client that reads too slowly is cut off."""
        self._answers += buffers
        self._server.has_answers(self)

    def write_out(self) -> None:
        """Hand the answers of this turn of the event loop to the socket, in one go."""
        answers, self._answers = self._answers, []
        transport = self._transport
        if transport is None or transport.is_closing() or not answers:
            return
        if sum(map(len, answers)) < _WORTH_JOINING:
            transport.write(b"".join(answers))
        else:
            transport.writelines(answers)
        if transport.get_write_buffer_size() > self._server.limits.send_buffer:
            self._server.log("client_too_slow", peer=self.peer)
            transport.abort()

    def close(self) -> None:
        """Close after what is written has been sent."""
        self.write_out()
        if self._transport is not None:
            self._transport.close()

    def abort(self) -> None:
        """Close at once."""
        if self._transport is not None:
            self._transport.abort()

    @property
    def local_address(self) -> tuple[str, int]:
        """The address that the client reached us at."""
        if self._transport is None:
            return "", 0
        host, port = self._transport.get_extra_info("sockname")[:2]
        return host, port

    # -- called by asyncio -------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Take in a new client."""
        # uvloop's transports are no subclasses of asyncio's, but the same in use.
        self._transport = transport = cast("asyncio.Transport", transport)
        transport.set_write_buffer_limits(high=_HIGH_WATER)
        found = transport.get_extra_info("socket")
        if found is not None:
            found.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        name = transport.get_extra_info("peername")
        if name:
            self.peer = f"{name[0]}:{name[1]}"
        self._server.opened(self)

    def get_buffer(self, sizehint: int) -> memoryview:
        """Return where the next bytes go."""
        del sizehint
        return self._reader.buffer()

    def buffer_updated(self, nbytes: int) -> None:
        """Handle every frame that is whole now."""
        reader = self._reader
        reader.received(nbytes)
        now_ms = self._active_at_ms = self._server.clock.monotonic_ms()
        try:
            while (frame := reader.next_frame()) is not None:
                self._frame_began_at_ms = None
                self._server.handler.handle(self, frame)
        except ProtocolError as error:
            self.refuse(error)
        self.write_out()
        if not reader.is_inside_frame:
            self._frame_began_at_ms = None
        elif self._frame_began_at_ms is None:
            self._frame_began_at_ms = now_ms

    def refuse(self, error: PulqueError, request_id: int = 0) -> None:
        """Say what is wrong and close."""
        self._server.log("connection_refused", peer=self.peer, reason=str(error))
        self.send([encode_error(error, request_id, 0)])
        self.close()

    def eof_received(self) -> bool:
        """Close when the client does."""
        return False

    def pause_writing(self) -> None:
        """Stop reading requests while the client does not read answers."""
        if self._transport is not None:
            self._transport.pause_reading()
        self._stalled_at_ms = self._server.clock.monotonic_ms()

    def resume_writing(self) -> None:
        """Go on reading."""
        if self._transport is not None and not self._transport.is_closing():
            self._transport.resume_reading()
        self._stalled_at_ms = None

    def connection_lost(self, exc: Exception | None) -> None:
        """Forget the client."""
        del exc
        self._transport = None
        self._server.lost(self)

    def overdue(self, now_ms: int) -> str | None:
        """Return why this client has to go, if it has to."""
        limits = self._server.limits
        if not self.is_welcome and now_ms - self.opened_at_ms > limits.handshake_ms:
            return f"no handshake within {limits.handshake_ms} ms"
        began = self._frame_began_at_ms
        if began is not None and now_ms - began > limits.frame_ms:
            return f"a frame did not end within {limits.frame_ms} ms"
        if self._stalled_at_ms is not None and now_ms - self._stalled_at_ms > _STALLED_MS:
            return f"answers were not read for {_STALLED_MS} ms"
        if not self.waiting and now_ms - self._active_at_ms > limits.idle_ms:
            return f"nothing was heard for {limits.idle_ms} ms"
        return None


class FrameServer:
    """Listens, and keeps its connections within their limits."""

    def __init__(
        self,
        handler: Handler,
        limits: ConnectionLimits,
        clock: Clock,
        log: Callable[..., None],
    ) -> None:
        self.handler = handler
        self.limits = limits
        self.clock = clock
        self.log = log
        """Called with an event and its fields."""
        self.connections: set[Connection] = set()
        self._answering: set[Connection] = set()
        self._server: asyncio.Server | None = None
        self._sweeper: asyncio.TimerHandle | None = None
        self._is_empty: asyncio.Event | None = None
        """Set when the last connection is gone, once the server closes."""

    async def listen(self, host: str, port: int) -> tuple[str, int]:
        """Begin to accept connections; return the address."""
        loop = asyncio.get_running_loop()
        self._server = await loop.create_server(
            lambda: Connection(self), host, port, backlog=1024, reuse_address=True
        )
        self._sweep()
        address = self._server.sockets[0].getsockname()
        return address[0], address[1]

    def stop_listening(self) -> None:
        """Stop accepting connections."""
        if self._sweeper is not None:
            self._sweeper.cancel()
        if self._server is not None:
            self._server.close()

    async def close(self) -> None:
        """Close all connections once their answers are sent, or after a second."""
        self.stop_listening()
        for connection in list(self.connections):
            connection.close()
        self._is_empty = asyncio.Event()
        if self.connections:
            with suppress(TimeoutError):
                await asyncio.wait_for(self._is_empty.wait(), _LAST_ANSWERS_S)
        for connection in list(self.connections):
            connection.abort()

    def has_answers(self, connection: Connection) -> None:
        """See to it that a connection's answers are written when this turn of the loop ends."""
        if not self._answering:
            asyncio.get_running_loop().call_soon(self.write_out)
        self._answering.add(connection)

    def write_out(self) -> None:
        """Write the answers of all connections that have some."""
        answering, self._answering = self._answering, set()
        for connection in answering:
            connection.write_out()

    def opened(self, connection: Connection) -> None:
        """Count a connection, or refuse it."""
        if len(self.connections) >= self.limits.max_connections:
            connection.refuse(
                OverloadedError(f"{self.limits.max_connections} connections are open already")
            )
            return
        self.connections.add(connection)

    def lost(self, connection: Connection) -> None:
        """Forget a connection."""
        self.connections.discard(connection)
        if self._is_empty is not None and not self.connections:
            self._is_empty.set()
        self.handler.closed(connection)

    def _sweep(self) -> None:
        now_ms = self.clock.monotonic_ms()
        for connection in list(self.connections):
            reason = connection.overdue(now_ms)
            if reason is not None:
                self.log("connection_timed_out", peer=connection.peer, reason=reason)
                connection.abort()
        loop = asyncio.get_running_loop()
        self._sweeper = loop.call_later(_SWEEP_EVERY_S, self._sweep)
