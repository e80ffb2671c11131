"""Nacked messages, and those of lost consumers, come to their group again, each once."""

import asyncio

import pytest

from pulque.errors import FencedError
from pulque.model.batch import Codec, seed_of
from pulque.model.pack import BatchPacker
from pulque.testing.clock import ManualClock
from pulque.testing.raw import Handed, RawConnection, pack_batch
from pulque.wire.requests import Acks, Send
from pulque.wire.responses import Sent
from tests.unit.broker.disks import PickyDisk
from tests.unit.broker.running import Running, Start, eventually, numbered

RETRY = "%retry%orders%g"
LEASE_MS = 30_000
LIMIT_S = 20.0
AT_ONCE = {"delays": "0s"}
"""For tests of what is retried, not of when."""


async def pull_retries(raw: RawConnection, count: int, consumer: str = "c2") -> Handed:
    """Pull from the retry partition until so many messages are there."""
    async with asyncio.timeout(LIMIT_S):
        got = await raw.pull(RETRY, consumer=consumer, timeout_ms=5000)
        while got.length < count:
            got = await raw.pull(RETRY, consumer=consumer, timeout_ms=50)
    return got


@pytest.mark.accepts("000-27")
async def test_a_nacked_message_comes_again_with_the_next_attempt(raw: RawConnection) -> None:
    await raw.send("orders", numbered(4))
    got = await raw.pull("orders")

    await raw.settle(got.runs[0], nacked={1: "no stock", 3: "no money"})
    retried = await pull_retries(raw, 2)

    assert retried.bodies == [b"1", b"3"]
    assert [message.attempt for message in retried.runs[0].messages] == [2, 2]
    assert [message.headers["pulque.reason"] for message in retried.runs[0].messages] == [
        "no stock",
        "no money",
    ]


async def test_a_retried_message_is_the_same_message(raw: RawConnection) -> None:
    packer = BatchPacker()
    packer.add(b"plain")
    packer.add(
        b"body",
        key="k",
        order_key="o",
        tags=("red", "blue"),
        headers={"who": "me"},
        expires_at_ms=9_999_999_999_999,
    )
    batch = packer.encode(
        seed=seed_of("orders"), ids=bytes(range(32)), created_at_ms=1_700_000_000_123
    )
    await raw.ask(Send(Acks.MEMORY, 1000, (("orders", batch),)), Sent)
    got = await raw.pull("orders")
    await raw.settle(got.runs[0], nacked={1: ""})

    (before,) = got.runs[0].messages[1:]
    (after,) = (await pull_retries(raw, 1)).runs[0].messages

    for name in ("id", "body", "key", "order_key", "tags", "created_at_ms", "expires_at_ms"):
        assert getattr(after, name) == getattr(before, name), name
    assert {k: v for k, v in after.headers.items() if not k.startswith("pulque.")} == {"who": "me"}
    assert after.subject == "orders"
    assert (before.attempt, after.attempt) == (1, 2)


@pytest.mark.accepts("000-40", "000-43", "000-44")
async def test_a_message_that_fails_again_comes_a_third_time(raw: RawConnection) -> None:
    await raw.send("orders", [b"stubborn"])
    got = await raw.pull("orders")
    await raw.settle(got.runs[0], nacked={0: "once"})
    again = await pull_retries(raw, 1)
    await raw.settle(again.runs[0], consumer="c2", nacked={0: "twice"})

    third = await raw.pull(RETRY, consumer="c2", expected=1, timeout_ms=5000)

    (message,) = third.runs[0].messages
    assert (message.body, message.attempt, message.headers["pulque.reason"]) == (
        b"stubborn",
        3,
        "twice",
    )


async def test_retries_of_one_group_are_not_seen_by_another(raw: RawConnection) -> None:
    await raw.send("orders", numbered(2))
    got = await raw.pull("orders", group="g")
    await raw.settle(got.runs[0], group="g", nacked={0: ""})
    await pull_retries(raw, 1)

    other = await raw.pull("orders", "%retry%orders%h", group="h")

    assert other.bodies == numbered(2)


@pytest.mark.parametrize("codec", Codec)
async def test_single_messages_are_taken_out_of_any_batch(
    raw: RawConnection, codec: Codec
) -> None:
    batch = pack_batch("orders", numbered(50), codec=codec)
    await raw.ask(Send(Acks.MEMORY, 1000, (("orders", batch),)), Sent)
    got = await raw.pull("orders")

    await raw.settle(got.runs[0], nacked={0: "", 17: "", 49: ""})

    assert (await pull_retries(raw, 3)).bodies == [b"0", b"17", b"49"]


