"""A connection to one broker; by hand, as in asyncio answers are handed to whoever asked."""

import asyncio
import contextlib
import os
import time
from collections.abc import Callable, Sequence
from typing import Self, TypeVar, cast

from pulque.client.connection.fork_safety import on_fork
from pulque.client.connection.session import Session
from pulque.client.connection.url import Address
from pulque.errors import (
    DisconnectedError,
    NotLeaderError,
    PulqueError,
    RemoteProtocolError,
    RequestTimeoutError,
)
from pulque.net.sockets import prepare_socket
from pulque.wire.requests import Request
from pulque.wire.responses import Response, Welcome

__all__ = ["AsyncConnection", "Handler", "connect_any"]

T = TypeVar("T")
Handler = Callable[[Response | PulqueError], None]
"""Takes an answer in; views in it are valid until it returns."""


class AsyncConnection(asyncio.BufferedProtocol):
    """One connection, welcomed by its broker. For one event loop."""

    def __init__(self, address: Address, client: str) -> None:
        self.address = address
        self.is_open = True
        self._session = Session(client)
        self._loop = asyncio.get_running_loop()
        self._transport: asyncio.Transport | None = None
        self._handlers: dict[int, Handler] = {}
        self._welcomed: asyncio.Future[Welcome] = self._loop.create_future()
        self._closed = asyncio.Event()
        self._is_connected = False
        """Whether the loop has handed it over: only then does it tell of its end."""
        self.on_lost: Callable[[DisconnectedError], None] | None = None
        """Called once when the connection is gone, after all handlers were told."""
        self.on_deposed: Callable[[], None] | None = None
        """Called when the broker says that it does not lead: who does has to be asked."""
        on_fork(self, AsyncConnection.after_fork)

    @classmethod
    async def open(cls, address: Address, *, client: str, timeout: float) -> Self:
        """Connect and shake hands.

        Raises:
            DisconnectedError: Nobody answers there, or not in time.
            PulqueError: The broker refused.
        """
        started = time.monotonic()
        connection = cls(address, client)
        try:
            async with asyncio.timeout(timeout):
                await connection._loop.create_connection(
                    lambda: connection, address.host, address.port
                )
                connection._is_connected = True
                await connection._welcomed
        except (OSError, TimeoutError) as error:
            waited = time.monotonic() - started
            await connection.close()
            raise DisconnectedError(
                f"cannot connect to {address} ({error or 'no answer'}) after {waited:.1f} s"
            ) from None
        except BaseException:
            await connection.close()
            raise
        return connection

    @property
    def welcome(self) -> Welcome:
        """What the broker said of itself."""
        return self._welcomed.result()

    def post(self, request: Request, handler: Handler) -> int:
        """Write a request; ``handler`` is called with the answer, or with why there is none."""
        if not self.is_open or self._transport is None:
            handler(DisconnectedError(f"the connection to {self.address} is lost"))
            return 0
        request_id, buffers = self._session.ask(request)
        self._handlers[request_id] = handler
        self._transport.writelines(buffers)
        return request_id

    async def request(
        self, request: Request, timeout: float, convert: Callable[[Response], T]
    ) -> T:
        """Ask, and return the answer after ``convert``, which sees views while they are valid.

        Raises:
            DisconnectedError: The connection is gone; the outcome is unknown.
            RequestTimeoutError: No answer in time.
            PulqueError: The broker said no.
        """
        answer: asyncio.Future[T] = self._loop.create_future()

        def take_in(response: Response | PulqueError) -> None:
            if answer.done():
                return
            try:
                if isinstance(response, PulqueError):
                    answer.set_exception(response)
                else:
                    answer.set_result(convert(response))
            except PulqueError as error:
                answer.set_exception(error)

        request_id = self.post(request, take_in)
        try:
            async with asyncio.timeout(timeout):
                return await answer
        except TimeoutError:
            raise RequestTimeoutError(
                f"no answer from {self.address} within {timeout:.1f} s"
            ) from None
        finally:
            self._handlers.pop(request_id, None)

    async def close(self) -> None:
        """End it, and wait until the socket is free."""
        self.abort()
        if self._is_connected:
            await self._closed.wait()

    def abort(self) -> None:
        """End it at once."""
        self.is_open = False
        if self._transport is not None:
            self._transport.abort()

    def after_fork(self) -> None:
        """Let go of the parent's socket in a child.

        Its number stays taken: the transport closes it one day, and must close nothing else.
        """
        self.is_open = False
        sock = None if self._transport is None else self._transport.get_extra_info("socket")
        if sock is not None and sock.fileno() >= 0:
            nothing = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
            os.dup2(nothing, sock.fileno(), inheritable=False)
            os.close(nothing)

    # ── what the event loop calls ──────────────────────────────────────────────────────────

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        sock = transport.get_extra_info("socket")
        if sock is not None:
            prepare_socket(sock)
        self._transport.write(self._session.hello())

    def get_buffer(self, sizehint: int) -> memoryview:  # the loop's guess
        return self._session.reader.buffer()

    def buffer_updated(self, nbytes: int) -> None:
        self._session.reader.received(nbytes)
        try:
            if self._session.welcome is None:
                welcome = self._session.receive_welcome()
                if welcome is None or self._welcomed.done():
                    return  # nobody waits for it any more
                self._welcomed.set_result(welcome)
            while (answer := self._session.next_answer()) is not None:
                self._dispatch(*answer)
        except PulqueError as error:
            self._fail(error)
            self.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        self.is_open = False
        self._closed.set()
        reason = exc or "the broker closed it"
        error = DisconnectedError(f"the connection to {self.address} is lost: {reason}")
        self._fail(error)
        if self.on_lost is not None:
            on_lost, self.on_lost = self.on_lost, None
            on_lost(error)

    def _dispatch(self, request_id: int, response: Response | PulqueError) -> None:
        if isinstance(response, NotLeaderError):
            raise self._deposed(response)
        handler = self._handlers.pop(request_id, None)
        if handler is not None:
            handler(response)
        elif not request_id:
            # Answers without a request are complaints about the connection itself.
            if isinstance(response, PulqueError):
                raise response
            raise RemoteProtocolError(f"{self.address} sent {response!r} to no request")

    def _deposed(self, error: NotLeaderError) -> DisconnectedError:
        """Take in that somebody else leads: the connection is as good as lost.

        What was asked may have come into effect all the same, and be known to who leads now.
        """
        self.is_open = False
        if self.on_deposed is not None:
            self.on_deposed()
        return DisconnectedError(f"the connection to {self.address} is lost: {error}")

    def _fail(self, error: PulqueError) -> None:
        if not self._welcomed.done():
            self._welcomed.set_exception(error)
        handlers, self._handlers = self._handlers, {}
        for handler in handlers.values():
            handler(error)


async def connect_any(
    addresses: Sequence[Address], *, client: str, timeout: float
) -> AsyncConnection:
    """Connect to the first of several addresses that answers; all together within ``timeout``."""
    deadline = time.monotonic() + timeout
    for address in addresses[:-1]:
        share = (deadline - time.monotonic()) / len(addresses)
        with contextlib.suppress(DisconnectedError, RequestTimeoutError):
            return await AsyncConnection.open(address, client=client, timeout=share)
    left = deadline - time.monotonic()
    return await AsyncConnection.open(addresses[-1], client=client, timeout=left)
