"""Ordered groups: a partition is one consumer's at a time, and only the newest token counts."""

import asyncio

import pytest

from pulque.errors import (
    ErrorCode,
    FencedError,
    InvalidRequestError,
    LockLostError,
    NotAllowedError,
    StaleSettleError,
    UnknownGroupError,
)
from pulque.model.actions import LockGranted, LockReleased, Pulled
from pulque.model.groups import Mode
from pulque.model.ordered import OrderStrategy
from pulque.testing.clock import ManualClock
from pulque.testing.raw import RawConnection, expect
from pulque.wire.groups import ChangeGroup, GroupChanged, Subscribe, Subscribed
from pulque.wire.ordered import (
    Close,
    Closed,
    Lock,
    Locked,
    Ordered,
    OrderedReport,
    OrderedRow,
    Skip,
    Skipped,
    Unlock,
    Unlocked,
)
from pulque.wire.requests import EARLIEST, FROM_SETTLED, Dead, Heartbeat, Pull, Wanted
from pulque.wire.responses import Beaten, DeadListed
from pulque.wire.responses import Pulled as PullAnswer
from tests.unit.broker.running import Running, Start, eventually, numbered
from tests.unit.broker.test_settle import facts_of

STRICT, BEST_EFFORT = OrderStrategy.STRICT, OrderStrategy.BEST_EFFORT


async def subscribe(
    raw: RawConnection,
    subject: str = "orders",
    mode: Mode = Mode.ORDERED,
    *,
    consumer: str = "c",
    group: str = "g",
) -> Subscribed:
    return await raw.ask(Subscribe(group, consumer, 1, subject, mode), Subscribed)


async def lock(
    raw: RawConnection,
    consumer: str = "c",
    *,
    partition: str = "orders",
    incarnation: int = 1,
    order: OrderStrategy = STRICT,
    token: int = 0,
    wait_ms: int = 0,
) -> Locked:
    request = Lock(partition, "g", consumer, incarnation, order, token, wait_ms)
    return await raw.ask(request, Locked)


async def unlock(raw: RawConnection, token: int, consumer: str = "c") -> bool:
    request = Unlock("orders", "g", consumer, 1, token)
    return (await raw.ask(request, Unlocked)).was_held


async def row_of(raw: RawConnection, partition: str = "orders") -> OrderedRow:
    report = await raw.ask(Ordered("orders", "g"), OrderedReport)
    return next(row for row in report.rows if row.partition == partition)


async def row_of_dead(raw: RawConnection) -> DeadListed:
    return await raw.ask(Dead("orders", "g", 0, 2**64 - 1, 10), DeadListed)


async def code_of(raw: RawConnection, token: int, consumer: str = "c") -> ErrorCode:
    handed = await raw.pull("orders", consumer=consumer, token=token)
    return handed.states[0].code


@pytest.mark.accepts("002-52", "002-53", "004-77")
async def test_a_partition_belongs_to_one_consumer_of_a_group_until_it_gives_it_up(
    raw: RawConnection,
) -> None:
    await subscribe(raw)
    mine = await lock(raw, "c1")

    other = await lock(raw, "c2")
    assert (mine.token, other.token, other.holder) == (1, 0, "c1")
    assert 0 < other.lock_ms <= mine.lock_ms

    assert await unlock(raw, mine.token, "c1")
    assert (await lock(raw, "c2")).token == 2


@pytest.mark.accepts("002-52")
async def test_locks_of_groups_and_partitions_do_not_hinder_each_other(
    raw: RawConnection,
) -> None:
    await subscribe(raw)
    await subscribe(raw, group="other", consumer="c2")

    assert (await lock(raw, "c1")).token == 1
    assert (await lock(raw, "c2", partition="orders#1")).token == 1
    other = Lock("orders", "other", "c2", 1, STRICT)
    assert (await raw.ask(other, Locked)).token == 1


@pytest.mark.accepts("002-43")
async def test_progress_is_on_consume_sequences_and_goes_on_with_the_next_consumer(
    raw: RawConnection,
) -> None:
    await raw.send("orders", numbered(10))
    await subscribe(raw)
    first = await lock(raw, "c1")
    got = await raw.pull("orders", consumer="c1", token=first.token, max_messages=6)
    await raw.settle(got.runs[0], consumer="c1", last=3, token=first.token)

    await unlock(raw, first.token, "c1")
    second = await lock(raw, "c2")
    rest = await raw.pull("orders", consumer="c2", token=second.token)

    assert got.bodies == numbered(6)
    assert rest.bodies == numbered(6, 4)
    assert rest.runs[0].first_pull == rest.runs[0].first_sequence == 4
    await raw.settle(rest.runs[0], consumer="c2", token=second.token)
    assert (await row_of(raw)).settled == 10


