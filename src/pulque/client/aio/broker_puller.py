"""What a consumer has for each broker; by hand, as in asyncio answers come by themselves."""

import asyncio
import contextlib
import functools
import logging
import time
from collections.abc import Awaitable, Callable

from pulque.client.aio.concurrency import Lock
from pulque.client.aio.connection import AsyncConnection
from pulque.client.aio.deferral import Deferrals
from pulque.client.connection.backoff import Backoff
from pulque.client.options.consumer_plan import ConsumerPart
from pulque.client.receiving.error_policy import Trouble, problem_of
from pulque.errors import (
    CorruptionError,
    DisconnectedError,
    PulqueError,
    RejectedError,
    RequestTimeoutError,
)
from pulque.model.names import PartitionName
from pulque.model.positions import Tenure
from pulque.wire.requests import Request, Settle
from pulque.wire.responses import Beaten, Pulled, Response

__all__ = ["FOR_EVER", "UNREACHABLE", "Inlet"]

log = logging.getLogger("pulque.client")

FOR_EVER = float("inf")
_LONG_POLL = 10.0
_TICK = 0.1
_BEATS_PER_LEASE = 3
_REQUEST_TIMEOUT = 5.0
_CONNECT_LIMIT = 5.0
_NO_ROOM_WAIT = 0.02
UNREACHABLE = (DisconnectedError, RequestTimeoutError, CorruptionError)
"""What another connection may mend."""


