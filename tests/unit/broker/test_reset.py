"""Groups can be set to another place: exactly, durably, and their consumers notice."""

import asyncio
from pathlib import Path
from random import Random

import pytest

from pulque.errors import (
    InvalidNameError,
    InvalidRequestError,
    StaleSettleError,
    UnknownGroupError,
    UnknownSubjectError,
)
from pulque.model.groups import FROM_EARLIEST, Start, StartKind
from pulque.testing.clock import ManualClock
from pulque.testing.files import MemoryFileSystem
from pulque.testing.power import Cut
from pulque.testing.raw import Handed, RawConnection, expect
from pulque.wire.requests import EARLIEST, Groups, Pull, Reset, Seal, Wanted
from pulque.wire.resets import GroupPosition, ResetRow
from pulque.wire.responses import GroupsReport, Pulled, ResetDone, Sealed
from tests.unit.broker.running import Running, eventually, numbered
from tests.unit.broker.running import Start as StartBroker

LATEST = Start(StartKind.LATEST)
LONG_MS = 30_000


def at(ms: int) -> Start:
    return Start(StartKind.TIME, ms)


def sequence(number: int) -> Start:
    return Start(StartKind.SEQUENCE, number)


async def reset(
    raw: RawConnection,
    target: Start,
    *,
    subject: str = "orders",
    group: str = "g",
    partition: str = "",
    is_dry_run: bool = False,
) -> list[ResetRow]:
    request = Reset(group, subject, partition, target, is_dry_run)
    return list((await raw.ask(request, ResetDone)).rows)


async def consumed(raw: RawConnection, count: int, *partitions: str, group: str = "g") -> None:
    """Send so many messages to each partition, and have the group settle them all."""
    for partition in partitions:
        await raw.send(partition, numbered(count))
    for run in (await raw.pull(*partitions, group=group)).runs:
        await raw.settle(run, group=group)


async def position(raw: RawConnection, partition: str, group: str = "g") -> GroupPosition:
    report = await raw.ask(Groups(group=group), GroupsReport)
    return next(each for each in report.positions if each.partition == partition)


# -- where to -----------------------------------------------------------------------------------


@pytest.mark.accepts("003-27")
@pytest.mark.parametrize(
    ("target", "comes"),
    [(FROM_EARLIEST, 0), (LATEST, 10), (sequence(4), 4), (sequence(99), 10)],
)
async def test_a_group_goes_on_from_where_it_is_told(
    raw: RawConnection, target: Start, comes: int
) -> None:
    await consumed(raw, 10, "orders")

    (row,) = await reset(raw, target)

    assert (row.partition, row.position, row.target, row.end) == ("orders", 10, comes, 10)
    await raw.send("orders", numbered(1, 10))
    got = await raw.pull("orders", expected=10)
    assert got.bodies == numbered(11 - comes, comes)


@pytest.mark.accepts("003-27")
async def test_a_group_can_be_sent_forward(raw: RawConnection) -> None:
    await raw.send("orders", numbered(10))
    (run,) = (await raw.pull("orders", max_messages=2)).runs
    await raw.settle(run)

    (row,) = await reset(raw, sequence(7))

    assert (row.position, row.target) == (2, 7)
    assert (await raw.pull("orders", expected=2)).bodies == numbered(3, 7)


@pytest.mark.accepts("004-11")
async def test_an_instant_is_exact_to_the_millisecond_both_ways(start: StartBroker) -> None:
    clock = ManualClock()
    running = await start(clock=clock, consumption={"lease": "1h"})
    raw = await running.connect()
    times = []
    for number in range(12):
        # Batches that share a millisecond, and neighbours that are one apart.
        await raw.send("orders", [f"{number}a".encode(), f"{number}b".encode()])
        times += [clock.now_ms()] * 2
        clock.advance(number % 3)
        if number == 5:
            await raw.ask(Seal(), Sealed)

    await raw.pull("orders", max_messages=1)

    for wanted in (*range(times[0] - 1, times[-1] + 2), times[0], times[-1], times[3]):
        (row,) = await reset(raw, at(wanted))
        first = next((i for i, time_ms in enumerate(times) if time_ms >= wanted), len(times))
        assert row.target == first, f"at {wanted - times[0]} ms"
        assert (await position(raw, "orders")).next_sequence == first


