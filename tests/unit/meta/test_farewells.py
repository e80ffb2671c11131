"""A consumer that said goodbye stays away, however late its older words are written down."""

import asyncio
from collections.abc import Sequence

import pytest

from pulque.meta.database.allotment_store import AttendingConsumer, AttendingStore, Word
from pulque.testing.raw import RawConnection
from pulque.wire.ordered import Attend, Attended
from pulque.wire.requests import Status
from pulque.wire.responses import StatusReport
from tests.unit.meta.running import Start, register, route

BEFORE = 40
"""Words of one connection before the one that counts: 16 at a time are written down."""


def word(consumer: str, group: str = "g", *, is_online: bool = True) -> Attend:
    return Attend(consumer, 1, "orders", group, is_online=is_online, wait_ms=0)


async def handled(raw: RawConnection) -> None:
    """Wait until the meta server has taken in all that a connection asked so far."""
    await raw.ask(Status(), StatusReport)


@pytest.fixture
def writing(monkeypatch: pytest.MonkeyPatch) -> asyncio.Event:
    """Words are written down only while this is set."""
    may_write = asyncio.Event()
    attend = AttendingStore.attend

    async def wait_and_attend(
        store: AttendingStore, consumers: Sequence[AttendingConsumer]
    ) -> list[Word]:
        await may_write.wait()
        return await attend(store, consumers)

    monkeypatch.setattr(AttendingStore, "attend", wait_and_attend)
    may_write.set()
    return may_write


async def test_a_farewell_over_another_connection_comes_after_older_heartbeats(
    start: Start, writing: asyncio.Event
) -> None:
    meta = await start()
    crowded, other = await meta.connect(), await meta.connect()
    await register(crowded, "b1", "b2")
    await route(crowded, "orders")
    await crowded.answer_to(await crowded.put(word("leaver")))

    writing.clear()
    asked = [await crowded.put(word("c", f"group-{number}")) for number in range(BEFORE)]
    asked.append(await crowded.put(word("leaver")))
    await handled(crowded)
    farewell = await other.put(word("leaver", is_online=False))
    await handled(other)
    writing.set()
    await other.answer_to(farewell)
    for each in asked:
        await crowded.answer_to(each)

    found = await other.ask(word("stayer"), Attended)
    assert len(found.partitions) == 2
