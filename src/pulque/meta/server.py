"""Puts the parts of a meta server together, in order, and starts them. Holds no logic."""

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import structlog

from pulque.clock import Clock, SystemClock
from pulque.errors import ConfigError, UnavailableError
from pulque.meta.admin_cluster import AdministeredCluster
from pulque.meta.cluster_commands import ClusterCommands
from pulque.meta.components import Background, MetaParts
from pulque.meta.config import MetaSettings
from pulque.meta.database.allotment_store import AttendingStore
from pulque.meta.database.connection import Database, check_directory, parse_database_url
from pulque.meta.database.leadership_store import LeadershipStore
from pulque.meta.database.store import ClusterStore
from pulque.meta.directory import Directory
from pulque.meta.directory_refresh import Refresher
from pulque.meta.leadership.elections import Elections
from pulque.meta.leadership.leases import LeaderLeases
from pulque.meta.online_clients import OnlineClients
from pulque.meta.ordered.closed_partitions import Drains
from pulque.meta.ordered.partition_allotment import PartitionAllotment
from pulque.meta.registration import ServerRegistrar
from pulque.meta.requests import MetaHandler
from pulque.meta.route_watches import Watches
from pulque.meta.saved_directory import FILE
from pulque.meta.status import status_report
from pulque.meta.subject_creation import Subjects
from pulque.model.positions import Epoch, StartCount, Tenure
from pulque.model.routes import Role
from pulque.net.server import ConnectionLimits, FrameServer
from pulque.rules.membership import Heard
from pulque.serving.attended import Authorisation
from pulque.serving.process import listen, run_process, serve
from pulque.wire.frame import MAX_PAYLOAD
from pulque.wire.responses import Welcome
from pulque.wire.versions import NEWEST

if TYPE_CHECKING:
    from pulque.admin.server import AdminServer

__all__ = ["MetaServer", "run_meta"]

_SEND_BUFFER = 32 * 1024 * 1024
_FRAME_MS = 10_000
_GRACE_S = 3.0
_ADMIN_ABOVE = 40
_PORTS = 65536


def run_meta(settings: MetaSettings, *, on_ready: Callable[[str], None]) -> None:
    """Run a meta server until SIGTERM or SIGINT.

    Args:
        settings: The meta server's.
        on_ready: Called with its URL once it serves.

    Raises:
        PulqueError: It cannot start.
    """
    run_process(settings.log, lambda: serve(MetaServer(settings), on_ready))