@pytest.mark.accepts("004-11")
async def test_messages_come_again_from_an_instant_on(start: StartBroker) -> None:
    clock = ManualClock()
    running = await start(clock=clock, consumption={"lease": "1h"})
    raw = await running.connect()
    for number in range(5):
        await raw.send("orders", numbered(2, 2 * number))
        clock.advance(10)
    (run,) = (await raw.pull("orders")).runs
    await raw.settle(run)

    await reset(raw, at(clock.now_ms() - 30))
    again = await raw.pull("orders", expected=10)
    assert again.bodies == numbered(6, 4)
    await reset(raw, at(clock.now_ms() - 10))
    assert (await raw.pull("orders", expected=16)).bodies == numbered(2, 8)


async def test_a_dry_run_says_it_and_changes_nothing(raw: RawConnection) -> None:
    await raw.send("orders", numbered(10))
    got = await raw.pull("orders", max_messages=6)
    await raw.settle(got.runs[0], last=3)

    (row,) = await reset(raw, sequence(2), is_dry_run=True)

    assert row == ResetRow("orders", 6, 2, 0, 10, 2)  # type: ignore[arg-type]
    await raw.settle(got.runs[0], first=4)
    assert (await raw.pull("orders", expected=6)).bodies == numbered(4, 6)


async def test_all_partitions_of_a_subject_are_set_or_one_of_them(raw: RawConnection) -> None:
    await consumed(raw, 3, "orders", "orders#p9")

    (only,) = await reset(raw, FROM_EARLIEST, partition="orders#p9")
    assert (only.partition, only.target) == ("orders#p9", 0)
    rows = await reset(raw, FROM_EARLIEST)

    assert {(row.partition, row.position) for row in rows} == {("orders", 3), ("orders#p9", 0)}
    got = await raw.pull("orders", "orders#p9", expected=3)
    assert got.length == 6


async def test_all_subjects_of_a_pattern_are_set(raw: RawConnection) -> None:
    await consumed(raw, 2, "order.a", "order.b", "other")

    rows = await reset(raw, FROM_EARLIEST, subject="order.*")

    assert [row.partition for row in rows] == ["order.a", "order.b"]
    assert (await position(raw, "other")).next_sequence == 2


async def test_other_groups_stay_where_they_are(raw: RawConnection) -> None:
    await consumed(raw, 3, "orders")
    (run,) = (await raw.pull("orders", group="h")).runs
    await raw.settle(run, group="h")

    await reset(raw, FROM_EARLIEST)

    assert (await position(raw, "orders", "h")).next_sequence == 3
    assert (await raw.pull("orders", group="h", expected=3)).runs == ()


# -- retries ------------------------------------------------------------------------------------


async def with_a_retry(raw: RawConnection) -> str:
    """Leave one message in the group's retry partition."""
    await raw.send("orders", numbered(3))
    (run,) = (await raw.pull("orders")).runs
    await raw.settle(run, nacked={1: "no"})
    retries = "%retry%orders%g"

    async def is_there() -> bool:
        names = {each["name"]: each["end"] for each in (await raw.status())["partitions"]}
        return bool(names.get(retries, 0) == 1)

    await eventually(is_there)
    return retries


@pytest.mark.parametrize("target", [FROM_EARLIEST, sequence(1)])
async def test_retries_still_come_after_a_reset_backward(
    raw: RawConnection, target: Start
) -> None:
    retries = await with_a_retry(raw)

    rows = await reset(raw, target)

    assert [row.partition for row in rows] == ["orders"]
    assert (await raw.pull(retries)).bodies == [b"1"]


async def test_retries_are_skipped_by_a_reset_to_the_end(raw: RawConnection) -> None:
    retries = await with_a_retry(raw)

    rows = await reset(raw, LATEST)

    assert [(row.partition, row.target) for row in rows] == [("orders", 3), (retries, 1)]
    assert (await raw.pull(retries)).runs == ()


