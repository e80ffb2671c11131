"""A pull from very many partitions is handled in parts, a turn for each, and answered as one."""

import asyncio
import gc
from collections.abc import Sequence

import pytest

from pulque.broker.pulling.puller import PART
from pulque.broker.pulling.waiting_pulls import WaitingPull, WholePull
from pulque.errors import ErrorCode, FencedError, InvalidNameError, NotAllowedError
from pulque.testing.raw import Handed, RawConnection, expect, pack_batch
from pulque.wire.requests import EARLIEST, FROM_SETTLED, LATEST, Acks, Pull, Send, Wanted
from pulque.wire.responses import Pulled, Sent
from tests.unit.broker.running import Running, Start, eventually

NAMES = [f"many.{number:04d}" for number in range(3 * PART + 7)]
VERY_MANY = [f"many.{number:04d}" for number in range(9000)]
LONG_MS = 30_000
"""Longer than any test waits."""


def pull_of(names: Sequence[str], **limits: int) -> Pull:
    wanted = tuple(Wanted(name, FROM_SETTLED) for name in names)
    start = limits.get("start_at", EARLIEST)
    timeout_ms = limits.get("timeout_ms", 0)
    return Pull("g", "c", 1, 1000, 2**20, timeout_ms, start, wanted, ("many.*",))


async def send_to(raw: RawConnection, names: Sequence[str]) -> None:
    for at in range(0, len(names), 1000):
        batches = tuple(
            (name, pack_batch(name, [name.encode()])) for name in names[at : at + 1000]
        )
        await raw.ask(Send(Acks.MEMORY, 10_000, batches), Sent)


async def handed(raw: RawConnection, request_id: int) -> Handed:
    return Handed.of(expect(await raw.answer_to(request_id), Pulled), NAMES)


async def waits(raw: RawConnection) -> bool:
    """Return whether a pull stands in line, which counts as one."""
    return bool((await raw.status())["pulls_waiting"] == 1)


async def test_another_client_is_answered_while_a_pull_goes_through_its_partitions(
    running: Running, raw: RawConnection
) -> None:
    other = await running.connect()
    large = await raw.put(pull_of(VERY_MANY))
    answer = asyncio.create_task(raw.answer_to(large))
    for _ in range(2):
        await other.status()

    assert not answer.done()
    assert len(expect(await answer, Pulled).states) == len(VERY_MANY)


async def test_every_partition_is_handed_out_once_and_in_its_place(raw: RawConnection) -> None:
    await send_to(raw, NAMES)

    found: list[bytes] = []
    pulls = 0
    while len(found) < len(NAMES):
        got = await raw.pull(*NAMES)
        found += got.bodies
        assert [run.partition.encode() for run in got.runs] == got.bodies
        assert len(got.states) == len(NAMES)
        pulls += 1
        for run in got.runs:
            await raw.settle(run)

    assert sorted(found) == [name.encode() for name in NAMES]
    assert pulls == len(range(0, len(NAMES), PART))
    last = await raw.pull(*NAMES)
    assert not last.bodies
    assert {(state.settled, state.next_pull) for state in last.states} == {(1, 1)}


@pytest.mark.parametrize("place", [0, PART, len(NAMES) - 1])
async def test_a_pull_that_waits_is_answered_by_a_message_in_any_part(
    running: Running, raw: RawConnection, place: int
) -> None:
    producer = await running.connect()
    waiting = await raw.put(pull_of(NAMES, timeout_ms=LONG_MS))
    await eventually(lambda: waits(producer))

    await producer.send(NAMES[place], [b"new"])
    got = await handed(raw, waiting)

    assert [(run.partition, run.bodies) for run in got.runs] == [(NAMES[place], [b"new"])]
    assert not got.routes_changed
    assert (await producer.status())["pulls_waiting"] == 0


async def test_a_pull_that_got_nothing_in_time_is_answered_once(raw: RawConnection) -> None:
    waiting = await raw.put(pull_of(NAMES, timeout_ms=50))
    got = await handed(raw, waiting)

    assert got.runs == ()
    assert len(got.states) == len(NAMES)
    assert not await raw.is_answered(waiting)
    assert (await raw.status())["pulls_waiting"] == 0


async def test_a_connection_that_goes_leaves_no_part_in_line(
    running: Running, raw: RawConnection
) -> None:
    other = await running.connect()
    await raw.put(pull_of(NAMES, timeout_ms=LONG_MS))
    await eventually(lambda: waits(other))
    raw.close()

    async def is_empty() -> bool:
        return bool((await other.status())["pulls_waiting"] == 0)

    await eventually(is_empty)


