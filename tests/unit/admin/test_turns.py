"""Requests that come together, beside what else the event loop has to do."""

import asyncio

import pytest
from starlette.types import Message, Receive, Scope, Send

from pulque.admin.http.guard import RequestGuard
from pulque.admin.http.round_robin import RoundRobin

LOCAL = (b"host", b"localhost")
GET = {"type": "http", "method": "GET", "path": "/api/v1/subjects", "headers": [LOCAL]}
PATCH = {
    **GET,
    "method": "PATCH",
    "headers": [LOCAL, (b"content-length", b"2"), (b"content-type", b"application/json")],
}


class Rounds:
    """Counts the rounds of the event loop."""

    def __init__(self) -> None:
        self.count = 0
        self.tick()

    def tick(self) -> None:
        self.count += 1
        asyncio.get_running_loop().call_soon(self.tick)


@pytest.mark.parametrize("scope", [GET, PATCH], ids=["without a body", "bodies come together"])
async def test_each_request_goes_on_in_a_round_of_its_own(scope: dict[str, object]) -> None:
    rounds, began, went_on = Rounds(), list[int](), list[int]()
    same = asyncio.Event()

    async def app(_scope: Scope, _receive: Receive, _send: Send) -> None:
        began.append(rounds.count)
        await same.wait()
        went_on.append(rounds.count)

    whole = asyncio.Event()

    async def receive() -> Message:
        await whole.wait()
        return {"type": "http.request", "body": b"{}"}

    async def send(_: Message) -> None:
        raise AssertionError("nothing is to be sent")

    guard = RequestGuard(app)
    asyncio.get_running_loop().call_later(0.05, whole.set)
    asyncio.get_running_loop().call_later(0.2, same.set)
    await asyncio.gather(*(guard(scope, receive, send) for _ in range(50)))

    assert (len(set(began)), len(set(went_on))) == (50, 50)


async def test_a_request_alone_does_not_wait() -> None:
    turns, rounds = RoundRobin(), Rounds()
    await asyncio.sleep(0)
    before = rounds.count

    await turns.take()

    assert rounds.count == before


async def test_who_left_does_not_keep_the_turn() -> None:
    turns = RoundRobin()
    waiting = [asyncio.create_task(turns.take()) for _ in range(5)]
    await asyncio.sleep(0)
    waiting[2].cancel()

    found = await asyncio.wait_for(asyncio.gather(*waiting, return_exceptions=True), 30)

    assert [each is None for each in found] == [True, True, False, True, True]
    with pytest.raises(asyncio.CancelledError):
        waiting[2].result()


async def test_a_request_in_turns_returns_raises_and_is_cancelled_as_ever() -> None:
    turns, told = RoundRobin(), list[str]()

    async def returns() -> int:
        await asyncio.sleep(0)
        return 7

    async def raises() -> None:
        await asyncio.sleep(0)
        raise ValueError("wrong")

    async def times_out() -> str:
        try:
            async with asyncio.timeout(0.01):
                await asyncio.Event().wait()
        except TimeoutError:
            return "late"
        return "never"

    async def waits() -> None:
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            told.append("cancelled")
            raise

    assert await turns.run(returns()) == 7
    assert await turns.run(times_out()) == "late"
    with pytest.raises(ValueError, match="wrong"):
        await turns.run(raises())
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(turns.run(waits()), 0.01)
    assert told == ["cancelled"]
