"""Back-off: what failed waits, comes again when it is due, and in the end is kept as dead."""

from collections.abc import Sequence
from typing import Any

import pytest

from pulque.errors import InvalidRequestError, NotAllowedError
from pulque.model.batch import Codec, seed_of
from pulque.model.groups import Filter, Mode, RetrySettings
from pulque.model.groups import Start as StartOf
from pulque.model.message import Message
from pulque.model.pack import NOBODY, BatchPacker, ProducedBy
from pulque.storage.engine import Engine
from pulque.storage.indexes.consume_log import Span
from pulque.storage.logs.partitions import Partition
from pulque.testing.clock import ManualClock
from pulque.testing.raw import RawConnection, RawRun
from pulque.wire.groups import Subscribe, Subscribed
from pulque.wire.requests import Acks, Seal, Send
from pulque.wire.responses import Sealed, Sent
from tests.unit.broker.disks import PickyDisk
from tests.unit.broker.running import Running, Start, eventually, numbered

RETRY, WAIT, DEAD = "%retry%orders%g", "%wait%orders%g", "%dead%orders%g"
TABLE = {"delays": "1s 10s", "jitter_percent": 0, "attempts": 3}
POLICY = -1


async def stored(raw: RawConnection, partition: str, count: int) -> list[Message]:
    """Read a partition until so many messages are there."""
    found: list[Message] = []

    async def is_there() -> bool:
        nonlocal found
        _, found = await raw.read(partition, max_messages=10_000, max_bytes=8 * 1024 * 1024)
        return len(found) >= count

    await eventually(is_there)
    return found


async def hand_out(raw: RawConnection, *partitions: str, consumer: str = "c") -> RawRun:
    got = await raw.pull(*partitions, consumer=consumer, timeout_ms=5000)
    return got.runs[0]


async def fail(raw: RawConnection, partition: str, reason: str) -> RawRun:
    """Pull what is there and nack all of it, as the policy says."""
    run = await hand_out(raw, partition)
    nacked = {run.first_pull + i: reason for i in range(run.length)}
    await raw.settle(run, nacked=nacked, delay_ms=POLICY)
    return run


def bodies(messages: Sequence[Message]) -> list[bytes]:
    return [message.body for message in messages]


# -- waiting --------------------------------------------------------------------------------------


@pytest.mark.accepts("000-27", "000-41", "000-43", "004-13")
async def test_a_message_waits_longer_after_each_failure(start: Start) -> None:
    clock = ManualClock()
    running = await start(clock=clock, retry=TABLE)
    raw = await running.connect()
    await raw.send("orders", [b"stubborn"])
    failed_at_ms = clock.now_ms()
    await fail(raw, "orders", "first")
    (waiting,) = await stored(raw, WAIT, 1)
    assert waiting.due_at_ms == failed_at_ms + 1000
    status = await raw.status()
    assert (status["messages_waiting"], status["messages_left"]) == (1, 1)

    await raw.send("orders", [b"quick"])
    quick = await hand_out(raw, "orders")
    await raw.settle(quick, nacked={quick.first_pull: "soon"}, delay_ms=500)
    await stored(raw, WAIT, 2)

    clock.advance(999)
    # Another one that is due by now comes, and this one does not.
    run = await hand_out(raw, RETRY)
    assert run.bodies == [b"quick"]
    await raw.settle(run)
    clock.advance(101)
    again = await hand_out(raw, RETRY)
    assert [(m.body, m.attempt) for m in again.messages] == [(b"stubborn", 2)]
    status = await raw.status()
    assert (status["messages_waiting"], status["messages_left"]) == (0, 1)

    await raw.settle(again, nacked={again.first_pull: "second"}, delay_ms=POLICY)
    waited = await stored(raw, WAIT, 3)
    assert waited[2].due_at_ms == clock.now_ms() + 10_000
    clock.advance(10_100)
    third = await hand_out(raw, RETRY)
    assert [message.attempt for message in third.messages] == [3]


async def test_a_delay_that_was_asked_for_wins_and_zero_is_at_once(start: Start) -> None:
    clock = ManualClock()
    raw = await (await start(clock=clock, retry=TABLE)).connect()
    await raw.send("orders", numbered(2))
    run = await hand_out(raw, "orders")
    await raw.settle(run, last=0, nacked={0: "soon"}, delay_ms=0)
    await raw.settle(run, first=1, nacked={1: "later"}, delay_ms=60_000)

    assert (await hand_out(raw, RETRY)).bodies == [b"0"]
    (waiting,) = await stored(raw, WAIT, 1)
    assert (waiting.body, waiting.due_at_ms) == (b"1", clock.now_ms() + 60_000)


