"""Puts the parts of a broker together, in order, and starts them. Holds no logic.

Nothing is served before the end: the directory is locked, the start counted, both logs replayed,
a checkpoint written; then the port opens.
"""

import asyncio
import json
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass

import structlog

from pulque.broker.clients import ClientTable
from pulque.broker.cluster.membership import ClusterSide, advertised, join_cluster, register_of
from pulque.broker.cluster.partition_coverage import PartitionCoverage
from pulque.broker.components import BrokerParts
from pulque.broker.config import BrokerSettings
from pulque.broker.groups.group_reset import Resetter
from pulque.broker.groups.ordered_groups import Steward
from pulque.broker.groups.partition_allotment import LoneAttendance
from pulque.broker.groups.pull_locks import Locker
from pulque.broker.groups.subscriptions import GroupRegistrar
from pulque.broker.housekeeping import Housekeeper
from pulque.broker.parameters import (
    READERS,
    connection_limits,
    in_ms,
    longest_delay_ms,
    pull_limits,
    retry_policy,
    rhythm_of,
    send_limits,
    storage_options,
)
from pulque.broker.pulling.partition_reads import Browser
from pulque.broker.pulling.puller import Puller
from pulque.broker.receiving.internal_appends import Appender
from pulque.broker.receiving.new_subjects import Newcomers
from pulque.broker.receiving.receiver import BrokerReceiver
from pulque.broker.recovery import Recovered, recover
from pulque.broker.replication.leader import ReplicationLeader, Rule
from pulque.broker.replication.log_streams import Streams
from pulque.broker.requests import BrokerHandler
from pulque.broker.search.key_index_writer import Indexer
from pulque.broker.search.search_thread import Finder
from pulque.broker.settling.adopted_nacks import Adopter, AdoptionRules
from pulque.broker.settling.dead_letters import DeadLetterOffice
from pulque.broker.settling.due_retries import Releaser
from pulque.broker.settling.retry import Policies, Redeliverer
from pulque.broker.settling.settler import Settler
from pulque.broker.state import BrokerState, Surroundings
from pulque.broker.status import cluster_report, status_report
from pulque.client.connection.url import Address
from pulque.clock import Clock, SystemClock
from pulque.errors import PulqueError, StorageError
from pulque.model.positions import Epoch, Tenure
from pulque.net.server import FrameServer
from pulque.net.steps import Steps
from pulque.rules.lease import Leases
from pulque.rules.locks import LockTimes
from pulque.serving.attended import Authorisation
from pulque.serving.commit import Committer
from pulque.serving.listener import LoggingListener
from pulque.serving.process import listen
from pulque.serving.supervised import Supervised
from pulque.storage.files import DataDirectory, open_directory
from pulque.storage.indexes.key_index import KeyIndex
from pulque.storage.logs.partitions import Partition
from pulque.wire.frame import MAX_PAYLOAD
from pulque.wire.registration import Register, ServerState
from pulque.wire.responses import Welcome
from pulque.wire.versions import NEWEST

__all__ = ["Broker", "Reign"]


@dataclass(frozen=True, slots=True)
class Reign:
    """What a broker is lent while it leads its group: it is the process's, and stays with it."""

    rule: Rule
    cluster: ClusterSide
    port: int
    """Where it listens, whether it leads or follows."""
    listener: LoggingListener
    """Hears what happens in storage."""