@pytest.mark.accepts("003-46", "003-52", "000-36", "000-37", "000-38")
async def test_what_a_silent_consumer_held_comes_to_others_and_nobody_is_rewound(
    start: Start,
) -> None:
    clock = ManualClock()
    raw = await (await start(clock=clock, retry=AT_ONCE)).connect()
    await raw.send("orders", numbered(7))
    dead = await raw.pull("orders", consumer="dead", max_messages=4)
    await raw.settle(dead.runs[0], consumer="dead", last=0)
    await raw.pull("orders", consumer="alive", max_messages=1)
    # Its pull log has a second range, as the other consumer was handed a message in between.
    second = await raw.pull("orders", consumer="dead", expected=4, max_messages=1)
    assert second.bodies == [b"5"]

    clock.advance(LEASE_MS)
    await raw.heartbeat(consumer="alive")
    clock.advance(1)
    retried = await pull_retries(raw, 4, consumer="alive")
    fresh = await raw.pull("orders", consumer="alive", expected=1)

    assert retried.bodies == [b"1", b"2", b"3", b"5"]
    assert {message.attempt for run in retried.runs for message in run.messages} == {2}
    assert fresh.bodies == [b"6"]
    status = await raw.status()
    assert {
        s["consumer"]: s["settled"] for s in status["subscriptions"] if s["partition"] == "orders"
    } == {"dead": 5, "alive": 0}


@pytest.mark.accepts("000-36")
async def test_a_consumer_that_is_heard_of_in_any_way_keeps_what_it_holds(start: Start) -> None:
    clock = ManualClock()
    running = await start(
        clock=clock,
        consumption={"lease": "2s", "lease_check": "10ms"},
    )
    raw = await running.connect()
    await raw.send("orders", numbered(9))
    held = {name: await raw.pull("orders", consumer=name, max_messages=3) for name in "abc"}

    for step in range(4):
        clock.advance(1500)
        await raw.heartbeat(consumer="a")
        await raw.pull("orders", consumer="b", expected=3)
        await raw.settle(held["c"].runs[0], consumer="c", first=0, last=min(step, 1))
        await running.house_kept()

    assert (await raw.status())["deliveries_lost"] == 0
    clock.advance(2001)
    await running.house_kept()
    assert (await raw.status())["deliveries_lost"] == 7


async def test_a_twin_that_is_fenced_off_does_not_keep_its_successors_lease(start: Start) -> None:
    clock = ManualClock()
    running = await start(clock=clock, retry=AT_ONCE)
    raw = await running.connect()
    await raw.send("orders", numbered(2))
    await raw.pull("orders", incarnation=2)

    clock.advance(LEASE_MS)
    for request in (raw.pull("orders", incarnation=1), raw.heartbeat(incarnation=1)):
        with pytest.raises(FencedError):
            await request
    clock.advance(1)

    assert (await pull_retries(raw, 2)).bodies == numbered(2)


async def test_a_consumer_that_leaves_hands_back_what_it_holds_at_once(
    raw: RawConnection,
) -> None:
    await raw.send("orders", numbered(3))
    await raw.pull("orders", consumer="leaver")

    await raw.heartbeat(consumer="leaver", is_leaving=True)

    assert (await pull_retries(raw, 3)).bodies == numbered(3)


async def test_a_loss_of_very_many_messages_is_redelivered_whole(raw: RawConnection) -> None:
    for at in range(0, 3000, 500):
        await raw.send("orders", numbered(500, at))
    await raw.pull("orders", consumer="dead", max_messages=3000)

    await raw.heartbeat(consumer="dead", is_leaving=True)
    bodies: list[bytes] = []
    while len(bodies) < 3000:
        got = await raw.pull(
            RETRY, consumer="heir", expected=len(bodies), max_messages=700, timeout_ms=5000
        )
        bodies += got.bodies

    assert bodies == numbered(3000)
    assert (await raw.status())["messages_redelivered"] == 3000


async def test_redelivery_does_not_hold_up_the_group(raw: RawConnection) -> None:
    await raw.send("orders", numbered(2))
    got = await raw.pull("orders")
    await raw.settle(got.runs[0], nacked={0: "", 1: ""})
    await raw.send("orders", [b"fresh"])

    fresh = await raw.pull("orders", expected=2)

    assert fresh.bodies == [b"fresh"]


