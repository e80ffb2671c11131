"""Build and start the parts of a delay server, in order. Contains no logic."""

import asyncio
import contextlib
import json
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from hashlib import blake2b
from typing import Any

import structlog

from pulque.client.connection.url import Address, parse_address
from pulque.clock import Clock, SystemClock
from pulque.delay.config import DelaySettings
from pulque.delay.context import Around
from pulque.delay.dispatch.broker_connections import BrokerConnections, Taker
from pulque.delay.dispatch.dispatcher import Dispatcher
from pulque.delay.dispatch.due_batches import Delivery
from pulque.delay.housekeeping import DelayHousekeeper
from pulque.delay.pending_changes import Changer
from pulque.delay.pending_queries import Looker
from pulque.delay.receiver import DelayReceiver, DueLimits
from pulque.delay.recovery import RecoveredSchedule, recover
from pulque.delay.registration import DelayRegistration
from pulque.delay.requests import DelayHandler
from pulque.delay.schedule.dispatch_log_writer import Notebook
from pulque.delay.schedule.replay import Replayer
from pulque.errors import StorageError
from pulque.model.positions import Epoch, Tenure
from pulque.model.routes import Role
from pulque.net.server import ConnectionLimits, FrameServer
from pulque.serving.batches import SendLimits
from pulque.serving.commit import Committer
from pulque.serving.listener import LoggingListener
from pulque.serving.process import listen, run_process, serve
from pulque.serving.supervised import Supervised
from pulque.storage.files import DataDirectory, open_directory
from pulque.storage.options import StorageOptions
from pulque.wire.frame import MAX_PAYLOAD
from pulque.wire.registration import Register, ServerState
from pulque.wire.responses import Welcome
from pulque.wire.versions import NEWEST

__all__ = ["DelayServer", "run_delay"]

_READERS = 4
_MOST_BALLAST = 4 * 1024 * 1024
_SEND_BUFFER = 8 * 1024 * 1024
_HANDSHAKE_MS = 5000
_FRAME_MS = 10_000
_IDLE_MS = 120_000
_CATCH_UP_S = 5.0


def run_delay(settings: DelaySettings, *, on_ready: Callable[[str], None]) -> None:
    """Run a delay server until SIGTERM or SIGINT.

    Args:
        settings: Its settings.
        on_ready: Called with its URL once it serves.

    Raises:
        PulqueError: The server cannot start, or its disk failed.
    """
    run_process(settings.log, lambda: _serve(settings, on_ready))


async def _serve(settings: DelaySettings, on_ready: Callable[[str], None]) -> None:
    server = DelayServer(settings)
    asyncio.get_running_loop().set_exception_handler(server.callback_failed)
    await serve(server, on_ready)


