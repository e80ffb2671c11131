"""From frames to the parts of the broker and back: who may ask what, and where it goes."""

from collections.abc import Callable
from dataclasses import replace
from typing import assert_never

from pulque.broker.cluster.local_routes import LocalRoutes, parse_asked
from pulque.broker.cluster.membership import ClusterSide
from pulque.broker.cluster.partition_coverage import Place
from pulque.broker.cluster.route_watches import Watcher
from pulque.broker.components import Parts
from pulque.broker.receiving.receiver import BATCHES_PER_STEP
from pulque.broker.replication.log_streams import Streams
from pulque.broker.responses import Answerer
from pulque.broker.search.search_thread import Finder
from pulque.broker.segment_openings import opened_in_steps
from pulque.broker.state import BrokerState
from pulque.clock import Clock
from pulque.errors import (
    NotLeaderError,
    OverloadedError,
    ProtocolError,
    PulqueError,
    RemoteProtocolError,
    RequestTimeoutError,
    UnsupportedError,
)
from pulque.model.names import ConsumerId, Group, Pattern, effective_group
from pulque.model.routes import RouteKind
from pulque.net.server import Connection, Work
from pulque.net.steps import Steps, while_heard
from pulque.wire.frame import Frame
from pulque.wire.opcodes import Opcode
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
    decode_request,
)
from pulque.wire.responses import (
    Response,
    Routed,
    Sealed,
    StatusReport,
    Subscribed,
    Welcome,
)
from pulque.wire.single import read_single_send
from pulque.wire.versions import agree

__all__ = ["RequestHandler"]

_MOST_WAITING = 1000