async def test_a_connection_that_goes_in_the_middle_leaves_no_part_in_line(
    running: Running, raw: RawConnection
) -> None:
    other = await running.connect()
    await raw.put(pull_of(VERY_MANY, timeout_ms=LONG_MS))
    await other.status()
    raw.close()

    async def is_alone() -> bool:
        return bool((await other.status())["connections"] == 1)

    await eventually(is_alone)
    assert (await other.status())["pulls_waiting"] == 0


async def test_a_new_group_starts_at_the_end_in_every_part(raw: RawConnection) -> None:
    await send_to(raw, NAMES)
    assert not (await raw.pull(*NAMES, start_at=LATEST)).bodies
    await send_to(raw, [NAMES[0], NAMES[-1]])

    found: list[bytes] = []
    for _ in range(2):
        got = await raw.pull(*NAMES, start_at=LATEST)
        found += got.bodies
        await raw.settle(got.runs[0])

    assert sorted(found) == [NAMES[0].encode(), NAMES[-1].encode()]


async def test_a_group_that_is_here_misses_nothing_of_a_part_that_is_new(
    raw: RawConnection,
) -> None:
    await raw.pull(NAMES[-1], start_at=LATEST)
    await send_to(raw, NAMES[:1])

    assert (await raw.pull(*NAMES, start_at=LATEST)).bodies == [NAMES[0].encode()]


async def test_higher_priorities_come_first_whatever_part_they_are_in(raw: RawConnection) -> None:
    names = [*NAMES, f"{NAMES[-1]}#p9"]
    await send_to(raw, names)

    assert (await raw.pull(*names)).runs[0].partition == names[-1]


async def test_what_may_be_held_counts_over_all_parts(start: Start) -> None:
    running = await start(limits={"max_held": 2})
    raw = await running.connect()
    await send_to(raw, NAMES)

    assert (await raw.pull(NAMES[-1])).length == 1
    assert (await raw.pull(*NAMES)).length == 1


async def test_a_position_that_is_lost_is_told_in_its_place(raw: RawConnection) -> None:
    await send_to(raw, NAMES[-1:])
    expected = [FROM_SETTLED] * (len(NAMES) - 1) + [5]

    got = await raw.pull(*NAMES, expected=expected, timeout_ms=LONG_MS)

    assert [state.code for state in got.states[-2:]] == [ErrorCode.NONE, ErrorCode.POSITION_LOST]


async def test_a_new_partition_is_told_of_though_the_pull_is_in_parts(
    running: Running, raw: RawConnection
) -> None:
    await send_to(raw, NAMES)
    producer = await running.connect()
    wanted = tuple(Wanted(name, FROM_SETTLED) for name in NAMES)
    request = Pull("g", "c", 1, 1000, 2**20, LONG_MS, LATEST, wanted, ("many.*",))
    waiting = await raw.put(request)
    await eventually(lambda: waits(producer))

    await producer.send("many.more", [b"new"])
    got = expect(await raw.answer_to(waiting), Pulled)

    assert got.routes_changed
    assert not got.deliveries


async def test_what_is_refused_is_refused_before_anything_is_done(
    raw: RawConnection,
) -> None:
    await send_to(raw, NAMES)
    await raw.pull(NAMES[-1], incarnation=2)

    with pytest.raises(FencedError):
        await raw.pull(*NAMES)
    with pytest.raises(InvalidNameError):
        await raw.pull(*NAMES, "no name")
    with pytest.raises(NotAllowedError):
        await raw.pull(*NAMES, "%retry%many.0000%other")
    assert len((await raw.status())["subscriptions"]) == 1
    assert (await raw.status())["pulls_waiting"] == 0


async def test_a_pull_in_parts_is_freed_without_a_garbage_collection(
    running: Running, raw: RawConnection
) -> None:
    await send_to(raw, NAMES[:1])
    leaver, other = await running.connect(), await running.connect()
    gc.collect()
    gc.disable()
    try:
        await raw.settle((await raw.pull(*NAMES)).runs[0])
        assert not (await raw.pull(*NAMES, timeout_ms=20)).bodies
        with pytest.raises(NotAllowedError):
            await raw.pull(*NAMES, "%retry%many.0000%other")
        await leaver.put(pull_of(NAMES, timeout_ms=LONG_MS))
        await eventually(lambda: waits(other))
        leaver.close()

        async def is_alone() -> bool:
            return bool((await other.status())["connections"] == 2)

        await eventually(is_alone)
        left = [each for each in gc.get_objects() if isinstance(each, WaitingPull | WholePull)]
    finally:
        gc.enable()

    assert left == []
