"""Wakes a consumer when something came; by hand, as in asyncio answers set an event."""

import asyncio
import contextlib
import time
from collections.abc import Callable, Iterable

__all__ = ["Arrivals"]


class Arrivals(asyncio.Event):
    """Set when something came for a consumer.

    Args:
        is_needed: Whether anybody waits for several brokers.
    """

    def __init__(self, *, is_needed: bool) -> None:
        super().__init__()
        del is_needed  # an event costs nothing
        # A consumer may be made before its loop runs.
        self._loop: asyncio.AbstractEventLoop | None = None

    def set_from_anywhere(self) -> None:
        """Set it. Any thread may."""
        if self._loop is None:
            self.set()  # nobody waits yet
            return
        with contextlib.suppress(RuntimeError):  # the loop is closed, and with it the consumer
            self._loop.call_soon_threadsafe(self.set)

    async def wait_for_any(
        self, inlets: Iterable[object], until: float, may_wait: Callable[[], bool]
    ) -> None:
        """Wait until something came from a broker, or something else happened."""
        del inlets  # they set it
        self._loop = asyncio.get_running_loop()
        if may_wait():
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(max(0.0, until - time.monotonic())):
                    await self.wait()

    def close(self) -> None:
        """Do nothing: there is nothing to free."""
