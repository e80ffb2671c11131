"""From frames to the parts of the meta server and back."""

from collections.abc import Callable
from dataclasses import replace

from pulque.errors import (
    OverloadedError,
    ProtocolError,
    PulqueError,
    RemoteProtocolError,
    UnsupportedError,
)
from pulque.meta.components import Parts
from pulque.meta.directory_refresh import Refresher
from pulque.meta.leadership.leases import Leading
from pulque.meta.ordered.partition_allotment import Attendance
from pulque.meta.registration import Registrar
from pulque.meta.subject_creation import Subjects
from pulque.model.names import Pattern, Subject, parse_owner, parse_pattern, parse_subject
from pulque.model.routes import RouteKind
from pulque.net.server import Connection, Work
from pulque.net.steps import while_heard
from pulque.serving.metalink import MOST_HELD
from pulque.wire.frame import Frame
from pulque.wire.leadership import ChangeInSync, Lead
from pulque.wire.ordered import Attend
from pulque.wire.registration import Register
from pulque.wire.requests import Hello, Request, Status, decode_request
from pulque.wire.responses import (
    Response,
    Routed,
    StatusReport,
    Welcome,
    encode_error,
    encode_response,
)
from pulque.wire.routes import Route, Watch
from pulque.wire.versions import agree

__all__ = ["MetaHandler"]


class _Answerer:
    """Where the answer to one request goes."""

    __slots__ = ("_connection", "_request_id")

    def __init__(self, connection: Connection, request_id: int) -> None:
        self._connection = connection
        self._request_id = request_id

    def answer(self, response: Response) -> None:
        """Send the answer."""
        connection = self._connection
        connection.send(encode_response(response, self._request_id, 0, connection.version))

    def refuse(self, error: PulqueError) -> None:
        """Send an error."""
        self._connection.send([encode_error(error, self._request_id, 0)])

    def answer_held(self, response: Response) -> None:
        """Send the answer to a request that was held."""
        self._connection.waiting -= 1
        self.answer(response)

    def refuse_held(self, error: PulqueError) -> None:
        """Send an error to a request that was held."""
        self._connection.waiting -= 1
        self.refuse(error)


