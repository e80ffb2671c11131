"""A broker of a group that has followers: it follows, or leads, as the meta servers say.

It begins as a follower, always. When it is told to lead it writes down where its logs end, opens
them as after any restart, and serves; when somebody else leads it closes and follows again. What
stays the same over all that is the process's: its port, its registration, and the token that
leaderships are granted to.
"""

import asyncio
import contextlib
import secrets
from collections.abc import Callable
from typing import NamedTuple

import structlog

from pulque.broker.clients import ClientTable
from pulque.broker.cluster.membership import advertised, join_cluster
from pulque.broker.config import BrokerSettings
from pulque.broker.parameters import connection_limits, in_ms, longest_delay_ms, storage_options
from pulque.broker.replication.follower import FollowerHandler, Following
from pulque.broker.replication.leader import Rule
from pulque.broker.replication.leadership_client import Authority
from pulque.broker.server import Broker, Reign
from pulque.broker.status import cluster_report
from pulque.client.connection.url import Address
from pulque.clock import Clock, SystemClock
from pulque.errors import PulqueError, StorageFullError
from pulque.model.leadership import Leadership
from pulque.model.positions import Epoch, Tenure
from pulque.model.routes import Role
from pulque.net.server import FrameServer
from pulque.rules.consumption import Consumption
from pulque.serving.listener import LoggingListener
from pulque.serving.process import listen
from pulque.serving.registration import Registration
from pulque.serving.supervised import Supervised
from pulque.storage.events import Listener
from pulque.storage.files import FileSystem, open_directory
from pulque.storage.logs.partitions import Partitions
from pulque.storage.options import StorageOptions
from pulque.storage.replication.last_leadership import Told, read_told, write_told
from pulque.storage.replication.leadership_epochs import begin_epoch, has_followed
from pulque.storage.replication.replica_logs import ReplicaLogs
from pulque.storage.replication.synced_bounds import Known, write_known
from pulque.wire.frame import MAX_PAYLOAD
from pulque.wire.leadership import Lead, Led
from pulque.wire.registration import Register, ServerState
from pulque.wire.responses import Welcome
from pulque.wire.versions import NEWEST

__all__ = ["ReplicatedBroker", "open_logs"]

_TOKEN_BYTES = 8
_NOTE_S = 1.0
_FAREWELL_S = 0.1
_LEAVE_AGAIN_S = 5.0


class _KnownLeadership(NamedTuple):
    """What is known of the data directory, whoever has it open."""

    directory: str
    start: int
    message_end: int
    synced: int
    """How far both logs are on disk, together."""
    log_bytes: int
    is_fit: bool


class _Watchful(LoggingListener):
    """Logs what happens in storage; and tells, from any thread, if a log is damaged."""

    def __init__(self, damaged: Callable[[], None]) -> None:
        super().__init__()
        self._damaged = damaged
        self._loop = asyncio.get_running_loop()

    def corruption_found(self, path: str, offset: int, size: int, reason: str) -> None:
        """Bytes that had been durable are damaged."""
        super().corruption_found(path, offset, size, reason)
        if path.endswith(".log"):
            self._loop.call_soon_threadsafe(self._damaged)


