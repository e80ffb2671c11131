"""A checkpoint and what is on its way to the log: both are in it, or neither."""

import asyncio
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import pytest

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
from pulque.errors import PulqueError, StorageFullError
from pulque.model.actions import (
    GroupOpened,
    NackedDelivery,
    Pulled,
    Settled,
    SubscriptionId,
    SubscriptionOpened,
)
from pulque.model.batch import read_header
from pulque.model.names import ConsumerId, Group, PartitionName
from pulque.model.positions import ConsumeSequence, Epoch, PullSequence, StartCount, Tenure
from pulque.rules.lease import Leases
from pulque.rules.retry import RetryRules
from pulque.serving.attended import Authorisation
from pulque.serving.commit import Committer
from pulque.storage.events import SilentListener
from pulque.storage.logs.message_log import Appended
from pulque.storage.options import StorageOptions
from pulque.testing.clock import ManualClock
from pulque.testing.files import MemoryFileSystem
from pulque.testing.raw import pack_batch

G = Group("g")
TENURE = Tenure(Epoch(0), StartCount(1))


@dataclass
class Workshop:
    """The parts of a broker without a network."""

    files: MemoryFileSystem
    state: BrokerState
    committer: Committer
    housekeeper: Housekeeper


@pytest.fixture
async def workshop() -> AsyncIterator[Workshop]:
    files, clock = MemoryFileSystem(), ManualClock()
    engine, recovered = recover(files, StorageOptions(), SilentListener(), clock.now_ms())
    state = BrokerState(engine, recovered.consumption, recovered.dedup, Leases(1000), TENURE)
    executor = ThreadPoolExecutor(2)
    around = Surroundings(clock, executor, print, print)
    committer = Committer(
        engine, sync_interval_s=60, wake=print, fail=print, answered=lambda: None
    )
    appender = Appender(state, around, committer)
    releaser = Releaser(state, around, appender)
    redeliverer = Redeliverer(
        state,
        around,
        appender,
        lambda _group, _subject: RetryRules(),
        waits=releaser.wake,
        max_message=1000,
    )
    limits = PullLimits(100, 1000, 100)
    locker = Locker(state, clock, committer.sync_facts, print)
    parts = BrokerParts(
        BrokerReceiver(
            state,
            around,
            committer,
            SendLimits(1000, 1000, 1000),
            Newcomers(Gate("broker"), "broker", None, around.clock),
        ),
        Puller(state, around, limits, committer.sync_facts),
        Settler(state, clock, perform=redeliverer.perform, longest_delay_ms=1000),
        Browser(engine, executor, limits),
        redeliverer,
        GroupRegistrar(state, around, committer, print, locker),
        releaser,
        Resetter(state, around, committer, wake=print),
        DeadLetterOffice(state, around, committer, appender, 1000),
        Adopter(
            state,
            around,
            committer,
            appender,
            AdoptionRules(
                Gate("broker"),
                lambda _group, _subject: RetryRules(),
                SendLimits(1000, 1000, 1000),
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
    rhythm = Rhythm(10, 1000, 1000, 10**9, None)
    yield Workshop(files, state, committer, Housekeeper(state, around, parts, committer, rhythm))
    await committer.close()
    executor.shutdown()


def nack_one(state: BrokerState) -> None:
    """Let a consumer nack message 0 of orders, so that its redelivery is pending."""
    orders = state.engine.create_partition(PartitionName("orders"), 0)
    batch = pack_batch("orders", [b"first"])
    state.engine.append(orders, batch, read_header(batch), now_ms=0, wants_disk=False)
    state.engine.write()
    number = SubscriptionId(1)
    for fact in (
        GroupOpened(orders.id, G, ConsumeSequence(0)),
        SubscriptionOpened(number, orders.id, G, ConsumerId("c"), 1),
        Pulled(number, TENURE, PullSequence(0), ConsumeSequence(0), 1, 0),
        Settled(
            number, PullSequence(0), PullSequence(0), (NackedDelivery(PullSequence(0), -1, ""),), 0
        ),
    ):
        state.record(fact)


def append(workshop: Workshop) -> Appended:
    """Queue a batch that is not written yet."""
    batch = pack_batch("%retry%orders%g", [b"again"])
    engine = workshop.state.engine
    partition = engine.create_partition(PartitionName("%retry%orders%g"), 0)
    return engine.append(partition, batch, read_header(batch), now_ms=0, wants_disk=False)


async def test_a_retry_on_its_way_is_in_the_checkpoint_as_performed(workshop: Workshop) -> None:
    """Otherwise it would be performed once more after a restart."""
    nack_one(workshop.state)
    consumption = workshop.state.consumption
    (pending,) = consumption.pending()

    def done(_: Appended, error: PulqueError | None) -> None:
        assert error is None
        consumption.redelivered(pending.partition, G, [ConsumeSequence(0)])

    workshop.committer.submit(append(workshop), done)
    await workshop.housekeeper.checkpoint()

    again = recover(workshop.files, StorageOptions(), SilentListener(), 0)[1]
    assert again.consumption.pending() == []


async def test_what_changed_is_in_the_next_checkpoint_though_this_one_found_no_room(
    workshop: Workshop,
) -> None:
    nack_one(workshop.state)
    workshop.files.fail_after(1, StorageFullError("no room"))
    with pytest.raises(StorageFullError):
        await workshop.housekeeper.checkpoint()

    await workshop.housekeeper.checkpoint()

    again = recover(workshop.files, StorageOptions(), SilentListener(), 0)[1]
    assert again.facts == 0
    assert len(again.consumption.pending()) == 1
    assert [s.settled for s in again.consumption.subscriptions.values()] == [1]


async def test_a_checkpoint_waits_for_the_one_before_though_its_task_was_cancelled(
    workshop: Workshop,
) -> None:
    nack_one(workshop.state)
    first = asyncio.create_task(workshop.housekeeper.checkpoint())
    await asyncio.sleep(0)
    first.cancel()
    await asyncio.gather(first, return_exceptions=True)

    await workshop.housekeeper.checkpoint()

    again = recover(workshop.files, StorageOptions(), SilentListener(), 0)[1]
    assert (again.facts, len(again.consumption.pending())) == (0, 1)
