"""What a group says once: it is kept over restarts, and nobody can say otherwise by mistake."""

from dataclasses import replace
from random import Random

import pytest

from pulque.errors import (
    FencedError,
    InvalidNameError,
    InvalidRequestError,
    PulqueError,
)
from pulque.model.groups import (
    Filter,
    GroupSettings,
    Mode,
    RetrySettings,
    Start,
    StartKind,
)
from pulque.model.names import PartitionName
from pulque.testing.clock import ManualClock
from pulque.testing.files import Cut
from pulque.testing.raw import Handed, RawConnection, expect, pack_batch
from pulque.wire.groups import ChangeGroup, Subscription
from pulque.wire.requests import (
    EARLIEST,
    FROM_SETTLED,
    Acks,
    Pull,
    Request,
    Send,
    Subscribe,
    Subscriptions,
    Wanted,
)
from pulque.wire.responses import Pulled, Subscribed, SubscriptionsListed
from tests.unit.broker.disks import GatedDisk
from tests.unit.broker.running import Running, eventually, numbered
from tests.unit.broker.running import Start as StartBroker

ORDERS = Subscribe("g", "c", 1, "orders")
RETRY = RetrySettings((1000, 5000), 10, 7)


async def subscribe(raw: RawConnection, request: Request) -> Subscribed:
    return await raw.ask(request, Subscribed)


async def test_a_group_is_told_what_is_in_force(raw: RawConnection) -> None:
    answer = await subscribe(raw, replace(ORDERS, retry=RETRY))

    assert answer == Subscribed("g", Mode.SHARED, Filter(), RETRY)


async def test_settings_outlive_the_broker(running: Running, start: StartBroker) -> None:
    raw = await running.connect()
    await subscribe(raw, replace(ORDERS, retry=RETRY))
    killed = await start(running.as_if_killed("killed"))
    by_facts = await subscribe(await killed.connect(), ORDERS)

    again = await running.restarted()
    by_checkpoint = await subscribe(await again.connect(), ORDERS)
    await again.close()

    assert by_facts.retry == by_checkpoint.retry == RETRY


async def test_the_last_word_about_retries_counts(raw: RawConnection) -> None:
    await subscribe(raw, replace(ORDERS, retry=RETRY))

    answer = await subscribe(raw, replace(ORDERS, retry=RetrySettings(max_attempts=3)))

    assert answer.retry == RetrySettings((1000, 5000), 10, 3)


async def test_an_old_incarnation_is_fenced(raw: RawConnection) -> None:
    await raw.send("orders", numbered(1))
    await raw.pull("orders", incarnation=5)

    with pytest.raises(FencedError):
        await subscribe(raw, replace(ORDERS, incarnation=4))


async def test_what_groups_said_is_told_page_by_page(raw: RawConnection) -> None:
    said = [(group, subject) for group in ("g", "h") for subject in ("a", "a.*", "b")]
    for group, subject in reversed(said):
        await subscribe(raw, replace(ORDERS, group=group, subject=subject, retry=RETRY))

    async def listed(request: Subscriptions) -> tuple[Subscription, ...]:
        return (await raw.ask(request, SubscriptionsListed)).subscriptions

    whole = await listed(Subscriptions())
    assert [each[:2] for each in whole] == said  # though nothing was ever sent
    assert {each.settings for each in whole} == {GroupSettings(Mode.SHARED, Filter(), RETRY)}
    assert await listed(Subscriptions("h")) == whole[3:]
    assert await listed(Subscriptions("", "g", "a.*", most=2)) == whole[2:4]
    assert await listed(Subscriptions("g", "g", "b")) == ()
    assert await listed(Subscriptions(most=0)) == ()
    with pytest.raises(InvalidNameError):
        await listed(Subscriptions("a%b"))


@pytest.mark.parametrize(
    ("changes", "error"),
    [
        ({"group": ""}, InvalidRequestError),
        ({"group": "a%b"}, InvalidNameError),
        ({"group": "#c"}, InvalidNameError),
        ({"consumer": ""}, InvalidNameError),
        ({"subject": ""}, InvalidNameError),
        ({"subject": "%retry%a%b"}, InvalidNameError),
        ({"consumer": "c" * 255, "mode": Mode.BROADCAST}, InvalidNameError),
        ({"retry": RetrySettings((), 101)}, InvalidRequestError),
        ({"retry": RetrySettings((1,) * 256)}, InvalidRequestError),
    ],
)
@pytest.mark.accepts("003-58")
async def test_what_cannot_be_is_refused(
    raw: RawConnection, changes: dict[str, object], error: type[Exception]
) -> None:
    with pytest.raises(error):
        await subscribe(raw, replace(ORDERS, **changes))  # type: ignore[arg-type]

    assert await subscribe(raw, ORDERS)


