"""Accepting connections, reading frames, writing answers.

A connection is a protocol of asyncio, not a task: a thousand idle ones cost memory and nothing
else. Bytes go from the socket into the frame reader's own buffer. What a slow or dead client can
cost is bounded: while it does not read its answers we do not read its requests, and past a limit
it is cut off; a frame that has begun must end in time; no connection keeps the event loop for
longer than ``TURN_MS``.

A connection whose frames take longer stands in the server's backlog. All connections in the
backlog share one turn of ``TURN_MS`` per round of the event loop, one after the other, so that
one that asks little is served at once however much others ask. A request that would take longer
than a turn is handled in steps: see ``Work``.
"""

import asyncio
import resource
import traceback
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from itertools import chain
from typing import Protocol, cast

from pulque.clock import Clock
from pulque.errors import OverloadedError, ProtocolError, PulqueError
from pulque.net.sockets import prepare_socket
from pulque.wire.frame import HANDSHAKE_LIMIT, Frame, FrameReader
from pulque.wire.responses import encode_error
from pulque.wire.versions import OLDEST

__all__ = [
    "TURN_MS",
    "AcceptedConnection",
    "ConnectionLimits",
    "FrameHandler",
    "FrameServer",
    "Work",
]

TURN_MS = 5
"""How long frames of one connection are handled before the event loop goes on."""
Work = Iterator[None]
"""A request in steps: each takes well under a turn, and ends with a ``yield``.

Between two steps anything may change. The next frame of the connection is handled after the last
step. Work is finished although its connection is gone, unless it ends itself then.
"""

_HIGH_WATER = 1024 * 1024
_SWEEP_EVERY_S = 1.0
_STALLED_MS = 30_000
_QUIET_MS = 2000
_WORTH_JOINING = 16 * 1024
_LONG_MS = 2
_LINES_PER_SWEEP = 10
_HTTP_HINT = (
    b"HTTP/1.1 400 Bad Request\r\nContent-Type: text/plain\r\nConnection: close\r\n\r\n"
    b"This port speaks the protocol of Pulque, not HTTP: use a client, or `pulque send`.\n"
)
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


class FrameHandler(Protocol):
    """What a server does with frames."""

    def handle(self, connection: "AcceptedConnection", frame: Frame) -> Work | None:
        """Answer a frame, now or later. The payload must be copied to be kept.

        Returns:
            The steps of a request that may take long; None if nothing is left to do.

        Raises:
            ProtocolError: The connection is to be closed, after an answer that says why.
        """

    def pause(self, connection: "AcceptedConnection") -> None:
        """Take note that all frames of this connection that have come are handled."""

    def closed(self, connection: "AcceptedConnection") -> None:
        """Forget what was waiting for this connection."""


