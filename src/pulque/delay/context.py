"""What the parts of a delay server have at hand."""

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
    """The world around the data path."""

    clock: Clock
    scheduler: Executor
    """The thread that lets schedule logs grow: senders wait for it."""
    looker: Executor
    """The thread that looks into ticks, and removes them: nobody's messages wait for it."""
    noter: Executor
    """The thread that works on dispatch logs."""
    reader: Executor
    """Threads that read, and that wait for the disk."""
    lock: asyncio.Lock
    """Held while schedule logs grow."""
    warn: Callable[..., None]
    """Logs an event with its fields."""
    fail: Callable[[PulqueError], None]
    """Called when the disk failed and the server must stop."""
    looking: asyncio.Lock = field(default_factory=asyncio.Lock)
    """Held while somebody looks into ticks. Whoever needs both locks takes this one first."""

    async def look(self, work: Callable[[], _T]) -> _T:
        """Do something in the thread that looks into ticks, and return what it does."""
        async with self.looking:
            return await asyncio.get_running_loop().run_in_executor(self.looker, work)