@pytest.mark.parametrize(
    ("begin", "expected"),
    [
        (Start(), 0),
        (Start(StartKind.LATEST), 20),
        (Start(StartKind.SEQUENCE, 7), 7),
        (Start(StartKind.SEQUENCE, 99), 20),
        (Start(StartKind.TIME, 1_700_000_000_000), 0),
        (Start(StartKind.TIME, 1_700_000_000_001), 10),
        (Start(StartKind.TIME, 1_700_000_001_000), 10),
        (Start(StartKind.TIME, 1_700_000_001_001), 20),
        (Start(StartKind.TIME, 0), 0),
    ],
)
async def test_a_new_group_starts_where_it_wants_to(
    start: StartBroker, begin: Start, expected: int
) -> None:
    clock = ManualClock()
    running = await start(clock=clock)
    raw = await running.connect()
    await raw.send("orders", numbered(10))
    clock.advance(1000)
    await raw.send("orders", numbered(10, 10))

    await subscribe(raw, replace(ORDERS, start=begin))
    clock.advance(1000)
    await raw.send("orders", numbered(5, 20))
    got = await raw.pull("orders")

    assert got.bodies == numbered(25 - expected, expected)


async def test_only_a_new_group_chooses_its_start(raw: RawConnection) -> None:
    await raw.send("orders", numbered(5))
    await subscribe(raw, ORDERS)

    await subscribe(raw, replace(ORDERS, consumer="d", start=Start(StartKind.LATEST)))
    got = await raw.pull("orders", consumer="d")

    assert got.bodies == numbered(5)


async def test_a_subject_that_comes_later_is_read_from_its_start(raw: RawConnection) -> None:
    await subscribe(raw, replace(ORDERS, start=Start(StartKind.LATEST)))
    await raw.send("orders", numbered(5))
    await raw.send("orders", numbered(5, 5))

    assert (await raw.pull("orders")).bodies == numbered(10)


async def test_a_start_is_on_disk_before_the_answer(running: Running, start: StartBroker) -> None:
    raw = await running.connect()
    await raw.send("orders", numbered(5))
    await subscribe(raw, replace(ORDERS, start=Start(StartKind.SEQUENCE, 3)))

    killed = await start(running.as_if_killed("killed"))
    got = await (await killed.connect()).pull("orders")

    assert got.bodies == numbered(2, 3)


async def test_what_is_to_be_delivered_once_is_answered_when_no_power_cut_can_repeat_it(
    start: StartBroker,
) -> None:
    disk = GatedDisk()
    running = await start(files=disk, storage={"sync_interval": "1m"})
    raw = await running.connect()
    await subscribe(raw, replace(ORDERS, mode=Mode.ONCE))
    await raw.send("orders", [b"x"], acks=Acks.DISK)
    disk.close_gate()
    wanted = (Wanted(PartitionName("orders"), FROM_SETTLED, 0),)
    request = await raw.put(Pull("g", "c", 1, 10, 1 << 20, 0, EARLIEST, wanted))

    async def is_syncing() -> bool:
        return disk.syncs_waiting > 0

    assert not await raw.is_answered(request)
    await eventually(is_syncing)
    disk.open_gate()
    answer = expect(await raw.answer_to(request), Pulled)
    left = disk.after_power_cut(disk.operations, Cut.LOST, Random(1))

    assert Handed.of(answer, ["orders"]).bodies == [b"x"]
    raw = await (await start(files=left)).connect()
    assert (await raw.pull("orders")).bodies == []


async def test_a_sync_of_messages_alone_is_not_taken_for_one_of_facts(
    start: StartBroker,
) -> None:
    disk = GatedDisk()
    running = await start(files=disk, storage={"sync_interval": "1m"})
    raw, other = await running.connect(), await running.connect()
    await subscribe(raw, replace(ORDERS, mode=Mode.ONCE))
    await raw.send("orders", [b"x"], acks=Acks.DISK)

    async def is_syncing() -> bool:
        return disk.syncs_waiting > 0

    disk.close_gate()
    send = Send(Acks.DISK, 10_000, (("others", pack_batch("others", [b"y"])),))
    sent = await other.put(send)
    await eventually(is_syncing)  # of messages: there was no fact to wait for
    wanted = (Wanted(PartitionName("orders"), FROM_SETTLED, 0),)
    pulled = await raw.put(Pull("g", "c", 1, 10, 1 << 20, 0, EARLIEST, wanted))
    assert not await raw.is_answered(pulled)
    disk.let_one_through()
    await other.answer_to(sent)
    await eventually(is_syncing)

    assert not await raw.is_answered(pulled)
    disk.open_gate()
    answer = expect(await raw.answer_to(pulled), Pulled)
    assert Handed.of(answer, ["orders"]).bodies == [b"x"]


@pytest.mark.parametrize(
    "again",
    [
        replace(ORDERS, consumer="d"),
        ChangeGroup("g", "orders", retry=RETRY),
    ],
    ids=["by another consumer", "by a command"],
)
async def test_what_a_group_says_again_is_answered_when_the_first_time_is_on_disk(
    start: StartBroker, again: Request
) -> None:
    disk = GatedDisk()
    running = await start(files=disk, storage={"sync_interval": "1m"})
    raw, other = await running.connect(), await running.connect()
    await raw.send("orders", numbered(2), acks=Acks.DISK)
    disk.close_gate()
    first = replace(ORDERS, retry=RETRY, start=Start(StartKind.LATEST))
    requests = [(raw, await raw.put(first))]

    async def is_syncing() -> bool:
        return disk.syncs_waiting > 0

    await eventually(is_syncing)
    requests.append((other, await other.put(again)))
    for connection, request in requests:
        assert not await connection.is_answered(request)
    disk.open_gate()
    for connection, request in requests:
        assert not isinstance(await connection.answer_to(request), PulqueError)