class AcceptedConnection(asyncio.BufferedProtocol):
    """One client."""

    def __init__(self, server: "FrameServer") -> None:
        self._server = server
        self._reader = FrameReader(HANDSHAKE_LIMIT)
        self._transport: asyncio.Transport | None = None
        self.opened_at_ms = server.clock.monotonic_ms()
        self.peer = "?"
        self.is_welcome = False
        """Whether the handshake is done."""
        self.version = OLDEST
        """Of the protocol, as agreed in the handshake."""
        self.waiting = 0
        """Requests that are held until a message arrives."""
        self._answers: list[bytes | memoryview] = []
        self._unwritten = 0
        """Bytes of them."""
        self._unsent = 0
        """Bytes that the transport held when it was last given some: at most so many by now."""
        self._is_handling = False
        """Frames are handled: their answers are written when that is over."""
        self._is_ending = False
        """It is to be closed: nothing that it asks counts any more."""
        self._is_deaf = False
        """It gets the answers that are due, and can ask no more."""
        self._active_at_ms = self.opened_at_ms
        self._frame_began_at_ms: int | None = None
        self._stalled_at_ms: int | None = None
        self._received_at_ms = self.opened_at_ms
        self._is_behind = False
        """Frames are handled later than they came: nothing is read until all are."""
        self._work: Work | None = None
        """What is left of the request that is handled now."""

    @property
    def waited_ms(self) -> int:
        """How long the request that is handled now has waited here."""
        if not self._is_behind:
            return 0
        return self._server.clock.monotonic_ms() - self._received_at_ms

    @property
    def is_gone(self) -> bool:
        """Whether answers reach nobody any more."""
        return self._is_ending

    @property
    def silent_ms(self) -> int:
        """For how long nothing was heard of the client."""
        return self._server.clock.monotonic_ms() - self._received_at_ms

    def welcome(self) -> None:
        """Take note that the handshake is done, and allow larger frames."""
        self.is_welcome = True
        self._reader.limit = self._server.limits.max_payload

    def send(self, buffers: "list[bytes | memoryview]") -> None:
        """Write an answer; a client that leaves too much unread is cut off."""
        if self._is_ending:
            return
        if self._unwritten + self._unsent > self._server.limits.send_buffer and self._is_slow():
            return
        self._answers += buffers
        for buffer in buffers:
            self._unwritten += len(buffer)
        if not self._is_handling:
            self._server.has_answers(self)

    def write_out(self) -> None:
        """Hand the answers of this turn of the event loop to the socket, in one go."""
        answers, self._answers = self._answers, []
        unwritten, self._unwritten = self._unwritten, 0
        transport = self._transport
        if transport is None or transport.is_closing() or not answers:
            return
        # An answer counts as activity: a pull may have waited for longer than one may be idle.
        self._active_at_ms = self._server.clock.monotonic_ms()
        if unwritten < _WORTH_JOINING:
            transport.write(answers[0] if len(answers) == 1 else b"".join(answers))
        else:
            transport.writelines(answers)
        self._unsent = transport.get_write_buffer_size()

    def _is_slow(self) -> bool:
        """Say whether the client leaves too much unread; then it is cut off."""
        transport = self._transport
        if transport is None:
            return True
        self._unsent = transport.get_write_buffer_size()
        unread = self._unwritten + self._unsent
        if unread <= self._server.limits.send_buffer:
            return False
        self._server.log("client_too_slow", peer=self.peer, unread=unread)
        self.abort()
        return True

    def stop_reading(self) -> None:
        """Take no more requests; answers can still be sent."""
        self._is_deaf = True
        if self._transport is not None and not self._transport.is_closing():
            self._transport.pause_reading()

    def close(self) -> None:
        """Close after what is written has been sent."""
        self.write_out()
        self._is_ending = True
        if self._transport is not None:
            self._transport.close()

    def abort(self) -> None:
        """Close at once."""
        self._is_ending = True
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
        prepare_socket(found)
        name = transport.get_extra_info("peername")
        if name:
            self.peer = f"{name[0]}:{name[1]}"
        self._server.opened(self, found.fileno())

    def get_buffer(self, sizehint: int) -> memoryview:
        """Return where the next bytes go."""
        del sizehint
        return self._reader.buffer()

    def buffer_updated(self, nbytes: int) -> None:
        """Take in bytes, and handle the frames that are whole now."""
        self._reader.received(nbytes)
        clock = self._server.clock
        now_ms = self._active_at_ms = self._received_at_ms = clock.monotonic_ms()
        if self._is_behind:
            return
        # uvloop reads up to 32 times in a row: what takes long must make it stop.
        if self._handle_frames(now_ms + TURN_MS) or clock.monotonic_ms() >= now_ms + _LONG_MS:
            self._fall_behind()

    def _handle_frames(self, until_ms: int) -> bool:
        """Handle frames until the turn is over; return whether something is left for another."""
        clock, reader = self._server.clock, self._reader
        is_over = False
        self._is_handling = True
        while (self._work is not None or reader) and self._handle_next():
            if clock.monotonic_ms() >= until_ms:
                is_over = True
                break
        self._server.handler.pause(self)
        self._is_handling = False
        if self._answers:
            self.write_out()
        if self._work is None and not reader:
            self._frame_began_at_ms = None
            return False
        if is_over:
            # What waits for its turn here is not late.
            self._frame_began_at_ms = None
        elif self._frame_began_at_ms is None:
            self._frame_began_at_ms = clock.monotonic_ms()
        return is_over

    def _handle_next(self) -> bool:
        """Take the next step of a request, or handle the next frame, if there is one."""
        request_id = 0
        try:
            if self._work is not None:
                self._take_step(self._work)
                return True
            if self._is_ending or self._is_deaf or self._stalled_at_ms is not None:
                return False
            frame = self._reader.next_frame()
            if frame is None:
                return False
            self._frame_began_at_ms = None
            request_id = frame.request_id
            work = self._server.handler.handle(self, frame)
            if work is not None:
                self._put_first(work)
        except ProtocolError as error:
            self.refuse(error)
        except Exception as error:  # noqa: BLE001  # a client must not be able to break the loop
            self._failed(error, request_id)
        if self._unwritten > _HIGH_WATER:
            self.write_out()
        return True

    def _take_step(self, work: Work) -> None:
        # Should the step fail, there is no other one.
        self._work = None
        for _ in work:
            self._put_first(work)
            return

    def _put_first(self, work: Work) -> None:
        """Go on with a request before what was taken on while it was handled."""
        self._work = work if self._work is None else chain(work, self._work)

    def go_on_with(self, work: Work) -> None:
        """Take on the rest of a request that had to wait for something else."""
        self._work = work if self._work is None else chain(self._work, work)
        self._fall_behind()

    def _fall_behind(self) -> None:
        """Wait for a turn, and read nothing before all that came is handled."""
        self._is_behind = True
        if self._transport is not None and not self._is_ending:
            self._transport.pause_reading()
        self._server.go_on_later(self)

    def go_on(self, until_ms: int) -> bool:
        """Handle more of what has come, then read again; return whether it needs another turn."""
        if self._handle_frames(until_ms):
            return True
        if self._transport is None:
            self._server.forget(self)
        if self._stalled_at_ms is not None:
            return False  # it goes on when the client has read its answers
        self._is_behind = False
        if self._transport is not None and not self._is_ending and not self._is_deaf:
            self._transport.resume_reading()
        return False

    def _failed(self, error: Exception, request_id: int) -> None:
        """Say that there is a bug here, without its details."""
        place = traceback.extract_tb(error.__traceback__)[-1]
        self._server.log(
            "request_failed",
            peer=self.peer,
            error=repr(error),
            where=f"{place.name}:{place.lineno}",  # the log has its time under `at`
        )
        self.send([encode_error(PulqueError("the broker failed; see its log"), request_id, 0)])
        self.close()

    def refuse(self, error: PulqueError, request_id: int = 0) -> None:
        """Say what is wrong and close."""
        self._server.log("connection_refused", peer=self.peer, reason=str(error))
        if self._reader.is_http and not self.is_welcome:
            self.send([_HTTP_HINT])
        else:
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
        """Go on where we stopped."""
        self._stalled_at_ms = None
        self._fall_behind()

    def connection_lost(self, exc: Exception | None) -> None:
        """Forget the client."""
        del exc
        self._transport = None
        self._is_ending = True
        self._answers = []
        self._server.lost(self)
        if self._work is None:
            self._server.forget(self)

    def overdue(self, now_ms: int) -> str | None:
        """Return why this client has to go, if it has to."""
        limits = self._server.limits
        if not self.is_welcome and now_ms - self.opened_at_ms > limits.handshake_ms:
            return f"no handshake within {limits.handshake_ms} ms"
        if self._stalled_at_ms is not None:
            stalled_ms = min(_STALLED_MS, limits.idle_ms)
            is_dead = now_ms - self._stalled_at_ms > stalled_ms
            return f"answers were not read for {stalled_ms} ms" if is_dead else None
        if self._is_behind:
            return None  # the others' turns and its own are what it waits for
        began = self._frame_began_at_ms
        if began is not None and now_ms - began > limits.frame_ms:
            return f"a frame did not end within {limits.frame_ms} ms"
        if not self.waiting and now_ms - self._active_at_ms > limits.idle_ms:
            return f"nothing was heard for {limits.idle_ms} ms"
        return None

    def rest(self, now_ms: int) -> None:
        """Give back memory that only a busy client needs."""
        if now_ms - self._active_at_ms > _QUIET_MS:
            self._reader.let_go()


