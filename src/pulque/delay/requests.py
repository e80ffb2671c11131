"""Dispatch the requests of clients to the parts of the delay server."""

import asyncio
from collections.abc import Callable, Coroutine
from dataclasses import replace
from weakref import WeakKeyDictionary

from pulque.delay.pending_changes import Changer
from pulque.delay.pending_queries import Looker
from pulque.delay.receiver import Receiver
from pulque.delay.registration import Joining
from pulque.errors import (
    OverloadedError,
    ProtocolError,
    PulqueError,
    ReadOnlyError,
    RemoteProtocolError,
    RequestTimeoutError,
    UnavailableError,
    UnsupportedError,
)
from pulque.model.names import PartitionName, Pattern, parse_pattern
from pulque.model.routes import PartitionRoute, RouteKind
from pulque.model.routes import Route as RouteOf
from pulque.net.server import Connection, Work
from pulque.wire.delay import (
    Cancel,
    Cancelled,
    Reschedule,
    Rescheduled,
    Scheduled,
    ScheduledListed,
)
from pulque.wire.frame import Frame
from pulque.wire.requests import (
    Hello,
    Request,
    Route,
    Send,
    Status,
    StuckMessages,
    decode_request,
)
from pulque.wire.responses import (
    Outcome,
    Response,
    Routed,
    Sent,
    StatusReport,
    StuckListed,
    Welcome,
    encode_error,
    encode_response,
)
from pulque.wire.single import encode_single_stored, read_single_send
from pulque.wire.versions import agree

__all__ = ["DelayHandler"]

_MOST_WAITING = 1000


class _Answerer:
    """Sends the answer to one request."""

    __slots__ = ("_connection", "_request_id")

    def __init__(self, connection: Connection, request_id: int) -> None:
        self._connection = connection
        self._request_id = request_id

    def answer(self, response: Response) -> None:
        """Send the answer."""
        self._connection.send(encode_response(response, self._request_id, 0))

    def refuse(self, error: PulqueError) -> None:
        """Send an error."""
        self._connection.send([encode_error(error, self._request_id, 0)])

    def put(self, index: int, outcome: Outcome) -> None:
        """Send the outcome of a send that has one batch."""
        del index
        if outcome.code:
            self.answer(Sent((outcome,)))
            return
        answer = encode_single_stored(
            is_duplicate=outcome.is_duplicate,
            first_sequence=outcome.first_sequence,
            stored_at_ms=outcome.stored_at_ms,
            request_id=self._request_id,
            epoch=0,
        )
        self._connection.send([answer])