async def test_a_consumer_that_gets_its_partition_back_goes_on_where_the_group_is(
    raw: RawConnection,
) -> None:
    await raw.send("orders", numbered(10))
    await subscribe(raw)
    for consumer, last in (("c1", 1), ("c2", 4), ("c1", 7), ("c2", 9)):
        token = (await lock(raw, consumer)).token
        got = await raw.pull("orders", consumer=consumer, token=token)
        assert got.bodies == numbered(10)[got.runs[0].first_sequence :]
        await raw.settle(got.runs[0], consumer=consumer, last=last, token=token)
        await unlock(raw, token, consumer)

    assert (await row_of(raw)).settled == 10


@pytest.mark.accepts("002-51")
async def test_who_lost_its_lock_can_neither_pull_nor_settle(start: Start) -> None:
    clock = ManualClock()
    raw = await (await start(clock=clock, consumption={"lock": "5s"})).connect()
    await raw.send("orders", numbered(4))
    await subscribe(raw)
    late = await lock(raw, "late")
    got = await raw.pull("orders", consumer="late", token=late.token, max_messages=2)

    clock.advance(5_000)
    quick = await lock(raw, "quick")

    assert quick.token > late.token
    with pytest.raises(LockLostError, match=r"token 1 .* the newest is 2"):
        await raw.settle(got.runs[0], consumer="late", token=late.token)
    assert await code_of(raw, late.token, "late") is ErrorCode.LOCK_LOST
    again = await raw.pull("orders", consumer="quick", token=quick.token)
    assert again.bodies == numbered(4)


@pytest.mark.parametrize("token", [0, 2, 2**64 - 1])
async def test_a_token_that_was_never_granted_counts_nothing(
    raw: RawConnection, token: int
) -> None:
    await raw.send("orders", numbered(2))
    await subscribe(raw)
    mine = await lock(raw)
    got = await raw.pull("orders", token=mine.token)

    assert await code_of(raw, token) is ErrorCode.LOCK_LOST
    with pytest.raises(LockLostError):
        await raw.settle(got.runs[0], token=token)
    assert not await unlock(raw, token)
    assert (await row_of(raw)).settled == 0


@pytest.mark.accepts("002-52")
async def test_a_token_counts_for_its_own_consumer_only(raw: RawConnection) -> None:
    await raw.send("orders", numbered(2))
    await subscribe(raw)
    mine = await lock(raw, "c1")

    assert await code_of(raw, mine.token, "c2") is ErrorCode.LOCK_LOST
    assert not await unlock(raw, mine.token, "c2")
    assert (await raw.pull("orders", consumer="c1", token=mine.token)).length == 2


async def test_a_shared_group_has_no_tokens(raw: RawConnection) -> None:
    await raw.send("orders", numbered(2))
    await subscribe(raw, mode=Mode.SHARED)
    got = await raw.pull("orders")

    assert await code_of(raw, 1) is ErrorCode.LOCK_LOST
    with pytest.raises(LockLostError):
        await raw.settle(got.runs[0], token=1)
    await raw.settle(got.runs[0])


@pytest.mark.accepts("002-56")
async def test_the_next_consumer_waits_for_the_lock_and_gets_it_when_it_is_given_up(
    running: Running, raw: RawConnection
) -> None:
    await subscribe(raw)
    mine = await lock(raw, "c1")
    other = await running.connect()
    waits = await other.put(Lock("orders", "g", "c2", 1, STRICT, 0, 30_000))
    # A grant is answered when it is on disk, and recorded before that.
    row = await row_of(other)
    assert (row.holder, row.token) == ("c1", mine.token)
    assert not await other.is_answered(waits)

    await unlock(raw, mine.token, "c1")

    assert expect(await other.answer_to(waits), Locked).token == 2


@pytest.mark.accepts("002-54")
async def test_a_lock_that_nobody_uses_goes_to_the_next_in_line(start: Start) -> None:
    running = await start(consumption={"lock": "300ms"})
    raw = await running.connect()
    await subscribe(raw)
    await lock(raw, "dead")

    others = [await running.connect(patience_s=30) for _ in range(2)]
    got = await asyncio.gather(
        *(lock(other, f"c{i}", wait_ms=20_000) for i, other in enumerate(others))
    )

    assert sorted(each.token for each in got) == [2, 3]


