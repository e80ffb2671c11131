"""Puts the parts of a broker together, in order, and starts them. Holds no logic.

Nothing is served before the end: the directory is locked, the start counted, both logs replayed,
a checkpoint written; then the port opens.
"""

import asyncio
import json
import signal
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Protocol

import structlog

from pulque.broker.adopt import Adopter, AdoptionRules
from pulque.broker.appending import Appender
from pulque.broker.attendance import LoneAttendance
from pulque.broker.belonging import advertised, join_cluster, register_of
from pulque.broker.clients import ClientTable
from pulque.broker.config import BrokerSettings, parse_delays
from pulque.broker.dead import DeadLetterOffice
from pulque.broker.find import Finder
from pulque.broker.groups import Registrar
from pulque.broker.housekeeping import Housekeeper, Rhythm
from pulque.broker.indexing import Indexer
from pulque.broker.locks import Locker
from pulque.broker.newcomers import Newcomers
from pulque.broker.ordered import Steward
from pulque.broker.parts import Parts
from pulque.broker.places import Places
from pulque.broker.pull import Puller
from pulque.broker.read import Browser
from pulque.broker.receive import Receiver
from pulque.broker.recovery import Recovered, recover
from pulque.broker.requests import RequestHandler
from pulque.broker.reset import Resetter
from pulque.broker.retry import Policies, Redeliverer
from pulque.broker.settle import Settler
from pulque.broker.state import BrokerState, PullLimits, SendLimits, Surroundings
from pulque.broker.status import cluster_report, status_report
from pulque.broker.waiting import Releaser
from pulque.client.url import Address
from pulque.clock import Clock, SystemClock
from pulque.errors import ConfigError, StorageError
from pulque.model.positions import Epoch, Tenure
from pulque.net.process import allow_descriptors, loop_factory
from pulque.net.server import ConnectionLimits, FrameServer
from pulque.rules.lease import Leases
from pulque.rules.locks import LockTimes
from pulque.rules.retry import RetryPolicy
from pulque.serving.attended import Authorisation
from pulque.serving.commit import Committer
from pulque.serving.listener import LoggingListener
from pulque.serving.supervised import Supervised
from pulque.settings.logs import configure_logging
from pulque.storage.files import FileSystem, OsFileSystem
from pulque.storage.key_index import KeyIndex
from pulque.storage.options import StorageOptions
from pulque.storage.partitions import Partition
from pulque.wire.frame import MAX_PAYLOAD
from pulque.wire.registration import Register, ServerState
from pulque.wire.responses import Welcome
from pulque.wire.versions import NEWEST

__all__ = ["Broker", "DataDirectory", "run_broker"]

_READERS = 4
_MOST_BALLAST = 4 * 1024 * 1024


def run_broker(settings: BrokerSettings, *, on_ready: Callable[[str], None]) -> None:
    """Run a broker until SIGTERM or SIGINT.

    Args:
        settings: The broker's.
        on_ready: Called with the broker's URL once it serves.

    Raises:
        PulqueError: It cannot start, or its disk failed.
    """
    configure_logging(settings.log)
    allow_descriptors()
    with asyncio.Runner(loop_factory=loop_factory()) as runner:
        runner.run(_serve(settings, on_ready))


async def _serve(settings: BrokerSettings, on_ready: Callable[[str], None]) -> None:
    broker = Broker(settings)
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, broker.stop)
    loop.set_exception_handler(broker.callback_failed)
    await broker.start()
    try:
        on_ready(broker.url)
        await broker.stopped()
    finally:
        await broker.close()


class DataDirectory(FileSystem, Protocol):
    """Files that one broker at a time may have."""

    def lock(self) -> None: ...

    def unlock(self) -> None: ...