async def test_retries_are_skipped_by_time_when_messages_are(start: StartBroker) -> None:
    clock = ManualClock()
    running = await start(clock=clock, consumption={"lease": "1h"})
    raw = await running.connect()
    retries = await with_a_retry(raw)
    clock.advance(1000)

    back = await reset(raw, at(clock.now_ms() - 1000), is_dry_run=True)
    assert [row.partition for row in back] == ["orders"]
    assert await reset(raw, at(clock.now_ms())) == [ResetRow("orders", 3, 3, 0, 3, 0)]  # type: ignore[arg-type]
    await raw.send("orders", numbered(1, 3))
    clock.advance(1)
    forward = await reset(raw, at(clock.now_ms()))

    assert [(row.partition, row.target) for row in forward] == [("orders", 4), (retries, 1)]


# -- consumers notice ---------------------------------------------------------------------------


async def test_a_waiting_pull_is_served_at_once(running: Running, raw: RawConnection) -> None:
    other = await running.connect()
    await consumed(raw, 5, "orders")
    wanted = (Wanted("orders", 5),)
    request_id = await raw.put(Pull("g", "c", 1, 9, 9999, LONG_MS, EARLIEST, wanted))

    async def waits() -> bool:
        return bool((await other.status())["pulls_waiting"] == 1)

    await eventually(waits)
    await reset(other, FROM_EARLIEST)

    got = Handed.of(expect(await raw.answer_to(request_id), Pulled), ["orders"])
    assert got.bodies == numbered(5)


async def test_what_consumers_hold_is_taken_from_them_and_not_retried(raw: RawConnection) -> None:
    await raw.send("orders", numbered(5))
    (run,) = (await raw.pull("orders", max_messages=3)).runs

    (row,) = await reset(raw, LATEST)

    assert row.held == 3
    with pytest.raises(StaleSettleError, match="its group was reset"):
        await raw.settle(run)
    report = await raw.status()
    assert [each["name"] for each in report["partitions"]] == ["orders"]
    assert (await raw.pull("orders", expected=3)).states[0].settled == 3


async def test_a_late_settle_cannot_settle_what_comes_again(raw: RawConnection) -> None:
    await raw.send("orders", numbered(3))
    (run,) = (await raw.pull("orders")).runs
    await reset(raw, FROM_EARLIEST)
    again = await raw.pull("orders", expected=3)
    assert again.bodies == numbered(3)

    for _ in range(2):
        with pytest.raises(StaleSettleError):
            await raw.settle(run)
    await reset(raw, FROM_EARLIEST)
    with pytest.raises(StaleSettleError):
        await raw.settle(again.runs[0])
    assert (await position(raw, "orders")).lag == 3


# -- for good -----------------------------------------------------------------------------------


@pytest.mark.parametrize("cut", Cut)
async def test_a_reset_survives_a_power_cut_once_it_is_answered(
    start: StartBroker, tmp_path: Path, cut: Cut
) -> None:
    files = MemoryFileSystem()
    running = await start(files=files, storage={"sync_interval": "60s"})
    raw = await running.connect()
    await consumed(raw, 10, "orders", "orders#p0")
    await reset(raw, sequence(4), partition="orders")
    (run,) = (await raw.pull("orders", expected=10, max_messages=2)).runs
    await reset(raw, FROM_EARLIEST, partition="orders#p0")
    left = files.after_power_cut(files.operations, cut, Random(7))

    again = await start(tmp_path / "again", files=left)
    raw = await again.connect()
    assert (await position(raw, "orders#p0")).next_sequence == 0
    assert (await position(raw, "orders")).next_sequence == 6
    await raw.settle(run)
    assert (await raw.pull("orders", expected=12)).bodies == numbered(4, 6)


async def test_a_reset_survives_a_kill_and_restarts(start: StartBroker) -> None:
    running = await start()
    raw = await running.connect()
    await consumed(raw, 10, "orders")
    await reset(raw, sequence(4))
    killed = await start(running.as_if_killed("killed"))
    assert (await position(await killed.connect(), "orders")).next_sequence == 4

    again = await killed.restarted()
    raw = await again.connect()
    assert (await position(raw, "orders")).next_sequence == 4
    assert (await raw.pull("orders", expected=10)).bodies == numbered(6, 4)
    await again.close()


async def test_what_was_nacked_before_and_after_a_reset_is_retried_both_times(
    start: StartBroker,
) -> None:
    running = await start()
    raw = await running.connect()
    await raw.send("orders", numbered(1))
    for life in range(3):
        (run,) = (await raw.pull("orders", expected=life)).runs
        await raw.settle(run, nacked={life: "no"})
        retries = await raw.pull("%retry%orders%g", timeout_ms=10_000, expected=life)
        assert retries.bodies == numbered(1)
        await raw.settle(retries.runs[0])
        running = await start(running.as_if_killed(f"life{life}"))
        raw = await running.connect()
        await reset(raw, FROM_EARLIEST)