@pytest.mark.accepts("002-54")
async def test_pulls_and_settles_refresh_a_lock_without_a_fact(start: Start) -> None:
    clock = ManualClock()
    running = await start(clock=clock, consumption={"lock": "5s"})
    raw = await running.connect()
    await raw.send("orders", numbered(2))
    await subscribe(raw)
    token = (await lock(raw, "c1")).token
    clock.advance(4_000)
    got = await raw.pull("orders", consumer="c1", token=token)
    clock.advance(4_000)
    assert (await lock(raw, "c2")).holder == "c1", "the pull refreshed it"
    await raw.settle(got.runs[0], consumer="c1", token=token)
    clock.advance(4_000)
    assert (await lock(raw, "c2")).holder == "c1", "the settle refreshed it"
    assert (await lock(raw, "c1", token=token)).token == token
    clock.advance(4_000)

    assert (await lock(raw, "c2")).holder == "c1"
    facts = facts_of(running)
    assert sum(isinstance(each, LockGranted) for each in facts) == 1
    assert sum(isinstance(each, Pulled) for each in facts) == 1


async def test_a_pull_with_a_token_waits_no_longer_than_a_part_of_the_lock(start: Start) -> None:
    running = await start(consumption={"lock": "600ms"})
    raw = await running.connect(patience_s=20)
    await subscribe(raw)
    token = (await lock(raw)).token

    handed = await raw.pull("orders", token=token, timeout_ms=60_000)

    assert handed.length == 0
    assert (await row_of(raw)).holder == "c"


async def test_a_waiting_pull_is_told_at_once_that_its_lock_is_gone(
    running: Running, raw: RawConnection
) -> None:
    await subscribe(raw)
    token = (await lock(raw, "c1")).token
    other = await running.connect()
    wanted = (Wanted("orders", FROM_SETTLED, token),)
    waits = await other.put(Pull("g", "c1", 1, 10, 1000, 3_000, EARLIEST, wanted))
    later = await other.put(Ordered("orders", "g"))
    assert (await other.get())[0] == later

    await unlock(raw, token, "c1")

    assert expect(await other.answer_to(waits), PullAnswer).states[0].code is ErrorCode.LOCK_LOST


async def test_a_lock_survives_a_restart_and_so_do_acks_under_it(start: Start) -> None:
    running = await start()
    raw = await running.connect()
    await raw.send("orders", numbered(6))
    await subscribe(raw)
    token = (await lock(raw, "c1")).token
    got = await raw.pull("orders", consumer="c1", token=token)
    await raw.settle(got.runs[0], consumer="c1", last=1, token=token)

    again = await running.restarted()
    raw = await again.connect()

    other = await lock(raw, "c2")
    assert (other.token, other.holder) == (0, "c1")
    await raw.settle(got.runs[0], consumer="c1", first=2, last=3, token=token)
    rest = await raw.pull("orders", consumer="c1", token=token)
    assert rest.bodies == numbered(2, 4)
    await again.close()


async def test_after_a_kill_the_replay_gives_what_was_there_live(
    start: Start, running: Running, raw: RawConnection
) -> None:
    await raw.send("orders", numbered(8))
    await subscribe(raw)
    for consumer, last in (("c1", 2), ("c2", 4)):
        token = (await lock(raw, consumer, order=BEST_EFFORT)).token
        got = await raw.pull("orders", consumer=consumer, token=token, max_messages=6)
        await raw.settle(got.runs[0], consumer=consumer, last=last, token=token)
        if consumer == "c1":
            await unlock(raw, token, consumer)
    live = (await row_of(raw))._replace(left_ms=0)

    copy = running.as_if_killed("copy")
    other = await (await start(copy)).connect()

    assert (await row_of(other))._replace(left_ms=0) == live
    assert live[1:6] == ("g", False, 5, 0, 8)
    token = (await lock(other, "c2")).token
    assert token == 3
    assert (await other.pull("orders", consumer="c2", token=token)).bodies == numbered(3, 5)


async def test_a_restarted_consumer_has_its_partition_at_once_and_fences_its_twin(
    raw: RawConnection,
) -> None:
    await raw.send("orders", numbered(3))
    await subscribe(raw)
    old = await lock(raw, incarnation=1)
    got = await raw.pull("orders", token=old.token)

    new = await lock(raw, incarnation=2)

    assert new.token == old.token + 1
    with pytest.raises(FencedError):
        await lock(raw, incarnation=1)
    with pytest.raises(LockLostError):
        await raw.settle(got.runs[0], token=old.token)
    again = await raw.pull("orders", incarnation=2, token=new.token)
    assert again.bodies == numbered(3)
    with pytest.raises(FencedError):
        await raw.settle(got.runs[0], token=new.token)


