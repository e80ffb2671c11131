"""A leader whose log has a hole that no index names: its followers may have what is missing."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from pulque.errors import UnavailableError
from pulque.model.batch import seed_of
from pulque.model.groups import Mode, tag_filter
from pulque.model.ids import IdSource
from pulque.model.pack import BatchPacker
from pulque.testing.raw import Handed, RawConnection
from pulque.wire.groups import Subscribe, Subscribed
from pulque.wire.requests import Acks, Seal, Send
from pulque.wire.responses import Sealed, Sent
from tests.unit.broker.running import eventually
from tests.unit.broker.test_leading import EPOCH, LeaderAlone

BODIES = [b"first", b"victim", b"third"]
MAGIC = b"PL"


@pytest.fixture
async def held(tmp_path: Path) -> Handed:
    """What a consumer holds; the leader that handed it out is gone, and one batch damaged."""
    leader = LeaderAlone(tmp_path / "data", min_in_sync=1)
    await leader.broker.start()
    raw = await leader.connect()
    for body in BODIES:
        await raw.send("orders", [body], acks=Acks.DISK)
    found = await raw.pull("orders")
    await raw.ask(Seal(), Sealed)
    await leader.close()
    assert found.bodies == BODIES
    make_hole(tmp_path / "data")
    return found


def make_hole(directory: Path) -> None:
    """Damage the newest batch of the sealed segment that has the victim."""
    (path,) = (directory / "messages").glob("0*0.log")
    content = bytearray(path.read_bytes())
    at = content.rindex(MAGIC, 0, content.rindex(b"victim"))
    content[at : at + len(MAGIC)] = b"??"
    path.write_bytes(content)
    path.with_suffix(".index").unlink(missing_ok=True)


@pytest.fixture
async def raw(tmp_path: Path, held: Handed) -> AsyncIterator[RawConnection]:
    """A connection to the leader that is elected next, on the same directory."""
    leader = LeaderAlone(tmp_path / "data", min_in_sync=1, epoch=EPOCH + 1)
    await leader.broker.start()
    yield await leader.connect()
    await leader.close()


def red(body: bytes) -> bytes:
    """Return a batch of one message with a tag."""
    packer = BatchPacker()
    packer.add(body, tags=("red",))
    return packer.encode(
        seed=seed_of("orders"), ids=IdSource(1).many(1, 1), created_at_ms=1, priority=4
    )


async def test_a_consumer_that_holds_what_is_in_a_hole_is_not_handed_nothing_instead(
    raw: RawConnection,
) -> None:
    assert (await raw.pull("orders", expected=0, max_messages=1)).bodies == [b"first"]
    for most in (1, 2):
        with pytest.raises(UnavailableError, match="another one of its group has to lead"):
            await raw.pull("orders", expected=1, max_messages=most)
    assert (await raw.pull("orders", expected=2)).bodies == [b"third"]


async def test_a_failed_message_in_a_hole_waits_for_a_broker_that_has_it(
    held: Handed, raw: RawConnection
) -> None:
    with capture_logs() as lines:
        await raw.settle(held.runs[0], nacked={1: "it failed"})

        async def is_decided() -> bool:
            return any(line["event"].startswith("redelivery_") for line in lines)

        await eventually(is_decided)

    events = {line["event"] for line in lines}
    assert "redelivery_delayed" in events
    assert "redelivery_impossible" not in events
    assert (await raw.status())["groups"][0]["redeliveries_pending"] == 1


async def test_whole_messages_are_retried_beside_one_in_a_hole(
    held: Handed, raw: RawConnection
) -> None:
    await raw.settle(held.runs[0], nacked={0: "", 1: "", 2: ""})

    assert await retried(raw, 2) == [b"first", b"third"]
    assert (await raw.status())["groups"][0]["redeliveries_pending"] == 1


async def test_whole_messages_of_a_range_that_nobody_settles_are_retried_beside_one_in_a_hole(
    tmp_path: Path,
) -> None:
    """A group with a filter: which messages of the range it wants has to be read."""
    async with leading(tmp_path / "data", EPOCH) as (_, raw):
        wish = tag_filter(["red"])
        await raw.ask(Subscribe("g", "c", 1, "orders", Mode.SHARED, wish), Subscribed)
        for body in BODIES:
            await raw.ask(Send(Acks.DISK, 10_000, (("orders", red(body)),)), Sent)
        assert (await raw.pull("orders")).bodies == BODIES
        await raw.ask(Seal(), Sealed)
    make_hole(tmp_path / "data")

    async with leading(tmp_path / "data", EPOCH + 1) as (leader, raw):
        leader.clock.advance(60_000)  # the consumer is lost
        await waiting(raw, 2)
        leader.clock.advance(1000)
        assert await retried(raw, 2, "another") == [b"first", b"third"]


async def test_whole_messages_that_wait_are_released_beside_one_in_a_hole(tmp_path: Path) -> None:
    async with leading(tmp_path / "data", EPOCH) as (_, raw):
        for body in BODIES:
            await raw.send("orders", [body], acks=Acks.DISK)
        run = (await raw.pull("orders")).runs[0]
        for number in range(3):
            late = 1000 * (1 + number // 2)  # the first goes with the victim, the third later
            await raw.settle(run, first=number, last=number, nacked={number: ""}, delay_ms=late)

            await waiting(raw, number + 1)  # in a batch of its own
        await raw.ask(Seal(), Sealed)
    make_hole(tmp_path / "data")

    async with leading(tmp_path / "data", EPOCH + 1) as (leader, raw):
        leader.clock.advance(3000)
        assert await retried(raw, 2) == [b"first", b"third"]
        assert (await raw.status())["messages_waiting"] == 1


@asynccontextmanager
async def leading(directory: Path, epoch: int) -> AsyncIterator[tuple[LeaderAlone, RawConnection]]:
    leader = LeaderAlone(directory, min_in_sync=1, epoch=epoch)
    await leader.broker.start()
    try:
        yield leader, await leader.connect()
    finally:
        await leader.close()


async def waiting(raw: RawConnection, count: int) -> None:
    async def waits() -> bool:
        return bool((await raw.status())["messages_waiting"] == count)

    await eventually(waits)


async def retried(raw: RawConnection, count: int, consumer: str = "c") -> list[bytes]:
    """Pull so many messages that come again; return them in any order."""
    bodies: list[bytes] = []
    while len(bodies) < count:
        found = await raw.pull(
            "%retry%orders%g", consumer=consumer, expected=len(bodies), timeout_ms=9000
        )
        assert found.bodies, bodies
        bodies += found.bodies
    return sorted(bodies)