# -- what cannot be -----------------------------------------------------------------------------


async def test_an_unknown_group_is_named_together_with_those_there_are(raw: RawConnection) -> None:
    await consumed(raw, 1, "orders")
    await raw.send("refunds", numbered(1))

    with pytest.raises(UnknownGroupError, match=r"group nobody never consumed orders here.*: g$"):
        await reset(raw, FROM_EARLIEST, group="nobody")
    with pytest.raises(UnknownGroupError, match="groups that did: none"):
        await reset(raw, FROM_EARLIEST, subject="refunds")


async def test_an_unknown_subject_or_partition_is_refused(raw: RawConnection) -> None:
    await consumed(raw, 1, "orders")

    with pytest.raises(UnknownSubjectError, match="no message was ever sent to order here"):
        await reset(raw, FROM_EARLIEST, subject="order")
    with pytest.raises(UnknownSubjectError, match="orders#p9 is no partition of orders"):
        await reset(raw, FROM_EARLIEST, partition="orders#p9")
    with pytest.raises(UnknownSubjectError, match="is no partition of orders for group g"):
        await reset(raw, FROM_EARLIEST, partition="%retry%orders%h")


async def test_a_sequence_is_of_one_partition(raw: RawConnection) -> None:
    await consumed(raw, 1, "orders", "orders#p9")

    with pytest.raises(InvalidRequestError, match=r"of which partition.*orders, orders#p9"):
        await reset(raw, sequence(1))
    assert (await reset(raw, sequence(0), partition="orders"))[0].target == 0


@pytest.mark.parametrize(
    ("group", "subject"),
    [("", "orders"), ("g", ""), ("a b", "orders"), ("g", "a.*.b"), ("#", "a")],
)
async def test_bad_names_are_refused(raw: RawConnection, group: str, subject: str) -> None:
    with pytest.raises(InvalidNameError):
        await reset(raw, FROM_EARLIEST, group=group, subject=subject)


# -- where groups are ---------------------------------------------------------------------------


async def test_groups_tell_where_they_are_and_who_holds_what(start: StartBroker) -> None:
    clock = ManualClock()
    running = await start(clock=clock, consumption={"lease": "1h"})
    raw = await running.connect()
    await raw.send("orders", numbered(10))
    got = await raw.pull("orders", consumer="a", max_messages=4)
    await raw.settle(got.runs[0], consumer="a", last=0)
    await raw.pull("orders", consumer="b", max_messages=2)
    clock.advance(1500)
    await raw.heartbeat(consumer="a")
    clock.advance(500)

    found = await position(raw, "orders")

    assert (found.group, found.next_sequence, found.end, found.lag) == ("g", 6, 10, 9)
    assert {(each.consumer, each.held, each.silent_ms) for each in found.consumers} == {
        ("a", 3, 500),
        ("b", 2, 2000),
    }


async def test_groups_can_be_asked_for_by_subject_and_by_name(raw: RawConnection) -> None:
    await consumed(raw, 1, "order.a", "order.b#p9", group="g")
    await consumed(raw, 1, "order.a", "refund", group="h")

    async def found(subject: str, group: str) -> set[tuple[str, str]]:
        report = await raw.ask(Groups(subject, group), GroupsReport)
        return {(each.group, each.partition) for each in report.positions}

    assert await found("order.*", "") == {("g", "order.a"), ("g", "order.b#p9"), ("h", "order.a")}
    assert await found("order.b", "") == {("g", "order.b#p9")}
    assert await found("", "h") == {("h", "order.a"), ("h", "refund")}
    assert await found("nothing", "") == set()
    assert len(await found("", "")) == 4


async def test_a_consumer_that_left_is_gone(raw: RawConnection) -> None:
    await consumed(raw, 1, "orders")
    await raw.heartbeat(is_leaving=True)
    await asyncio.sleep(0)

    (consumer,) = (await position(raw, "orders")).consumers

    assert (consumer.held, consumer.silent_ms) == (0, -1)
