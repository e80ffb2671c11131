"""A producer's connections; by hand, as in asyncio one loop writes and reads."""

import asyncio
import contextlib
import functools
import logging
import time
from collections.abc import Awaitable, Callable
from typing import Generic, TypeVar

from pulque.client.aio.connection import AsyncConnection
from pulque.client.connection.backoff import Backoff
from pulque.client.routing.broker_health import Breaker
from pulque.client.routing.failover_rules import ANSWER_LIMIT
from pulque.client.sending.dispatch import Dispatch
from pulque.client.sending.outgoing_batch import OutgoingBatch
from pulque.client.sending.producer_core import OutgoingCore
from pulque.client.sending.promises import Promise
from pulque.errors import DisconnectedError, PulqueError
from pulque.wire.responses import Response

__all__ = ["SendLinks"]

log = logging.getLogger("pulque.client")

P = TypeVar("P", bound=Promise)
_CONNECT_LIMIT = 5.0


class SendLinks(Generic[P]):
    """All that moves the batches of one producer.

    Args:
        core: What to send.
        connect: Opens a connection to a place within so many seconds.
        stale: Told when a broker cannot be reached, or refuses what the route says is its own.
        draw: Returns a random number in ``0.0..1.0``.
    """

    def __init__(
        self,
        core: OutgoingCore[P],
        connect: Callable[[str, float], Awaitable[AsyncConnection]],
        stale: Callable[[], None],
        draw: Callable[[], float],
    ) -> None:
        self.changed = asyncio.Event()
        """Set whenever batches got their outcome."""
        self.stale = stale
        self._core = core
        self._connect = connect
        self._draw = draw
        self._links: list[SendLink[P]] = []
        self.owner: object = None
        """Lives as long as the links: a producer that nobody holds is still closed at the end."""
        core.on_place = self._add
        core.signal.on_hurry = self._hurry

    def pump(self) -> None:
        """Write what is ready, and have the clock ring when something will be."""
        self._core.signal.is_up = False
        for link in self._links:
            link.pump()

    def _hurry(self) -> None:
        self._core.let_loose()
        self.pump()

    def look(self) -> None:
        """Have what was dealt out anew sent; perhaps nobody else will come."""
        if self._core.was_dealt_anew:
            self._core.was_dealt_anew = False
            self.pump()

    def retry_now(self) -> None:
        """Have those connect that wait before another try: brokers may be elsewhere by now."""
        for link in self._links:
            link.retry_now()

    def tell(self) -> None:
        """Call those who wait for batches that have an outcome."""
        finished = self._core.take_finished()
        for batch in finished:
            batch.tell()
        if finished:
            self.changed.set()
        self.look()

    async def stop(self) -> None:
        """End the tasks and the connections."""
        await asyncio.gather(*(link.stop() for link in self._links))

    def _add(self, place: str, dispatch: Dispatch) -> None:
        connect = functools.partial(self._connect, place)
        self._links.append(SendLink(self, self._core, dispatch, connect, self._draw))


