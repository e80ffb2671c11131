"""Which parts of the broker answer which requests."""

from collections.abc import Callable
from dataclasses import replace

from pulque.broker.cluster.local_routes import LocalRoutes, parse_asked
from pulque.broker.cluster.membership import ClusterSide
from pulque.broker.cluster.partition_coverage import Place
from pulque.broker.cluster.route_watches import RouteWatch
from pulque.broker.components import BrokerParts
from pulque.broker.housekeeping import opened_in_steps
from pulque.broker.replication.log_streams import Streams
from pulque.broker.responses import BrokerResponder
from pulque.broker.search.search_thread import Finder
from pulque.broker.state import BrokerState
from pulque.clock import Clock
from pulque.errors import (
    NotLeaderError,
    PulqueError,
    UnsupportedError,
)
from pulque.model.names import ConsumerId, Group, Pattern, effective_group
from pulque.model.routes import RouteKind
from pulque.net.server import AcceptedConnection, Work
from pulque.net.steps import Steps
from pulque.serving.requests import (
    RequestHandler,
    RequestRow,
    calls_back,
    in_steps,
    returns,
    row,
)
from pulque.serving.responses import Responder
from pulque.wire.requests import (
    Adopt,
    Attend,
    Cancel,
    ChangeGroup,
    ChangeInSync,
    Clients,
    Close,
    CopyCheckpoint,
    Dead,
    Find,
    Follow,
    Groups,
    HandOver,
    Heartbeat,
    Hello,
    Lead,
    Lock,
    Ordered,
    Positions,
    Pull,
    Read,
    Register,
    Replicate,
    Request,
    Reschedule,
    Resend,
    Reset,
    Route,
    Scheduled,
    Seal,
    Send,
    Settle,
    Skip,
    Status,
    StuckMessages,
    Subscribe,
    Subscriptions,
    Unlock,
    Watch,
)
from pulque.wire.responses import (
    Response,
    Routed,
    Sealed,
    StatusReport,
    Subscribed,
    Welcome,
)

__all__ = ["ELSEWHERE", "BrokerHandler"]

_DELAYED = "delayed messages are at a delay server"
ELSEWHERE: dict[type[Request], str] = {
    Register: "servers register at a meta server",
    Lead: "meta servers say who leads",
    ChangeInSync: "meta servers say who leads",
    Cancel: _DELAYED,
    Reschedule: _DELAYED,
    Scheduled: _DELAYED,
    StuckMessages: _DELAYED,
}
"""What other servers answer, and which."""