@pytest.mark.parametrize(
    ("told", "silence_ms", "check_ms"),
    [
        pytest.param({}, 30_000, 5_000, id="as it comes"),
        pytest.param({"lease": "3min", "lease_check": "1min"}, 180_000, 60_000, id="as in QMQ"),
    ],
)
@pytest.mark.accepts("003-52", "003-54", "000-38")
async def test_what_a_lost_consumer_held_waits_like_any_failure(
    start: Start, told: dict[str, str], silence_ms: int, check_ms: int
) -> None:
    clock = ManualClock()
    running = await start(clock=clock, retry=TABLE, consumption=told)
    raw = await running.connect()
    await raw.send("orders", numbered(2))
    await raw.pull("orders", consumer="dead")

    for _ in range(silence_ms // check_ms):
        clock.advance(check_ms)
        await running.house_kept()
        assert (await raw.status())["deliveries_lost"] == 0
    clock.advance(check_ms - 1)  # it was silent for too long, and is missed by the next check
    await running.house_kept()
    assert (await raw.status())["deliveries_lost"] == 0
    clock.advance(2)
    waiting = await stored(raw, WAIT, 2)
    assert bodies(waiting) == numbered(2)
    assert "silent" in waiting[0].headers["pulque.failed.1"]
    clock.advance(1100)

    again = await hand_out(raw, RETRY)
    assert [message.attempt for message in again.messages] == [2, 2]


async def test_what_a_leaving_consumer_hands_back_is_no_failure(start: Start) -> None:
    raw = await (await start(clock=ManualClock(), retry={"attempts": 1})).connect()
    await raw.send("orders", numbered(2))
    await raw.pull("orders", consumer="leaver")

    await raw.heartbeat(consumer="leaver", is_leaving=True)

    again = await hand_out(raw, RETRY)
    assert again.bodies == numbered(2)
    assert [message.attempt for message in again.messages] == [1, 1]
    assert not any(name.startswith("pulque.failed") for name in again.messages[0].headers)


@pytest.mark.accepts("000-55")
async def test_each_group_waits_for_itself(start: Start) -> None:
    clock = ManualClock()
    raw = await (await start(clock=clock, retry=TABLE)).connect()
    await raw.send("orders", [b"tea"])
    for group in ("g", "h"):
        got = await raw.pull("orders", group=group)
        await raw.settle(got.runs[0], group=group, nacked={0: group}, delay_ms=POLICY)
    await stored(raw, WAIT, 1)
    await stored(raw, "%wait%orders%h", 1)
    clock.advance(1100)

    for group in ("g", "h"):
        got = await raw.pull(f"%retry%orders%{group}", group=group, timeout_ms=5000)
        assert [m.headers["pulque.reason"] for m in got.runs[0].messages] == [group]


@pytest.mark.accepts("000-03")
async def test_what_is_due_does_not_wait_for_what_is_not(start: Start) -> None:
    """Neither the group's backlog nor what waits for longer is looked at."""
    clock = ManualClock()
    raw = await (await start(clock=clock, retry=TABLE)).connect()
    for at in range(0, 5000, 500):
        await raw.send("orders", numbered(500, at))
    got = await raw.pull("orders", max_messages=2000)
    nacked = {pull: "later" for run in got.runs for pull in range(run.length)}
    soon = nacked.popitem()[0]
    (run,) = got.runs
    await raw.settle(run, last=soon - 1, nacked=nacked, delay_ms=3_600_000)
    await raw.settle(run, first=soon, nacked={soon: "soon"}, delay_ms=500)
    await stored(raw, WAIT, 2000)
    clock.advance(600)

    again = await hand_out(raw, RETRY)

    assert again.bodies == [b"%d" % soon]
    assert (await raw.status())["messages_waiting"] == 1999


@pytest.mark.slow
@pytest.mark.accepts("000-03")
async def test_a_backlog_of_a_million_is_not_looked_at_by_a_retry(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Counted, not timed: what is read for one retry is the same with and without it."""
    reads: list[int] = []
    span = Engine.span

    def counted(self: Engine, partition: Partition, *args: Any, **named: Any) -> Span:
        found = span(self, partition, *args, **named)
        if "%wait%" in partition.name or partition.name == "orders":
            reads.append(found.length)
        return found

    clock = ManualClock()
    raw = await (await start(clock=clock, retry=TABLE)).connect()
    costs = []
    for backlog in (0, 1_000_000):
        for _ in range(backlog // 10_000):
            await raw.send("orders", [b""] * 10_000)
        await raw.send("orders", [b"failing"])
        group = f"g{backlog}"
        (run,) = (await raw.pull("orders", group=group, max_messages=1)).runs
        monkeypatch.setattr(Engine, "span", counted)
        reads.clear()
        await raw.settle(run, group=group, nacked={0: "no"}, delay_ms=POLICY)
        await stored(raw, f"%wait%orders%{group}", 1)
        clock.advance(1100)
        again = await raw.pull(f"%retry%orders%{group}", group=group, timeout_ms=5000)
        monkeypatch.undo()
        assert again.length == 1
        costs.append(sum(reads))

    assert costs[0] == costs[1] > 0


async def test_a_group_that_said_how_it_retries_is_heard(start: Start) -> None:
    clock = ManualClock()
    raw = await (await start(clock=clock, retry=TABLE)).connect()
    await raw.send("orders", [b"x"])
    wish = RetrySettings((7000,), 0, 2)
    everything, shared = Filter(), Mode.SHARED
    await raw.ask(
        Subscribe("g", "c", 1, "orders", shared, everything, StartOf(), wish), Subscribed
    )
    await fail(raw, "orders", "no")

    (waiting,) = await stored(raw, WAIT, 1)
    assert waiting.due_at_ms == clock.now_ms() + 7000
    clock.advance(7100)
    await fail(raw, RETRY, "no")
    (dead,) = await stored(raw, DEAD, 1)
    assert dead.headers["pulque.dead"] == "2 attempts failed"


async def test_very_many_come_back_in_few_batches_and_each_once(start: Start) -> None:
    clock = ManualClock()
    raw = await (await start(clock=clock, retry={"delays": "1s"})).connect()
    for at in range(0, 3000, 500):
        await raw.send("orders", numbered(500, at))
    (run,) = (await raw.pull("orders", max_messages=3000)).runs
    await raw.settle(run, nacked=dict.fromkeys(range(3000), "no"), delay_ms=POLICY)
    await stored(raw, WAIT, 3000)
    clock.advance(1200)

    again = await stored(raw, RETRY, 3000)

    assert sorted(bodies(again), key=int) == numbered(3000)
    assert {message.attempt for message in again} == {2}
    assert (await raw.status())["messages_waiting"] == 0


# -- the end --------------------------------------------------------------------------------------


@pytest.mark.accepts("000-42", "000-43", "000-44", "000-45")
async def test_after_the_last_attempt_a_message_is_dead_with_every_reason(start: Start) -> None:
    clock = ManualClock()
    raw = await (await start(clock=clock, retry=TABLE)).connect()
    await raw.send("orders", [b"poison"])
    message_id = (await fail(raw, "orders", "no milk")).messages[0].id
    for reason, wait in (("no sugar", 1100), ("no tea", 10_100)):
        await stored(raw, WAIT, 1 if wait == 1100 else 2)
        clock.advance(wait)
        await fail(raw, RETRY, reason)

    (dead,) = await stored(raw, DEAD, 1)

    assert (dead.id, dead.body, dead.attempt) == (message_id, b"poison", 3)
    reasons = [dead.headers[f"pulque.failed.{attempt}"] for attempt in (1, 2, 3)]
    assert [text.split(" ", 1)[1] for text in reasons] == ["no milk", "no sugar", "no tea"]
    assert [text[:10] for text in reasons] == ["2023-11-14"] * 3
    assert dead.headers["pulque.dead"] == "3 attempts failed"
    assert dead.headers["pulque.origin"] == f"{RETRY}/1"
    assert dead.headers["pulque.first"] == "orders/0"
    clock.advance(10**9)
    assert len(await stored(raw, RETRY, 2)) == 2
    assert len(await stored(raw, WAIT, 2)) == 2


@pytest.mark.accepts("000-42", "000-45")
async def test_an_expired_message_is_dead_and_no_new_retry_is_written(start: Start) -> None:
    clock = ManualClock()
    raw = await (await start(clock=clock, retry=TABLE)).connect()
    packer = BatchPacker()
    for expires_in_ms in (999, 5000):
        packer.add(b"%d" % expires_in_ms, expires_at_ms=clock.now_ms() + expires_in_ms)
    batch = packer.encode(seed=seed_of("orders"), ids=bytes(range(32)), created_at_ms=0)
    await raw.ask(Send(Acks.MEMORY, 1000, (("orders", batch),)), Sent)
    await fail(raw, "orders", "no")

    (dead,) = await stored(raw, DEAD, 1)
    assert (dead.body, dead.attempt, dead.headers["pulque.dead"]) == (b"999", 1, "expired")
    assert bodies(await stored(raw, WAIT, 1)) == [b"5000"]
    assert (await raw.read(RETRY))[1] == []

    # The other one expires as its broker is asleep.
    clock.advance(5000)
    letters = await stored(raw, DEAD, 2)
    assert [(m.body, m.attempt) for m in letters] == [(b"999", 1), (b"5000", 1)]
    assert (await raw.read(RETRY))[1] == []


@pytest.mark.parametrize(
    ("codec", "produced_by"),
    [(Codec.ZSTD, NOBODY), (Codec.NONE, ProducedBy(1, 1, 1, named=True))],
    ids=["compressed", "named as a delay server is"],
)
async def test_headers_of_ours_that_a_producer_made_up_are_not_taken_for_true(
    start: Start, codec: Codec, produced_by: ProducedBy
) -> None:
    raw = await (await start(clock=ManualClock(), retry={"attempts": 1})).connect()
    packer = BatchPacker()
    lies = {
        "pulque.failed.7": "lies",
        "pulque.first": "lies/1",
        "pulque.origin": "orders/99",
        "pulque.due": "lies",
        "pulque.unreadable": "0-99",
    }
    packer.add(b"x", headers={**lies, "mine": "yes"})
    packer.add(b"y")
    # What is compressed or comes from a delay server, the broker does not look into.
    batch = packer.encode(
        seed=seed_of("orders"),
        ids=bytes(32),
        created_at_ms=0,
        codec=codec,
        produced_by=produced_by,
    )
    await raw.ask(Send(Acks.MEMORY, 1000, (("orders", batch),)), Sent)
    await fail(raw, "orders", "no")

    dead, _ = await stored(raw, DEAD, 2)

    assert not {"pulque.failed.7", "pulque.due", "pulque.unreadable"} & {*dead.headers}
    assert dead.headers["pulque.origin"] == "orders/0"
    assert (dead.headers["pulque.first"], dead.headers["mine"]) == ("orders/0", "yes")


async def test_a_long_history_of_failures_is_cut_to_the_newest(start: Start) -> None:
    raw = await (await start(retry={"delays": "0s", "attempts": 30})).connect()
    await raw.send("orders", [b"x"])
    await fail(raw, "orders", "x" * 1000)
    for attempt in range(2, 31):
        await fail(raw, RETRY, f"{attempt} " + "x" * 900)

    (dead,) = await stored(raw, DEAD, 1)

    kept = {name: text for name, text in dead.headers.items() if "failed" in name}
    assert set(kept) == {f"pulque.failed.{attempt}" for attempt in range(11, 31)}
    assert all(len(text) <= 300 for text in kept.values())


# -- what is not allowed ----------------------------------------------------------------------


@pytest.mark.parametrize("delay_ms", [-3, -(2**63), 60_001, 2**63 - 1])
async def test_a_delay_that_cannot_be_is_refused_and_nothing_is_settled(
    start: Start, delay_ms: int
) -> None:
    running = await start(retry={"longest_delay": "1m"})
    raw = await running.connect()
    await raw.send("orders", [b"x"])
    run = await hand_out(raw, "orders")

    with pytest.raises(InvalidRequestError, match="0 to 60000"):
        await raw.settle(run, nacked={0: "no"}, delay_ms=delay_ms)

    assert (await raw.settle(run, nacked={0: "no"}, delay_ms=60_000)).settled == 1
    assert raw.welcome is not None
    assert raw.welcome.max_delay_ms == 60_000


async def test_nothing_waits_for_longer_than_half_of_the_retention(start: Start) -> None:
    clock = ManualClock()
    running = await start(
        clock=clock,
        storage={"retention": "10m"},
        retry={"delays": "2h", "jitter_percent": 0, "longest_delay": "1h"},
    )
    raw = await running.connect()
    await raw.send("orders", [b"x"])
    await fail(raw, "orders", "no")

    (waiting,) = await stored(raw, WAIT, 1)

    assert waiting.due_at_ms == clock.now_ms() + 5 * 60 * 1000
    assert raw.welcome is not None
    assert raw.welcome.max_delay_ms == 5 * 60 * 1000


@pytest.mark.parametrize("partition", [WAIT, DEAD])
async def test_nobody_pulls_what_waits_or_is_dead_nor_sends_to_it(
    raw: RawConnection, partition: str
) -> None:
    with pytest.raises(NotAllowedError, match="cannot be pulled"):
        await raw.pull(partition)
    outcome = await raw.send(partition, [b"x"])
    assert "belongs to a group" in outcome.text


# -- over restarts --------------------------------------------------------------------------------


async def run_through(raw: RawConnection, clock: ManualClock) -> None:
    """Let four messages fail, two of them to the end; one waits long, one is due."""
    await raw.send("orders", numbered(4))
    run = await hand_out(raw, "orders")
    await raw.settle(run, last=1, nacked={0: "a", 1: "a"}, delay_ms=100)
    await raw.settle(run, first=2, last=2, nacked={2: "b"}, delay_ms=3_600_000)
    await raw.settle(run, first=3, nacked={3: "c"}, delay_ms=20_000)
    await stored(raw, WAIT, 4)


@pytest.mark.accepts("000-44")
@pytest.mark.parametrize("is_clean", [True, False], ids=["stopped", "killed"])
async def test_what_waits_is_known_after_a_restart_and_comes_once(
    start: Start, *, is_clean: bool
) -> None:
    clock = ManualClock()
    running = await start(clock=clock, retry=TABLE)
    raw = await running.connect()
    await run_through(raw, clock)
    await raw.ask(Seal(), Sealed)

    if is_clean:
        again = await running.restarted()
    else:
        again = await start(running.as_if_killed("killed"), clock=clock, retry=TABLE)
    raw = await again.connect()
    assert (await raw.status())["messages_waiting"] == 4
    clock.advance(200)
    assert sorted(bodies(await stored(raw, RETRY, 2))) == [b"0", b"1"]

    third = await start(again.as_if_killed("third"), clock=clock, retry=TABLE)
    raw = await third.connect()
    assert (await raw.status())["messages_waiting"] == 2
    clock.advance(20_000)
    assert bodies((await stored(raw, RETRY, 3))[2:]) == [b"3"]
    assert (await raw.status())["messages_waiting"] == 1
    await again.close()


async def test_what_is_due_and_finds_no_room_is_not_forgotten_over_a_restart(
    start: Start,
) -> None:
    clock, disk = ManualClock(), PickyDisk()
    running = await start(clock=clock, retry=TABLE, files=disk)
    raw = await running.connect()
    await raw.send("orders", [b"fails"])
    await fail(raw, "orders", "no")
    await stored(raw, WAIT, 1)
    disk.refuses = b"fails"
    clock.advance(1001)

    async def is_refused() -> bool:
        return disk.refused > 0

    await eventually(is_refused)
    assert (await raw.status())["messages_waiting"] == 1
    await running.close()  # with a checkpoint: what it does not have is forgotten
    disk.refuses = b""

    raw = await (await start(clock=clock, retry=TABLE, files=disk)).connect()
    assert bodies(await stored(raw, RETRY, 1)) == [b"fails"]


async def test_a_checkpoint_at_any_moment_forgets_and_doubles_nothing(start: Start) -> None:
    """Each copy is what a kill would leave, with a checkpoint before or after each step."""
    clock = ManualClock()
    every_record = {"checkpoint_records": 1}
    running = await start(clock=clock, retry=TABLE, storage=every_record)
    raw = await running.connect()
    copies: list[Running] = []

    async def copy(name: str) -> None:
        clock.advance(1001)
        await running.house_kept()
        for when in ("before", "after"):
            directory = running.as_if_killed(f"{name} {when}")
            copies.append(await start(directory, clock=clock, retry=TABLE, storage=every_record))
            await raw.send("other", [b"something happens"])
            clock.advance(1001)
            await running.house_kept()

    await raw.send("orders", numbered(3))
    run = await hand_out(raw, "orders")
    await raw.settle(run, nacked=dict.fromkeys(range(3), "no"), delay_ms=60_000)
    await copy("right after")
    await stored(raw, WAIT, 3)
    await copy("waiting")
    clock.advance(60_100)
    await copy("due")
    await stored(raw, RETRY, 3)
    await copy("through")

    for each in copies:
        await check_three_came_once(each)


async def check_three_came_once(running: Running) -> None:
    raw = await running.connect()
    again = await stored(raw, RETRY, 3)
    assert bodies(again) == numbered(3)
    assert [message.attempt for message in again] == [2, 2, 2]
    assert bodies(await stored(raw, WAIT, 3)) == numbered(3)
    assert (await raw.status())["messages_waiting"] == 0
    await running.close()