class Broker(Supervised):
    """One broker on one data directory. Lives in one event loop.

    Args:
        settings: All that it is told.
        clock: The machine's, if not given.
        files: The directory that the settings name, if not given.
    """

    def __init__(
        self,
        settings: BrokerSettings,
        clock: Clock | None = None,
        files: DataDirectory | None = None,
    ) -> None:
        self._settings = settings
        self._clock = clock or SystemClock()
        self._files = files
        super().__init__(structlog.get_logger(component="broker"), failed="broker_failed")
        self._listener = LoggingListener()
        self._tasks: list[asyncio.Task[None]] = []
        self._address = Address("", 0)
        """Where clients reach it."""
        self.url = ""

    async def start(self) -> None:
        """Recover, serve, and make itself known to its cluster.

        Raises:
            PulqueError: It cannot; nothing runs then.
        """
        await self._begin()
        if self._cluster.registration is not None:
            try:
                await self._cluster.registration.start()
            except BaseException:
                await self.close()
                raise

    async def _begin(self) -> None:
        """Recover, then serve."""
        clock = self._clock
        began_ms = clock.monotonic_ms()
        recovered = self._recover()
        self._build()
        await self._housekeeper.checkpoint()
        if recovered.was_clipped:
            # No fact tells of it: neither of the two that are kept may be from before.
            await self._housekeeper.checkpoint()
        for effect in self._state.consumption.pending():
            self._parts.redeliverer.perform(effect)
        self._tasks = [
            asyncio.create_task(self._supervise(self._parts.redeliverer.run())),
            asyncio.create_task(self._supervise(self._parts.releaser.run())),
            asyncio.create_task(self._supervise(self._housekeeper.run())),
            asyncio.create_task(self._supervise(self._indexer.run())),
        ]
        host, port = await self._listen()
        self.url = f"pulque://{Address(host, port)}"
        self._address = advertised(self._settings, host, port)
        self._log.info(
            "broker_started",
            url=self.url,
            start=self._state.engine.start_count,
            replayed_batches=recovered.batches,
            replayed_facts=recovered.facts,
            recovery_ms=clock.monotonic_ms() - began_ms,
        )

    def _recover(self) -> Recovered:
        """Take the data directory and bring it to where it was."""
        settings = self._settings
        if self._files is None:
            settings.storage.directory.mkdir(parents=True, exist_ok=True, mode=0o700)
            self._files = OsFileSystem(str(settings.storage.directory))
        self._files.lock()
        engine, recovered = recover(
            self._files, _options(settings), self._listener, self._clock.now_ms()
        )
        leases = Leases(_ms(settings.consumption.lease))
        now_ms = self._clock.monotonic_ms()
        for subscription in recovered.consumption.subscriptions.values():
            if subscription.held_count:
                leases.renew(subscription.group, subscription.consumer, now_ms)
        self._state = BrokerState(
            engine,
            recovered.consumption,
            recovered.dedup,
            leases,
            Tenure(Epoch(0), engine.start_count),
            Places(engine.partitions.by_id.values()),
            schedule=recovered.schedule,
            dead=recovered.dead,
            adoptions=recovered.adoptions,
            lock_times=LockTimes(_ms(settings.consumption.lock), now_ms),
            max_partitions=settings.limits.max_partitions,
            max_subscriptions=settings.limits.max_subscriptions,
        )
        return recovered

    def _build(self) -> None:
        """Make the parts and put them together."""
        settings, state = self._settings, self._state
        self._executor = ThreadPoolExecutor(_READERS, "pulque-disk")
        around = Surroundings(self._clock, self._executor, self._log.warning, self._fail)
        self._committer = Committer(
            state.engine,
            sync_interval_s=settings.storage.sync_interval.total_seconds(),
            wake=self._wake,
            fail=self._fail,
            answered=self._write_out,
        )
        appender = Appender(state, around, self._committer)
        releaser = Releaser(state, around, appender)
        policies = Policies(
            state.consumption.settings, _retry_policy(settings), _longest_delay_ms(settings)
        )
        assert self._files is not None  # noqa: S101  # the state was recovered from them
        names = state.engine.partitions.name_of
        index = KeyIndex(self._files, lambda: state.engine.segments, names, self._listener)
        self._indexer = Indexer(index, state.engine, around)
        self._finder = Finder(state.engine, index, settings.limits.max_pull_bytes)
        self._cluster = join_cluster(settings, self._files, self._describe, self._log)
        newcomers = Newcomers(
            self._cluster.gate,
            self._cluster.broker_group,
            None if self._cluster.relay is None else self._cluster.relay.ask_route,
            self._clock,
        )
        redeliverer = Redeliverer(state, around, appender, policies.policy_of, waits=releaser.wake)
        settler = Settler(
            state,
            self._clock,
            perform=redeliverer.perform,
            longest_delay_ms=_longest_delay_ms(settings),
        )
        puller = Puller(state, around, _pull_limits(settings), self._committer.sync_facts)
        locker = Locker(state, self._clock, self._committer.sync_facts, puller.look_again)
        self._parts = Parts(
            Receiver(state, around, self._committer, _send_limits(settings), newcomers),
            puller,
            settler,
            Browser(state.engine, self._executor, _pull_limits(settings)),
            redeliverer,
            Registrar(state, around, self._committer, puller.dismiss, locker),
            releaser,
            Resetter(state, around, self._committer, wake=self._wake),
            DeadLetterOffice(
                state, around, self._committer, appender, settings.limits.max_message
            ),
            Adopter(
                state,
                around,
                self._committer,
                appender,
                AdoptionRules(
                    self._cluster.gate,
                    policies.policy_of,
                    _send_limits(settings),
                    _longest_delay_ms(settings),
                ),
                waits=releaser.wake,
            ),
            ClientTable(state, self._clock),
            locker,
            Steward(
                state,
                self._clock,
                locker,
                perform=redeliverer.perform,
                sync_facts=self._committer.sync_facts,
            ),
            LoneAttendance(
                state.places,
                self._cluster.broker_group,
                self._clock,
                Authorisation(state.lock_times.lock_ms),
                settings.consumption.strict,
            ),
        )
        state.engine.partitions.watch(self._partition_added)
        self._housekeeper = Housekeeper(
            state, around, self._parts, self._committer, _rhythm(settings)
        )
        welcome = Welcome(
            NEWEST,
            settings.name,
            state.tenure,
            MAX_PAYLOAD,
            settings.limits.max_message,
            state.leases.lease_ms,
            _longest_delay_ms(settings),
        )
        self._handler = RequestHandler(
            welcome,
            self._parts,
            state,
            self._clock,
            status=self._report,
            cluster=self._cluster,
            finder=self._finder,
        )
        self._server = FrameServer(
            self._handler, _connection_limits(settings), self._clock, self._log.info
        )

    def _describe(self, state: ServerState) -> Register:
        cluster, now_ms = self._cluster.gate.standing.cluster, self._clock.now_ms()
        engine = self._state.engine
        return register_of(self._settings, engine, self._address, cluster, state, now_ms)

    def _report(self) -> bytes:
        connections = len(self._server.connections)
        found = status_report(self._state, self._parts, self._committer, connections)
        named = {"broker": self._settings.name, "cluster": cluster_report(self._cluster)}
        return json.dumps({**named, **found}).encode()

    async def close(self) -> None:
        """Stop serving, sync, write a checkpoint, and give the directory back."""
        await self._cluster.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._server.stop_listening()
        await self._parts.office.close()
        await self._parts.adopter.close()
        await self._finder.close()
        await self._committer.close()
        await self._server.close()
        if self._failure is None:
            try:
                await self._housekeeper.checkpoint()
            except StorageError as error:
                self._log.warning("last_checkpoint_failed", reason=str(error))
        self._executor.shutdown()
        self._state.engine.close()
        if self._files is not None:
            self._files.unlock()
        self._log.info("broker_stopped")

    async def _listen(self) -> tuple[str, int]:
        listen = self._settings.listen
        try:
            return await self._server.listen(listen.host, listen.port)
        except OSError as error:
            raise ConfigError(
                f"cannot listen on {listen.host}:{listen.port}: {error.strerror}"
            ) from error

    def _wake(self, partitions: list[Partition]) -> None:
        self._parts.puller.wake(partitions)
        self._parts.browser.wake(partitions)

    def _partition_added(self, partition: Partition) -> None:
        places = self._state.places.add(partition)
        self._parts.puller.partition_added(partition, places)
        self._handler.partition_added(places)

    def _write_out(self) -> None:
        self._server.write_out()