class SendLink(Generic[P]):
    """Moves the batches of one producer to one broker."""

    def __init__(
        self,
        links: SendLinks[P],
        core: OutgoingCore[P],
        dispatch: Dispatch,
        connect: Callable[[float], Awaitable[AsyncConnection]],
        draw: Callable[[], float],
    ) -> None:
        self._links = links
        self._core = core
        self._dispatch = dispatch
        self._connect = connect
        self._backoff = Backoff(draw)
        self._loop = asyncio.get_running_loop()
        self._connection: AsyncConnection | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._lost = asyncio.Event()
        self._retry = asyncio.Event()
        self._task = asyncio.create_task(self._keep_connected(), name="pulque-producer")

    async def stop(self) -> None:
        """End the task and the connection."""
        self._task.cancel()
        if self._timer is not None:
            self._timer.cancel()
        await asyncio.gather(self._task, return_exceptions=True)

    def retry_now(self) -> None:
        """Connect now, if it waits before another try."""
        self._backoff.reset()
        self._retry.set()

    def pump(self) -> None:
        """Write what is ready, and have the clock ring when something will be."""
        connection = self._connection
        while connection is not None and connection.is_open:
            now = time.monotonic()
            batches = self._dispatch.take(now)
            if not batches:
                break
            self._post(connection, batches, now)
        self._set_timer()

    def _post(self, connection: AsyncConnection, batches: list[OutgoingBatch], now: float) -> None:
        key = id(batches)
        self._dispatch.sent(key, batches)

        def take_in(response: Response | PulqueError) -> None:
            if not isinstance(response, DisconnectedError):
                self._backoff.reset()
                self._dispatch.answered(key, response, time.monotonic())
                self._links.tell()
                self._look_for_refusals()
                self.pump()

        connection.post(self._dispatch.request(batches, now), take_in)

    def _look_for_refusals(self) -> None:
        if self._dispatch.was_refused:
            # What it did not take is with other brokers by now.
            self._dispatch.was_refused = False
            self._links.stale()
            self._links.pump()

    def _set_timer(self) -> None:
        wake = self._dispatch.next_wake()
        patience_ends = self._patience_ends()
        if patience_ends is not None:
            wake = patience_ends if wake is None else min(wake, patience_ends)
        if self._timer is not None:
            if wake is not None and self._timer.when() <= self._loop_time(wake):
                return  # it rings early enough, and looks again then
            self._timer.cancel()
            self._timer = None
        if wake is not None and not self._task.done():
            self._timer = self._loop.call_at(self._loop_time(wake), self._ring)

    def _loop_time(self, instant: float) -> float:
        return self._loop.time() + (instant - time.monotonic())

    def _patience_ends(self) -> float | None:
        """Return when to give the broker up for others, if it does not answer until then."""
        sent_at = self._dispatch.oldest_in_flight()
        if self._dispatch.health is None or sent_at is None:
            return None
        return sent_at + ANSWER_LIMIT

    def _ring(self) -> None:
        self._timer = None
        now = time.monotonic()
        is_overdue = self._dispatch.expire(now)
        self._links.tell()
        patience_ends = self._patience_ends()
        is_stuck = patience_ends is not None and patience_ends <= now
        if (is_overdue or is_stuck) and self._connection is not None:
            log.info("disconnected: the broker owes an answer for too long")
            self._connection.on_lost = None
            self._connection.abort()
            self._disconnected(DisconnectedError("the broker owes an answer for too long"))
            self._give_up(max(ANSWER_LIMIT, Breaker.LONG))
        self.pump()

    def _give_up(self, lasted: float) -> None:
        """Let other brokers have what this one cannot be sent, if there are any."""
        if self._core.unreachable(self._dispatch, time.monotonic(), lasted):
            self._links.pump()
        self._links.look()
        self._links.stale()

    async def _keep_connected(self) -> None:
        try:
            while True:
                started = time.monotonic()
                try:
                    connection = await self._connect(_CONNECT_LIMIT)
                except PulqueError as error:
                    self._not_connected(error, started)
                else:
                    await self._stay_connected(connection)
                await self._rest()
        finally:
            if self._connection is not None:
                self._connection.on_lost = None
                await self._connection.close()

    async def _rest(self) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._backoff.next_wait()):
                await self._retry.wait()
        self._retry.clear()

    def _not_connected(self, error: PulqueError, started: float) -> None:
        log.info("not connected: %s", error)
        self._dispatch.problem = error
        self._give_up(time.monotonic() - started)
        if not error.retryable:
            self._dispatch.fail_all(error)
            self._links.tell()

    async def _stay_connected(self, connection: AsyncConnection) -> None:
        self._dispatch.problem = None
        self._dispatch.is_led = connection.welcome.tenure.epoch > 0
        if self._dispatch.health is not None:
            self._dispatch.health.answered(time.monotonic(), 0.0)
        self._core.limit_messages(connection.welcome.max_message)
        self._lost.clear()
        connection.on_lost = self._disconnected
        self._connection = connection
        if not connection.is_open:
            self._disconnected(DisconnectedError(f"{connection.address} closed it at once"))
        self.pump()
        await self._lost.wait()

    def _disconnected(self, error: DisconnectedError) -> None:
        log.info("disconnected: %s", error)
        self._connection = None
        self._dispatch.problem = error
        self._dispatch.disconnected()
        self._links.look()
        self._lost.set()