class DelayServer(Supervised):
    """One delay server on one data directory. Lives in one event loop.

    Args:
        settings: Its settings.
        clock: By default the machine's clock.
        files: By default the data directory of the settings.
        brokers: The receivers of due messages; by default the brokers of the cluster.
    """

    def __init__(
        self,
        settings: DelaySettings,
        clock: Clock | None = None,
        files: DataDirectory | None = None,
        brokers: Taker | None = None,
    ) -> None:
        self._settings = settings
        self._clock = clock or SystemClock()
        self._files = files
        self._given_brokers = brokers
        super().__init__(structlog.get_logger(component="delay"), failed="delay_server_failed")
        self._listener = LoggingListener(self._log)
        self._tasks: list[asyncio.Task[None]] = []
        self._address = Address("", 0)
        self.url = ""

    async def start(self) -> None:
        """Recover, serve, and register at the meta servers.

        Raises:
            PulqueError: The start failed; nothing runs then.
        """
        began_ms = self._clock.monotonic_ms()
        with contextlib.ExitStack() as undo:
            if self._files is None:
                self._files = open_directory(self._settings.storage.directory)
            files = self._files
            files.lock()
            undo.callback(files.unlock)
            recovered = self._recover(files)
            undo.callback(recovered.engine.close)
            self._build(recovered)
            undo.pop_all()  # from here on, `close` does it
        try:
            await self._begin(recovered, began_ms)
        except BaseException:
            await self.close()
            raise

    async def _begin(self, recovered: RecoveredSchedule, began_ms: int) -> None:
        """Start to serve, after all parts are built."""
        self._tasks = [asyncio.create_task(self._supervise(self._notebook.run()))]
        if recovered.store.is_ahead:
            # Else what is sent next would be taken for what is there already.
            await self._housekeeper.checkpoint()
            recovered.store.forget_ahead()
        for work in (self._replayer.run(), self._dispatcher.run(), self._housekeeper.run()):
            self._tasks.append(asyncio.create_task(self._supervise(work)))
        at = self._settings.listen
        host, port = await listen(self._server, at.host, at.port)
        self.url = f"pulque://{Address(host, port)}"
        told = self._settings.cluster.advertise
        self._address = parse_address(told, default_port=port) if told else Address(host, port)
        self._log.info(
            "delay_server_started",
            url=self.url,
            start=recovered.engine.start_count,
            replayed_batches=recovered.batches,
            ticks=len(recovered.store.ticks),
            recovery_ms=self._clock.monotonic_ms() - began_ms,
        )
        if self._given_brokers is not None and not self._settings.cluster.meta:
            return  # there is nobody to register at, and no need to
        await self._registration.start()

    def _recover(self, files: DataDirectory) -> RecoveredSchedule:
        """Recover the data directory."""
        settings = self._settings
        return recover(
            files,
            _options(settings),
            self._listener,
            _ms(settings.schedule.tick),
            self._clock.now_ms(),
        )

    def _build(self, recovered: RecoveredSchedule) -> None:
        """Build the parts."""
        settings, clock = self._settings, self._clock
        engine, store = recovered.engine, recovered.store
        self._engine, self._store = engine, store
        assert self._files is not None  # noqa: S101  # the state was recovered from them
        # This may fail, so it comes before the committer, which starts a thread.
        self._registration = DelayRegistration(
            settings.cluster.meta_addresses,
            self._files,
            name=settings.name,
            describe=self._describe,
            warn=self._log.warning,
        )
        scheduler = ThreadPoolExecutor(1, "pulque-schedule")
        looking = ThreadPoolExecutor(1, "pulque-look")
        noter = ThreadPoolExecutor(1, "pulque-dispatch")
        reader = ThreadPoolExecutor(_READERS, "pulque-disk")
        self._executors = (scheduler, looking, noter, reader)
        around = Around(clock, *self._executors, asyncio.Lock(), self._log.warning, self._fail)
        self._committer = Committer(
            engine,
            sync_interval_s=settings.storage.sync_interval.total_seconds(),
            wake=lambda _: self._replayer.wake(),
            fail=self._fail,
            answered=self._answered,
        )
        self._notebook = Notebook(store, around.noter, around.warn)
        self._brokers: Taker = self._given_brokers or BrokerConnections(
            self._registration.links,
            settings.name,
            clock,
            timeout_s=settings.delivery.timeout.total_seconds(),
        )
        delivery = _delivery(settings, engine.identity.id)
        self._dispatcher = Dispatcher(
            store,
            self._notebook,
            self._brokers,
            delivery,
            around,
            recovered.sequences,
            first_sequence=recovered.first_sequence,
            unresumed=recovered.unresumed,
        )
        self._replayer = Replayer(
            engine,
            store,
            self._notebook,
            around,
            wanted=self._dispatcher.live.indexes,
            answered=self._answered,
            added=self._dispatcher.extend,
            missed=self._dispatcher.live.catch_up,
        )
        due = DueLimits(
            _ms(settings.schedule.longest_delay), store.tick_ms, settings.limits.max_partitions
        )
        self._receiver = DelayReceiver(
            engine,
            recovered.dedup,
            self._committer,
            self._replayer,
            clock=clock,
            limits=_send_limits(settings),
            due=due,
        )
        looker = Looker(store, self._dispatcher, around, settings.limits.index_memory)
        self._changer = Changer(
            store, looker, self._notebook, self._receiver, self._dispatcher, clock=clock, due=due
        )
        self._housekeeper = DelayHousekeeper(
            recovered,
            self._committer,
            self._notebook,
            self._dispatcher,
            looker,
            around,
            replayer=self._replayer,
            checkpoint_ms=_ms(settings.storage.checkpoint_interval),
        )
        tenure = Tenure(Epoch(0), engine.start_count)
        welcome = Welcome(
            NEWEST,
            settings.name,
            tenure,
            MAX_PAYLOAD,
            settings.limits.max_message,
            0,
            due.longest_delay_ms,
            Role.DELAY,
        )
        self._handler = DelayHandler(
            welcome, self._receiver, self._changer, looker, self._registration, status=self._report
        )
        self._server = FrameServer(
            self._handler, _connection_limits(settings), clock, self._log.info
        )

    def _describe(self, state: ServerState) -> Register:
        if state is ServerState.READY and self._engine.is_full:
            state = ServerState.FULL
        return Register(
            self._registration.cluster,
            self._settings.name,
            self._settings.name,
            Role.DELAY,
            *self._address,
            self._engine.identity.id,
            self._engine.start_count,
            self._clock.now_ms(),
            state,
            len(self._engine.partitions.by_id),
            self._engine.end - self._engine.segments[0].base,
        )

    def status(self) -> dict[str, Any]:
        """Return the status of the delay server."""
        ticks = list(self._store.ticks.values())
        dispatcher, receiver = self._dispatcher, self._receiver
        return {
            "delay": self._settings.name,
            "cluster": {
                "id": self._registration.cluster,
                "meta": self._registration.registered_at,
                "meta_servers": [str(each.address) for each in self._registration.links],
            },
            "start": self._engine.start_count,
            "connections": len(self._server.connections),
            "is_full": self._engine.is_full,
            "received": {
                "messages": receiver.messages,
                "batches": receiver.batches,
                "refused": receiver.refused,
            },
            "schedule": {
                "ticks": len(ticks),
                "bytes": sum(each.size for each in ticks),
                "messages": sum(each.messages for each in ticks),
                "in_memory": len(dispatcher.live.indexes),
                "damaged": self._store.damaged,
                "lag_bytes": self._replayer.waiting_bytes,
            },
            "dispatch": {
                "dispatched": dispatcher.dispatched,
                "read_ahead": dispatcher.read_ahead,
                "refused": dispatcher.refused,
                "lost": dispatcher.lost,
                "stuck": dispatcher.stuck.report(),
                "clock_steps": dispatcher.steps,
                "lateness_ms": dispatcher.lateness.report(),
            },
            "changed": {"cancelled": self._changer.cancelled, "moved": self._changer.moved},
            "checkpoints": self._housekeeper.checkpoints,
            "removed_ticks": self._housekeeper.removed_ticks,
        }

    def _report(self) -> bytes:
        return json.dumps(self.status()).encode()

    @property
    def is_idle(self) -> bool:
        """Whether no message is being scheduled, or sent to a broker."""
        is_placed = not self._replayer.waiting_bytes
        return is_placed and self._notebook.is_idle and self._dispatcher.is_idle

    @property
    def has_due(self) -> bool:
        """Whether a due message is not at a broker yet, or an unscheduled one may be due."""
        return bool(self._replayer.waiting_bytes) or self._dispatcher.has_due

    async def checkpoint(self) -> None:
        """Write a checkpoint now, and remove files that are no longer needed."""
        await self._housekeeper.checkpoint()

    async def close(self, *, catch_up_s: float = _CATCH_UP_S) -> None:
        """Stop serving, sync, write a checkpoint, and unlock the directory.

        Args:
            catch_up_s: How long to wait until all stored messages are in the schedule, so that
                the next start need not replay them.
        """
        await self._registration.close()
        self._server.stop_listening()
        await self._handler.close()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(catch_up_s):
                await self._replayer.caught_up()
        notes, *others = self._tasks
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)
        # What was cancelled goes on in its thread: a step, a look.
        for executor in self._executors[:2]:
            await asyncio.get_running_loop().run_in_executor(executor, int)
        await self._dispatcher.close()
        await self._brokers.close()
        await self._committer.close()
        await self._server.close()
        if self._failure is None and not self._store.is_torn:
            try:
                await self._housekeeper.checkpoint(is_last=True)
            except StorageError as error:
                self._log.warning("last_checkpoint_failed", reason=str(error))
        notes.cancel()
        await asyncio.gather(notes, return_exceptions=True)
        for executor in self._executors:
            executor.shutdown()
        self._engine.close()
        if self._files is not None:
            self._files.unlock()
        self._log.info("delay_server_stopped")

    def _answered(self) -> None:
        self._server.write_out()
        self._replayer.wake()