class MetaServer:
    """One meta server. Lives in one event loop, alone or beside others.

    Args:
        settings: All that it is told.
        clock: The machine's, if not given.
    """

    def __init__(self, settings: MetaSettings, clock: Clock | None = None) -> None:
        self._settings = settings
        self._clock = clock or SystemClock()
        self._log = structlog.get_logger(component="meta")
        self._background = Background(self._failed)
        self._stop = asyncio.Event()
        self._server: FrameServer | None = None
        self._store: ClusterStore | None = None
        self._watches: Watches | None = None
        self._refresher: Refresher | None = None
        self._attendance: PartitionAllotment | None = None
        self._drains: Drains | None = None
        self._elections: Elections | None = None
        self._leading: LeaderLeases | None = None
        self.administration: ClusterCommands
        """What is done by command; there once it is started."""
        self._admin: AdminServer | None = None
        self.url = ""
        """Where it listens."""
        self.admin_url = ""
        """Where its administration API listens; empty if it has none."""

    async def start(self) -> str:
        """Open the database and serve; return the URL.

        A database that is away is no reason not to: it is read as soon as it is back. Until then
        it goes on with what it knew last, if that is written down (``storage.directory``); else
        everything is refused with an error that says so.

        Raises:
            ConfigError: The settings cannot be used, or the tables are of a newer version.
        """
        try:
            await self._begin()
        except BaseException:
            await self.close()
            raise
        return self.url

    async def _begin(self) -> None:
        refresher = self._build()
        try:
            await refresher.refresh()
        except UnavailableError:
            # The log says it; the refresher goes on trying.
            refresher.recall()
        self._background.start(refresher.run())
        for each in (self._attendance, self._drains, self._elections):
            assert each is not None  # noqa: S101  # it was built
            self._background.start(each.run())
        at = self._settings.listen
        assert self._server is not None  # noqa: S101  # it was built
        host, port = await listen(self._server, at.host, at.port)
        shown = f"[{host}]" if ":" in host else host
        self.url = f"pulque://{shown}:{port}"
        if self._settings.admin.enabled:
            await self._start_admin(host, port)
        self._log.info("meta_server_ready", url=self.url, cluster=refresher.cluster)

    def stop(self) -> None:
        """Ask the meta server to stop."""
        self._stop.set()

    async def stopped(self) -> None:
        """Wait until the meta server is asked to stop."""
        await self._stop.wait()

    async def close(self) -> None:
        """Stop serving: who waits is answered, then everything is closed."""
        if self._admin is not None:
            await self._admin.stop()
        if self._server is not None:
            self._server.stop_listening()
        self._end_waits()
        if self._server is not None:
            await self._server.close()
        if self._refresher is not None:
            self._refresher.stop()
        await self._background.close(_GRACE_S)
        if self._store is not None:
            await self._store.close()
        self._log.info("meta_server_stopped")

    def _end_waits(self) -> None:
        """Answer all that wait."""
        if self._watches is not None:
            self._watches.close()
        if self._attendance is not None:
            self._attendance.stop()
        if self._leading is not None:
            self._leading.close()
        for each in (self._drains, self._elections):
            if each is not None:
                each.stop()

    def _build(self) -> Refresher:
        """Make the parts and put them together."""
        settings, clock = self._settings, self._clock
        beat_s = settings.cluster.heartbeat.total_seconds()
        directory = Directory(Heard(int(beat_s * 1000)), clock)
        database = _database(settings)
        self._store = ClusterStore(database)
        self._watches = Watches(directory, clock)
        online = OnlineClients(clock)
        parts = MetaParts(self._store, directory, self._watches, online, clock, self._log.warning)
        refresher = self._refresher = Refresher(
            parts,
            refresh_s=settings.database.refresh.total_seconds(),
            # Twice as often: what another meta server heard must be seen before it is too late.
            beat_s=beat_s / 2,
            file=_last_known(settings),
        )
        registrar = ServerRegistrar(parts, refresher, self._background, settings)
        subjects = Subjects(parts, refresher, self._background, settings)
        leaderships = LeadershipStore(database)
        lease_ms = int(settings.replication.lease.total_seconds() * 1000)
        elections = Elections(parts, leaderships, refresher, lease_ms=lease_ms)
        leading = LeaderLeases(parts, leaderships, refresher, elections, self._background)
        self._elections, self._leading = elections, leading
        registrar.on_left = elections.hurry
        self.administration = ClusterCommands(parts, refresher, subjects)
        self._cluster = AdministeredCluster(
            parts, refresher, self.administration, subjects.policies
        )
        ordered = settings.ordered
        attendance = self._attendance = PartitionAllotment(
            parts,
            AttendingStore(database),
            refresher,
            self._background,
            Authorisation(int(ordered.timeout.total_seconds() * 1000)),
            is_exclusive=ordered.exclusive,
        )
        refresher.told += [attendance.changed, leading.changed]
        self._drains = Drains(
            directory,
            attendance,
            pause_s=ordered.drain_check.total_seconds(),
            warn=self._log.warning,
        )
        handler = MetaHandler(
            _welcome(settings),
            parts,
            refresher,
            registrar,
            subjects,
            attendance,
            leading=leading,
            status=lambda: json.dumps(
                {
                    "meta": settings.name,
                    "admin": self.admin_url,
                    **status_report(parts, refresher, registrar, elections, leading),
                }
            ).encode(),
            max_watched=settings.limits.max_watched,
        )
        self._server = FrameServer(handler, _limits(settings), clock, self._log.info)
        return refresher

    async def _start_admin(self, host: str, port: int) -> None:
        from pulque.admin.server import AdminServer

        given, told = self._settings.admin.port, self._settings.listen.port
        wanted = given if given is not None else told and (port + _ADMIN_ABOVE) % _PORTS
        self._admin = AdminServer(self._cluster, self._clock, host=host, port=wanted)
        try:
            self.admin_url = await self._admin.start()
        except ConfigError:
            if given is not None:
                raise
            # Nobody chose that port, and routes matter more than where they are administered.
            self._admin = AdminServer(self._cluster, self._clock, host=host, port=0)
            self.admin_url = await self._admin.start()
        self._log.info("admin_ready", url=self.admin_url)

    def _failed(self, error: BaseException) -> None:
        self._log.error("task_failed", exc_info=error)


def _last_known(settings: MetaSettings) -> Path | None:
    """Return where to write down what is known, if the database is elsewhere."""
    directory = settings.storage.directory
    return directory / FILE if directory is not None and settings.database.url else None


def _database(settings: MetaSettings) -> Database:
    if settings.storage.directory is not None:
        check_directory(settings.storage.directory)
    return Database(
        parse_database_url(settings.database_url()),
        password=settings.database.read_password(),
        timeout_s=settings.database.timeout.total_seconds(),
    )


def _welcome(settings: MetaSettings) -> Welcome:
    return Welcome(
        NEWEST,
        settings.name,
        Tenure(Epoch(0), StartCount(0)),
        MAX_PAYLOAD,
        0,
        0,
        0,
        Role.META,
    )


def _limits(settings: MetaSettings) -> ConnectionLimits:
    limits = settings.limits
    return ConnectionLimits(
        max_connections=limits.max_connections,
        max_payload=MAX_PAYLOAD,
        send_buffer=_SEND_BUFFER,
        handshake_ms=int(limits.handshake_timeout.total_seconds() * 1000),
        frame_ms=_FRAME_MS,
        idle_ms=int(limits.idle_timeout.total_seconds() * 1000),
    )
