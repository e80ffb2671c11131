"""One run of an application: hooks, handlers, shutdown."""

import asyncio
import logging
import time
from collections.abc import Awaitable, Sequence
from dataclasses import dataclass

from pulque.app.handler import Handler
from pulque.app.runner import Runner
from pulque.app.signature import Function, name_of
from pulque.client.aio.client import Client

__all__ = ["AppRun", "Plan"]

log = logging.getLogger("pulque.app")

_LOOK = 1.0
_BLOCKED = 1.0


@dataclass(frozen=True, slots=True)
class Plan:
    """The handlers, hooks and options of an application."""

    handlers: Sequence[Handler]
    middleware: Sequence[Function]
    startup: Sequence[Function]
    shutdown: Sequence[Function]
    grace: float


class AppRun:
    """An application while it runs. Lives in one event loop; only ``stop`` is thread-safe.

    Args:
        plan: Its handlers, hooks and options.
        client: Its client, which it closes.
    """

    def __init__(self, plan: Plan, client: Client) -> None:
        self.client = client
        self.loop = asyncio.get_running_loop()
        self.ready = asyncio.Event()
        """Set when the first messages may be pulled."""
        self._plan = plan
        self._stopping = asyncio.Event()
        self._hurry = asyncio.Event()
        self._problem: BaseException | None = None

    @property
    def is_stopping(self) -> bool:
        """Whether ``stop`` was called."""
        return self._stopping.is_set()

    def stop(self) -> None:
        """Stop gracefully; the second call skips the grace."""
        self.loop.call_soon_threadsafe(self._stop)

    def _stop(self) -> None:
        if self._stopping.is_set():
            self._hurry.set()
        self._stopping.set()

    async def run(self) -> BaseException | None:
        """Handle messages until ``stop``; return the error that stopped it otherwise."""
        try:
            for hook in self._plan.startup:
                await _call(hook)
            await self._handle()
        finally:
            await self.client.close()
        return self._problem

    async def _handle(self) -> None:
        runners = [self._runner(handler) for handler in self._plan.handlers]
        tasks = [
            asyncio.create_task(each.run(), name=f"pulque-{each.handler.name}") for each in runners
        ]
        for task in tasks:
            task.add_done_callback(self._ended)
        watch = asyncio.create_task(_watch(runners), name="pulque-watch")
        log.info("running: handlers=%d", len(runners))
        self.ready.set()
        try:
            await self._stopping.wait()
        finally:
            for task in (*tasks, watch):
                task.cancel()
            await asyncio.gather(*tasks, watch, return_exceptions=True)
            await self._finish(runners)
        log.info("stopped")

    def _runner(self, handler: Handler) -> Runner:
        consumer = self.client.consumer(handler.subject, handler.group, **handler.consumer)
        return Runner(handler, consumer, self._plan.middleware, self._exit)

    async def _finish(self, runners: Sequence[Runner]) -> None:
        grace = self._plan.grace
        log.info("stopping: grace=%g", grace)
        await asyncio.gather(*(each.finish(self._hurry, grace) for each in runners))
        for hook in reversed(self._plan.shutdown):
            try:
                await _call(hook)
            except Exception:
                log.exception("a shutdown hook failed: %s", name_of(hook))

    def _ended(self, task: asyncio.Task[None]) -> None:
        """Stop everything if one handler cannot continue."""
        if not task.cancelled() and (error := task.exception()) is not None:
            self._exit(error)

    def _exit(self, error: BaseException) -> None:
        log.error("ending, because of %s: %s", type(error).__name__, error)
        self._problem = self._problem or error
        self._stopping.set()


async def _call(hook: Function) -> None:
    result = hook()
    if isinstance(result, Awaitable):
        await result


async def _watch(runners: Sequence[Runner]) -> None:
    """Log when the broker is lost and back, and when the loop is blocked."""
    gone_at: float | None = None
    while True:
        slept_at = time.monotonic()
        await asyncio.sleep(_LOOK)
        now = time.monotonic()
        if now - slept_at > _LOOK + _BLOCKED:
            log.warning(
                "the event loop stood still for %.1f s: an async handler blocks it, or the "
                "machine is busy",
                now - slept_at - _LOOK,
            )
        is_connected = all(each.consumer.is_connected for each in runners)
        if not is_connected and gone_at is None:
            gone_at = slept_at
            log.warning("no connection to the broker; trying on")
        elif is_connected and gone_at is not None:
            log.warning("connected to the broker again after %.0f s", now - gone_at)
            gone_at = None
