"""Servers that register, and say again and again that they live.

A heartbeat is answered from memory. What is new goes to the database first; if that is away, a
server that is known goes on all the same, and is written down when it is back.
"""

import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from pulque.errors import (
    FencedError,
    InvalidRequestError,
    NotAllowedError,
    PulqueError,
    UnavailableError,
)
from pulque.meta.components import Background, MetaParts
from pulque.meta.config import MetaSettings
from pulque.meta.directory_refresh import Refresher
from pulque.meta.policies import PoliciesInForce
from pulque.model.cluster import GroupMarks, Server, ServerState
from pulque.model.names import parse_group
from pulque.model.routes import Role
from pulque.rules.leadership import beat_within
from pulque.rules.membership import (
    Change,
    check_cluster,
    check_directory,
    check_owner,
    clock_warning,
    decide,
)
from pulque.wire.registration import Register, Registered

__all__ = ["ServerRegistrar", "ServerReport"]

_TRIES = 3
_LARGEST = 2**63 - 1
_LONGEST = 255
_NO_MARKS = GroupMarks()


class ServerReport(NamedTuple):
    """What a server told about itself with its last heartbeat."""

    partitions: int
    log_bytes: int
    clock_apart_ms: int


@dataclass(frozen=True, slots=True)
class _Registration:
    request: Register
    server: Server
    answer: Callable[[Registered], None]
    refuse: Callable[[PulqueError], None]


class ServerRegistrar:
    """Takes registrations."""

    def __init__(
        self,
        parts: MetaParts,
        refresher: Refresher,
        background: Background,
        settings: MetaSettings,
    ) -> None:
        self._parts = parts
        self._directory = parts.directory
        self._refresher = refresher
        self._background = background
        self._policies = PoliciesInForce(settings.subjects, parts.directory)
        self._beat_ms = int(settings.cluster.heartbeat.total_seconds() * 1000)
        self._lease_ms = int(settings.replication.lease.total_seconds() * 1000)
        self._tolerance_ms = int(settings.cluster.clock_tolerance.total_seconds() * 1000)
        self._unwritten: set[str] = set()
        """Servers that go on though the database does not know it yet."""
        self.reports: dict[str, ServerReport] = {}
        """By name, what each told last."""
        self.on_left: Callable[[], None] = lambda: None
        """Called when a server has said that it stops."""

    def register(
        self,
        request: Register,
        answer: Callable[[Registered], None],
        refuse: Callable[[PulqueError], None],
    ) -> None:
        """Answer a registration, at once if it changes nothing.

        Raises:
            InvalidRequestError: It makes no sense.
            NotAllowedError: It is of another cluster.
            UnavailableError: The database was never read.
        """
        server = _server_of(request)
        self._refresher.check_loaded()
        check_cluster(request.cluster, self._refresher.cluster, server.name)
        asked = _Registration(request, server, answer, refuse)
        try:
            self._take_in(asked)
        except (FencedError, NotAllowedError):
            # Another meta server may know better: who leads, or that the other one is gone.
            self._background.start(self._look_again(asked))

    def _take_in(self, asked: _Registration) -> None:
        server = asked.server
        known = self._directory.servers.get(server.name)
        change = self._decide(known, server)
        if change is Change.NOTHING and server.name not in self._unwritten:
            self._accept(asked)
        else:
            self._background.start(self._write(asked, known))

    async def _look_again(self, asked: _Registration) -> None:
        """Take in a server that was to be refused, unless the database says the same."""
        with contextlib.suppress(UnavailableError):
            await self._refresher.refresh()
        try:
            self._take_in(asked)
        except PulqueError as error:
            asked.refuse(error)

    def _decide(self, known: Server | None, server: Server) -> Change:
        now_ms = self._parts.clock.monotonic_ms()
        heard = self._directory.heard
        change = decide(known, server, is_alive=heard.is_alive(server.name, now_ms))
        if change is not Change.NOTHING and not _is_farewell(known, server):
            servers, leaderships = self._directory.servers.values(), self._directory.leaderships
            check_directory(servers, server, heard, now_ms, leaderships)
            check_owner(servers, server, heard, now_ms, leaderships)
        return change

    async def _write(self, asked: _Registration, known: Server | None) -> None:
        """Write a server down, then let it in."""
        name = asked.server.name
        try:
            await self._write_down(asked.server, known)
        except UnavailableError as error:
            if known is None:
                asked.refuse(error)
                return
            self._parts.warn("server_not_written_down", server=name, reason=str(error))
            self._unwritten.add(name)
        except PulqueError as error:
            asked.refuse(error)
            return
        else:
            self._unwritten.discard(name)
        self._accept(asked)

    async def _write_down(self, server: Server, seen: Server | None) -> None:
        for _ in range(_TRIES):
            other = await self._parts.store.register(server, seen)
            if other is None:
                return
            # Another meta server was faster: what it wrote counts, and it lives.
            self._directory.put(other)
            if self._decide(other, server) is Change.NOTHING:
                return
            seen = other
        raise UnavailableError(f"{server.name} registers at several places at once; try again")

    def _accept(self, asked: _Registration) -> None:
        request, server = asked.request, asked.server
        clock = self._parts.clock
        self._directory.put(server)
        self._refresher.heard(server.name)
        self._refresher.look()
        if server.state is ServerState.LEAVING:
            self.on_left()
        apart_ms = request.now_ms - clock.now_ms()
        self.reports[server.name] = ServerReport(request.partitions, request.log_bytes, apart_ms)
        marks = self._directory.marks.get(server.broker_group, _NO_MARKS)
        warning = clock_warning(server.name, request.now_ms, clock.now_ms(), self._tolerance_ms)
        asked.answer(
            Registered(
                self._refresher.cluster,
                self._beat_of(server),
                marks.is_read_only,
                marks.is_draining,
                self._policies.is_first_send,
                self._directory.marks_version,
                tuple(sorted(self._directory.read_only)),
                warning,
            )
        )

    def _beat_of(self, server: Server) -> int:
        """Return how often a server is to say that it lives: a leader within its lease."""
        is_led = server.broker_group in self._directory.leaderships
        if server.role is Role.BROKER and (is_led or server.state is ServerState.FOLLOWING):
            return min(self._beat_ms, beat_within(self._lease_ms))
        return self._beat_ms


def _is_farewell(known: Server | None, asked: Server) -> bool:
    """Whether a server that is known leaves, and says nothing else about itself."""
    return (
        asked.state is ServerState.LEAVING
        and known is not None
        and (known.directory, known.broker_group) == (asked.directory, asked.broker_group)
    )


def _server_of(request: Register) -> Server:
    """Return who registers.

    Raises:
        InvalidNameError: A name is none.
        InvalidRequestError: Another field makes no sense.
    """
    if request.role is Role.META:
        raise InvalidRequestError("meta servers do not register; their database is their bond")
    for what in ("host", "directory", "cluster"):
        text = getattr(request, what)
        if len(text) > _LONGEST or not text.isprintable():
            raise InvalidRequestError(
                f"{what} is {text[:40]!r}; at most {_LONGEST} printable characters are allowed"
            )
    if not request.host or not request.port:
        raise InvalidRequestError(f"{request.name} registers without an address")
    if request.incarnation > _LARGEST:
        raise InvalidRequestError(
            f"incarnation {request.incarnation}; at most {_LARGEST} is allowed"
        )
    return Server(
        parse_group(request.name),
        parse_group(request.broker_group),
        request.role,
        request.host,
        request.port,
        request.directory,
        request.incarnation,
        request.state,
    )
