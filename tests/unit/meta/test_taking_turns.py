"""One connection with very many questions does not hold up the question of another one."""

from collections.abc import Callable

import pytest

from pulque.net.server import AcceptedConnection
from pulque.testing.raw import RawConnection
from pulque.wire.ordered import Attend
from pulque.wire.requests import Request
from tests.unit.meta.running import Start, eventually, follow, lead, register, route

MANY = 90
FEW = 40
"""Answers to the crowd that may come first: words are written down 16 at a time."""


def a_word(number: int) -> Attend:
    return Attend("c", 1, "orders", f"group-{number}", is_online=True, wait_ms=0)


@pytest.mark.parametrize(
    ("crowd", "single"),
    [(a_word, a_word(MANY)), (lambda number: lead(f"b{number % 3}"), lead("b0"))],
    ids=["Attend", "Lead"],
)
async def test_a_question_is_answered_before_most_of_a_crowd_from_another_connection(
    start: Start,
    monkeypatch: pytest.MonkeyPatch,
    crowd: Callable[[int], Request],
    single: Request,
) -> None:
    meta = await start()
    greedy, modest = await meta.connect(), await meta.connect()
    await register(greedy, "group-a")
    await route(greedy, "orders")
    await follow(greedy, "b0", "b1", "b2")
    peers: list[str] = []
    send = AcceptedConnection.send

    def noted(connection: AcceptedConnection, buffers: list[bytes | memoryview]) -> None:
        peers.append(connection.peer)
        send(connection, buffers)

    monkeypatch.setattr(AcceptedConnection, "send", noted)
    await modest.answer_to(await modest.put(single))
    me = peers.pop()
    asked = [await greedy.put(crowd(number)) for number in range(MANY)]

    async def has_begun() -> bool:
        return bool(peers)

    # What comes now stands behind all of them, if questions are taken as they come.
    await eventually(has_begun)
    await modest.answer_to(await modest.put(single))
    await _all_answered(greedy, asked)

    assert peers.index(me) <= FEW


async def _all_answered(raw: RawConnection, asked: list[int]) -> None:
    for each in asked:
        await raw.answer_to(each)
