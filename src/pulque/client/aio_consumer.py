"""The consumer for asyncio: the blocking one's twin, on the same core.

Pulls, settles and heartbeats share one connection; nothing on it waits for anything else.
"""

import asyncio
import contextlib
import functools
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from types import TracebackType
from typing import Self

from pulque.client.aio_connection import AsyncConnection
from pulque.client.identity import Identity
from pulque.client.incoming import IncomingCore
from pulque.client.options import check_timeout
from pulque.client.pace import Pace
from pulque.client.received import ACKED, ReceivedBatch, ReceivedMessage
from pulque.client.route_table import RouteKey
from pulque.client.trouble import Trouble, problem_of
from pulque.errors import (
    CorruptionError,
    DisconnectedError,
    PulqueError,
    RejectedError,
    RequestTimeoutError,
    UsageError,
)
from pulque.model.names import ConsumerId
from pulque.wire.requests import Heartbeat, Request, Settle
from pulque.wire.responses import Beaten, Pulled, Response, Routed

__all__ = ["Consumer"]

log = logging.getLogger("pulque.client")

_LONG_POLL = 10.0
_TICK = 0.1
_BEATS_PER_LEASE = 3
_REQUEST_TIMEOUT = 5.0
_NO_ROOM_WAIT = 0.02
_SETTLE_WAIT = 0.001
_FOR_EVER = float("inf")


