"""Clock, threads and locks that the parts of a delay server share."""

import asyncio
from collections.abc import Callable
from concurrent.futures import Executor
from dataclasses import dataclass, field
from typing import TypeVar

from pulque.clock import Clock
from pulque.errors import PulqueError

__all__ = ["Around"]

_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class Around:
    """Clock, threads and locks around the data path."""

    clock: Clock
    scheduler: Executor
    """The thread that writes schedule logs: producers wait for it."""
    looker: Executor
    """The thread that searches and removes ticks: no message waits for it."""
    noter: Executor
    """The thread that writes dispatch logs."""
    reader: Executor
    """Threads for reads and syncs."""
    lock: asyncio.Lock
    """Held while schedule logs are written."""
    warn: Callable[..., None]
    """Logs an event with its fields."""
    fail: Callable[[PulqueError], None]
    """Called when the disk failed and the server must stop."""
    looking: asyncio.Lock = field(default_factory=asyncio.Lock)
    """Held during searches of ticks. If both locks are needed, this one is taken first."""

    async def look(self, work: Callable[[], _T]) -> _T:
        """Run a function in the search thread, and return its result."""
        async with self.looking:
            return await asyncio.get_running_loop().run_in_executor(self.looker, work)