class FrameServer:
    """Listens, and keeps its connections within their limits."""

    def __init__(
        self,
        handler: FrameHandler,
        limits: ConnectionLimits,
        clock: Clock,
        log: Callable[..., None],
    ) -> None:
        self.handler = handler
        self.limits = limits
        self.clock = clock
        self._log = log
        self._told: dict[str, int] = {}
        self.connections: set[AcceptedConnection] = set()
        self._answering: set[AcceptedConnection] = set()
        self._backlog: OrderedDict[AcceptedConnection, None] = OrderedDict()
        """Connections that wait for their turn, in this order."""
        self._is_turn_due = False
        self._server: asyncio.Server | None = None
        self._sweeper: asyncio.TimerHandle | None = None
        self._is_empty: asyncio.Event | None = None
        """Set when the last connection is gone, once the server closes."""

    async def listen(self, host: str, port: int) -> tuple[str, int]:
        """Begin to accept connections; return the address."""
        loop = asyncio.get_running_loop()
        self._server = await loop.create_server(
            lambda: AcceptedConnection(self), host, port, backlog=1024, reuse_address=True
        )
        self._sweep()
        address = self._server.sockets[0].getsockname()
        return address[0], address[1]

    def stop_listening(self) -> None:
        """Accept no more connections, and take no more requests from those that are there."""
        if self._sweeper is not None:
            self._sweeper.cancel()
        if self._server is not None:
            self._server.close()
        for connection in self.connections:
            connection.stop_reading()

    async def close(self) -> None:
        """Close all connections once their answers are sent, or after a second."""
        self.stop_listening()
        with suppress(TimeoutError):
            async with asyncio.timeout(_LAST_ANSWERS_S):
                while self._backlog:  # noqa: ASYNC110  # each turn of the loop is one of theirs
                    await asyncio.sleep(0)
        for connection in list(self.connections):
            connection.close()
        self._is_empty = asyncio.Event()
        if self.connections:
            with suppress(TimeoutError):
                await asyncio.wait_for(self._is_empty.wait(), _LAST_ANSWERS_S)
        for connection in list(self.connections):
            connection.abort()

    def has_answers(self, connection: AcceptedConnection) -> None:
        """See to it that a connection's answers are written when this turn of the loop ends."""
        if not self._answering:
            asyncio.get_running_loop().call_soon(self.write_out)
        self._answering.add(connection)

    def write_out(self) -> None:
        """Write the answers of all connections that have some."""
        answering, self._answering = self._answering, set()
        for connection in answering:
            connection.write_out()

    def go_on_later(self, connection: AcceptedConnection) -> None:
        """See to it that a connection has its turn."""
        self._backlog[connection] = None
        self._take_turns_later()

    def _take_turns_later(self) -> None:
        if not self._is_turn_due:
            self._is_turn_due = True
            asyncio.get_running_loop().call_soon(self._take_turns)

    def _take_turns(self) -> None:
        """Give the connections of the backlog one turn together, each after the other."""
        self._is_turn_due = False
        until_ms = self.clock.monotonic_ms() + TURN_MS
        try:
            for _ in range(len(self._backlog)):
                connection, _ = self._backlog.popitem(last=False)
                if connection.go_on(until_ms):
                    self._backlog[connection] = None
                if self.clock.monotonic_ms() >= until_ms:
                    break
        finally:
            if self._backlog:
                self._take_turns_later()

    def opened(self, connection: AcceptedConnection, descriptor: int) -> None:
        """Count a connection, or refuse it."""
        count = len(self.connections)
        if count >= self.limits.max_connections or descriptor >= _last_descriptor():
            connection.refuse(OverloadedError(f"{count} connections are open already"))
            return
        self.connections.add(connection)

    def log(self, event: str, **fields: object) -> None:
        """Log an event; of many alike, only the first ones."""
        told = self._told.get(event, 0)
        self._told[event] = told + 1
        if told < _LINES_PER_SWEEP:
            self._log(event, **fields)

    def lost(self, connection: AcceptedConnection) -> None:
        """Forget what a connection was waiting for."""
        self.handler.closed(connection)

    def forget(self, connection: AcceptedConnection) -> None:
        """Forget a connection. One that is lost counts until the work it began is done."""
        self.connections.discard(connection)
        if self._is_empty is not None and not self.connections:
            self._is_empty.set()

    def _sweep(self) -> None:
        now_ms = self.clock.monotonic_ms()
        for connection in list(self.connections):
            reason = connection.overdue(now_ms)
            if reason is not None:
                self.log("connection_timed_out", peer=connection.peer, reason=reason)
                connection.abort()
            else:
                connection.rest(now_ms)
        for event, count in self._told.items():
            if count > _LINES_PER_SWEEP:
                self._log("lines_left_out", of=event, count=count - _LINES_PER_SWEEP)
        self._told.clear()
        loop = asyncio.get_running_loop()
        self._sweeper = loop.call_later(_SWEEP_EVERY_S, self._sweep)


def _last_descriptor() -> int:
    """Return which descriptors are kept for files: the log must go on, whoever connects."""
    most, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return most - max(16, min(256, most // 8))
