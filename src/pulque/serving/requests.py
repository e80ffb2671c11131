"""From frames to answers, the same for every server: greet, look up, hold, answer.

A server lists the types of request that it answers, one ``RequestRow`` for each. What holds for
all servers is done here once, between a frame and its row: the handshake, the refusal of requests
that come too late, how many requests of one connection may wait, steps, and how errors are
answered. A check or a counter for every request belongs into ``RequestHandler.handle``,
authentication into ``RequestHandler._authenticate``.
"""

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any, NamedTuple, TypeVar

from pulque.errors import (
    OverloadedError,
    ProtocolError,
    PulqueError,
    RemoteProtocolError,
    RequestTimeoutError,
    UnsupportedError,
)
from pulque.net.server import AcceptedConnection, Work
from pulque.serving.responses import Responder
from pulque.wire.frame import Frame
from pulque.wire.requests import Hello, Request, decode_request
from pulque.wire.responses import Response, Welcome
from pulque.wire.single import SingleSend, read_single_send
from pulque.wire.versions import agree

__all__ = ["RequestHandler", "RequestRow", "calls_back", "in_steps", "returns", "row"]

_MOST_HELD = 1000
"""Requests of one connection that may wait for their answers, if the server says nothing else."""

R = TypeVar("R", bound=Request)
RowHandler = Callable[[AcceptedConnection, R, Responder], Work | None]
"""Answers a request, at once, later, or with the last of the steps that it returns."""


class RequestRow(NamedTuple):
    """How requests of one type are answered."""

    kind: type[Any]
    handler: RowHandler[Any]
    is_held: bool
    has_deadline: bool
    needs_leadership: bool
    outlives_client: bool


def row(  # one fact after the other, each by its name
    kind: type[R],
    handler: RowHandler[R],
    *,
    is_held: bool = False,
    has_deadline: bool = False,
    needs_leadership: bool = True,
    outlives_client: bool = False,
) -> RequestRow:
    """Return how requests of one type are answered.

    Args:
        kind: The type.
        handler: Answers one of them.
        is_held: Whether the answer may have to wait for something else to happen. Only so many
            of these may wait on one connection.
        has_deadline: Whether a request is refused if it waited for its turn for longer than its
            own ``timeout_ms``.
        needs_leadership: Whether a server that cannot tell whether it leads refuses it.
        outlives_client: Whether all its steps are taken, although its client is gone.
    """
    return RequestRow(kind, handler, is_held, has_deadline, needs_leadership, outlives_client)


def returns(answer: Callable[[R], Response]) -> RowHandler[R]:
    """Return a handler that sends what a function returns."""

    def handle(_: AcceptedConnection, request: R, responder: Responder) -> None:
        responder.answer(answer(request))

    return handle


def calls_back(
    begin: Callable[[R, Callable[[Any], None], Callable[[PulqueError], None]], None],
) -> RowHandler[R]:
    """Return a handler for a function that calls one of two functions, now or later."""

    def handle(_: AcceptedConnection, request: R, responder: Responder) -> None:
        begin(request, responder.answer, responder.refuse)

    return handle


def in_steps(work: Work, responder: Responder, client: AcceptedConnection | None = None) -> Work:
    """Take the steps of a request, and send an error if one of them raises it.

    Args:
        work: The steps. The last one sends the answer.
        responder: Takes the error.
        client: The connection without which no further step is taken; None to take all.
    """
    try:
        for _ in work:
            if client is not None and client.is_gone:
                return
            yield
    except PulqueError as error:
        responder.refuse(error)


