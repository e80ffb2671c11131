"""Settling: one range, one number of progress, and nobody settles what it does not hold."""

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from pulque.errors import InvalidRequestError, StaleSettleError, StorageError
from pulque.model.actions import Pulled, Settled
from pulque.model.positions import Epoch, StartCount, Tenure
from pulque.storage.logs.action_log import decode_action, walk_actions
from pulque.testing.clock import ManualClock
from pulque.testing.files import MemoryFileSystem
from pulque.testing.raw import RawConnection
from pulque.wire.requests import Nacked, Settle
from pulque.wire.responses import Settled as SettledAnswer
from tests.unit.broker.running import Running, Start, eventually, numbered


async def positions(raw: RawConnection) -> dict[str, tuple[int, int]]:
    """Return settled and next pull sequence of every consumer."""
    status = await raw.status()
    return {s["consumer"]: (s["settled"], s["next_pull"]) for s in status["subscriptions"]}


def facts_of(running: Running) -> list[object]:
    """Return what the action log says."""
    found: list[object] = []
    for path in sorted((running.directory / "actions").iterdir()):
        data = path.read_bytes()
        facts = walk_actions(data, int(path.stem))
        found += [decode_action(fact) for _, _, fact in facts if fact is not None]
    return found


@pytest.mark.accepts("000-10", "000-25", "001-23", "003-48", "003-49")
async def test_progress_is_one_number_per_consumer_and_one_per_group(raw: RawConnection) -> None:
    await raw.send("orders", numbered(10))
    c1 = await raw.pull("orders", consumer="c1", max_messages=3)
    await raw.pull("orders", consumer="c2", max_messages=4)

    await raw.settle(c1.runs[0], consumer="c1", last=1)

    assert await positions(raw) == {"c1": (2, 3), "c2": (0, 4)}
    (group,) = (await raw.status())["groups"]
    assert (group["next_sequence"], group["lag"]) == (7, 3)


@pytest.mark.accepts("003-44", "003-05", "000-25")
async def test_pulls_and_settles_are_facts_of_the_action_log(
    running: Running, raw: RawConnection
) -> None:
    await raw.send("orders", numbered(5))
    got = await raw.pull("orders")
    await raw.settle(got.runs[0], last=2, nacked={1: "no"})

    facts = facts_of(running)
    (pulled,) = (fact for fact in facts if isinstance(fact, Pulled))
    (settled,) = (fact for fact in facts if isinstance(fact, Settled))
    assert (pulled.first_pull, pulled.first_sequence, pulled.count) == (0, 0, 5)
    assert (settled.first, settled.last, [n.sequence for n in settled.nacked]) == (0, 2, [1])
    assert facts.index(pulled) < facts.index(settled)


@pytest.mark.accepts("003-02")
async def test_the_pull_log_costs_one_small_fact_per_pull_and_per_settle(
    running: Running, raw: RawConnection
) -> None:
    """The price of a pull log for each consumer: bytes of the action log."""
    await raw.send("orders", numbered(1))
    got = await raw.pull("orders")
    await raw.settle(got.runs[0])
    await raw.send("orders", numbered(1000, 1))
    (log,) = running.directory.glob("actions/*.log")
    before = log.stat().st_size

    got = await raw.pull("orders", max_messages=1000)
    pulled = log.stat().st_size - before
    await raw.settle(got.runs[0])
    settled = log.stat().st_size - before - pulled

    print(f"{pulled} bytes for a pull of 1000 messages, {settled} for its settle")
    assert got.length == 1000
    assert max(pulled, settled) < 64
    assert [path.name for path in running.directory.rglob("*pull*")] == []


@pytest.mark.accepts("000-28", "000-29", "001-30", "003-44")
async def test_settles_name_pull_sequences_and_move_the_settled_position(
    raw: RawConnection,
) -> None:
    await raw.send("orders", numbered(6))
    await raw.pull("orders", consumer="other", max_messages=2)
    got = await raw.pull("orders", max_messages=4)
    assert (got.runs[0].first_pull, got.runs[0].first_sequence) == (0, 2)

    assert (await raw.settle(got.runs[0], first=0, last=1)).settled == 2
    assert (await raw.settle(got.runs[0], first=2, last=3)).settled == 4


@pytest.mark.accepts("000-30", "003-50")
async def test_what_was_done_out_of_order_is_settled_in_order(raw: RawConnection) -> None:
    """Pulled 0 to 2; 2 is done first: nothing can be settled until 0 and 1 are done."""
    await raw.send("orders", numbered(3))
    got = await raw.pull("orders")

    with pytest.raises(StaleSettleError):
        await raw.settle(got.runs[0], first=2, last=2)
    assert (await positions(raw))["c"] == (0, 3)

    assert (await raw.settle(got.runs[0], first=0, last=2)).settled == 3