class ReplicatedBroker(Supervised):
    """One process of a broker group. Lives in one event loop.

    Args:
        settings: All that it is told.
        clock: The machine's, if not given.
    """

    def __init__(self, settings: BrokerSettings, clock: Clock | None = None) -> None:
        super().__init__(structlog.get_logger(component="broker"), failed="broker_failed")
        self._settings = settings
        self._clock = clock or SystemClock()
        self._told = Told()
        """What this broker, in this process or one before, was told of its group."""
        self._is_damaged = False
        """Whether a log of this directory has holes that others' copies do not have."""
        self._leaving: asyncio.Task[None] | None = None
        self._started_ms = self._clock.monotonic_ms()
        self._token = secrets.token_hex(_TOKEN_BYTES)
        self._address = Address("", 0)
        self._broker: Broker | None = None
        """While it leads."""
        self._logs: ReplicaLogs | None = None
        """While it follows."""
        self._following: Following | None = None
        self._server: FrameServer | None = None
        self._tasks: list[asyncio.Task[None]] = []
        self._last = _KnownLeadership("", 0, 0, 0, 0, is_fit=True)
        """As it was when the logs were closed last."""
        self._port = settings.listen.port
        self.url = ""

    async def start(self) -> None:
        """Open the logs, listen, and make itself known to its cluster.

        Raises:
            PulqueError: It cannot; nothing runs then.
        """
        self._files = open_directory(self._settings.storage.directory)
        self._files.lock()
        try:
            registration = self._join()
        except BaseException:
            self._files.unlock()
            raise
        try:
            await self._begin_to_follow()
            await registration.start()
        except BaseException:
            await self.close()
            raise
        self._tasks = [
            asyncio.create_task(self._supervise(self._authority.run())),
            asyncio.create_task(self._supervise(self._run())),
            asyncio.create_task(self._supervise(self._note_marks())),
            asyncio.create_task(self._supervise(registration.watch())),
        ]

    def _join(self) -> Registration:
        """Make what ties this broker to its cluster, as its directory says that it stood there."""
        self._listener = _Watchful(self._damaged)
        self._cluster = join_cluster(self._settings, self._files, self._describe, self._log)
        registration = self._cluster.registration
        assert registration is not None  # noqa: S101  # the settings name meta servers
        self._told = read_told(self._files)
        self._authority = Authority(
            registration.links,
            self._question,
            self._clock,
            self._log.warning,
            self._told.version,
            self._hear_of,
        )
        return registration

    async def close(self) -> None:
        """Hand the leadership over if there is one, and stop everything."""
        broker = self._broker
        if broker is not None and broker.leading is not None and self._failure is None:
            try:
                await broker.leading.hand_over()
                # So that its successor hears that it is over, and need not wait for the lease.
                await asyncio.sleep(_FAREWELL_S)
            except PulqueError as error:
                self._log.info("leadership_not_handed_over", reason=str(error))
            # Whoever hears that this broker leaves may have another one lead at once.
            broker.leading.retire()
        tasks = [*self._tasks, *([] if self._leaving is None else [self._leaving])]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._cluster.close()
        if self._broker is not None:
            await self._stop_leading(self._broker)
        await self._stop_following()
        self._files.unlock()

    # -- taking turns ---------------------------------------------------------------------------

    async def _run(self) -> None:
        """Follow and lead in turns."""
        while True:
            following = self._following
            assert following is not None  # noqa: S101  # it begins, and ends, with following
            led = await following.run(self._is_mine)
            await self._wait_as_promised(following.copier.promised_ms, led)
            if not self._is_mine(self._authority.led or led):
                continue
            if self._had_epoch((self._authority.led or led).leadership.epoch):
                # Of an older database. As a new process, this one is elected in the next epoch.
                self._token = secrets.token_hex(_TOKEN_BYTES)
                self._authority.forget()
                continue
            await self._lead(self._authority.led or led)
            if self._stop.is_set():
                return
            await self._begin_to_follow()
            self._hurry()

    def _is_mine(self, led: Led) -> bool:
        leadership, known = led.leadership, self._known()
        # One that lost what it had confirmed must not lead, whatever anybody says.
        return known.is_fit and (leadership.leader, leadership.token) == (
            known.directory,
            self._token,
        )

    def _had_epoch(self, epoch: Epoch) -> bool:
        assert self._logs is not None  # noqa: S101  # it follows
        return any(epoch <= each.epoch for each in self._logs.epochs)

    async def _wait_as_promised(self, until_ms: int, led: Led) -> None:
        """Let the leader before have the time that it was promised, also before a restart."""
        if has_followed(self._files):
            until_ms = max(until_ms, self._started_ms + led.lease_ms)
        await asyncio.sleep(max(until_ms - self._clock.monotonic_ms(), 0) / 1000)

    async def _lead(self, led: Led) -> None:
        """Lead until somebody else does, or the process is to stop."""
        logs = self._logs
        assert logs is not None  # noqa: S101  # it followed
        epoch, ends = led.leadership.epoch, (logs.message_end, logs.action_end)
        heard_ms = self._authority.heard_ms
        await self._stop_following()
        epochs = begin_epoch(self._files, epoch, *ends)
        self._log.info("leadership_granted", epoch=epoch, message_end=ends[0], action_end=ends[1])
        lag_ms = in_ms(self._settings.replication.lag)
        rule = Rule(led, self._authority, epochs, lag_ms, heard_ms)
        reign = Reign(rule, self._cluster, self._port, self._listener)
        broker = Broker(self._settings, self._clock, self._files, reign)
        await broker.start()
        self._broker = broker
        attending = asyncio.create_task(self._supervise(self._attend(broker)))
        try:
            await broker.stopped()
        finally:
            attending.cancel()
            await asyncio.gather(attending, return_exceptions=True)
        if not self._stop.is_set():
            await self._stop_leading(broker)

    async def _attend(self, broker: Broker) -> None:
        """Tell the meta servers when the leader is open; write down how far its disk is."""
        assert broker.leading is not None  # noqa: S101  # it was told to lead
        await broker.leading.opened.wait()
        self._hurry()
        if self._is_damaged:
            self._damaged()
        while True:
            await asyncio.sleep(_NOTE_S)
            self._note_synced(broker)
            try:
                await broker.leading.make_room()
            except PulqueError as error:
                # It goes on leading; pulls are interrupted by every try.
                self._log.info("leadership_not_handed_over", reason=str(error))
                await asyncio.sleep(_LEAVE_AGAIN_S)

    def _damaged(self) -> None:
        """Hand over to a broker whose copy is whole, and copy from it what is damaged here."""
        if self._following is not None:
            self._following.copier.mend()
            return
        self._is_damaged = True
        if self._broker is not None and self._broker.leading is not None:
            self._broker.leading.is_whole = False
        if self._broker is not None and self._leaving is None:
            self._leaving = asyncio.create_task(self._leave(self._broker))

    async def _leave(self, broker: Broker) -> None:
        """Hand over as soon as a follower has everything; until then what is damaged waits."""
        leading = broker.leading
        assert leading is not None  # noqa: S101  # it was told to lead
        told = ""
        while self._broker is broker and not leading.is_over:
            try:
                await leading.hand_over()
            except PulqueError as error:
                if told != str(error):
                    self._log.error("damaged_log_leads", reason=str(error))
                told = str(error)
                await asyncio.sleep(_LEAVE_AGAIN_S)

    def _note_synced(self, broker: Broker) -> None:
        """Write down how far the disk of a leader is."""
        if broker.leading is not None:
            own = broker.leading.own
            # On a full disk the last one serves: it is only a lower bound.
            with contextlib.suppress(StorageFullError):
                write_known(self._files, Known(own.messages, own.actions), is_durable=False)

    async def _stop_leading(self, broker: Broker) -> None:
        self._authority.on_led = lambda _: None
        if broker.leading is not None:
            self._note(self._mark())
        self._broker = None
        self._last = self._known_of(broker)
        self._note_synced(broker)  # what is damaged below it is mended, not cut
        await broker.close()

    async def _begin_to_follow(self) -> None:
        """Open the logs as a follower does, and listen."""
        options = storage_options(self._settings, Epoch(0), is_replicated=True)
        # In a thread: to look through a long log takes its time.
        logs = await asyncio.to_thread(open_logs, self._files, options, self._listener)
        self._logs = logs
        following = self._following = Following(
            logs, self._authority, self._clock, self._settings.name, self._log
        )
        following.copier.confirmed = self._told.confirmed
        following.copier.followed = (self._told.epoch, self._told.token)
        if self._is_damaged or logs.has_holes:
            following.copier.mend()
        self._is_damaged, self._leaving = False, None
        self._authority.on_led = following.led
        clients = ClientTable(Consumption(), Partitions(), self._clock)
        handler = FollowerHandler(
            self._welcome, self._cluster, clients, self._authority, self._report
        )
        limits = connection_limits(self._settings)
        self._server = FrameServer(handler, limits, self._clock, self._log.info)
        host, self._port = await listen(self._server, self._settings.listen.host, self._port)
        self._address = advertised(self._settings, host, self._port)
        self.url = f"pulque://{Address(host, self._port)}"
        self._log.info(
            "broker_follows", url=self.url, start=logs.start_count, end=logs.message_end
        )

    async def _stop_following(self) -> None:
        self._note(self._mark())
        server, self._server = self._server, None
        following, self._following = self._following, None
        if server is not None:
            server.stop_listening()
            await server.close()  # clients are answered until then: the logs say what to tell them
        if following is not None:
            await following.close()
        logs, self._logs = self._logs, None
        if logs is not None:
            self._last = _known_of_logs(logs)
            logs.close()

    def _hear_of(self, leadership: Leadership) -> None:
        """Write down which leadership this broker was told of, if it has the leader's messages.

        What an older database says of another leader must not make that one the newer.
        """
        mark = self._mark()
        if leadership.token == self._token or (leadership.epoch, leadership.token) == (
            mark.epoch,
            mark.token,
        ):
            self._note(mark._replace(version=max(mark.version, leadership.version)))

    async def _note_marks(self) -> None:
        """Write down now and then how much is confirmed, until cancelled."""
        while True:
            await asyncio.sleep(_NOTE_S)
            self._note(self._mark())
            if self._authority.led is not None:
                self._hear_of(self._authority.led.leadership)

    def _mark(self) -> Told:
        """Return what this broker knows of its group, to be known after a restart, too."""
        told, broker, following = self._told, self._broker, self._following
        if broker is not None and broker.leading is not None:
            leadership = broker.leading.leadership
            epoch, token = int(leadership.epoch), leadership.token
            confirmed = int(broker.leading.in_sync.confirmed.messages)
        elif following is not None:
            (epoch, token), confirmed = following.copier.followed, following.copier.confirmed
        else:
            return told
        return Told(told.version, epoch, token, max(told.confirmed, confirmed))

    def _note(self, told: Told) -> None:
        if told != self._told:
            self._told = told
            # On a full disk the one before serves: it is only a lower bound.
            with contextlib.suppress(StorageFullError):
                write_told(self._files, told)

    # -- what it says ---------------------------------------------------------------------------

    def _hurry(self) -> None:
        """Tell the meta servers at once how this broker stands."""
        registration = self._cluster.registration
        if registration is not None:
            for link in registration.links:
                link.hurry()

    def _known(self) -> _KnownLeadership:
        if self._broker is not None:
            return self._known_of(self._broker)
        return self._last if self._logs is None else _known_of_logs(self._logs)

    @staticmethod
    def _known_of(broker: Broker) -> _KnownLeadership:
        found = broker.describe(ServerState.READY)
        return _KnownLeadership(
            found.directory,
            found.incarnation,
            broker.message_end,
            broker.synced,
            found.log_bytes,
            is_fit=True,
        )

    def _question(self, version: int, wait_ms: int) -> Lead:
        known, settings = self._known(), self._settings
        return Lead(
            settings.broker_group,
            settings.name,
            known.directory,
            self._token,
            version,
            known.synced,
            settings.replication.least_in_sync,
            known.is_fit,
            wait_ms,
        )

    def _describe(self, state: ServerState) -> Register:
        """Return what a meta server is told: a leader that is not open yet leads nobody."""
        broker = self._broker
        if broker is not None and broker.leading is not None and broker.leading.opened.is_set():
            return broker.describe(state)
        known = self._known()
        if state is not ServerState.LEAVING:
            state = ServerState.FOLLOWING
        return Register(
            self._cluster.gate.standing.cluster,
            self._settings.name,
            self._settings.broker_group,
            Role.BROKER,
            *self._address,
            known.directory,
            known.start,
            self._clock.now_ms(),
            state,
            0,
            known.log_bytes,
        )

    def _welcome(self) -> Welcome:
        settings, logs = self._settings, self._logs
        assert logs is not None  # noqa: S101  # it follows
        led = self._authority.led
        epoch = Epoch(0) if led is None else led.leadership.epoch
        return Welcome(
            NEWEST,
            settings.name,
            Tenure(epoch, logs.start_count),
            MAX_PAYLOAD,
            settings.limits.max_message,
            in_ms(settings.consumption.lease),
            longest_delay_ms(settings),
            cluster=self._cluster.gate.standing.cluster,
        )

    def _report(self) -> dict[str, object]:
        known, led, following = self._known(), self._authority.led, self._following
        copier = None if following is None else following.copier
        return {
            "broker": self._settings.name,
            "cluster": cluster_report(self._cluster),
            "replication": {
                "role": "follower",
                "group": self._settings.broker_group,
                "epoch": 0 if led is None else led.leadership.epoch,
                "leader": "" if led is None else led.name,
                "is_in_sync": led is not None and known.directory in led.leadership.in_sync,
                "is_whole": known.is_fit,
                "message_end": known.message_end,
                "confirmed": 0 if copier is None else copier.confirmed,
                "leader_end": 0 if copier is None else copier.leader_end,
            },
        }


def open_logs(files: FileSystem, options: StorageOptions, listener: Listener) -> ReplicaLogs:
    """Open the logs of a follower, all of them on disk: the meta servers remember how far."""
    logs = ReplicaLogs(files, options, listener)
    job = logs.begin_sync()
    if job is not None:
        job.run()
        logs.finish_sync(job)
    return logs


def _known_of_logs(logs: ReplicaLogs) -> _KnownLeadership:
    return _KnownLeadership(
        logs.identity.id,
        logs.start_count,
        logs.message_end,
        logs.message_synced + logs.action_synced,
        logs.message_end - logs.message_oldest,
        logs.is_whole,
    )