class MetaHandler:
    """Answers every opcode that a meta server knows.

    Args:
        welcome: What it says about itself; the id of the cluster is added.
        parts: What answers come from.
        refresher: Knows the cluster, and whether the database was read.
        registrar: Takes registrations.
        subjects: Creates subjects.
        attendance: Allots partitions to consumers of ordered groups.
        leading: Says who leads.
        status: Makes the report.
    """

    def __init__(  # noqa: PLR0913  # one for each kind of question
        self,
        welcome: Welcome,
        parts: Parts,
        refresher: Refresher,
        registrar: Registrar,
        subjects: Subjects,
        attendance: Attendance,
        *,
        leading: Leading,
        status: Callable[[], bytes],
        max_watched: int,
    ) -> None:
        self._welcome = welcome
        self._directory = parts.directory
        self._watches = parts.watches
        self._online = parts.online
        self._refresher = refresher
        self._registrar = registrar
        self._subjects = subjects
        self._attendance = attendance
        self._leading = leading
        self._status = status
        self._max_watched = max_watched

    def handle(self, connection: Connection, frame: Frame) -> Work | None:
        """Answer a frame, now or when there is something to answer."""
        answerer = _Answerer(connection, frame.request_id)
        try:
            request = decode_request(frame, max_watched=self._max_watched)
            if connection.is_welcome and isinstance(request, Watch):
                return self._watch(connection, request, answerer)
            if connection.is_welcome:
                self._dispatch(connection, request, answerer)
            else:
                self._greet(connection, request, answerer)
        except ProtocolError as error:
            connection.refuse(error, frame.request_id)
        except PulqueError as error:
            answerer.refuse(error)
        return None

    def pause(self, connection: Connection) -> None:
        """Every request is answered on its own: there is nothing to be done together."""

    def closed(self, connection: Connection) -> None:
        """Forget what a connection was waiting for."""
        self._watches.closed(connection)
        self._attendance.closed(connection)
        self._leading.closed(connection)

    def _greet(self, connection: Connection, request: Request, answerer: _Answerer) -> None:
        if not isinstance(request, Hello):
            raise RemoteProtocolError("the first frame on a connection must be a Hello")
        if request.mechanism:
            raise UnsupportedError(
                f"authentication by {request.mechanism!r} is not known; this server knows none"
            )
        connection.version = version = agree(request.min_version, request.max_version)
        connection.welcome()
        cluster = self._refresher.cluster
        answerer.answer(replace(self._welcome, version=version, cluster=cluster))

    def _dispatch(self, connection: Connection, request: Request, answerer: _Answerer) -> None:
        match request:
            case Route():
                self._route(connection, request, answerer)
            case Register() | Attend() | Lead() | ChangeInSync():
                self._take_in(connection, request, answerer)
            case Status():
                answerer.answer(StatusReport(self._status()))
            case Hello():
                raise RemoteProtocolError("a second Hello on one connection")
            case _:
                raise UnsupportedError(
                    f"this is a meta server and does not know {type(request).__name__}: ask it "
                    "for a route, and go to the broker that it names"
                )

    def _take_in(
        self,
        connection: Connection,
        request: Register | Attend | Lead | ChangeInSync,
        answerer: _Answerer,
    ) -> None:
        """Have what somebody says about itself written down, and answer then."""
        self._hold(connection)
        answers = (answerer.answer_held, answerer.refuse_held)
        try:
            match request:
                case Register():
                    self._registrar.register(request, *answers)
                case Attend():
                    self._attendance.attend(request, connection, *answers)
                case Lead():
                    self._leading.lead(request, connection, *answers)
                case ChangeInSync():
                    self._leading.change_in_sync(request, *answers)
        except PulqueError as error:
            answerer.refuse_held(error)

    def _route(self, connection: Connection, request: Route, answerer: _Answerer) -> None:
        pattern = _pattern_of(request)
        self._refresher.check_loaded()
        if request.kind is RouteKind.LOCAL:
            raise UnsupportedError("a meta server has no partitions; ask a broker for its own")
        subject = Subject(pattern)
        is_sending = not request.group and request.kind is RouteKind.REALTIME
        if not is_sending or subject in self._directory.subjects:
            answerer.answer(Routed(self._directory.route(request.kind, pattern)))
            return
        self._hold(connection)

        def created(error: PulqueError | None) -> None:
            if error is not None:
                answerer.refuse_held(error)
            else:
                answerer.answer_held(Routed(self._directory.route(request.kind, pattern)))

        try:
            self._subjects.create(subject, created)
        except PulqueError as error:
            answerer.refuse_held(error)

    def _watch(self, connection: Connection, request: Watch, answerer: _Answerer) -> Work:
        if any(kind is RouteKind.LOCAL for kind, *_ in request.known):
            raise UnsupportedError("a meta server has no partitions; ask a broker for its own")
        self._refresher.check_loaded()
        routes = len(request.known)
        self._online.hear(request.client, request.application, connection.peer, routes)
        self._hold(connection)
        work = self._watches.watch(request, connection, answerer.answer_held)
        return while_heard(connection, _refusing(work, answerer))

    @staticmethod
    def _hold(connection: Connection) -> None:
        if connection.waiting >= MOST_HELD:
            raise OverloadedError(f"{connection.waiting} requests of this connection wait already")
        connection.waiting += 1


def _refusing(work: Work, answerer: _Answerer) -> Work:
    """Take the steps of a request that is held, and send an error if it cannot be."""
    try:
        yield from work
    except PulqueError as error:
        answerer.refuse_held(error)


def _pattern_of(request: Route) -> Pattern:
    """Return what a request for a route is about.

    Raises:
        InvalidNameError: That is no subject, pattern or group.
    """
    if request.group:
        parse_owner(request.group)
        return parse_pattern(request.subject)
    return Pattern(parse_subject(request.subject))
