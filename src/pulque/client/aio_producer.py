"""The producer for asyncio: the blocking one's twin, on the same core."""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Generator, Iterable, Sequence
from types import TracebackType
from typing import Self, Unpack

from pulque.client.aio_connection import AsyncConnection
from pulque.client.backoff import Backoff
from pulque.client.batches import OutgoingBatch
from pulque.client.dispatch import SendOptions
from pulque.client.outgoing import NoRouteError, OutgoingCore
from pulque.client.pending import Promise, Promises, Span
from pulque.client.receipt import Outgoing, Parts, Receipt
from pulque.client.routes import Targets
from pulque.errors import (
    DisconnectedError,
    PulqueError,
    RequestTimeoutError,
)
from pulque.model.ids import IdSource
from pulque.wire.responses import Response

__all__ = ["PendingSend", "PendingSends", "Producer"]

log = logging.getLogger("pulque.client")

_CONNECT_LIMIT = 5.0


class PendingSend(Promise):
    """The promise of a receipt for one message; ``await`` it."""

    __slots__ = ()

    async def result(self, timeout: float | None = None) -> Receipt:
        """Return the receipt, or raise what went wrong; wait for it if need be.

        Raises:
            RequestTimeoutError: There was no outcome within ``timeout`` seconds.
            PulqueError: The message could not be sent.
        """
        await _wait_for((self._batch,), timeout)
        return self._batch.receipt(self._index)

    async def exception(self, timeout: float | None = None) -> PulqueError | None:
        """Return what went wrong, or None for a confirmed message; wait for it if need be."""
        await _wait_for((self._batch,), timeout)
        return self._batch.error

    def __await__(self) -> Generator[object, None, Receipt]:
        return self.result().__await__()


class PendingSends(Promises[PendingSend]):
    """The promises of receipts for many messages; ``await`` them together."""

    __slots__ = ()

    def __init__(self, spans: list[Span]) -> None:
        super().__init__(spans, PendingSend)

    async def result(self, timeout: float | None = None) -> list[Receipt]:
        """Return the receipts in order, or raise the first thing that went wrong.

        Raises:
            RequestTimeoutError: Not all had an outcome within ``timeout`` seconds.
            PulqueError: A message could not be sent; a note says how many were.
        """
        await _wait_for(self.batches, timeout)
        return self.receipts()

    def __await__(self) -> Generator[object, None, list[Receipt]]:
        return self.result().__await__()


