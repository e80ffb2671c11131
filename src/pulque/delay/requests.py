"""Which parts of the delay server answer which requests."""

import asyncio
from collections.abc import Callable, Coroutine
from dataclasses import replace
from typing import TypeVar
from weakref import WeakKeyDictionary

from pulque.delay.pending_changes import Changer
from pulque.delay.pending_queries import Looker
from pulque.delay.receiver import DelayReceiver
from pulque.delay.registration import DelayRegistration
from pulque.errors import PulqueError, ReadOnlyError, UnsupportedError
from pulque.model.names import PartitionName, Pattern, parse_pattern
from pulque.model.routes import PartitionRoute, RouteKind
from pulque.model.routes import Route as RouteOf
from pulque.net.server import AcceptedConnection, Work
from pulque.serving.request_tasks import RequestTasks
from pulque.serving.requests import RequestHandler, returns, row
from pulque.serving.responses import Responder
from pulque.wire.delay import (
    Cancel,
    Cancelled,
    Reschedule,
    Rescheduled,
    Scheduled,
    ScheduledListed,
)
from pulque.wire.requests import (
    Request,
    Route,
    Send,
    Status,
    StuckMessages,
)
from pulque.wire.responses import (
    Response,
    Routed,
    StatusReport,
    StuckListed,
    Welcome,
)
from pulque.wire.single import SingleSend

__all__ = ["DelayHandler"]

R = TypeVar("R", bound=Request)


class DelayHandler(RequestHandler):
    """Answers every opcode that a delay server knows."""

    def __init__(
        self,
        welcome: Welcome,
        receiver: DelayReceiver,
        changer: Changer,
        looker: Looker,
        registration: DelayRegistration,
        *,
        status: Callable[[], bytes],
    ) -> None:
        self._broker = welcome.broker
        self._receiver = receiver
        self._changer = changer
        self._looker = looker
        self._registration = registration
        self._status = status
        self._tasks = RequestTasks("delay server")
        self._changing: WeakKeyDictionary[AcceptedConnection, asyncio.Lock] = WeakKeyDictionary()
        """So that a connection stands once in the queue of those who change something."""
        super().__init__(
            (
                row(Send, self._send, has_deadline=True, outlives_client=True),
                row(Cancel, self._in_task(self._cancel), is_held=True),
                row(Reschedule, self._in_task(self._reschedule), is_held=True),
                row(Scheduled, self._in_task(self._listed), is_held=True),
                row(StuckMessages, self._in_task(self._stuck), is_held=True),
                row(Route, returns(self._route)),
                row(Status, returns(self._report)),
            ),
            server="server",
            welcome=lambda: replace(welcome, cluster=registration.cluster),
            unknown=_elsewhere,
            send_single=self._single_send,
        )

    def pause(self, connection: AcceptedConnection) -> None:
        """Pass on that a connection has sent all of its requests for now."""
        self._receiver.pause(connection)

    async def close(self) -> None:
        """Give up what is under way."""
        await self._tasks.close()

    def _report(self, request: Status) -> StatusReport:
        del request
        return StatusReport(self._status())

    def _single_send(self, request: SingleSend, responder: Responder) -> None:
        self._check_writable()
        self._receiver.send_single(request, responder)

    def _send(
        self, connection: AcceptedConnection, request: Send, responder: Responder
    ) -> Work | None:
        self._check_writable()
        if len(request.batches) > self._receiver.batches_per_step:
            return self._receiver.send_in_steps(request, responder.answer)
        self._receiver.send(request, responder.answer, connection)
        return None

    def _check_writable(self) -> None:
        if self._registration.is_read_only:
            raise ReadOnlyError("this delay server takes no messages, by command")

    async def _listed(self, connection: AcceptedConnection, request: Scheduled) -> ScheduledListed:
        del connection
        await self._receiver.replayer.caught_up()
        return await self._looker.listed(request)

    async def _stuck(self, connection: AcceptedConnection, request: StuckMessages) -> StuckListed:
        del connection
        return self._looker.stuck(request)

    async def _cancel(self, connection: AcceptedConnection, request: Cancel) -> Cancelled:
        async with self._turn_of(connection):
            return Cancelled(await self._changer.cancel(request.tickets))

    async def _reschedule(
        self, connection: AcceptedConnection, request: Reschedule
    ) -> Rescheduled:
        async with self._turn_of(connection):
            return Rescheduled(await self._changer.reschedule(request.moves))

    def _turn_of(self, connection: AcceptedConnection) -> asyncio.Lock:
        return self._changing.setdefault(connection, asyncio.Lock())

    def _route(self, request: Route) -> Routed:
        """Say that delayed messages come here; of all else nothing is known."""
        pattern = Pattern(parse_pattern(request.subject))
        if request.kind is not RouteKind.DELAYED:
            raise UnsupportedError("this is a delay server; ask a meta server who serves subjects")
        here = PartitionRoute(PartitionName(pattern), self._broker, "", 0)
        return Routed(RouteOf(pattern, 0, (here,)))

    def _in_task(
        self, work: Callable[[AcceptedConnection, R], Coroutine[None, None, Response]]
    ) -> Callable[[AcceptedConnection, R, Responder], None]:
        """Return a handler that answers a request from a task."""

        def handle(connection: AcceptedConnection, request: R, responder: Responder) -> None:
            async def do() -> Response:
                try:
                    return await work(connection, request)
                finally:
                    responder.release()

            self._tasks.begin(do(), responder.answer, responder.refuse)

        return handle


def _elsewhere(request: Request) -> PulqueError:
    """Return the error for a request that other servers answer."""
    return UnsupportedError(
        f"this is a delay server; {type(request).__name__} is for brokers and meta servers"
    )