async def test_a_silent_consumer_keeps_order_nothing_of_its_is_retried(start: Start) -> None:
    clock = ManualClock()
    running = await start(
        clock=clock, consumption={"lock": "5s", "lease": "1s", "lease_check": "10ms"}
    )
    raw = await running.connect()
    await raw.send("orders", numbered(3))
    await subscribe(raw)
    token = (await lock(raw, "dead")).token
    await raw.pull("orders", consumer="dead", token=token)

    clock.advance(60_000)
    await running.house_kept()

    new = await lock(raw, "c2")
    assert (await raw.pull("orders", consumer="c2", token=new.token)).bodies == numbered(3)
    status = await raw.status()
    assert [each["partition"] for each in status["groups"]] == ["orders"]


async def test_who_leaves_gives_its_locks_up(raw: RawConnection) -> None:
    await subscribe(raw)
    await lock(raw, "c1")

    await raw.ask(Heartbeat("g", "c1", 1, is_leaving=True), Beaten)

    assert (await lock(raw, "c2")).token == 2


# -- modes ---------------------------------------------------------------------------------------


async def test_a_group_is_either_ordered_or_shared_and_is_told_the_way_out(
    raw: RawConnection,
) -> None:
    await subscribe(raw)
    await subscribe(raw, "refunds", Mode.SHARED)

    with pytest.raises(NotAllowedError, match=r"pulque group change .* --mode shared"):
        await subscribe(raw, mode=Mode.SHARED)
    with pytest.raises(NotAllowedError, match=r"pulque group change .* --mode ordered"):
        await subscribe(raw, "refunds")
    with pytest.raises(NotAllowedError, match="--mode ordered"):
        await lock(raw, partition="refunds")
    with pytest.raises(NotAllowedError, match="use another group"):
        await subscribe(raw, "*", Mode.SHARED)
    with pytest.raises(InvalidRequestError, match="one subject at a time"):
        await subscribe(raw, "order.*")


async def test_a_group_without_a_word_has_no_locks(raw: RawConnection) -> None:
    with pytest.raises(NotAllowedError, match="mode shared"):
        await lock(raw)


@pytest.mark.parametrize("partition", ["%retry%orders%g", "orders#p7"])
async def test_retries_and_priorities_are_shared(raw: RawConnection, partition: str) -> None:
    await subscribe(raw)

    with pytest.raises(InvalidRequestError, match="cannot be locked"):
        await lock(raw, partition=partition)


async def test_a_group_can_be_switched_to_and_fro_while_nobody_has_its_partitions(
    raw: RawConnection,
) -> None:
    await raw.send("orders", numbered(6))
    await subscribe(raw, mode=Mode.SHARED)
    got = await raw.pull("orders", max_messages=2)
    await raw.settle(got.runs[0])
    await raw.ask(ChangeGroup("g", "orders", True, Mode.ORDERED), GroupChanged)
    await subscribe(raw)
    token = (await lock(raw)).token
    got = await raw.pull("orders", token=token, max_messages=2)
    assert (got.bodies, got.runs[0].first_pull) == (numbered(2, 2), 2)
    await raw.settle(got.runs[0], token=token)

    with pytest.raises(NotAllowedError, match="has the lock"):
        await raw.ask(ChangeGroup("g", "orders", True, Mode.SHARED), GroupChanged)
    await unlock(raw, token)
    await raw.ask(ChangeGroup("g", "orders", True, Mode.SHARED), GroupChanged)
    await subscribe(raw, mode=Mode.SHARED)
    one = await raw.pull("orders", max_messages=1)
    two = await raw.pull("orders", consumer="c2")
    assert (one.bodies, two.bodies) == (numbered(1, 4), numbered(1, 5))
    await raw.settle(one.runs[0])
    await raw.settle(two.runs[0], consumer="c2")

    await raw.ask(ChangeGroup("g", "orders", True, Mode.ORDERED), GroupChanged)
    assert (await lock(raw)).token > token


# -- failures ------------------------------------------------------------------------------------


@pytest.mark.accepts("002-38")
async def test_under_strict_order_nothing_is_retried_later(raw: RawConnection) -> None:
    await raw.send("orders", numbered(3))
    await subscribe(raw)
    token = (await lock(raw, order=STRICT)).token
    got = await raw.pull("orders", token=token)

    with pytest.raises(NotAllowedError, match="strict order"):
        await raw.settle(got.runs[0], nacked={1: "no"}, token=token)

    assert (await row_of(raw)).settled == 0
    assert (await raw.pull("orders", token=token)).bodies == numbered(3)


