"""Cancels a task wherever asyncio itself may: where it waits for something."""

import asyncio
from collections.abc import Awaitable, Coroutine, Generator
from typing import Any


class Canceller:
    """Cancels what is passed to ``run`` at the point where it waits for the so-many-th time.

    Args:
        point: At which one, from 0.
    """

    def __init__(self, point: int) -> None:
        self.has_cancelled = False
        self._left = point

    async def run(self, act: Coroutine[Any, Any, Any]) -> Any:
        """Return what ``act`` returns, or None if it was cancelled."""
        try:
            return await asyncio.create_task(self._drive(act))
        except asyncio.CancelledError:
            assert self.has_cancelled
            return None

    async def _drive(self, act: Coroutine[Any, Any, Any]) -> Any:
        return await _Driven(act, self)

    def look(self) -> None:
        """Cancel the running task if it is time; it finds out where it waits next."""
        if self._left == 0:
            self.has_cancelled = True
            task = asyncio.current_task()
            assert task is not None
            task.cancel()
        self._left -= 1


class _Driven(Awaitable[Any]):
    def __init__(self, act: Coroutine[Any, Any, Any], canceller: Canceller) -> None:
        self._act = act
        self._canceller = canceller

    def __await__(self) -> Generator[Any, Any, Any]:
        step, value = self._act.send, None
        while True:
            try:
                waits_for = step(value)
            except StopIteration as end:
                return end.value
            self._canceller.look()
            try:
                value, step = (yield waits_for), self._act.send
            except BaseException as error:  # noqa: BLE001  # for what is driven
                value, step = error, self._act.throw
