"""A connection to one broker; by hand, as each thread reads the answer to its own request.

Limits of time are set on the socket itself (``SO_RCVTIMEO``), so that an answer costs one
system call and not a ``poll`` before it.
"""

import contextlib
import socket
import struct
import time
from collections.abc import Callable, Sequence
from typing import Self, TypeVar

from pulque.client.connection.busy_poll import Lookout
from pulque.client.connection.fork_safety import on_fork
from pulque.client.connection.session import Answer, Session
from pulque.client.connection.url import Address
from pulque.errors import (
    DisconnectedError,
    ErrorCode,
    NotLeaderError,
    PulqueError,
    RemoteProtocolError,
    RequestTimeoutError,
    error_from_wire,
)
from pulque.net.sockets import prepare_socket
from pulque.wire.frame import Frame
from pulque.wire.requests import Request
from pulque.wire.responses import Response, Sent, Welcome, decode_response
from pulque.wire.single import SingleStored, encode_single_send, read_single_stored

__all__ = ["Connection", "connect_any"]

T = TypeVar("T")
_TIMEVAL = struct.Struct("ll")
_SHORTEST = 0.001
_SMALL = 32 * 1024
"""Below it, one copy is cheaper than a list of buffers."""
_MANY_BUFFERS = 512
"""The system takes 1,024 at once."""