@pytest.mark.accepts("000-30")
async def test_an_error_of_a_later_delivery_cannot_come_before_a_success_of_an_earlier(
    raw: RawConnection,
) -> None:
    await raw.send("orders", numbered(101))
    got = await raw.pull("orders")

    with pytest.raises(StaleSettleError):
        await raw.settle(got.runs[0], first=100, last=100, nacked={100: "error 100"})
    await raw.settle(got.runs[0], first=0, last=50)

    assert (await positions(raw))["c"] == (51, 101)
    assert (await raw.status())["deliveries_nacked"] == 0


@pytest.mark.accepts("003-51", "003-03")
async def test_consumers_settle_independently_of_each_other(raw: RawConnection) -> None:
    await raw.send("orders", numbered(6))
    c1 = await raw.pull("orders", consumer="c1", max_messages=3)
    c2 = await raw.pull("orders", consumer="c2", max_messages=3)

    await raw.settle(c2.runs[0], consumer="c2")
    assert await positions(raw) == {"c1": (0, 3), "c2": (3, 3)}
    await raw.settle(c1.runs[0], consumer="c1")

    assert await positions(raw) == {"c1": (3, 3), "c2": (3, 3)}


async def test_a_repeated_settle_is_answered_as_before_and_changes_nothing(
    running: Running, raw: RawConnection
) -> None:
    await raw.send("orders", numbered(3))
    got = await raw.pull("orders")
    first = await raw.settle(got.runs[0], last=1, nacked={0: "no"})
    before = len(facts_of(running))

    again = await raw.settle(got.runs[0], last=1, nacked={0: "no"})

    assert again == first
    assert len([f for f in facts_of(running)[before:] if isinstance(f, Settled)]) == 0


async def test_a_settle_that_overlaps_settles_the_rest(raw: RawConnection) -> None:
    await raw.send("orders", numbered(5))
    got = await raw.pull("orders")
    await raw.settle(got.runs[0], first=0, last=2)

    answer = await raw.settle(got.runs[0], first=1, last=3, nacked={1: "too late", 3: "no"})

    assert answer.settled == 4
    assert (await raw.status())["deliveries_nacked"] == 1


@pytest.mark.parametrize(
    ("first", "last", "error"),
    [
        (3, 2, InvalidRequestError),
        (1, 2, StaleSettleError),
        (0, 3, StaleSettleError),
        (0, 2**40, StaleSettleError),
        (7, 9, StaleSettleError),
    ],
)
async def test_a_settle_that_cannot_be_is_refused(
    raw: RawConnection, first: int, last: int, error: type[Exception]
) -> None:
    await raw.send("orders", numbered(3))
    got = await raw.pull("orders")

    with pytest.raises(error):
        await raw.settle(got.runs[0], first=first, last=last)

    assert (await positions(raw))["c"] == (0, 3)


@pytest.mark.parametrize(
    "nacked", [{3: "beyond"}, {1: "b", 0: "a"}, {2**63: "far"}], ids=["beyond", "order", "far"]
)
async def test_nacked_deliveries_must_lie_in_the_range_in_order(
    raw: RawConnection, nacked: dict[int, str]
) -> None:
    await raw.send("orders", numbered(3))
    got = await raw.pull("orders")

    with pytest.raises(InvalidRequestError):
        await raw.settle(got.runs[0], nacked=nacked)

    assert (await positions(raw))["c"] == (0, 3)


async def test_nobody_settles_what_another_holds(raw: RawConnection) -> None:
    await raw.send("orders", numbered(3))
    got = await raw.pull("orders", consumer="holder")
    await raw.pull("orders", consumer="thief")

    for other in ("thief", "stranger"):
        with pytest.raises(StaleSettleError):
            await raw.settle(got.runs[0], consumer=other)
    with pytest.raises(StaleSettleError):
        await raw.settle(got.runs[0], consumer="holder", group="another")
    with pytest.raises(StaleSettleError):
        await raw.ask(Settle("unknown", "g", "holder", 1, got.runs[0].tenure, 0, 2), SettledAnswer)

    assert (await positions(raw))["holder"] == (0, 3)


async def test_too_many_nacks_in_one_settle_are_refused(raw: RawConnection) -> None:
    await raw.send("orders", numbered(1))
    got = await raw.pull("orders")
    many = tuple(Nacked(pull, -1, "") for pull in range(10_001))

    with pytest.raises(InvalidRequestError):
        await raw.ask(
            Settle("orders", "g", "c", 1, got.runs[0].tenure, 0, 10_000, many), SettledAnswer
        )


