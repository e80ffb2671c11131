"""A broker that follows: it copies its leader's logs, and tells clients who leads."""

import asyncio
import contextlib
import json
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import structlog

from pulque.broker.clients import ClientTable
from pulque.broker.cluster.membership import ClusterSide
from pulque.broker.cluster.meta_relay import Relay
from pulque.broker.replication.leadership_client import Authority
from pulque.broker.replication.log_copier import Copier
from pulque.broker.responses import BrokerResponder
from pulque.clock import Clock
from pulque.errors import (
    CorruptionError,
    NotAllowedError,
    NotLeaderError,
    PulqueError,
    StorageError,
    StorageFullError,
    UnavailableError,
)
from pulque.model.names import ConsumerId, Pattern, effective_group
from pulque.net.server import AcceptedConnection
from pulque.serving.requests import RequestHandler, calls_back, returns, row
from pulque.serving.responses import Responder
from pulque.serving.sync_thread import SyncThread
from pulque.storage.replication.replica_logs import ReplicaLogs
from pulque.wire.leadership import Led
from pulque.wire.requests import (
    Attend,
    Clients,
    Heartbeat,
    Hello,
    Request,
    Route,
    Status,
    Watch,
)
from pulque.wire.responses import Beaten, StatusReport, Welcome

__all__ = ["FollowerHandler", "Following"]

_AGAIN_S = 0.2
_PART_S = 0.02
_REFUSED_S = 1.0
_KEEP_S = 1.0
_ANY = Pattern("")
"""What a consumer pulls is its leader's to know."""


class Following:
    """Follows whoever leads, until it is to lead itself. Lives in one event loop.

    Args:
        logs: This broker's own.
        authority: Says who leads.
        clock: The broker's.
        name: Its name.
        log: Where it says what happens.
    """

    def __init__(
        self,
        logs: ReplicaLogs,
        authority: Authority,
        clock: Clock,
        name: str,
        log: structlog.typing.FilteringBoundLogger,
    ) -> None:
        self._logs = logs
        self._authority = authority
        self._clock = clock
        self._log = log
        self._thread = SyncThread(asyncio.get_running_loop())
        self._executor = ThreadPoolExecutor(1, "pulque-index")
        self._changed = asyncio.Event()
        self._keeping: asyncio.Task[None] | None = None
        self._told = ""
        self.copier = Copier(logs, self._thread, clock, name, log.warning)
        """How far it is."""
        self.copier.has_room = logs.has_room()

    def led(self, led: Led) -> None:
        """Take in who leads; what is under way ends if that is somebody else."""
        del led
        self._changed.set()

    async def run(self, is_mine: Callable[[Led], bool]) -> Led:
        """Follow until somebody says that this broker leads; return who said so.

        Raises:
            StorageError: The disk failed.
        """
        keeping = self._keeping = asyncio.create_task(self._keep())
        keeping.add_done_callback(lambda _: self._changed.set())
        try:
            while True:
                led = self._authority.led
                if led is not None and is_mine(led):
                    return led
                self._changed.clear()
                if led is None or led.leadership.leader == self._logs.identity.id:
                    # This broker led before it was restarted: it is elected anew, or another one.
                    await self._changed.wait()
                else:
                    await self._follow(led, is_mine)
                if keeping.done():
                    keeping.result()
        finally:
            keeping.cancel()
            await asyncio.gather(keeping, return_exceptions=True)

    async def close(self) -> None:
        """Stop the threads; what is synced is written down."""
        # In a thread: while they finish, the meta servers must go on hearing of this broker.
        await asyncio.to_thread(self._thread.stop)
        await asyncio.to_thread(self._executor.shutdown)
        self._logs.note_synced()

    async def _follow(self, led: Led, is_mine: Callable[[Led], bool]) -> None:
        """Copy from one leader until it is gone, or another one leads."""
        self.copier.is_parting = False
        copying = asyncio.create_task(self._copy(led))
        try:
            while not copying.done() and self._goes_on(led, is_mine):
                self._changed.clear()
                changed = asyncio.create_task(self._changed.wait())
                limit_s = _PART_S if self.copier.is_parting else None
                await asyncio.wait(
                    [copying, changed], timeout=limit_s, return_when=asyncio.FIRST_COMPLETED
                )
                changed.cancel()
        finally:
            copying.cancel()
            await asyncio.gather(copying, return_exceptions=True)
        if copying.done() and not copying.cancelled() and copying.exception() is not None:
            copying.result()

    def _goes_on(self, led: Led, is_mine: Callable[[Led], bool]) -> bool:
        """Whether to stay with a leader: also with one in whose place this broker is to lead.

        That one may say itself that it is over, and then nobody has to wait for the lease.
        """
        now = self._authority.led
        if self._keeping is not None and self._keeping.done():
            return False
        if now is None or not is_mine(now):
            return self._is_still(led)
        self.copier.is_parting = True
        return self._clock.monotonic_ms() < self.copier.promised_ms

    def _is_still(self, led: Led) -> bool:
        now = self._authority.led
        if now is None:
            return True
        before, after = led.leadership, now.leadership
        return (before.epoch, led.host, led.port) == (after.epoch, now.host, now.port)

    async def _copy(self, led: Led) -> None:
        """Copy again and again; only this broker's own disk ends it, or its own leadership."""
        while not self.copier.is_parting:
            pause_s = _AGAIN_S
            try:
                await self.copier.copy(led)
            except (CorruptionError, NotAllowedError, StorageFullError) as error:
                # Of what the leader sent, of what is here, of the disk: none is a reason to stop.
                pause_s = _REFUSED_S
                self._tell("not_followed", led, str(error))
            except StorageError:
                raise
            except PulqueError as error:
                self._tell("leader_away", led, str(error))
            await asyncio.sleep(pause_s)

    def _tell(self, event: str, led: Led, text: str) -> None:
        """Log what is wrong; the same thing once."""
        told = f"{event} {led.name} {text}"
        if told != self._told:
            self._log.warning(event, leader=led.name, reason=text)
        self._told = told

    async def _keep(self) -> None:
        """Write down what is synced, and index what is sealed."""
        loop = asyncio.get_running_loop()
        while True:
            await asyncio.sleep(_KEEP_S)
            self._logs.note_synced()
            self.copier.has_room = self._logs.has_room()
            job = self._logs.begin_index()
            # Without room it is made later: the engine that opens these logs would make it, too.
            with contextlib.suppress(StorageFullError):
                if job is not None:
                    await loop.run_in_executor(self._executor, job.run)
                    self._logs.finish_index(job)