class RequestHandler:
    """Answers every opcode."""

    def __init__(  # noqa: PLR0913  # all that it hands requests to
        self,
        welcome: Welcome,
        parts: Parts,
        state: BrokerState,
        clock: Clock,
        *,
        status: Callable[[], Steps[bytes]],
        cluster: ClusterSide,
        finder: Finder,
        streams: Streams | None = None,
    ) -> None:
        self._welcome = welcome
        self._streams = streams
        """What followers copy; None for a broker that stands alone."""
        self._leading = None if streams is None else streams.leading
        self._cluster = cluster
        self._epoch = welcome.tenure.epoch
        self._receiver = parts.receiver
        self._puller = parts.puller
        self._settler = parts.settler
        self._browser = parts.browser
        self._registrar = parts.registrar
        self._resetter = parts.resetter
        self._office = parts.office
        self._finder = finder
        self._adopter = parts.adopter
        self._clients = parts.clients
        self._locker = parts.locker
        self._steward = parts.steward
        self._engine = state.engine
        self._attendance = parts.attendance
        self.routes = LocalRoutes(
            state.places, cluster.broker_group, cluster.gate, self._attendance.order_of
        )
        """Which partitions are here."""
        self._watcher = Watcher(state.places, self.routes)
        self._consumption = state.consumption
        self._clock = clock
        self._status = status

    def handle(self, connection: Connection, frame: Frame) -> Work | None:
        """Answer a frame, now or when there is something to answer."""
        answerer = Answerer(connection, frame.request_id, self._epoch)
        try:
            if not connection.is_welcome:
                self._greet(connection, decode_request(frame), answerer)
                return None
            if self._leading is not None and not self._leading.serves(frame.opcode):
                raise self._leading.refusal()
            single = read_single_send(frame)
            if single is None:
                return self._begin(connection, decode_request(frame), answerer)
            _check_time(connection, single.timeout_ms)
            self._receiver.send_single(single, answerer)
        except ProtocolError as error:
            connection.refuse(error, frame.request_id)
        except PulqueError as error:
            answerer.refuse(error)
        return None

    def pause(self, connection: Connection) -> None:
        """Write what a connection sent, now that all its requests are handled."""
        self._receiver.pause(connection)

    def closed(self, connection: Connection) -> None:
        """Forget what a connection was waiting for."""
        self._puller.closed(connection)
        self._browser.closed(connection)
        self._watcher.closed(connection)
        self._clients.closed(connection)
        self._locker.closed(connection)
        self._attendance.closed(connection)
        if self._streams is not None:
            self._streams.closed(connection)

    def partition_added(self, places: list[Place]) -> None:
        """Tell the watches that a new partition matters to."""
        self._watcher.partition_added(places)
        self._attendance.partition_added()

    def _greet(self, connection: Connection, request: Request, answerer: Answerer) -> None:
        if not isinstance(request, Hello):
            raise RemoteProtocolError("the first frame on a connection must be a Hello")
        if request.mechanism:
            raise UnsupportedError(
                f"authentication by {request.mechanism!r} is not known; this broker knows none"
            )
        connection.version = version = agree(request.min_version, request.max_version)
        connection.welcome()
        self._clients.greeted(connection, request.client)
        cluster = self._cluster.gate.standing.cluster
        answerer.answer(replace(self._welcome, version=version, cluster=cluster))

    def _begin(  # noqa: C901, PLR0911  # one for each kind that is answered in steps
        self, connection: Connection, request: Request, answerer: Answerer
    ) -> Work | None:
        """Answer a request, at once or in steps."""
        match request:
            case Send() if len(request.batches) > BATCHES_PER_STEP:
                _check_time(connection, request.timeout_ms)
                return self._receiver.send_in_steps(request, answerer.answer, self._send_refusal)
            case Status():
                return while_heard(connection, self._report(answerer))
            case Groups():
                groups = self._resetter.groups(request, answerer.answer_written)
                return while_heard(connection, _refusing(groups, answerer))
            case Ordered():
                ordered = self._ordered(request, answerer)
                return while_heard(connection, _refusing(ordered, answerer))
            case Reset():
                reset = self._resetter.reset(
                    request,
                    answerer.answer_written,
                    answerer.refuse,
                    lambda rest: connection.go_on_with(_refusing(rest, answerer)),
                )
                return _refusing(reset, answerer)
            case Seal():
                return _refusing(self._seal(answerer), answerer)
            case Watch():
                _count_in(connection)
                return self._watch(connection, request, answerer)
            case Pull():
                _count_in(connection)
                return self._pull(connection, request, answerer)
            case _:
                self._dispatch(connection, request, answerer)
                return None

    def _send_refusal(self) -> PulqueError | None:
        """Return why a send may not go on, if another broker leads by now."""
        if self._leading is None or self._leading.serves(Opcode.SEND):
            return None
        return self._leading.refusal()

    def _report(self, answerer: Answerer) -> Work:
        report = yield from self._status()
        answerer.answer(StatusReport(report))

    def _ordered(self, request: Ordered, answerer: Answerer) -> Work:
        report = yield from self._steward.report(request)
        answerer.answer(report)

    def _dispatch(  # noqa: C901, PLR0912, PLR0915  # one case per opcode
        self,
        connection: Connection,
        request: Request,
        answerer: Answerer,
    ) -> None:
        match request:
            case Send():
                _check_time(connection, request.timeout_ms)
                self._receiver.send(request, answerer.answer, connection)
            case Settle():
                answerer.answer(self._settler.settle(request))
                self._puller.settled(*_consumer_of(request))
            case Heartbeat():
                self._beat(connection, request, answerer)
            case Read():
                self._hold(
                    connection,
                    answerer,
                    lambda: self._browser.read(
                        request, connection, answerer.answer_held, answerer.refuse_held
                    ),
                )
            case Positions():
                self._browser.positions(request, answerer.answer, answerer.refuse)
            case Subscribe():
                self._subscribe(connection, request, answerer)
            case ChangeGroup():
                self._registrar.change(request, answerer.answer, answerer.refuse)
            case Subscriptions():
                answerer.answer(self._registrar.subscriptions(request))
            case Route():
                self._hold(connection, answerer, lambda: self._route(request, answerer))
            case Register():
                raise UnsupportedError("this is a broker; servers register at a meta server")
            case Adopt():
                self._hold(
                    connection,
                    answerer,
                    lambda: self._adopter.adopt(
                        request, answerer.answer_held, answerer.refuse_held
                    ),
                )
            case Clients():
                answerer.answer(self._clients.listed(request))
            case Dead():
                self._hold(
                    connection,
                    answerer,
                    lambda: self._office.dead(request, answerer.answer_held, answerer.refuse_held),
                )
            case Resend():
                self._hold(
                    connection,
                    answerer,
                    lambda: self._office.resend(
                        request, answerer.answer_held, answerer.refuse_held
                    ),
                )
            case Find():
                self._hold(
                    connection,
                    answerer,
                    lambda: self._finder.find(request, answerer.answer_held, answerer.refuse_held),
                )
            case Attend():
                self._hold(
                    connection, answerer, lambda: self._attend(connection, request, answerer)
                )
            case Lock():
                self._hold(
                    connection,
                    answerer,
                    lambda: self._locker.lock(
                        request,
                        connection,
                        self._while_it_leads(Opcode.LOCK, answerer),
                        answerer.refuse_held,
                    ),
                )
            case Unlock():
                answerer.answer(self._locker.unlock(request))
            case Skip():
                self._steward.skip(request, answerer.answer, answerer.refuse)
            case Close():
                self._steward.close(request, answerer.answer, answerer.refuse)
            case Follow() | Replicate() | CopyCheckpoint():
                self._hold(connection, answerer, lambda: self._copy(connection, request, answerer))
            case HandOver():
                self._hold(connection, answerer, lambda: self._hand_over(request, answerer))
            case Lead() | ChangeInSync():
                raise UnsupportedError("this is a broker; meta servers say who leads")
            case Cancel() | Reschedule() | Scheduled() | StuckMessages():
                raise UnsupportedError("this is a broker; delayed messages are at a delay server")
            case Hello():
                raise RemoteProtocolError("a second Hello on one connection")
            case Status() | Groups() | Ordered() | Reset() | Seal() | Watch() | Pull():
                raise AssertionError(f"{request!r} is answered in steps")
            case _:
                assert_never(request)

    @staticmethod
    def _hold(connection: Connection, answerer: Answerer, begin: Callable[[], None]) -> None:
        _count_in(connection)
        try:
            begin()
        except PulqueError as error:
            answerer.refuse_held(error)

    def _pull(self, connection: Connection, request: Pull, answerer: Answerer) -> Work | None:
        answer = self._while_it_leads(Opcode.PULL, answerer)
        refuse = answerer.refuse_held
        try:
            work = self._puller.pull(request, connection, answer, refuse, connection.go_on_with)
            self._clients.pulled(connection, request)
        except PulqueError as error:
            refuse(error)
            return None
        return None if work is None else while_heard(connection, work)

    def _while_it_leads(self, opcode: Opcode, answerer: Answerer) -> Callable[[Response], None]:
        """Return what answers a request that was held, unless another broker leads by then."""
        leading = self._leading
        if leading is None:
            return answerer.answer_held

        def answer(response: Response) -> None:
            if leading.serves(opcode):
                answerer.answer_held(response)
            else:
                answerer.refuse_held(leading.refusal())

        return answer

    def _route(self, request: Route, answerer: Answerer) -> None:
        """Answer what is here, or have a meta server say who serves a subject."""
        if self._cluster.relay is not None and request.kind is not RouteKind.LOCAL:
            pattern, _ = parse_asked(request.subject, request.group)
            is_here = self._engine.partition(pattern) is not None
            self._cluster.relay.route(
                request,
                answerer.answer_held,
                answerer.refuse_held,
                here=self.routes.plain(pattern) if is_here else None,
            )
            return
        route = self.routes.route(request.subject, request.group, request.kind)
        answerer.answer_held(Routed(route))

    def _watch(self, connection: Connection, request: Watch, answerer: Answerer) -> Work:
        relay = self._cluster.relay
        if relay is not None:
            relay.watch(request, answerer.answer_held, answerer.refuse_held)
            return
        try:
            yield from while_heard(
                connection, self._watcher.watch(request, connection, answerer.answer_held)
            )
        except PulqueError as error:
            answerer.refuse_held(error)

    def _attend(self, connection: Connection, request: Attend, answerer: Answerer) -> None:
        relay = self._cluster.relay
        if relay is None:
            self._attendance.attend(request, connection, answerer.answer_held)
        else:
            relay.attend(request, answerer.answer_held, answerer.refuse_held)

    def _copy(
        self,
        connection: Connection,
        request: Follow | Replicate | CopyCheckpoint,
        answerer: Answerer,
    ) -> None:
        """Let a follower have what it asks for."""
        streams = self._streams
        if streams is None:
            raise NotLeaderError("this broker stands alone: nobody can follow it")
        match request:
            case Follow():
                answerer.answer_held(streams.follow(request, connection))
            case Replicate():
                streams.replicate(request, connection, answerer.answer_held, answerer.refuse_held)
            case CopyCheckpoint():
                streams.checkpoint(request, connection, answerer.answer_held, answerer.refuse_held)
            case _:
                assert_never(request)

    def _hand_over(self, request: HandOver, answerer: Answerer) -> None:
        if self._streams is None:
            raise NotLeaderError("this broker stands alone: nobody can take over")
        self._streams.hand_over(request, answerer.answer_held, answerer.refuse_held)

    def _subscribe(self, connection: Connection, request: Subscribe, answerer: Answerer) -> None:
        def answer(response: Subscribed) -> None:
            key = (Group(response.group), ConsumerId(request.consumer))
            self._clients.subscribed(connection, key, Pattern(request.subject))
            answerer.answer(response)

        self._registrar.subscribe(request, answer, answerer.refuse)

    def _beat(self, connection: Connection, request: Heartbeat, answerer: Answerer) -> None:
        answerer.answer(self._settler.heartbeat(request))
        if request.is_leaving:
            key = _consumer_of(request)
            self._clients.left(connection, key)
            self._locker.left(*key)
            self._puller.dismiss([key])

    def _seal(self, answerer: Answerer) -> Work:
        """Seal both logs at one instant, so that an archive has of both what belongs together."""
        actions = self._engine.actions
        opened: list[bytes] = []
        if actions.has_facts():
            opened = yield from opened_in_steps(self._consumption)
        if self._leading is not None and not self._leading.serves(Opcode.SEAL):
            raise self._leading.refusal()  # another broker leads by now
        if self._engine.open_batches:
            self._engine.roll(self._clock.now_ms())
        if actions.has_facts():
            actions.start_segment(opened or self._consumption.open_facts())
        answerer.answer(Sealed(self._engine.segments[-1].base))


def _count_in(connection: Connection) -> None:
    """Count a request that is held, or refuse it."""
    if connection.waiting >= _MOST_WAITING:
        raise OverloadedError(f"{connection.waiting} requests of this connection wait already")
    connection.waiting += 1


def _refusing(work: Work, answerer: Answerer) -> Work:
    """Take the steps of a request, and send an error if it cannot be."""
    try:
        yield from work
    except PulqueError as error:
        answerer.refuse(error)


def _check_time(connection: Connection, timeout_ms: int) -> None:
    """Refuse what its sender has given up by now: nothing is stored for nobody."""
    waited_ms = connection.waited_ms
    if waited_ms and waited_ms > timeout_ms > 0:
        raise RequestTimeoutError(
            f"a send with a limit of {timeout_ms} ms waited {waited_ms} ms for its turn, "
            "as its connection did not read answers; nothing of it was stored"
        )


def _consumer_of(request: Settle | Heartbeat) -> tuple[Group, ConsumerId]:
    consumer = ConsumerId(request.consumer)
    return effective_group(request.group, consumer), consumer