@pytest.mark.parametrize(
    "tenure",
    [
        Tenure(Epoch(0), StartCount(0)),
        Tenure(Epoch(0), StartCount(2)),
        Tenure(Epoch(1), StartCount(1)),
    ],
)
async def test_a_settle_under_another_tenure_is_refused(
    raw: RawConnection, tenure: Tenure
) -> None:
    await raw.send("orders", numbered(2))
    got = await raw.pull("orders")

    with pytest.raises(StaleSettleError):
        await raw.settle(got.runs[0], tenure=tenure)

    assert (await positions(raw))["c"] == (0, 2)


async def test_an_ack_kept_over_a_restart_of_the_broker_still_counts_if_the_pull_survived(
    running: Running, raw: RawConnection
) -> None:
    await raw.send("orders", numbered(3))
    got = await raw.pull("orders")

    again = await running.restarted()
    raw = await again.connect()
    answer = await raw.settle(got.runs[0])

    assert answer.settled == 3
    await again.close()


async def test_a_late_ack_settles_nothing_if_the_pull_did_not_survive(
    running: Running, raw: RawConnection, start: Start
) -> None:
    """The broker lost its last facts; another consumer is handed the messages meanwhile."""
    await raw.send("orders", numbered(3))
    before = running.as_if_killed("before the pull")
    got = await raw.pull("orders", consumer="c")

    recovered = await (await start(before)).connect()
    with pytest.raises(StaleSettleError):
        await recovered.settle(got.runs[0], consumer="c")
    anew = await recovered.pull("orders", consumer="c")
    with pytest.raises(StaleSettleError):
        await recovered.settle(got.runs[0], consumer="c")

    assert anew.bodies == numbered(3)
    assert anew.runs[0].tenure.start == got.runs[0].tenure.start + 1
    assert (await recovered.settle(anew.runs[0], consumer="c")).settled == 3


async def test_a_consumer_ahead_of_a_broker_that_lost_facts_is_told_so(
    running: Running, raw: RawConnection, start: Start
) -> None:
    await raw.send("orders", numbered(3))
    before = running.as_if_killed("before the pull")
    await raw.pull("orders")

    recovered = await (await start(before)).connect()
    got = await recovered.pull("orders", expected=3)

    assert got.states[0].code.name == "POSITION_LOST"


@pytest.mark.parametrize("what", ["settle", "pull", "leave"])
async def test_what_cannot_be_written_down_did_not_happen(start: Start, what: str) -> None:
    """A fact is in the action log before the rules see it."""
    files = MemoryFileSystem()
    raw = await (await start(files=files, storage={"sync_interval": "1m"})).connect()
    await raw.send("orders", numbered(4))
    got = await raw.pull("orders", max_messages=2)
    before = await raw.status()
    files.fail_after(1, StorageError("the disk is gone"), part=9)
    asked: dict[str, Callable[[], Awaitable[object]]] = {
        "settle": lambda: raw.settle(got.runs[0], nacked={0: "no"}),
        "pull": lambda: raw.pull("orders", expected=2),
        "leave": lambda: raw.heartbeat(is_leaving=True),
    }

    with pytest.raises(StorageError):
        await asked[what]()

    after = await raw.status()
    for part in ("groups", "subscriptions"):
        assert after[part] == before[part]


async def test_a_disk_that_fails_under_a_fact_stops_the_broker(start: Start) -> None:
    files = MemoryFileSystem()
    running = await start(files=files, storage={"sync_interval": "20ms"})
    raw = await running.connect()
    await raw.send("orders", numbered(1))
    files.fail_after(1, StorageError("the disk is gone"))
    with pytest.raises(StorageError):
        await raw.pull("orders")

    async with asyncio.timeout(5):
        with pytest.raises(StorageError):
            await running.broker.stopped()


async def test_a_settle_after_the_loss_of_its_consumer_is_refused(start: Start) -> None:
    clock = ManualClock()
    running = await start(clock=clock)
    raw, other = await running.connect(), await running.connect()
    await raw.send("orders", numbered(3))
    got = await raw.pull("orders")
    clock.advance(30_001)

    async def is_lost() -> bool:
        return bool((await other.status())["deliveries_lost"] == 3)

    await eventually(is_lost)
    with pytest.raises(StaleSettleError):
        await raw.settle(got.runs[0])

    assert (await positions(other))["c"] == (3, 3)