class Consumer:
    """Receives the messages of one subject for one group. Made by ``Client.consumer``.

    One task at a time may iterate, pull or settle; any may ack, nack and close. ::

        async for message in consumer:
            await handle(message.body)
            message.ack()
    """

    def __init__(  # ports, by keyword
        self,
        core: IncomingCore,
        identity: Identity,
        *,
        connect: Callable[[float], Awaitable[AsyncConnection]],
        timeout: float,
        prefetch: bool | None,
        draw: Callable[[], float],
    ) -> None:
        self._core = core
        self._identity = identity
        self._connect = connect
        self._timeout = timeout
        self._prefetch = prefetch
        self._trouble = Trouble(draw, timeout)
        self._pace = Pace(core.options.max_messages)
        self._connection: AsyncConnection | None = None
        self._keeper: asyncio.Task[None] | None = None
        self._arrived = asyncio.Event()
        self._problem: PulqueError | None = None
        self._fatal: PulqueError | None = None
        self._pull_due = _FOR_EVER
        self._lease = _FOR_EVER
        self._beat_at = 0.0
        self._contact_at = _FOR_EVER
        self._is_closed = False
        self._handed = 0
        self._handed_at = 0.0

    @property
    def consumer_id(self) -> ConsumerId:
        """Who the broker takes this consumer for."""
        return self._identity.consumer

    @property
    def held(self) -> int:
        """How many messages were delivered to this consumer and are not settled."""
        return self._core.held

    @property
    def abandoned(self) -> int:
        """How many messages the broker took back, after a long silence or a reset of the group."""
        return self._core.abandoned

    async def __aiter__(self) -> AsyncIterator[ReceivedMessage]:
        """Yield messages as they come, until the consumer is closed.

        Raises:
            DisconnectedError: No broker could be reached within the client's timeout. The
                consumer can go on: iterate again.
            FencedError: Another consumer took over this id.
        """
        prefetch = self._prefetch is not False
        while (batch := await self._next_batch(_FOR_EVER, None, prefetch=prefetch)) is not None:
            index = batch.start
            try:
                for index in range(batch.start, batch.end):  # where it was left is used below
                    message = ReceivedMessage(batch, index)
                    if batch.lost and message.is_abandoned:
                        continue  # others have it by now
                    yield message
            finally:
                self._core.put_back(batch, index + 1)

    async def pull(
        self, max_messages: int | None = None, *, timeout: float = 1.0
    ) -> list[ReceivedMessage]:
        """Return messages that are there, at most so many; none if none come in time.

        Raises:
            DisconnectedError: No broker could be reached for the client's timeout; before
                that, there are just no messages.
            FencedError: Another consumer took over this id.
        """
        limit = max_messages or self._core.options.max_messages
        if limit < 1:
            raise UsageError(f"max_messages is {max_messages}; at least 1 must be asked for")
        deadline = time.monotonic() + timeout
        batch = await self._next_batch(deadline, limit, prefetch=bool(self._prefetch))
        messages = self._core.take_messages(batch, limit)
        self._handed = len(messages)
        return messages

    def ack_all(self, messages: Iterable[ReceivedMessage]) -> None:
        """Ack many messages."""
        for message in messages:
            message._batch.states[message._index] = ACKED  # noqa: SLF001  # what ack() does

    async def settle(self, *, timeout: float | None = None) -> None:
        """Tell the broker now what was acked and nacked, and return when it knows.

        Otherwise it is told with the next pull, or within 200 ms. What comes after a message
        that is neither acked nor nacked has to wait for it. Called by the task that pulls.

        Raises:
            UnavailableError: The broker does not know it within the timeout, which is the
                client's if none is given. The consumer goes on trying.
            FencedError: Another consumer took over this id.
        """
        limit = self._timeout if timeout is None else check_timeout(timeout)
        deadline = time.monotonic() + limit
        while not self._is_closed and not self._core.is_told:
            if self._fatal is not None:
                raise self._fatal.with_traceback(None)
            if time.monotonic() >= deadline:
                raise RequestTimeoutError(f"no answer to a settle within {limit:g} s")
            try:
                self._settle_all(self._connection or await self._open(deadline))
            except DisconnectedError as error:
                await self._recover(error, deadline)
            await asyncio.sleep(_SETTLE_WAIT)

    def on_abandoned(self, callback: Callable[[], None]) -> None:
        """Have ``callback`` called when messages that this consumer held went to others.

        It may look at ``is_abandoned`` of the messages it knows, and must not block.
        """
        self._core.on_abandoned = callback

    @property
    def is_connected(self) -> bool:
        """Whether there is a connection to a broker right now."""
        return self._connection is not None and self._connection.is_open

    async def _routes_changed(self, keys: Iterable[RouteKey]) -> None:
        """Take in that the subject is served by others; the client calls it."""

    async def close(self) -> None:
        """Settle what is done, and hand the rest back at once."""
        if self._is_closed:
            return
        self._is_closed = True
        self._arrived.set()
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
        await self._save(is_last=True)
        self._identity.release()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.close()

    async def _save(self, *, is_last: bool = False) -> None:
        """Write down how far this consumer got, for after a restart."""
        local, now = self._identity.local, time.monotonic()
        if local is not None and (is_last or local.is_due(now)):
            progress = self._core.progress()
            await asyncio.to_thread(local.save, progress, now, is_last=is_last)

    # ── one batch after the other ──────────────────────────────────────────────────────────

    async def _next_batch(
        self, deadline: float, want: int | None, *, prefetch: bool
    ) -> ReceivedBatch | None:
        """Return the next batch to hand out, or None at the deadline or when closed."""
        if self._handed:
            self._pace.handled(self._handed, time.monotonic() - self._handed_at)
            self._handed = 0
        while not self._is_closed:
            batch = self._core.next_batch()
            if batch is not None:
                if prefetch and self._connection is not None and not self._core.is_pulling:
                    self._ask(self._connection, _FOR_EVER, want)
                self._handed = batch.end - batch.start
                self._handed_at = time.monotonic()
                return batch
            if self._fatal is not None:
                raise self._fatal.with_traceback(None)
            try:
                await self._exchange(deadline, want)
            except (DisconnectedError, RequestTimeoutError, CorruptionError) as error:
                await self._recover(error, deadline)
            if time.monotonic() >= deadline and not self._core.has_waiting:
                return None
        return None

    async def _exchange(self, deadline: float, want: int | None) -> None:
        """Have a pull on its way, and wait for its answer, but not beyond the deadline."""
        connection = self._connection or await self._open(deadline)
        now = time.monotonic()
        if not self._core.is_pulling and not self._ask(connection, deadline, want):
            await asyncio.sleep(min(_NO_ROOM_WAIT, max(0.0, deadline - now)))
            return
        limit = min(deadline, self._pull_due)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(None if limit == _FOR_EVER else max(0.0, limit - now)):
                await self._arrived.wait()
        self._arrived.clear()
        problem, self._problem = self._problem, None
        if problem is not None:
            raise problem
        if self._core.is_pulling and time.monotonic() >= self._pull_due:
            raise RequestTimeoutError(
                f"no answer to a pull from {connection.address} within {self._timeout:g} s "
                "of its end"
            )

    def _ask(self, connection: AsyncConnection, deadline: float, want: int | None) -> bool:
        """Write settles and the next pull; say whether there was room for a pull.

        Where to pull from may have to be asked first; the pull follows when that is known.
        """
        now = time.monotonic()
        wait = max(0.0, min(_LONG_POLL, deadline - now))
        self._settle_all(connection)
        room = min(want or self._pace.want, self._core.room)
        route = self._core.next_route()
        if route is not None:
            self._pull_due = now + self._timeout
            connection.post(route, self._take_in_routed)
        elif room > 0:
            self._pull_due = now + wait + self._timeout
            connection.post(self._core.next_pull(room, wait), self._take_in_pulled)
        return room > 0 or route is not None

    def _take_in_routed(self, response: Response | PulqueError) -> None:
        if not self._core.is_pulling:
            return
        if isinstance(response, Routed):
            self._core.routed(response)
        else:
            self._core.pull_failed()
            self._problem = problem_of(response)
        self._arrived.set()

    def _take_in_pulled(self, response: Response | PulqueError) -> None:
        if not self._core.is_pulling:
            return
        try:
            if isinstance(response, Pulled):
                self._core.pulled(response)
                self._trouble.over()
            else:
                self._core.pull_failed()
                self._problem = problem_of(response)
        except PulqueError as error:
            self._problem = error
        self._arrived.set()

    # ── settling, and the lease ────────────────────────────────────────────────────────────

    def _settle_all(self, connection: AsyncConnection) -> None:
        for settle in self._core.next_settles():
            self._post_settle(connection, settle)

    def _post_settle(self, connection: AsyncConnection, settle: Settle) -> None:
        def take_in(response: Response | PulqueError) -> None:
            # Without a connection it stays on its way, and is repeated on the next one.
            if not isinstance(response, DisconnectedError):
                self._take_in_settled(settle, response)

        connection.post(settle, take_in)

    def _take_in_settled(self, settle: Settle, response: Response | PulqueError) -> None:
        try:
            self._core.settle_answered(settle, response)
        except PulqueError as error:
            self._stop(error)

    def _stop(self, error: PulqueError) -> None:
        self._fatal = error
        self._arrived.set()

    async def _keep(self) -> None:
        while self._fatal is None:
            await asyncio.sleep(min(_TICK, self._lease / _BEATS_PER_LEASE))
            await self._save()
            now = time.monotonic()
            if now - self._contact_at > self._lease:
                self._core.lose_contact()
            connection = self._connection
            if connection is None or not connection.is_open:
                continue
            self._settle_all(connection)
            if now >= self._beat_at:
                self._beat_at = now + self._lease / _BEATS_PER_LEASE
                beat = self._heartbeat(is_leaving=False)
                connection.post(beat, functools.partial(self._take_in_beaten, now))

    def _take_in_beaten(self, sent_at: float, response: Response | PulqueError) -> None:
        if isinstance(response, Beaten):
            self._lease = response.lease_ms / 1000
            self._contact_at = max(self._contact_at, sent_at)
        elif isinstance(response, PulqueError) and not response.retryable:
            self._stop(response)

    def _heartbeat(self, *, is_leaving: bool) -> Heartbeat:
        options = self._core.options
        return Heartbeat(
            options.group, options.consumer, options.incarnation, is_leaving=is_leaving
        )

    async def _last_words(self) -> None:
        connection = self._connection
        if connection is None or not connection.is_open:
            connection = await self._open(time.monotonic() + _REQUEST_TIMEOUT)
        deadline = time.monotonic() + self._timeout
        # A change of tenure, or very many nacks, take more than one round.
        while settles := [*self._core.repeat_settles(), *self._core.next_settles()]:
            if time.monotonic() >= deadline or self._fatal is not None:
                return
            for settle in settles:
                self._take_in_settled(settle, await _answer(connection, settle))
        await _answer(connection, self._heartbeat(is_leaving=True))

    # ── connections come and go ────────────────────────────────────────────────────────────

    async def _open(self, deadline: float) -> AsyncConnection:
        left = min(self._timeout, deadline - time.monotonic())
        connection = await self._connect(max(left, 0.1))
        await self._subscribe(connection)
        self._core.connected()
        self._connection = connection
        connection.on_lost = self._lost
        self._core.limit_delays(connection.welcome.max_delay_ms)
        for settle in self._core.repeat_settles():
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
        request = self._core.subscribe_request()
        try:
            await connection.request(request, self._timeout, self._core.subscribed)
        except PulqueError as error:
            await connection.close()
            raise problem_of(error) from None
        except BaseException:
            await connection.close()
            raise

    def _lost(self, error: DisconnectedError) -> None:
        self._connection = None
        if self._core.is_pulling:
            self._core.pull_failed()
        self._problem = self._problem or error
        self._arrived.set()

    async def _recover(self, error: PulqueError, deadline: float) -> None:
        """Drop a broken connection and wait a while, or raise the error if it lasts too long."""
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.on_lost = None
            await connection.close()
        if self._core.is_pulling:
            self._core.pull_failed()
        self._problem = None
        if not self._is_closed:
            wait = self._trouble.next_wait(error, time.monotonic(), deadline)
            log.info("disconnected: %s", error)
            await asyncio.sleep(wait)


async def _answer(connection: AsyncConnection, request: Request) -> Response | PulqueError:
    """Return the answer to a request, an error of the broker too."""
    try:
        return await connection.request(request, _REQUEST_TIMEOUT, lambda answer: answer)
    except RejectedError as error:
        return error