def _options(settings: DelaySettings) -> StorageOptions:
    storage = settings.storage
    return StorageOptions(
        segment_bytes=storage.segment_size,
        tail_cache_bytes=0,
        reserve_bytes=storage.reserve,
        ballast_bytes=min(storage.reserve // 4, _MOST_BALLAST),
    )


def _delivery(settings: DelaySettings, directory: str) -> Delivery:
    delivery = settings.delivery
    digest = blake2b(f"delay {directory}".encode(), digest_size=8).digest()
    return Delivery(
        settings.name,
        int.from_bytes(digest, "little") | 1,
        delivery.batch_messages,
        delivery.batch_size,
        _ms(delivery.patience),
    )


def _send_limits(settings: DelaySettings) -> SendLimits:
    limits = settings.limits
    return SendLimits(
        limits.max_batch, limits.max_message, limits.max_in_flight, limits.open_records
    )


def _connection_limits(settings: DelaySettings) -> ConnectionLimits:
    return ConnectionLimits(
        settings.limits.max_connections,
        MAX_PAYLOAD,
        _SEND_BUFFER,
        _HANDSHAKE_MS,
        _FRAME_MS,
        _IDLE_MS,
    )


def _ms(duration: timedelta) -> int:
    return duration // timedelta(milliseconds=1)