class Connection:
    """One connection, welcomed by its broker. Not thread-safe, except ``close``."""

    def __init__(self, sock: socket.socket, address: Address, session: Session) -> None:
        self.address = address
        self.session = session
        self._sock = sock
        self._timeout = 0.0
        self._lookout = Lookout(self.read)
        self.is_open = True
        self.on_deposed: Callable[[], None] | None = None
        """Called when the broker says that it does not lead: who does has to be asked."""
        on_fork(self, Connection.after_fork)

    @classmethod
    def open(cls, address: Address, *, client: str, timeout: float) -> Self:
        """Connect and shake hands.

        Raises:
            DisconnectedError: Nobody answers there, or not in time.
            PulqueError: The broker refused.
        """
        started = time.monotonic()
        try:
            sock = socket.create_connection(address, timeout=max(timeout, _SHORTEST))
        except OSError as error:
            waited = time.monotonic() - started
            raise DisconnectedError(
                f"cannot connect to {address} ({error}) after {waited:.1f} s"
            ) from None
        try:
            prepare_socket(sock)
            sock.settimeout(None)
            connection = cls(sock, address, Session(client))
            connection._shake_hands(started + timeout)
        except BaseException:
            sock.close()
            raise
        return connection

    @property
    def welcome(self) -> Welcome:
        """What the broker said of itself."""
        assert self.session.welcome is not None  # noqa: S101  # open() sees to it
        return self.session.welcome

    def fileno(self) -> int:
        """Return the socket's descriptor, to wait for bytes with others."""
        return self._sock.fileno()

    def abort(self) -> None:
        """End the conversation. Any thread may: one that waits here wakes up.

        The socket stays, so that its number is not given to another while that thread uses it.
        """
        self.is_open = False
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """End it and free the socket. Only its owner may."""
        self.abort()
        self._sock.close()

    def after_fork(self) -> None:
        """Close the child's end of the socket; the parent goes on with its own."""
        self.is_open = False
        self._sock.close()

    def set_timeout(self, seconds: float) -> None:
        """Limit every single wait of ``read`` and ``write``, to within a hundredth.

        To tell the system costs two calls: a limit that is hardly longer does as well.
        """
        if not seconds <= self._timeout <= seconds * 1.01:
            self._timeout = seconds
            whole = max(seconds, _SHORTEST)
            value = _TIMEVAL.pack(int(whole), int(whole % 1 * 1_000_000))
            try:
                self._sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, value)
                self._sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, value)
            except OSError as error:
                raise self._broken(error) from None

    def request(self, request: Request, timeout: float, convert: Callable[[Response], T]) -> T:
        """Ask, and return the answer after ``convert``, which sees views while they are valid.

        Raises:
            DisconnectedError: The connection is gone; the outcome is unknown.
            RequestTimeoutError: No answer in time; the connection is closed.
            PulqueError: The broker said no.
        """
        request_id, buffers = self.session.ask(request)
        response = self.exchange(request_id, buffers, timeout)
        if isinstance(response, PulqueError):
            raise response
        return convert(response)

    def exchange(
        self, request_id: int, buffers: Sequence[bytes | memoryview], timeout: float
    ) -> Response | PulqueError:
        """Write a frame and return the answer to it, an error of the broker too."""
        self.set_timeout(timeout)
        self.write(buffers)
        deadline = time.monotonic() + timeout
        while True:
            answered, response = self.read_answer()
            if answered == request_id:
                return response
            if not answered:
                raise self._refused(response)
            if time.monotonic() > deadline:
                self.abort()
                raise self._late(timeout)

    def send_single(
        self, partition: str, batch: bytes, *, acks: int, timeout: float
    ) -> SingleStored | PulqueError:
        """Send one batch and wait for its outcome: the short way."""
        session = self.session
        request_id = session.next_id()
        data = encode_single_send(
            partition,
            batch,
            acks=acks,
            timeout_ms=int(timeout * 1000),
            request_id=request_id,
            epoch=session.epoch,
        )
        self.set_timeout(timeout)
        asked_at = self._lookout.ask()
        try:
            self._sock.sendall(data)
        except BlockingIOError:
            self.abort()
            raise self._late(timeout) from None
        except OSError as error:
            raise self._broken(error) from None
        self._lookout.look(asked_at)
        frame = self._read_frame(request_id, timeout)
        self._lookout.answered(asked_at)
        stored = read_single_stored(frame) or _not_stored(frame)
        if isinstance(stored, NotLeaderError):
            raise self._deposed(stored)
        return stored

    def _read_frame(self, request_id: int, timeout: float) -> Frame:
        next_frame = self.session.reader.next_frame
        deadline = 0.0
        while True:
            try:
                frame = next_frame()
            except BaseException:
                self.abort()
                raise
            if frame is None:
                if not self.read() or (deadline and time.monotonic() > deadline):
                    self.abort()
                    raise self._late(timeout)
            elif frame.request_id == request_id:
                return frame
            elif not frame.request_id:
                raise self._refused(decode_response(frame))
            # Something came that is not the answer: from now on the time is watched.
            deadline = deadline or time.monotonic() + timeout

    def write(self, buffers: Sequence[bytes | memoryview]) -> None:
        """Write all buffers."""
        try:
            if sum(map(len, buffers)) < _SMALL or len(buffers) > _MANY_BUFFERS:
                self._sock.sendall(b"".join(buffers))
            else:
                self._write_buffers(buffers)
        except BlockingIOError:
            self.abort()
            raise self._late(self._timeout) from None
        except OSError as error:
            raise self._broken(error) from None
        except BaseException:
            self.abort()  # interrupted: perhaps half of a frame is written
            raise

    def read_answer(self) -> Answer:
        """Return the next answer; wait for it as long as the socket's timeout allows."""
        while True:
            answer = self._next_answer()
            if answer is not None:
                return answer
            if not self.read():
                self.abort()
                raise self._late(self._timeout)

    def try_answer(self) -> Answer | None:
        """Return the next answer if it is here already."""
        answer = self._next_answer()
        if answer is None and self.read(socket.MSG_DONTWAIT):
            answer = self._next_answer()
        return answer

    def wait_answer(self, deadline: float) -> Answer | None:
        """Return the next answer, or None at the deadline; the connection lives on."""
        while True:
            answer = self._next_answer()
            if answer is not None:
                return answer
            left = deadline - time.monotonic()
            if left <= 0:
                return None
            self.set_timeout(left)
            self.read()

    def buffered_answer(self) -> Answer | None:
        """Return the next answer among the bytes read so far."""
        return self._next_answer()

    def read(self, flags: int = 0) -> int:
        """Take what the socket has; 0 if nothing came in time, or at once if told not to wait."""
        reader = self.session.reader
        try:
            count = self._sock.recv_into(reader.buffer(), 0, flags)
            if count:
                reader.received(count)
                return count
        except BlockingIOError:
            return 0
        except OSError as error:
            raise self._broken(error) from None
        except BaseException:
            self.abort()  # interrupted: perhaps what came is lost
            raise
        raise self._lost("the broker closed it")

    def _next_answer(self) -> Answer | None:
        try:
            answer = self.session.next_answer()
        except BaseException:
            self.abort()
            raise
        if answer is not None and isinstance(answer[1], NotLeaderError):
            raise self._deposed(answer[1])
        return answer

    def _shake_hands(self, deadline: float) -> None:
        self.set_timeout(deadline - time.monotonic())
        self.write((self.session.hello(),))
        while self.session.receive_welcome() is None:
            if not self.read() or time.monotonic() > deadline:
                raise self._late(self._timeout)

    def _write_buffers(self, buffers: Sequence[bytes | memoryview]) -> None:
        sent = self._sock.sendmsg(buffers)
        if sent < sum(map(len, buffers)):
            self._sock.sendall(memoryview(b"".join(buffers))[sent:])

    def _lost(self, reason: object) -> DisconnectedError:
        self.abort()
        return DisconnectedError(f"the connection to {self.address} is lost: {reason}")

    def _broken(self, error: OSError) -> Exception:
        """Return what to raise where the socket is used: that the connection is lost.

        What has no number is no error of the socket. A signal handler raised it, as TimeoutError
        is an OSError, and it is for the application.
        """
        lost = self._lost(error)
        return error if error.errno is None else lost

    def _deposed(self, error: NotLeaderError) -> DisconnectedError:
        """Take in that somebody else leads: the connection is as good as lost.

        What was asked may have come into effect all the same, and be known to who leads now.
        """
        lost = self._lost(error)
        if self.on_deposed is not None:
            self.on_deposed()
        return lost

    def _late(self, waited: float) -> RequestTimeoutError:
        return RequestTimeoutError(f"no answer from {self.address} within {waited:.1f} s")

    def _refused(self, response: object) -> PulqueError:
        """Answers without a request are complaints about the connection itself."""
        self.abort()
        if isinstance(response, PulqueError):
            return response
        return RemoteProtocolError(f"{self.address} sent {response!r} to no request")


def connect_any(addresses: Sequence[Address], *, client: str, timeout: float) -> Connection:
    """Connect to the first of several addresses that answers; all together within ``timeout``."""
    deadline = time.monotonic() + timeout
    for address in addresses[:-1]:
        share = (deadline - time.monotonic()) / len(addresses)
        with contextlib.suppress(DisconnectedError, RequestTimeoutError):
            return Connection.open(address, client=client, timeout=share)
    left = deadline - time.monotonic()
    return Connection.open(addresses[-1], client=client, timeout=left)


def _not_stored(frame: Frame) -> SingleStored | PulqueError:
    """Return what became of the only batch of a send, decoded the long way."""
    response = decode_response(frame)
    if isinstance(response, PulqueError):
        return response
    if not isinstance(response, Sent) or len(response.outcomes) != 1:
        return RemoteProtocolError(f"a send of one batch got {response!r}")
    outcome = response.outcomes[0]
    if outcome.code is not ErrorCode.NONE:
        return error_from_wire(outcome.code, outcome.text)
    return SingleStored(outcome.is_duplicate, outcome.first_sequence, outcome.stored_at_ms)
