"""A meta server that is stopped leaves no work behind, nor begins any."""

import asyncio
from collections.abc import Sequence

import pytest

from pulque.errors import UnavailableError
from pulque.meta.components import Background
from pulque.meta.database.allotment_store import AttendingConsumer, AttendingStore, Word
from pulque.wire.ordered import Attend
from tests.unit.meta.running import Start, register, route

LONG_S = 60.0
TURNS = 20
"""Turns of the event loop that pass while closing is over at once."""


def unexpected(error: BaseException) -> None:
    raise AssertionError from error


async def test_a_word_that_is_being_written_is_done_with_before_the_database_is_closed(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    is_written, may_be_written, is_closing = asyncio.Event(), asyncio.Event(), asyncio.Event()
    attend, close = AttendingStore.attend, Background.close

    async def wait_and_attend(
        store: AttendingStore, consumers: Sequence[AttendingConsumer]
    ) -> list[Word]:
        is_written.set()
        await may_be_written.wait()
        return await attend(store, consumers)

    async def tell_and_close(background: Background, grace_s: float) -> None:
        is_closing.set()
        await close(background, max(grace_s, LONG_S))  # a busy machine takes its time

    monkeypatch.setattr(AttendingStore, "attend", wait_and_attend)
    monkeypatch.setattr(Background, "close", tell_and_close)
    before = asyncio.all_tasks()
    meta = await start()
    raw = await meta.connect()
    await register(raw, "b1")
    await route(raw, "orders")
    await raw.put(Attend("c", 1, "orders", "g", is_online=True, wait_ms=0))
    await is_written.wait()

    stopping = asyncio.create_task(meta.server.close())
    await is_closing.wait()
    may_be_written.set()
    await stopping

    assert asyncio.all_tasks() == before


async def test_work_that_other_work_began_is_waited_for() -> None:
    background = Background(unexpected)
    may_end = asyncio.Event()
    ended: list[str] = []

    async def second() -> None:
        for _ in range(TURNS):
            await asyncio.sleep(0)
        ended.append("second")

    async def first() -> None:
        await may_end.wait()
        background.start(second())

    background.start(first())
    closing = asyncio.create_task(background.close(LONG_S))
    asyncio.get_running_loop().call_soon(may_end.set)
    await closing

    assert ended == ["second"]


async def test_work_that_goes_on_for_ever_is_cancelled_when_its_time_is_over() -> None:
    background = Background(unexpected)
    before = asyncio.all_tasks()

    async def begin_again() -> None:
        await asyncio.sleep(0)
        background.start(begin_again())

    async def wait() -> None:
        await asyncio.Event().wait()

    background.start(begin_again())
    background.start(wait())
    await background.close(0.05)

    assert asyncio.all_tasks() == before


async def test_nothing_begins_once_it_is_closed() -> None:
    background = Background(unexpected)
    before = asyncio.all_tasks()
    await background.close(LONG_S)

    async def work() -> None:
        raise AssertionError

    with pytest.raises(UnavailableError, match="stop"):
        background.start(work())
    assert asyncio.all_tasks() == before