class Producer:
    """Sends messages in batches, and finds an outcome for each of them.

    Made by ``Client.producer``. Any number of tasks of one event loop may send through one
    producer. Messages that one task sends to one subject arrive in that order, unless a batch
    has to be sent again after the broker refused it for a while (``max_in_flight=1`` keeps it
    even then).
    """

    def __init__(
        self,
        options: SendOptions,
        *,
        connect: Callable[[float], Awaitable[AsyncConnection]],
        find_targets: Callable[[str], Awaitable[Targets]],
        producer_id: int,
        ids: IdSource,
        draw: Callable[[], float],
    ) -> None:
        self._core = OutgoingCore(
            options,
            producer_id=producer_id,
            ids=ids,
            promise=PendingSend,
            monotonic=time.monotonic,
            now_ms=lambda: time.time_ns() // 1_000_000,
            draw=draw,
        )
        self._dispatch = self._core.dispatch
        self._connect = connect
        self._find_targets = find_targets
        self._backoff = Backoff(draw)
        self._loop = asyncio.get_running_loop()
        self._connection: AsyncConnection | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._changed = asyncio.Event()
        self._lost = asyncio.Event()
        self._is_closed = False
        self._task = asyncio.create_task(self._keep_connected(), name="pulque-producer")

    async def send(self, subject: str, body: bytes, **parts: Unpack[Parts]) -> PendingSend:
        """Take in one message and return the promise of its receipt.

        Waits while too much is buffered, for at most the producer's timeout.

        Args:
            subject: Where to.
            body: What.
            **parts: What the message has beside: ``key``, ``order_key``, ``tags``, ``headers``,
                ``expires_at``, ``priority``, ``reliable``.

        Raises:
            MessageTooLargeError: The broker would refuse it; it was not taken in.
            UsageError: It is no message, or the producer is closed.
            UnavailableError: Who serves the subject could not be found out.
        """
        core = self._core
        try:
            if parts:
                pending = core.add_message(subject, Outgoing(body, **parts))
            else:
                pending = core.add(subject, body)
        except NoRouteError:
            await self._learn(subject)
            return await self.send(subject, body, **parts)
        if self._dispatch.has_work:
            await self._work()
        return pending

    async def send_many(self, subject: str, messages: Iterable[bytes | Outgoing]) -> PendingSends:
        """Take in many messages, and return the promises of their receipts in order.

        The cheapest way to send bodies that are at hand. Waits and raises as ``send`` does;
        when it raises in the middle, a note says how many were taken in.
        """
        if not self._core.knows(subject):
            await self._learn(subject)
        spans: list[Span] = []
        for some in self._core.add_in_steps(subject, messages):
            spans += some
            if self._dispatch.has_work:
                await self._work()
        return PendingSends(spans)

    async def flush(self, timeout: float | None = None) -> None:
        """Send what lingers, and wait until every message so far has an outcome.

        The outcome may be an error: ask the promises, which know it by then.

        Raises:
            RequestTimeoutError: Some have none within ``timeout`` seconds.
        """
        batches = self._dispatch.flush()
        self._pump()
        await _wait_for(batches, timeout)

    async def close(self, timeout: float | None = None) -> None:
        """Flush, and end. Messages without an outcome by then get ``DisconnectedError``."""
        if self._is_closed:
            return
        self._is_closed = True
        batches = self._core.close()
        self._changed.set()
        self._pump()
        try:
            await _wait_for(batches, timeout)
        except RequestTimeoutError:
            log.info("a producer is closed with messages on their way")
        finally:
            self._dispatch.fail_all(
                DisconnectedError("the producer was closed before the outcome was known")
            )
            self._tell()
            self._task.cancel()
            if self._timer is not None:
                self._timer.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.close()

    # ── underneath ─────────────────────────────────────────────────────────────────────────

    async def _learn(self, subject: str) -> None:
        self._core.add_subject(subject, await self._find_targets(subject))

    async def _work(self) -> None:
        """Send what is ready, and wait while too much is not."""
        self._pump()
        # Whatever happens, batches have an outcome within their timeout: that makes room.
        deadline = self._loop.time() + self._core.options.timeout
        while self._core.is_crowded and not self._is_closed and self._loop.time() < deadline:
            self._changed.clear()
            try:
                async with asyncio.timeout_at(deadline):
                    await self._changed.wait()
            except TimeoutError:
                return

    def _pump(self) -> None:
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
                self._tell()
                self._pump()

        connection.post(self._dispatch.request(batches, now), take_in)

    def _set_timer(self) -> None:
        wake = self._dispatch.next_wake()
        if self._timer is not None:
            if wake is not None and self._timer.when() <= self._loop_time(wake):
                return  # it rings early enough, and looks again then
            self._timer.cancel()
            self._timer = None
        if wake is not None and not self._task.done():
            self._timer = self._loop.call_at(self._loop_time(wake), self._ring)

    def _loop_time(self, instant: float) -> float:
        return self._loop.time() + (instant - time.monotonic())

    def _ring(self) -> None:
        self._timer = None
        is_overdue = self._dispatch.expire(time.monotonic())
        self._tell()
        if is_overdue and self._connection is not None:
            log.info("disconnected: the broker owes an answer for too long")
            self._connection.abort()
        self._pump()

    def _tell(self) -> None:
        finished = self._dispatch.take_finished()
        for batch in finished:
            batch.tell()
        if finished:
            self._changed.set()

    async def _keep_connected(self) -> None:
        try:
            while True:
                try:
                    await self._stay_connected(await self._connect(_CONNECT_LIMIT))
                except PulqueError as error:
                    self._not_connected(error)
                await asyncio.sleep(self._backoff.next_wait())
        finally:
            if self._connection is not None:
                self._connection.on_lost = None
                await self._connection.close()

    def _not_connected(self, error: PulqueError) -> None:
        log.info("not connected: %s", error)
        self._dispatch.problem = str(error)
        if not error.retryable:
            self._dispatch.fail_all(error)
            self._tell()

    async def _stay_connected(self, connection: AsyncConnection) -> None:
        self._dispatch.problem = ""
        self._core.limit_messages(connection.welcome.max_message)
        self._lost.clear()
        connection.on_lost = self._disconnected
        self._connection = connection
        if not connection.is_open:
            self._disconnected(DisconnectedError(f"{connection.address} closed it at once"))
        self._pump()
        await self._lost.wait()

    def _disconnected(self, error: DisconnectedError) -> None:
        log.info("disconnected: %s", error)
        self._connection = None
        self._dispatch.problem = str(error)
        self._dispatch.disconnected()
        self._lost.set()


async def _wait_for(batches: Sequence[OutgoingBatch], timeout: float | None) -> None:
    todo = [batch for batch in batches if not batch.is_done]
    if not todo:
        return
    done = asyncio.Event()
    left = len(todo)

    def finished() -> None:
        nonlocal left
        left -= 1
        if not left:
            done.set()

    for batch in todo:
        batch.when_done(finished)
    try:
        async with asyncio.timeout(timeout):
            await done.wait()
    except TimeoutError:
        raise RequestTimeoutError(
            f"{left} batches have no outcome within {timeout} s; they are still on their way"
        ) from None