class Broker(Supervised):
    """One broker on one data directory. Lives in one event loop.

    Args:
        settings: All that it is told.
        clock: The machine's, if not given.
        files: The directory that the settings name, if not given.
        reign: What it is lent while it leads a group; None for a broker that stands alone.
    """

    def __init__(
        self,
        settings: BrokerSettings,
        clock: Clock | None = None,
        files: DataDirectory | None = None,
        reign: Reign | None = None,
    ) -> None:
        self._settings = settings
        self._clock = clock or SystemClock()
        self._files = files
        self._reign = reign
        self._streams: Streams | None = None
        self.is_deposed = False
        """Whether somebody else leads by now."""
        super().__init__(structlog.get_logger(component="broker"), failed="broker_failed")
        self._listener = LoggingListener() if reign is None else reign.listener
        self._tasks: list[asyncio.Task[None]] = []
        self._address = Address("", 0)
        """Where clients reach it."""
        self.url = ""

    async def start(self) -> None:
        """Recover, serve, and make itself known to its cluster.

        Raises:
            PulqueError: It cannot; nothing runs then.
        """
        began_ms = self._clock.monotonic_ms()
        with ExitStack() as undo:
            if self._files is None:
                self._files = open_directory(self._settings.storage.directory)
            files = self._files
            if self._reign is None:
                files.lock()
                undo.callback(files.unlock)
                recovered = self._recover(files)
            else:
                # In a thread: meta servers must hear of a leader while it opens a long log.
                recovered = await asyncio.to_thread(self._recover, files)
            undo.callback(self._state.engine.close)
            self._build()
            undo.pop_all()  # from here on, `close` does it
        try:
            await self._begin(recovered, began_ms)
            if self._reign is None and self._cluster.registration is not None:
                await self._cluster.registration.start()
                watching = self._supervise(self._cluster.registration.watch())
                self._tasks.append(asyncio.create_task(watching))
        except BaseException:
            await self.close()
            raise

    async def _begin(self, recovered: Recovered, began_ms: int) -> None:
        """Serve, now that all is put together."""
        await self._housekeeper.checkpoint()
        if recovered.was_cut:
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
        if self.leading is not None:
            self._tasks.append(asyncio.create_task(self._supervise(self.leading.run())))
        at = self._settings.listen
        port = at.port if self._reign is None else self._reign.port
        host, port = await listen(self._server, at.host, port)
        self.url = f"pulque://{Address(host, port)}"
        self._address = advertised(self._settings, host, port)
        self._log.info(
            "broker_started",
            url=self.url,
            start=self._state.engine.start_count,
            replayed_batches=recovered.batches,
            replayed_facts=recovered.facts,
            recovery_ms=self._clock.monotonic_ms() - began_ms,
        )

    def _recover(self, files: DataDirectory) -> Recovered:
        """Bring the data directory to where it was."""
        settings = self._settings
        epoch = Epoch(0) if self._reign is None else self._reign.rule.led.leadership.epoch
        options = storage_options(settings, epoch, is_replicated=self._reign is not None)
        engine, recovered = recover(files, options, self._listener, self._clock.now_ms())
        leases = Leases(in_ms(settings.consumption.lease))
        now_ms = self._clock.monotonic_ms()
        for subscription in recovered.consumption.subscriptions.values():
            if subscription.held_count:
                leases.renew(subscription.group, subscription.consumer, now_ms)
        self._state = BrokerState(
            engine,
            recovered.consumption,
            recovered.dedup,
            leases,
            Tenure(epoch, engine.start_count),
            PartitionCoverage(engine.partitions.by_id.values()),
            schedule=recovered.schedule,
            dead=recovered.dead,
            adoptions=recovered.adoptions,
            lock_times=LockTimes(in_ms(settings.consumption.lock), now_ms),
            max_partitions=settings.limits.max_partitions,
            max_subscriptions=settings.limits.max_subscriptions,
        )
        return recovered

    def _build(self) -> None:
        """Make the parts and put them together."""
        settings, state = self._settings, self._state
        self._executor = ThreadPoolExecutor(READERS, "pulque-disk")
        around = Surroundings(self._clock, self._executor, self._log.warning, self._fail)
        assert self._files is not None  # noqa: S101  # the state was recovered from them
        self._cluster = (
            join_cluster(settings, self._files, self.describe, self._log)
            if self._reign is None
            else self._reign.cluster
        )
        self._streams = self._lead(around)
        self._committer = Committer(
            state.engine,
            sync_interval_s=settings.storage.sync_interval.total_seconds(),
            wake=self._wake,
            fail=self._fail,
            answered=self._write_out,
            copying=self.leading,
        )
        if self.leading is not None:
            self.leading.attach(self._committer)
        appender = Appender(state, around, self._committer)
        releaser = Releaser(state, around, appender)
        policies = Policies(
            state.consumption.settings, retry_policy(settings), longest_delay_ms(settings)
        )
        names = state.engine.partitions.name_of
        index = KeyIndex(self._files, lambda: state.engine.segments, names, self._listener)
        self._indexer = Indexer(index, state.engine, around)
        self._finder = Finder(state.engine, index, settings.limits.max_pull_bytes)
        newcomers = Newcomers(
            self._cluster.gate,
            self._cluster.broker_group,
            None if self._cluster.relay is None else self._cluster.relay.ask_route,
            self._clock,
        )
        redeliverer = Redeliverer(
            state,
            around,
            appender,
            policies.policy_of,
            waits=releaser.wake,
            max_message=settings.limits.max_message,
        )
        settler = Settler(
            state,
            self._clock,
            perform=redeliverer.perform,
            longest_delay_ms=longest_delay_ms(settings),
        )
        puller = Puller(state, around, pull_limits(settings), self._committer.sync_facts)
        locker = Locker(state, self._clock, self._committer.sync_facts, puller.look_again)
        self._parts = BrokerParts(
            BrokerReceiver(state, around, self._committer, send_limits(settings), newcomers),
            puller,
            settler,
            Browser(state.engine, self._executor, pull_limits(settings)),
            redeliverer,
            GroupRegistrar(state, around, self._committer, puller.dismiss, locker),
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
                    send_limits(settings),
                    longest_delay_ms(settings),
                ),
                waits=releaser.wake,
            ),
            ClientTable(state.consumption, state.engine.partitions, self._clock),
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
        if self.leading is not None:
            self.leading.on_short = self._forsake
        state.engine.partitions.watch(self._partition_added)
        self._housekeeper = Housekeeper(
            state, around, self._parts, self._committer, rhythm_of(settings)
        )
        welcome = Welcome(
            NEWEST,
            settings.name,
            state.tenure,
            MAX_PAYLOAD,
            settings.limits.max_message,
            state.leases.lease_ms,
            longest_delay_ms(settings),
        )
        self._handler = BrokerHandler(
            welcome,
            self._parts,
            state,
            self._clock,
            status=self._report,
            cluster=self._cluster,
            finder=self._finder,
            streams=self._streams,
        )
        self._server = FrameServer(
            self._handler, connection_limits(settings), self._clock, self._log.info
        )

    @property
    def leading(self) -> ReplicationLeader | None:
        """How it leads its group; None for a broker that stands alone."""
        return None if self._streams is None else self._streams.leading

    def _lead(self, around: Surroundings) -> Streams | None:
        """Begin to lead, if this broker is to."""
        if self._reign is None:
            return None
        return Streams(
            ReplicationLeader(
                self._reign.rule,
                self._state.engine,
                self._cluster.gate,
                around,
                info=self._log.info,
                deposed=self._depose,
            )
        )

    def _depose(self) -> None:
        self.is_deposed = True
        self.stop()

    @property
    def message_end(self) -> int:
        """How far its message log is written."""
        return self._state.engine.segments[-1].end

    @property
    def synced(self) -> int:
        """How far its logs are on disk, messages and facts together."""
        return self._state.engine.synced + self._state.engine.actions.synced

    def describe(self, state: ServerState) -> Register:
        """Return what it says to a meta server about itself."""
        cluster, now_ms = self._cluster.gate.standing.cluster, self._clock.now_ms()
        engine = self._state.engine
        return register_of(self._settings, engine, self._address, cluster, state, now_ms)

    def _report(self) -> Steps[bytes]:
        connections = len(self._server.connections)
        found = yield from status_report(self._state, self._parts, self._committer, connections)
        named = {"broker": self._settings.name, "cluster": cluster_report(self._cluster)}
        if self._streams is not None:
            named["replication"] = self._streams.report()
        return json.dumps({**named, **found}).encode()

    async def close(self) -> None:
        """Stop serving, sync, write a checkpoint, and give the directory back."""
        if self._reign is None:
            await self._cluster.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._server.stop_listening()
        await self._parts.office.close()
        await self._parts.adopter.close()
        await self._finder.close()
        if self._streams is not None:
            await self._streams.close()
        await self._committer.close()
        await self._server.close()
        if self._failure is None and not self.is_deposed:
            try:
                await self._housekeeper.checkpoint()
            except StorageError as error:
                self._log.warning("last_checkpoint_failed", reason=str(error))
        self._executor.shutdown()
        self._state.engine.close()
        if self._files is not None and self._reign is None:
            self._files.unlock()
        self._log.info("broker_stopped")

    def _forsake(self, error: PulqueError) -> None:
        """Confirm no message that was taken in while enough were in sync, and is not confirmed.

        Facts that say how far consumers are go on: while too few are in sync, pulls do.
        """
        self._parts.receiver.forsake(error)
        self._parts.adopter.forsake(error)

    def _wake(self, partitions: list[Partition]) -> None:
        self._parts.puller.wake(partitions)
        self._parts.browser.wake(partitions)

    def _partition_added(self, partition: Partition) -> None:
        places = self._state.places.add(partition)
        self._parts.puller.partition_added(partition, places)
        self._handler.partition_added(places)

    def _write_out(self) -> None:
        self._server.write_out()