# -- over restarts ------------------------------------------------------------------------------


async def test_a_redelivery_is_performed_once_over_a_clean_restart(
    running: Running, raw: RawConnection
) -> None:
    await raw.send("orders", numbered(3))
    got = await raw.pull("orders")
    await raw.settle(got.runs[0], nacked={0: "", 2: ""})

    again = await running.restarted()
    raw = await again.connect()
    retried = await pull_retries(raw, 2)
    once_more = await again.restarted()
    _, messages = await (await once_more.connect()).read(RETRY)

    assert retried.bodies == [b"0", b"2"]
    assert [message.body for message in messages] == [b"0", b"2"]
    await once_more.close()


@pytest.mark.parametrize("delay_ms", [0, 60_000])
async def test_a_redelivery_that_finds_no_room_is_not_forgotten_over_a_restart(
    start: Start, delay_ms: int
) -> None:
    disk = PickyDisk()
    running = await start(files=disk)
    raw = await running.connect()
    await raw.send("orders", [b"fails"])
    got = await raw.pull("orders")
    disk.refuses = b"fails"
    await raw.settle(got.runs[0], nacked={0: "no"}, delay_ms=delay_ms)

    async def is_refused() -> bool:
        return disk.refused > 0

    await eventually(is_refused)
    (group,) = (await raw.status())["groups"]
    assert group["redeliveries_pending"] == 1
    await running.close()  # with a checkpoint: what it does not have is forgotten
    disk.refuses = b""

    raw = await (await start(files=disk)).connect()
    target = "%wait%orders%g" if delay_ms else RETRY

    async def has_come() -> bool:
        _, messages = await raw.read(target)
        return [message.body for message in messages] == [b"fails"]

    await eventually(has_come)


async def test_a_redelivery_is_performed_once_after_a_kill_at_any_moment(
    running: Running, raw: RawConnection, start: Start
) -> None:
    await raw.send("orders", numbered(3))
    got = await raw.pull("orders")
    await raw.settle(got.runs[0], nacked={0: "", 2: ""})
    copies = [running.as_if_killed("right after the settle")]
    await pull_retries(raw, 2)
    copies.append(running.as_if_killed("after the retry"))

    for copy in copies:
        recovered = await (await start(copy)).connect()
        assert (await pull_retries(recovered, 2)).bodies == [b"0", b"2"]
        _, messages = await recovered.read(RETRY)
        assert [message.body for message in messages] == [b"0", b"2"]


async def test_a_lease_begins_anew_when_the_broker_starts(running: Running, start: Start) -> None:
    raw = await running.connect()
    await raw.send("orders", numbered(2))
    await raw.pull("orders")
    await running.close()
    clock = ManualClock()

    again = await start(clock=clock, retry=AT_ONCE)
    raw = await again.connect()
    clock.advance(LEASE_MS)
    await again.house_kept()
    assert (await raw.status())["deliveries_lost"] == 0
    clock.advance(5001)

    assert (await pull_retries(raw, 2)).bodies == numbered(2)


# -- what cannot be redelivered -----------------------------------------------------------------


async def test_a_message_that_nobody_can_read_stops_no_retry(raw: RawConnection) -> None:
    """Its producer packed headers that are no text: the crc is right, the content is nonsense."""
    packer = BatchPacker()
    packer.add(b"fine")
    packer.add_encoded(b"bad", headers=b"\xff\xfe\xfd")
    packer.add_encoded(b"odd", headers=b"name without value")
    packer.add(b"also fine")
    batch = packer.encode(seed=seed_of("orders"), ids=bytes(64), created_at_ms=0)
    await raw.ask(Send(Acks.MEMORY, 1000, (("orders", batch),)), Sent)
    got = await raw.pull("orders")
    assert got.runs[0].length == 4

    await raw.settle(got.runs[0], nacked=dict.fromkeys(range(4), "no"))

    assert (await pull_retries(raw, 2)).bodies == [b"fine", b"also fine"]

    async def is_done() -> bool:
        status = await raw.status()
        return not any(group["redeliveries_pending"] for group in status["groups"])

    await eventually(is_done)
    _, letters = await raw.read("%dead%orders%g")
    assert [each.headers["pulque.unreadable"] for each in letters] == ["1", "2"]
    assert [each.body.count(body) for each, body in zip(letters, (b"bad", b"odd"), strict=True)]