def _options(settings: BrokerSettings) -> StorageOptions:
    storage = settings.storage
    return StorageOptions(
        segment_bytes=storage.segment_size,
        segment_batches=storage.segment_batches,
        segment_age_ms=_ms(storage.segment_age),
        action_segment_bytes=storage.action_segment_size,
        tail_cache_bytes=storage.tail_cache,
        reserve_bytes=storage.reserve,
        ballast_bytes=min(storage.reserve // 4, _MOST_BALLAST),
        keeps_for_archive=storage.archive,
    )


def _send_limits(settings: BrokerSettings) -> SendLimits:
    limits = settings.limits
    return SendLimits(limits.max_batch, limits.max_message, limits.max_in_flight)


def _pull_limits(settings: BrokerSettings) -> PullLimits:
    limits = settings.limits
    return PullLimits(
        limits.max_pull_messages,
        limits.max_pull_bytes,
        limits.max_held,
        settings.consumption.low_priority_share,
        # One is left for checkpoints, indexes, retries and reads without a group.
        _READERS - 1,
    )


def _retry_policy(settings: BrokerSettings) -> RetryPolicy:
    retry, longest = settings.retry, _longest_delay_ms(settings)
    delays_ms = tuple(min(_ms(delay), longest) for delay in parse_delays(retry.delays))
    return RetryPolicy(delays_ms, retry.jitter_percent / 100, retry.attempts)


def _longest_delay_ms(settings: BrokerSettings) -> int:
    """No message may wait for so long that it is deleted meanwhile."""
    return min(_ms(settings.retry.longest_delay), _ms(settings.storage.retention) // 2)


def _rhythm(settings: BrokerSettings) -> Rhythm:
    storage = settings.storage
    return Rhythm(
        checkpoint_records=storage.checkpoint_records,
        checkpoint_ms=_ms(storage.checkpoint_interval),
        lease_check_ms=_ms(settings.consumption.lease_check),
        retention_ms=_ms(storage.retention),
        retention_bytes=storage.retention_size,
    )


def _connection_limits(settings: BrokerSettings) -> ConnectionLimits:
    limits = settings.limits
    return ConnectionLimits(
        max_connections=limits.max_connections,
        max_payload=MAX_PAYLOAD,
        send_buffer=limits.send_buffer + limits.max_pull_bytes,
        handshake_ms=_ms(limits.handshake_timeout),
        frame_ms=_ms(limits.frame_timeout),
        idle_ms=_ms(limits.idle_timeout),
    )


def _ms(duration: timedelta) -> int:
    return int(duration.total_seconds() * 1000)