class BrokerHandler(RequestHandler):
    """Answers the requests of clients, followers and other servers."""

    def __init__(  # noqa: PLR0913  # all that it hands requests to
        self,
        welcome: Welcome,
        parts: BrokerParts,
        state: BrokerState,
        clock: Clock,
        *,
        status: Callable[[], Steps[bytes]],
        cluster: ClusterSide,
        finder: Finder,
        streams: Streams | None = None,
    ) -> None:
        self._streams = streams
        """What followers copy; None for a broker that stands alone."""
        self._leading = None if streams is None else streams.leading
        self._cluster = cluster
        self._parts = parts
        self._receiver = parts.receiver
        self._puller = parts.puller
        self._settler = parts.settler
        self._clients = parts.clients
        self._finder = finder
        self._engine = state.engine
        self.routes = LocalRoutes(
            state.places, cluster.broker_group, cluster.gate, parts.attendance.order_of
        )
        """Which partitions are here."""
        self._watcher = RouteWatch(state.places, self.routes)
        self._consumption = state.consumption
        self._clock = clock
        self._status = status
        super().__init__(
            (*self._rows_of_messages(), *self._rows_of_groups(), *self._rows_of_the_cluster()),
            server="broker",
            welcome=lambda: replace(welcome, cluster=cluster.gate.standing.cluster),
            unknown=_elsewhere,
            epoch=welcome.tenure.epoch,
            responder=BrokerResponder,
            refusal=None if self._leading is None else self._leading.why_refused,
            send_single=self._receiver.send_single,
            lateness=", as its connection did not read answers",
        )

    def _rows_of_messages(self) -> tuple[RequestRow, ...]:
        parts = self._parts
        return (
            row(Send, self._send, has_deadline=True, outlives_client=True),
            row(Pull, self._pull, is_held=True),
            row(Settle, self._settle),
            row(Read, self._read, is_held=True),
            row(Positions, calls_back(parts.browser.positions)),
            row(Find, calls_back(self._finder.find), is_held=True),
            row(Dead, calls_back(parts.office.dead), is_held=True),
            row(Resend, calls_back(parts.office.resend), is_held=True),
            row(Adopt, calls_back(parts.adopter.adopt), is_held=True),
            row(Seal, self._seal, outlives_client=True),
        )

    def _rows_of_groups(self) -> tuple[RequestRow, ...]:
        parts = self._parts
        return (
            row(Heartbeat, self._beat),
            row(Subscribe, self._subscribe),
            row(Subscriptions, returns(parts.registrar.subscriptions)),
            row(ChangeGroup, calls_back(parts.registrar.change)),
            row(Groups, self._groups),
            row(Reset, self._reset, outlives_client=True),
            row(Ordered, self._ordered),
            row(Lock, self._lock, is_held=True),
            row(Unlock, returns(parts.locker.unlock)),
            row(Skip, calls_back(parts.steward.skip)),
            row(Close, calls_back(parts.steward.close)),
        )

    def _rows_of_the_cluster(self) -> tuple[RequestRow, ...]:
        relay, clients = self._cluster.relay, self._clients
        watch = self._watch if relay is None else calls_back(relay.watch)
        attend = self._attend if relay is None else calls_back(relay.attend)
        return (
            row(Status, self._report, needs_leadership=False),
            row(Clients, returns(clients.listed), needs_leadership=False),
            row(Route, self._route, is_held=True, needs_leadership=False),
            row(Watch, watch, is_held=True, needs_leadership=False),
            row(Attend, attend, is_held=True),
            row(Follow, self._follow, is_held=True, needs_leadership=False),
            row(Replicate, self._replicate, is_held=True, needs_leadership=False),
            row(CopyCheckpoint, self._copy_checkpoint, is_held=True, needs_leadership=False),
            row(HandOver, self._hand_over, is_held=True),
        )

    def pause(self, connection: AcceptedConnection) -> None:
        """Write what a connection sent, now that all its requests are handled."""
        self._receiver.pause(connection)

    def closed(self, connection: AcceptedConnection) -> None:
        """Forget what a connection was waiting for."""
        self._puller.closed(connection)
        self._parts.browser.closed(connection)
        self._watcher.closed(connection)
        self._clients.closed(connection)
        self._parts.locker.closed(connection)
        self._parts.attendance.closed(connection)
        if self._streams is not None:
            self._streams.closed(connection)

    def partition_added(self, places: list[Place]) -> None:
        """Tell the watches that a new partition matters to."""
        self._watcher.partition_added(places)
        self._parts.attendance.partition_added()

    def _greeted(self, connection: AcceptedConnection, request: Hello) -> None:
        self._clients.greeted(connection, request.client)

    # -- messages ----------------------------------------------------------------------------

    def _send(
        self, connection: AcceptedConnection, request: Send, responder: Responder
    ) -> Work | None:
        if len(request.batches) > self._receiver.batches_per_step:
            return self._receiver.send_in_steps(request, responder.answer, self._why_refused)
        self._receiver.send(request, responder.answer, connection)
        return None

    def _pull(
        self, connection: AcceptedConnection, request: Pull, responder: Responder
    ) -> Work | None:
        answer = self._while_it_leads(responder)
        refuse = responder.refuse
        work = self._puller.pull(request, connection, answer, refuse, connection.go_on_with)
        self._clients.pulled(connection, request)
        return work

    def _settle(self, _: AcceptedConnection, request: Settle, responder: Responder) -> None:
        responder.answer(self._settler.settle(request))
        self._puller.settled(*_consumer_of(request))

    def _read(self, connection: AcceptedConnection, request: Read, responder: Responder) -> None:
        self._parts.browser.read(request, connection, responder.answer, responder.refuse)

    def _seal(self, _: AcceptedConnection, request: Seal, responder: Responder) -> Work:
        """Seal both logs at one instant, so that an archive has of both what belongs together."""
        del request
        actions = self._engine.actions
        opened: list[bytes] = []
        if actions.has_facts():
            opened = yield from opened_in_steps(self._consumption)
        refusal = self._why_refused()
        if refusal is not None:
            raise refusal  # another broker leads by now
        if self._engine.open_batches:
            self._engine.roll(self._clock.now_ms())
        if actions.has_facts():
            actions.start_segment(opened or self._consumption.open_facts())
        responder.answer(Sealed(self._engine.segments[-1].base))

    # -- groups ------------------------------------------------------------------------------

    def _beat(
        self, connection: AcceptedConnection, request: Heartbeat, responder: Responder
    ) -> None:
        responder.answer(self._settler.heartbeat(request))
        if request.is_leaving:
            key = _consumer_of(request)
            self._clients.left(connection, key)
            self._parts.locker.left(*key)
            self._puller.dismiss([key])

    def _subscribe(
        self, connection: AcceptedConnection, request: Subscribe, responder: Responder
    ) -> None:
        def answer(response: Subscribed) -> None:
            key = (Group(response.group), ConsumerId(request.consumer))
            self._clients.subscribed(connection, key, Pattern(request.subject))
            responder.answer(response)

        self._parts.registrar.subscribe(request, answer, responder.refuse)

    def _groups(self, _: AcceptedConnection, request: Groups, responder: Responder) -> Work:
        return self._parts.resetter.groups(request, responder.answer_written)

    def _reset(self, connection: AcceptedConnection, request: Reset, responder: Responder) -> Work:
        return self._parts.resetter.reset(
            request,
            responder.answer_written,
            responder.refuse,
            lambda rest: connection.go_on_with(in_steps(rest, responder)),
        )

    def _ordered(self, _: AcceptedConnection, request: Ordered, responder: Responder) -> Work:
        report = yield from self._parts.steward.report(request)
        responder.answer(report)

    def _lock(self, connection: AcceptedConnection, request: Lock, responder: Responder) -> None:
        answer = self._while_it_leads(responder)
        self._parts.locker.lock(request, connection, answer, responder.refuse)

    # -- the cluster -------------------------------------------------------------------------

    def _report(self, _: AcceptedConnection, request: Status, responder: Responder) -> Work:
        del request
        report = yield from self._status()
        responder.answer(StatusReport(report))

    def _route(self, _: AcceptedConnection, request: Route, responder: Responder) -> None:
        """Answer what is here, or have a meta server say who serves a subject."""
        relay = self._cluster.relay
        if relay is not None and request.kind is not RouteKind.LOCAL:
            pattern, _group = parse_asked(request.subject, request.group)
            is_here = self._engine.partition(pattern) is not None
            here = self.routes.plain(pattern) if is_here else None
            relay.route(request, responder.answer, responder.refuse, here=here)
            return
        route = self.routes.route(request.subject, request.group, request.kind)
        responder.answer(Routed(route))

    def _watch(self, connection: AcceptedConnection, request: Watch, responder: Responder) -> Work:
        return self._watcher.watch(request, connection, responder.answer)

    def _attend(
        self, connection: AcceptedConnection, request: Attend, responder: Responder
    ) -> None:
        self._parts.attendance.attend(request, connection, responder.answer)

    # -- followers ---------------------------------------------------------------------------

    def _follow(
        self, connection: AcceptedConnection, request: Follow, responder: Responder
    ) -> None:
        responder.answer(self._copied().follow(request, connection))

    def _replicate(
        self, connection: AcceptedConnection, request: Replicate, responder: Responder
    ) -> None:
        self._copied().replicate(request, connection, responder.answer, responder.refuse)

    def _copy_checkpoint(
        self, connection: AcceptedConnection, request: CopyCheckpoint, responder: Responder
    ) -> None:
        self._copied().checkpoint(request, connection, responder.answer, responder.refuse)

    def _copied(self) -> Streams:
        """Return what followers copy.

        Raises:
            NotLeaderError: This broker has no followers.
        """
        if self._streams is None:
            raise NotLeaderError("this broker stands alone: nobody can follow it")
        return self._streams

    def _hand_over(self, _: AcceptedConnection, request: HandOver, responder: Responder) -> None:
        if self._streams is None:
            raise NotLeaderError("this broker stands alone: nobody can take over")
        self._streams.hand_over(request, responder.answer, responder.refuse)

    def _why_refused(self) -> PulqueError | None:
        """Return why requests that were taken in are refused now, if another broker leads."""
        return None if self._leading is None else self._leading.why_refused()

    def _while_it_leads(self, responder: Responder) -> Callable[[Response], None]:
        """Return what answers a request that was held, unless another broker leads by then."""
        leading = self._leading
        if leading is None:
            return responder.answer

        def answer(response: Response) -> None:
            refusal = leading.why_refused()
            if refusal is None:
                responder.answer(response)
            else:
                responder.refuse(refusal)

        return answer


def _elsewhere(request: Request) -> PulqueError:
    """Return the error for a request that another server answers."""
    where = ELSEWHERE.get(type(request), f"{type(request).__name__} is for other servers")
    return UnsupportedError(f"this is a broker; {where}")


def _consumer_of(request: Settle | Heartbeat) -> tuple[Group, ConsumerId]:
    consumer = ConsumerId(request.consumer)
    return effective_group(request.group, consumer), consumer
