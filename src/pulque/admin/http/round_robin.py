"""One HTTP request goes on per round of the event loop.

Brokers and meta servers live in the same loop. A step of a request, from one wait to the next,
takes a millisecond or more: a hundred that go on in one round, because they all waited for the
same, would keep everybody else waiting for a tenth of a second.
"""

import asyncio
import types
from collections import deque
from collections.abc import Coroutine, Generator
from typing import Any, TypeVar

__all__ = ["RoundRobin"]

T = TypeVar("T")


class RoundRobin:
    """Has requests take their steps one after the other, each in a round of its own."""

    def __init__(self) -> None:
        self._waiting: deque[asyncio.Future[None]] = deque()
        self._is_taken = False
        """Somebody had the turn of this round."""

    async def take(self) -> None:
        """Wait for a turn; return at once if nobody has had the one of this round."""
        loop = asyncio.get_running_loop()
        if not self._is_taken:
            self._is_taken = True
            loop.call_soon(self._give)
            return
        turn = loop.create_future()
        self._waiting.append(turn)
        await turn

    @types.coroutine
    def run(self, request: Coroutine[Any, Any, T]) -> Generator[Any, Any, T]:
        """Take a turn for each step of a request, and return what it returns."""
        problem: BaseException | None = None
        while True:
            try:
                waited_for = request.send(None) if problem is None else request.throw(problem)
            except StopIteration as end:
                found: T = end.value
                return found
            problem = None
            try:
                yield waited_for
                yield from self.take().__await__()
            except BaseException as error:  # noqa: BLE001  # cancellation too is the request's
                problem = error

    def _give(self) -> None:
        """Give the turn of the next round to who has waited longest."""
        while self._waiting:
            turn = self._waiting.popleft()
            if not turn.done():
                turn.set_result(None)
                asyncio.get_running_loop().call_soon(self._give)
                return
        self._is_taken = False