class RequestHandler:
    """Answers the requests of one server.

    Args:
        rows: The types of request that the server answers.
        server: What the server calls itself in errors.
        welcome: Returns what it says about itself.
        unknown: Returns the error for a type of request that has no row.
        epoch: The epoch that it answers in.
        most_held: How many requests of one connection may wait for their answers.
        responder: Sends answers.
        decode: Returns what a frame asks.
        refusal: Returns why requests that need leadership are refused now; None to answer them.
            A server that needs none gives no function.
        send_single: Stores a send of one batch; None for a server that stores nothing.
        lateness: What an error adds to how long a request waited for its turn.
    """

    def __init__(  # noqa: PLR0913  # all in which servers differ
        self,
        rows: Iterable[RequestRow],
        *,
        server: str,
        welcome: Callable[[], Welcome],
        unknown: Callable[[Request], PulqueError],
        epoch: int = 0,
        most_held: int = _MOST_HELD,
        responder: type[Responder] = Responder,
        decode: Callable[[Frame], Request] = decode_request,
        refusal: Callable[[], PulqueError | None] | None = None,
        send_single: Callable[[SingleSend, Responder], None] | None = None,
        lateness: str = "",
    ) -> None:
        self._table: dict[type[Any], RequestRow] = {each.kind: each for each in rows}
        self._table[Hello] = row(Hello, _greet_again)
        self._unconditional = frozenset(
            int(each.kind.opcode) for each in self._table.values() if not each.needs_leadership
        )
        self._server = server
        self._welcome = welcome
        self._unknown = unknown
        self._epoch = epoch
        self._most_held = most_held
        self._responder = responder
        self._decode = decode
        self._refusal = refusal
        self._send_single = send_single
        self._lateness = lateness

    @property
    def answered(self) -> frozenset[type[Any]]:
        """The types of request that the server answers."""
        return frozenset(self._table)

    def handle(self, connection: AcceptedConnection, frame: Frame) -> Work | None:
        """Answer a frame, now or later."""
        responder = self._responder(connection, frame.request_id, self._epoch)
        try:
            if not connection.is_welcome:
                self._greet(connection, self._decode(frame), responder)
                return None
            if self._refusal is not None and frame.opcode not in self._unconditional:
                refusal = self._refusal()
                if refusal is not None:
                    raise refusal
            if self._send_single is not None and (single := read_single_send(frame)) is not None:
                if connection.waited_ms:
                    self._check_deadline(connection, single.timeout_ms)
                self._send_single(single, responder)
                return None
            return self._dispatch(connection, self._decode(frame), responder)
        except ProtocolError as error:
            connection.refuse(error, frame.request_id)
        except PulqueError as error:
            responder.refuse(error)
        return None

    def pause(self, connection: AcceptedConnection) -> None:
        """Note that all frames of a connection that have come are handled."""

    def closed(self, connection: AcceptedConnection) -> None:
        """Forget what a connection was waiting for."""

    # -- inside ------------------------------------------------------------------------------

    def _greet(
        self, connection: AcceptedConnection, request: Request, responder: Responder
    ) -> None:
        """Do the handshake.

        Raises:
            RemoteProtocolError: The client did not begin with it.
            UnsupportedError: The client wants what this server does not have.
        """
        if not isinstance(request, Hello):
            raise RemoteProtocolError("the first frame on a connection must be a Hello")
        self._authenticate(request)
        connection.version = version = agree(request.min_version, request.max_version)
        connection.welcome()
        self._greeted(connection, request)
        responder.answer(replace(self._welcome(), version=version))

    def _authenticate(self, request: Hello) -> None:
        """Check who the client is.

        Raises:
            UnsupportedError: The client wants to prove who it is.
        """
        if request.mechanism:
            raise UnsupportedError(
                f"authentication by {request.mechanism!r} is not known; this {self._server} "
                "knows none"
            )

    def _greeted(self, connection: AcceptedConnection, request: Hello) -> None:
        """Note who a client is, once the handshake is done."""

    def _dispatch(
        self, connection: AcceptedConnection, request: Request, responder: Responder
    ) -> Work | None:
        """Answer a request by its row; return the steps that are left to take."""
        found = self._table.get(type(request))
        if found is None:
            raise self._unknown(request)
        if found.has_deadline:
            limited: Any = request
            self._check_deadline(connection, limited.timeout_ms)
        if found.is_held:
            self._hold(connection, responder)
        work = found.handler(connection, request, responder)
        if work is None:
            return None
        return in_steps(work, responder, None if found.outlives_client else connection)

    def _hold(self, connection: AcceptedConnection, responder: Responder) -> None:
        """Count a request among those that wait.

        Raises:
            OverloadedError: Too many wait on this connection already.
        """
        if connection.waiting >= self._most_held:
            raise OverloadedError(f"{connection.waiting} requests of this connection wait already")
        responder.hold()

    def _check_deadline(self, connection: AcceptedConnection, timeout_ms: int) -> None:
        """Refuse what its client has given up by now: nothing is stored for nobody.

        Raises:
            RequestTimeoutError: It has.
        """
        waited_ms = connection.waited_ms
        if waited_ms > timeout_ms > 0:
            raise RequestTimeoutError(
                f"a send with a limit of {timeout_ms} ms waited {waited_ms} ms for its turn"
                f"{self._lateness}; nothing of it was stored"
            )


def _greet_again(_: AcceptedConnection, request: Hello, responder: Responder) -> None:
    del request, responder
    raise RemoteProtocolError("a second Hello on one connection")
