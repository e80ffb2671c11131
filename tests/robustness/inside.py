"""The data path of a broker without its network, on a file system in memory.

For holes between two turns of the event loop, which a client cannot hit on purpose.
"""

import asyncio
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import dataclass

from pulque.broker.clients import ClientTable
from pulque.broker.components import BrokerParts
from pulque.broker.groups.group_reset import Resetter
from pulque.broker.groups.ordered_groups import Steward
from pulque.broker.groups.partition_allotment import LoneAttendance
from pulque.broker.groups.pull_locks import Locker
from pulque.broker.groups.subscriptions import GroupRegistrar
from pulque.broker.housekeeping import Housekeeper, Rhythm
from pulque.broker.pulling.partition_reads import Browser
from pulque.broker.pulling.puller import Puller
from pulque.broker.receiving.admission import Gate
from pulque.broker.receiving.internal_appends import Appender
from pulque.broker.receiving.new_subjects import Newcomers
from pulque.broker.receiving.receiver import BrokerReceiver
from pulque.broker.recovery import recover
from pulque.broker.settling.adopted_nacks import Adopter, AdoptionRules
from pulque.broker.settling.dead_letters import DeadLetterOffice
from pulque.broker.settling.due_retries import Releaser
from pulque.broker.settling.retry import Redeliverer
from pulque.broker.settling.settler import Settler
from pulque.broker.state import BrokerState, PullLimits, SendLimits, Surroundings
from pulque.clock import SystemClock
from pulque.errors import PulqueError
from pulque.model.positions import Epoch, Tenure
from pulque.rules.lease import Leases
from pulque.rules.retry import RetryRules
from pulque.serving.attended import Authorisation
from pulque.serving.commit import Committer
from pulque.storage.events import SilentListener
from pulque.storage.logs.partitions import Partition
from pulque.storage.options import StorageOptions
from pulque.testing.files import MemoryFileSystem
from pulque.wire.requests import EARLIEST, FROM_SETTLED, Acks, Pull, Send, Wanted
from pulque.wire.responses import Outcome, Pulled
from tests.robustness.raw import make_batch

__all__ = ["Inside", "open_inside"]

_MIB = 1024 * 1024


@dataclass(slots=True)
class Inside:
    """The parts, and what went wrong."""

    state: BrokerState
    parts: BrokerParts
    committer: Committer
    housekeeper: Housekeeper
    failures: list[PulqueError]

    def send(
        self, partition: str, body: bytes, *, producer: int = 0, sequence: int = 0
    ) -> list[Outcome]:
        """Send one message; its outcome is put into the list that is returned."""
        batch = make_batch(partition, [body], producer=producer, sequence=sequence)
        outcomes: list[Outcome] = []
        self.parts.receiver.send(
            Send(Acks.MEMORY, 1000, ((partition, batch),)),
            lambda sent: outcomes.extend(sent.outcomes),
        )
        return outcomes

    def pull(self, *partitions: str, consumer: str = "c", max_messages: int = 100) -> Pulled:
        """Pull what is there."""
        answers: list[Pulled] = []
        errors: list[PulqueError] = []
        wanted = tuple(Wanted(name, FROM_SETTLED) for name in partitions)
        request = Pull("g", consumer, 1, max_messages, _MIB, 0, EARLIEST, wanted)
        self.parts.puller.pull(request, object(), answers.append, errors.append, lambda _: None)
        assert not errors, errors
        return answers[0]


@asynccontextmanager
async def open_inside(files: MemoryFileSystem) -> AsyncIterator[Inside]:  # noqa: PLR0915  # one of each
    """Recover from ``files`` and run without a network; nothing is written at the end."""
    clock = SystemClock()
    engine, recovered = recover(files, StorageOptions(), SilentListener(), clock.now_ms())
    tenure = Tenure(Epoch(0), engine.start_count)
    state = BrokerState(
        engine,
        recovered.consumption,
        recovered.dedup,
        Leases(30_000),
        tenure,
        schedule=recovered.schedule,
        dead=recovered.dead,
        adoptions=recovered.adoptions,
    )
    failures: list[PulqueError] = []
    executor = ThreadPoolExecutor(1)
    around = Surroundings(clock, executor, lambda *_, **__: None, failures.append)
    limits = PullLimits(1000, _MIB, 1000)
    puller = Puller(state, around, limits, lambda done: committer.sync_facts(done))  # noqa: PLW0108  # made below

    def wake(partitions: list[Partition]) -> None:
        puller.wake(partitions)

    committer = Committer(
        engine, sync_interval_s=60, wake=wake, fail=failures.append, answered=lambda: None
    )
    appender = Appender(state, around, committer)
    releaser = Releaser(state, around, appender)
    at_once = RetryRules(delays_ms=())
    redeliverer = Redeliverer(
        state,
        around,
        appender,
        lambda _group, _subject: at_once,
        waits=releaser.wake,
        max_message=1000,
    )
    settler = Settler(state, clock, perform=redeliverer.perform, longest_delay_ms=1000)
    locker = Locker(state, clock, committer.sync_facts, puller.look_again)
    parts = BrokerParts(
        BrokerReceiver(
            state,
            around,
            committer,
            SendLimits(_MIB, _MIB, _MIB),
            Newcomers(Gate("broker"), "broker", None, around.clock),
        ),
        puller,
        settler,
        Browser(engine, executor, PullLimits(1000, _MIB, 1000)),
        redeliverer,
        GroupRegistrar(state, around, committer, puller.dismiss, locker),
        releaser,
        Resetter(state, around, committer, wake=wake),
        DeadLetterOffice(state, around, committer, appender, 1000),
        Adopter(
            state,
            around,
            committer,
            appender,
            AdoptionRules(
                Gate("broker"),
                lambda _group, _subject: at_once,
                SendLimits(_MIB, _MIB, _MIB),
                1000,
            ),
            waits=releaser.wake,
        ),
        ClientTable(state.consumption, state.engine.partitions, clock),
        locker,
        Steward(
            state,
            clock,
            locker,
            perform=redeliverer.perform,
            sync_facts=committer.sync_facts,
        ),
        LoneAttendance(state.places, "broker", clock, Authorisation(10_000), ()),
    )
    rhythm = Rhythm(10_000, 60_000, 60_000, 2**40, None)
    inside = Inside(
        state, parts, committer, Housekeeper(state, around, parts, committer, rhythm), failures
    )
    for effect in state.consumption.pending():
        redeliverer.perform(effect)
    running = asyncio.create_task(redeliverer.run())
    try:
        yield inside
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        executor.shutdown()