class Inlet:
    """The part of one consumer that deals with one broker.

    Args:
        part: What is held, and what is kept.
        connect: Opens a connection to the broker within so many seconds.
        timeout: The client's.
        draw: Returns a random number in ``0.0..1.0``.
        arrived: Set when something came.
        deferrals: Take messages to a delay server that are wanted again at a certain time.
    """

    def __init__(
        self,
        part: ConsumerPart,
        *,
        connect: Callable[[float], Awaitable[AsyncConnection]],
        timeout: float,
        draw: Callable[[], float],
        arrived: asyncio.Event,
        deferrals: Deferrals,
    ) -> None:
        self.core, self._local = part
        self.lock = Lock()
        self._deferrals = deferrals
        self.lost_at = time.monotonic()
        """Since when there is no connection, if there is none."""
        self.problem: PulqueError | None = None
        """Why there is no connection."""
        self.owner: object = None
        """Lives as long as this does."""
        self._connect = connect
        self._timeout = timeout
        self._arrived = arrived
        self._trouble = Trouble(draw, timeout)
        self._backoff = Backoff(draw)
        self._retry_at = 0.0
        self._opener: asyncio.Task[None] | None = None
        self._connection: AsyncConnection | None = None
        self._keeper: asyncio.Task[None] | None = None
        self._fatal: PulqueError | None = None
        self._pull_due = FOR_EVER
        self._lease = FOR_EVER
        self._beat_at = 0.0
        self._contact_at = FOR_EVER
        self._is_closed = self._has_ended = False
        if self._local is not None:
            self._local.on_adopted = self._adopted

    @property
    def connection(self) -> AsyncConnection | None:
        """The connection, if there is an open one."""
        found = self._connection
        return found if found is not None and found.is_open else None

    @property
    def pull_due(self) -> float:
        """When the answer to the pull on its way is overdue."""
        return self._pull_due if self.core.is_pulling else FOR_EVER

    def check(self) -> None:
        """Raise why there is no way to go on, if so."""
        if self._fatal is not None:
            raise self._fatal.with_traceback(None)

    def is_gone(self) -> bool:
        """Say whether the broker has been away for so long that nothing of it is ours any more."""
        if self.connection is not None:
            return False
        lease = _REQUEST_TIMEOUT if self._lease == FOR_EVER else self._lease
        contact = 0.0 if self._contact_at == FOR_EVER else self._contact_at
        return time.monotonic() - max(self.lost_at, contact) > lease

    def is_told(self) -> bool:
        """Say whether the broker has all that may be settled."""
        return self.core.is_told

    async def close(self) -> None:
        """Settle what is done, and hand the rest back at once."""
        if self._has_ended:
            return
        self._is_closed = True
        self._arrived.set()
        if self._opener is not None:
            self._opener.cancel()
            await asyncio.gather(self._opener, return_exceptions=True)
        if self._keeper is not None:
            self._keeper.cancel()
            await asyncio.gather(self._keeper, return_exceptions=True)
            try:
                if self._fatal is None:
                    await self._last_words()
            except PulqueError as error:
                log.warning("left without a word: %s", error)
        if self._connection is not None:
            self._connection.on_lost = None
            await self._connection.close()
            self._connection = None
        await self._save(is_last=True)
        self._has_ended = True

    async def _save(self, *, is_last: bool = False) -> None:
        """Write down how far the consumer got with this broker, for after a restart."""
        local, now = self._local, time.monotonic()
        if local is not None and (is_last or local.is_due(now)):
            progress = self.core.progress()
            await asyncio.to_thread(local.save, progress, now, is_last=is_last)

    def _adopted(self, partition: PartitionName, tenure: Tenure, pull: int) -> None:
        log.info("nack adopted by another broker: %s %d", partition, pull)
        self.core.adopted(partition, tenure, pull)

    # ── the only broker: the caller waits for it ───────────────────────────────────────────

    async def exchange(self, deadline: float, want: int) -> None:
        """Have a pull on its way, and wait for its answer, but not beyond the deadline."""
        connection = self._connection or await self.open(deadline)
        now = time.monotonic()
        if not self.core.is_pulling and not self.ask(connection, deadline, want):
            await asyncio.sleep(min(_NO_ROOM_WAIT, max(0.0, deadline - now)))
            return
        limit = min(deadline, self._pull_due)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(None if limit == FOR_EVER else max(0.0, limit - now)):
                await self._arrived.wait()
        self._arrived.clear()
        problem, self.problem = self.problem, None
        if problem is not None:
            raise problem
        if self.core.is_pulling and time.monotonic() >= self._pull_due:
            raise self._late(connection)

    async def recover(self, error: PulqueError, deadline: float) -> None:
        """Drop a broken connection and wait a while, or raise the error if it lasts too long."""
        await self._drop_connection()
        self.problem = None
        if not self._is_closed:
            wait = self._trouble.next_wait(error, time.monotonic(), deadline)
            log.info("disconnected: %s", error)
            await asyncio.sleep(wait)

    async def open_again(self, deadline: float) -> None:
        """Connect, if there is no open connection."""
        if self._connection is None:
            await self.open(deadline)

    def hurry(self) -> None:
        """Tell the broker what it has not been told, if there is a connection."""
        if self.connection is not None:
            self._settle_all(self.connection)

    # ── one of many brokers: the caller waits for all of them ──────────────────────────────

    def keep_going(self, want: int, deadline: float = FOR_EVER) -> bool:
        """Have a pull on its way if possible, without waiting; say whether it wants to be called.

        It does not, if there is no room for more messages: then somebody has to settle first.
        """
        connection = self.connection
        if connection is None:
            self._open_soon()
            return True
        if self.core.is_pulling:
            if time.monotonic() >= self._pull_due:
                self.lose(self._late(connection))
            return True
        return self.ask(connection, deadline, want)

    def retry_now(self) -> None:
        """Connect with the next call, if it waits before another try."""
        self._backoff.reset()
        self._retry_at = 0.0

    def lose(self, error: PulqueError) -> None:
        """Drop a connection that brought trouble; another one is opened soon."""
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.on_lost = None
            connection.abort()
        self._lost(error)
        if isinstance(error, CorruptionError):
            try:
                self._trouble.next_wait(error, time.monotonic(), FOR_EVER)
            except PulqueError as final:
                self._stop(final)

    def _open_soon(self) -> None:
        """Connect in a task of its own, if none is at it and it is time."""
        if time.monotonic() < self._retry_at or self._is_closed:
            return
        if self._opener is None or self._opener.done():
            self._opener = asyncio.create_task(self._open_quietly(), name="pulque-opener")

    async def _open_quietly(self) -> None:
        try:
            await self._drop_connection()
            await self.open(time.monotonic() + _CONNECT_LIMIT)
            self._backoff.reset()
            self.problem = None
        except UNREACHABLE as error:
            self.problem = error
            self._retry_at = time.monotonic() + self._backoff.next_wait()
        except PulqueError as error:
            self._stop(error)
        self._arrived.set()

    # ── asking and taking in ───────────────────────────────────────────────────────────────

    def ask_ahead(self, want: int) -> None:
        """Ask for the next messages before the caller handles these, if there is room for many."""
        if self._connection is not None and not self.core.is_pulling:
            self.ask(self._connection, FOR_EVER, want, is_early=True)

    def ask(
        self, connection: AsyncConnection, deadline: float, want: int, *, is_early: bool = False
    ) -> bool:
        """Write settles and the next pull; say whether there was room for a pull.

        Where to pull from may have to be asked first; the pull follows when that is known.
        """
        now = time.monotonic()
        wait = max(0.0, min(_LONG_POLL, deadline - now))
        self._settle_all(connection)
        room = self.core.room_for(want, is_early=is_early)
        route = self.core.next_route()
        if route is not None:
            self._pull_due = now + self._timeout
            connection.post(route, self._take_in_routed)
        elif room > 0:
            self._pull_due = now + wait + self._timeout
            connection.post(self.core.next_pull(room, wait), self._take_in_pulled)
        return room > 0 or route is not None

    def _take_in_routed(self, response: Response | PulqueError) -> None:
        if not self.core.is_pulling:
            return
        try:
            self.core.routed(response)
        except PulqueError as error:
            self.problem = error
        self._arrived.set()

    def _take_in_pulled(self, response: Response | PulqueError) -> None:
        if not self.core.is_pulling:
            return
        try:
            if isinstance(response, Pulled):
                self.core.pulled(response)
                self._trouble.over()
            else:
                self.core.pull_failed()
                self.problem = problem_of(response)
        except PulqueError as error:
            self.problem = error
        self._arrived.set()

    # ── settling, and the lease ────────────────────────────────────────────────────────────

    def _settle_all(self, connection: AsyncConnection) -> None:
        for settle in self.core.next_settles():
            self._post_settle(connection, settle)

    def _post_settle(self, connection: AsyncConnection, settle: Settle) -> None:
        def take_in(response: Response | PulqueError) -> None:
            # Without a connection it stays on its way, and is repeated on the next one.
            if not isinstance(response, DisconnectedError):
                self._take_in_settled(settle, response)

        connection.post(settle, take_in)

    def _take_in_settled(self, settle: Settle, response: Response | PulqueError) -> None:
        try:
            self.core.settle_answered(settle, response)
        except PulqueError as error:
            self._stop(error)

    def _stop(self, error: PulqueError) -> None:
        self._fatal = error
        self._arrived.set()

    async def _keep(self) -> None:
        while self._fatal is None:
            await asyncio.sleep(min(_TICK, self._lease / _BEATS_PER_LEASE))
            await self._save()
            self._deferrals.go_on()
            now = time.monotonic()
            if now - self._contact_at > self._lease:
                self.core.lose_contact()
            connection = self.connection
            if connection is None:
                continue
            self._settle_all(connection)
            if now >= self._beat_at:
                self._beat_at = now + self._lease / _BEATS_PER_LEASE
                beat = self.core.heartbeat()
                connection.post(beat, functools.partial(self._take_in_beaten, now))
            upkeep = self.core.next_upkeep()
            if upkeep is not None:
                connection.post(upkeep, self._take_in_upkept)

    def _take_in_beaten(self, sent_at: float, response: Response | PulqueError) -> None:
        if isinstance(response, Beaten):
            self._lease = response.lease_ms / 1000
            self._contact_at = max(self._contact_at, sent_at)
        elif isinstance(response, PulqueError) and not response.retryable:
            self._stop(response)

    def _take_in_upkept(self, response: Response | PulqueError) -> None:
        self.core.upkept(response)
        self._arrived.set()

    async def _last_words(self) -> None:
        await self._deferrals.finish()
        connection = self.connection
        if connection is None:
            connection = await self.open(time.monotonic() + _REQUEST_TIMEOUT)
        deadline = time.monotonic() + self._timeout
        # A change of tenure, or very many nacks, take more than one round.
        while settles := [*self.core.repeat_settles(), *self.core.next_settles()]:
            if time.monotonic() >= deadline or self._fatal is not None:
                return
            for settle in settles:
                self._take_in_settled(settle, await _answer(connection, settle))
        farewell = self.core.farewell()
        if farewell is not None:
            await _answer(connection, farewell)

    # ── connections come and go ────────────────────────────────────────────────────────────

    async def open(self, deadline: float) -> AsyncConnection:
        """Connect, subscribe, and ask again what has no answer.

        Raises:
            DisconnectedError: Nobody answers there.
            PulqueError: The broker refuses.
        """
        left = min(self._timeout, deadline - time.monotonic())
        connection = await self._connect(max(left, 0.1))
        await self._subscribe(connection)
        self.core.connected()
        self._connection = connection
        connection.on_lost = self._lost
        self.core.limit_delays(connection.welcome.max_delay_ms)
        self.core.broker_group = self.core.broker_group or connection.welcome.broker
        for settle in self.core.repeat_settles():
            self._post_settle(connection, settle)
        self._lease = connection.welcome.lease_ms / 1000
        # Before that there was nothing to lose, or it is lost by now.
        self._contact_at = time.monotonic()
        if self._keeper is None:
            self._beat_at = time.monotonic() + self._lease / _BEATS_PER_LEASE
            self._keeper = asyncio.create_task(self._keep(), name="pulque-keeper")
        return connection

    async def _subscribe(self, connection: AsyncConnection) -> None:
        """Say how the group wants the subject, before the first pull."""
        request = self.core.subscribe_request()
        try:
            await connection.request(request, self._timeout, self.core.subscribed)
        except PulqueError as error:
            await connection.close()
            raise problem_of(error) from None
        except BaseException:
            await connection.close()
            raise

    def _lost(self, error: PulqueError) -> None:
        self._connection = None
        self.lost_at = time.monotonic()
        if self.core.is_pulling:
            self.core.pull_failed()
        self.problem = self.problem or error
        self._arrived.set()

    async def _drop_connection(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            self.lost_at = time.monotonic()
            connection.on_lost = None
        if self.core.is_pulling:
            self.core.pull_failed()
        if connection is not None:
            await connection.close()

    def take_in_all(self) -> None:
        """Raise what is wrong with what came, if another connection cannot mend it."""
        problem = self.problem
        if problem is not None and self.connection is not None:
            self.problem = None
            if not isinstance(problem, UNREACHABLE):
                raise problem
            self.lose(problem)

    async def drop_broken(self) -> None:
        """Close the connection, after it brought what makes no sense."""
        await self._drop_connection()

    def _late(self, connection: AsyncConnection) -> RequestTimeoutError:
        return RequestTimeoutError(
            f"no answer to a pull from {connection.address} within {self._timeout:g} s of its end"
        )


async def _answer(connection: AsyncConnection, request: Request) -> Response | PulqueError:
    """Return the answer to a request, an error of the broker too."""
    try:
        return await connection.request(request, _REQUEST_TIMEOUT, lambda answer: answer)
    except RejectedError as error:
        return error