class DelayHandler:
    """Answers every opcode that a delay server knows."""

    def __init__(
        self,
        welcome: Welcome,
        receiver: Receiver,
        changer: Changer,
        looker: Looker,
        joining: Joining,
        *,
        status: Callable[[], bytes],
    ) -> None:
        self._welcome = welcome
        self._receiver = receiver
        self._changer = changer
        self._looker = looker
        self._joining = joining
        self._status = status
        self._tasks: set[asyncio.Task[None]] = set()
        self._changing: WeakKeyDictionary[Connection, asyncio.Lock] = WeakKeyDictionary()
        """By connection, so that each has one turn among those that change messages."""

    def handle(self, connection: Connection, frame: Frame) -> Work | None:
        """Handle a frame; answer now or later."""
        answerer = _Answerer(connection, frame.request_id)
        try:
            if not connection.is_welcome:
                self._greet(connection, decode_request(frame), answerer)
                return None
            single = read_single_send(frame)
            if single is None:
                return self._begin(connection, decode_request(frame), answerer)
            self._check_send(connection, single.timeout_ms)
            self._receiver.send_single(single, answerer)
        except ProtocolError as error:
            connection.refuse(error, frame.request_id)
        except PulqueError as error:
            answerer.refuse(error)
        return None

    def pause(self, connection: Connection) -> None:
        """Pass on that a connection has sent all of its requests for now."""
        self._receiver.pause(connection)

    def closed(self, connection: Connection) -> None:
        """Do nothing: no state belongs to a connection alone."""

    async def close(self) -> None:
        """Cancel pending requests."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _greet(self, connection: Connection, request: Request, answerer: _Answerer) -> None:
        if not isinstance(request, Hello):
            raise RemoteProtocolError("the first frame on a connection must be a Hello")
        if request.mechanism:
            raise UnsupportedError(
                f"authentication by {request.mechanism!r} is not known; this server knows none"
            )
        version = agree(request.min_version, request.max_version)
        connection.welcome()
        answerer.answer(replace(self._welcome, version=version, cluster=self._joining.cluster))

    def _begin(self, connection: Connection, request: Request, answerer: _Answerer) -> Work | None:
        """Handle a request, at once or in steps."""
        if isinstance(request, Send) and len(request.batches) > 1:
            self._check_send(connection, request.timeout_ms)
            return self._receiver.send_in_steps(request, answerer.answer, lambda: None)
        self._dispatch(connection, request, answerer)
        return None

    def _dispatch(self, connection: Connection, request: Request, answerer: _Answerer) -> None:
        match request:
            case Send():
                self._check_send(connection, request.timeout_ms)
                self._receiver.send(request, answerer.answer)
            case Cancel():
                self._do_later(connection, answerer, self._cancel(connection, request))
            case Reschedule():
                self._do_later(connection, answerer, self._reschedule(connection, request))
            case Scheduled() | StuckMessages():
                self._do_later(connection, answerer, self._listed(request))
            case Route():
                answerer.answer(Routed(self._route(request)))
            case Status():
                answerer.answer(StatusReport(self._status()))
            case Hello():
                raise RemoteProtocolError("a second Hello on one connection")
            case _:
                raise UnsupportedError(
                    f"this is a delay server; {type(request).__name__} is for brokers and meta "
                    "servers"
                )

    def _check_send(self, connection: Connection, timeout_ms: int) -> None:
        waited_ms = connection.waited_ms
        if waited_ms and waited_ms > timeout_ms > 0:
            raise RequestTimeoutError(
                f"a send with a limit of {timeout_ms} ms waited {waited_ms} ms for its turn; "
                "nothing of it was stored"
            )
        if self._joining.is_read_only:
            raise ReadOnlyError("this delay server takes no messages, by command")

    async def _listed(self, request: Scheduled | StuckMessages) -> ScheduledListed | StuckListed:
        if isinstance(request, StuckMessages):
            return self._looker.stuck(request)
        await self._receiver.replayer.caught_up()
        return await self._looker.listed(request)

    async def _cancel(self, connection: Connection, request: Cancel) -> Cancelled:
        async with self._turn_of(connection):
            return Cancelled(await self._changer.cancel(request.tickets))

    async def _reschedule(self, connection: Connection, request: Reschedule) -> Rescheduled:
        async with self._turn_of(connection):
            return Rescheduled(await self._changer.reschedule(request.moves))

    def _turn_of(self, connection: Connection) -> asyncio.Lock:
        return self._changing.setdefault(connection, asyncio.Lock())

    def _route(self, request: Route) -> RouteOf:
        """Answer a route request: delayed messages go here; other routes are unknown."""
        pattern = Pattern(parse_pattern(request.subject))
        if request.kind is not RouteKind.DELAYED:
            raise UnsupportedError("this is a delay server; ask a meta server who serves subjects")
        here = PartitionRoute(PartitionName(pattern), self._welcome.broker, "", 0)
        return RouteOf(pattern, 0, (here,))

    def _do_later(
        self,
        connection: Connection,
        answerer: _Answerer,
        work: Coroutine[None, None, Response],
    ) -> None:
        if connection.waiting >= _MOST_WAITING:
            work.close()
            raise OverloadedError(f"{connection.waiting} requests of this connection wait already")
        connection.waiting += 1

        async def do() -> None:
            try:
                answerer.answer(await work)
            except PulqueError as error:
                answerer.refuse(error)
            except asyncio.CancelledError:
                answerer.refuse(UnavailableError("the delay server stops"))
                raise
            finally:
                connection.waiting -= 1

        task = asyncio.create_task(do())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