@pytest.mark.accepts("002-40")
async def test_under_best_effort_what_failed_comes_again_from_the_retry_partition(
    raw: RawConnection,
) -> None:
    await raw.send("orders", numbered(3))
    await subscribe(raw)
    token = (await lock(raw, order=BEST_EFFORT)).token
    got = await raw.pull("orders", token=token)

    await raw.settle(got.runs[0], nacked={1: "no"}, token=token)

    again = await raw.pull("%retry%orders%g", timeout_ms=10_000)
    assert again.bodies == [b"1"]
    await raw.settle(again.runs[0])


async def test_the_message_that_a_group_waits_for_is_seen_and_can_be_skipped(
    start: Start,
) -> None:
    clock = ManualClock()
    running = await start(clock=clock)
    raw = await running.connect()
    await raw.send("orders", numbered(4))
    await subscribe(raw)
    token = (await lock(raw, "c1")).token
    got = await raw.pull("orders", consumer="c1", token=token)
    await raw.settle(got.runs[0], consumer="c1", last=0, token=token)
    since_ms = clock.now_ms()
    clock.advance(7_000)

    row = await row_of(raw)
    assert (row.settled, row.held, row.stuck_since_ms) == (1, 3, since_ms)
    for wrong in (0, 2, 2**64 - 1):
        with pytest.raises(NotAllowedError, match="waits for 1"):
            await raw.ask(Skip("orders", "g", wrong), Skipped)
    done = await raw.ask(Skip("orders", "g", 1, "no such customer"), Skipped)

    assert done.next_sequence == 2
    with pytest.raises(LockLostError):
        await raw.settle(got.runs[0], consumer="c1", first=1, token=token)
    again = await running.restarted()
    raw = await again.connect()
    new = await lock(raw, "c1")
    assert (await raw.pull("orders", consumer="c1", token=new.token)).bodies == numbered(2, 2)

    async def is_dead() -> bool:
        return bool((await row_of_dead(raw)).count)

    await eventually(is_dead)
    with pytest.raises(UnknownGroupError):
        await raw.ask(Skip("orders", "nobody", 2), Skipped)
    await again.close()


async def test_what_nobody_was_handed_is_not_stuck(raw: RawConnection) -> None:
    await raw.send("orders", numbered(2))
    await subscribe(raw)
    await lock(raw)

    assert (await row_of(raw)).stuck_since_ms == 0


# -- closing -------------------------------------------------------------------------------------


async def test_a_closed_partition_takes_no_messages_and_can_be_drained(start: Start) -> None:
    running = await start()
    raw = await running.connect()
    await raw.send("orders", numbered(2))

    assert (await raw.ask(Close("orders"), Closed)).end == 2
    running = await running.restarted()
    raw = await running.connect()

    outcome = await raw.send("orders", numbered(1))
    assert (outcome.code, outcome.text[:16]) == (ErrorCode.STALE_ROUTE, "partition orders")
    assert (await raw.ask(Close("orders"), Closed)).end == 2
    await subscribe(raw)
    assert not (await row_of(raw)).is_drained
    token = (await lock(raw)).token
    got = await raw.pull("orders", token=token)
    assert not (await row_of(raw)).is_drained
    await raw.settle(got.runs[0], token=token)
    assert (await row_of(raw)).is_drained
    await running.close()


@pytest.mark.parametrize("partition", ["%dead%orders%g", "orders#p3"])
async def test_only_partitions_with_order_keys_are_closed(
    raw: RawConnection, partition: str
) -> None:
    with pytest.raises(InvalidRequestError, match="split or merged"):
        await raw.ask(Close(partition), Closed)


async def test_an_unlock_is_a_fact(running: Running, raw: RawConnection) -> None:
    await subscribe(raw)
    token = (await lock(raw)).token
    await unlock(raw, token)

    (fact,) = (each for each in facts_of(running) if isinstance(each, LockReleased))
    assert (fact.group, fact.token, fact.is_end) == ("g", token, False)


async def test_deliveries_of_another_consumer_cannot_be_settled_with_a_good_token(
    raw: RawConnection,
) -> None:
    await raw.send("orders", numbered(3))
    await subscribe(raw)
    first = await lock(raw, "c1")
    got = await raw.pull("orders", consumer="c1", token=first.token)
    await unlock(raw, first.token, "c1")
    second = await lock(raw, "c2")

    with pytest.raises(StaleSettleError):
        await raw.settle(got.runs[0], consumer="c2", token=second.token)
