"""Which parts of the meta server answer which requests."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial

from pulque.errors import PulqueError, UnsupportedError
from pulque.meta.components import MetaParts
from pulque.meta.directory_refresh import Refresher
from pulque.meta.leadership.leases import LeaderLeases
from pulque.meta.ordered.partition_allotment import PartitionAllotment
from pulque.meta.registration import ServerRegistrar
from pulque.meta.subject_creation import Subjects
from pulque.model.names import Pattern, Subject, parse_owner, parse_pattern, parse_subject
from pulque.model.routes import RouteKind
from pulque.net.server import AcceptedConnection, Work
from pulque.serving.metalink import MOST_HELD
from pulque.serving.requests import RequestHandler, calls_back, returns, row
from pulque.serving.responses import Responder
from pulque.wire.leadership import ChangeInSync, Lead
from pulque.wire.ordered import Attend
from pulque.wire.registration import Register
from pulque.wire.requests import Request, Status, decode_request
from pulque.wire.responses import Routed, StatusReport, Welcome
from pulque.wire.routes import Route, Watch

__all__ = ["MetaHandler"]


class MetaHandler(RequestHandler):
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
        parts: MetaParts,
        refresher: Refresher,
        registrar: ServerRegistrar,
        subjects: Subjects,
        attendance: PartitionAllotment,
        *,
        leading: LeaderLeases,
        status: Callable[[], bytes],
        max_watched: int,
    ) -> None:
        self._directory = parts.directory
        self._watches = parts.watches
        self._online = parts.online
        self._refresher = refresher
        self._subjects = subjects
        self._attendance = attendance
        self._leading = leading
        self._status = status
        super().__init__(
            (
                row(Route, self._route),
                row(Watch, self._watch),
                row(Register, calls_back(registrar.register), is_held=True),
                row(Attend, self._attend, is_held=True),
                row(Lead, self._lead, is_held=True),
                row(ChangeInSync, calls_back(leading.change_in_sync), is_held=True),
                row(Status, returns(self._report)),
            ),
            server="server",
            welcome=lambda: replace(welcome, cluster=refresher.cluster),
            unknown=_elsewhere,
            most_held=MOST_HELD,
            decode=partial(decode_request, max_watched=max_watched),
        )

    def closed(self, connection: AcceptedConnection) -> None:
        """Forget what a connection was waiting for."""
        self._watches.closed(connection)
        self._attendance.closed(connection)
        self._leading.closed(connection)

    def _report(self, request: Status) -> StatusReport:
        del request
        return StatusReport(self._status())

    def _attend(
        self, connection: AcceptedConnection, request: Attend, responder: Responder
    ) -> None:
        self._attendance.attend(request, connection, responder.answer, responder.refuse)

    def _lead(self, connection: AcceptedConnection, request: Lead, responder: Responder) -> None:
        self._leading.lead(request, connection, responder.answer, responder.refuse)

    def _route(self, connection: AcceptedConnection, request: Route, responder: Responder) -> None:
        pattern = _pattern_of(request)
        self._refresher.check_loaded()
        if request.kind is RouteKind.LOCAL:
            raise UnsupportedError("a meta server has no partitions; ask a broker for its own")
        subject = Subject(pattern)
        is_sending = not request.group and request.kind is RouteKind.REALTIME
        if not is_sending or subject in self._directory.subjects:
            responder.answer(Routed(self._directory.route(request.kind, pattern)))
            return
        self._hold(connection, responder)

        def created(error: PulqueError | None) -> None:
            if error is not None:
                responder.refuse(error)
            else:
                responder.answer(Routed(self._directory.route(request.kind, pattern)))

        self._subjects.create(subject, created)

    def _watch(self, connection: AcceptedConnection, request: Watch, responder: Responder) -> Work:
        if any(kind is RouteKind.LOCAL for kind, *_ in request.known):
            raise UnsupportedError("a meta server has no partitions; ask a broker for its own")
        self._refresher.check_loaded()
        routes = len(request.known)
        self._online.hear(request.client, request.application, connection.peer, routes)
        self._hold(connection, responder)
        return self._watches.watch(request, connection, responder.answer)


def _elsewhere(request: Request) -> PulqueError:
    """Return the error for a request that brokers and delay servers answer."""
    return UnsupportedError(
        f"this is a meta server and does not know {type(request).__name__}: ask it "
        "for a route, and go to the broker that it names"
    )


def _pattern_of(request: Route) -> Pattern:
    """Return what a request for a route is about.

    Raises:
        InvalidNameError: That is no subject, pattern or group.
    """
    if request.group:
        parse_owner(request.group)
        return parse_pattern(request.subject)
    return Pattern(parse_subject(request.subject))