class FollowerHandler(RequestHandler):
    """Answers clients of a broker that follows: mostly, who leads.

    Args:
        welcome: What it says about itself.
        cluster: Relays what meta servers are asked.
        clients: Who is there.
        authority: Knows who leads.
        status: Makes the report.
    """

    def __init__(
        self,
        welcome: Callable[[], Welcome],
        cluster: ClusterSide,
        clients: ClientTable,
        authority: Authority,
        status: Callable[[], dict[str, object]],
    ) -> None:
        self._cluster = cluster
        self._clients = clients
        self._authority = authority
        self._status = status
        super().__init__(
            (
                row(Status, returns(self._report)),
                row(Heartbeat, self._beat),
                row(Clients, returns(clients.listed)),
                row(Route, calls_back(lambda *asked: self._relay().route(*asked)), is_held=True),
                row(Watch, calls_back(lambda *asked: self._relay().watch(*asked)), is_held=True),
                row(Attend, calls_back(lambda *asked: self._relay().attend(*asked)), is_held=True),
            ),
            server="broker",
            welcome=welcome,
            unknown=self._not_leader,
            responder=BrokerResponder,
        )

    def closed(self, connection: AcceptedConnection) -> None:
        """Forget a client."""
        self._clients.closed(connection)

    def _greeted(self, connection: AcceptedConnection, request: Hello) -> None:
        self._clients.greeted(connection, request.client)

    def _report(self, request: Status) -> StatusReport:
        del request
        return StatusReport(json.dumps(self._status()).encode())

    def _beat(
        self, connection: AcceptedConnection, request: Heartbeat, responder: Responder
    ) -> None:
        """Take note of a consumer of the group: should this broker lead, it is there."""
        consumer = ConsumerId(request.consumer)
        key = (effective_group(request.group, consumer), consumer)
        if request.is_leaving:
            self._clients.left(connection, key)
        else:
            self._clients.subscribed(connection, key, _ANY)
        responder.answer(Beaten(self._welcome().lease_ms))

    def _relay(self) -> Relay:
        if self._cluster.relay is None:
            raise UnavailableError("no meta server can be reached")
        return self._cluster.relay

    def _not_leader(self, request: Request) -> NotLeaderError:
        del request
        led = self._authority.led
        if led is None:
            return NotLeaderError("this broker follows, and nobody knows yet who leads its group")
        return NotLeaderError(
            f"this broker follows {led.name} at {led.host}:{led.port}, which leads "
            f"group {led.leadership.broker_group} in epoch {led.leadership.epoch}"
        )
