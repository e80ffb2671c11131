"""The producer, for asyncio; by hand, as ``send`` is the hot path and waits without a lock."""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Iterable, Sequence
from types import TracebackType
from typing import Self, Unpack

from pulque.client.aio.connection import AsyncConnection
from pulque.client.aio.guard import Guard
from pulque.client.aio.pending_sends import PendingSend, PendingSends, wait_for
from pulque.client.aio.producer_connections import SendLinks
from pulque.client.arguments.checks import check_wait
from pulque.client.connection.backoff import Backoff
from pulque.client.connection.fork_safety import forked, on_fork
from pulque.client.persistence.message_spool import BatchNote, SendSpool
from pulque.client.routing.route_table import RouteKey
from pulque.client.routing.targets import NoRouteError, Targets, Way
from pulque.client.sending.outgoing_message import MessageParts, Outgoing, Receipt, outgoing_of
from pulque.client.sending.producer_options import SendOptions
from pulque.client.sending.promises import Span
from pulque.client.sending.spooled_producer_core import SpoolingCore, core_of, is_stored
from pulque.clock import wall_ms
from pulque.errors import (
    DisconnectedError,
    PulqueError,
    RequestTimeoutError,
    SpoolFullError,
)
from pulque.model.ids import IdSource
from pulque.model.names import parse_subject

__all__ = ["Producer"]

log = logging.getLogger("pulque.client")

_CONNECT_LIMIT = 5.0


class Producer:
    """Sends messages in batches, and finds an outcome for each of them.

    Made by ``Client.producer``. Any number of tasks of one event loop may send through one
    producer. Messages that one task sends to one subject arrive in that order, unless a batch
    has to be sent again after the broker refused it for a while (``max_in_flight=1`` keeps it
    even then).
    """

    def __init__(  # noqa: PLR0913  # ports, by keyword
        self,
        options: SendOptions,
        *,
        connect: Callable[[str, float], Awaitable[AsyncConnection]],
        find_targets: Callable[[Way, float | None], Awaitable[Targets]],
        stale: Callable[[], None],
        first_place: str | None,
        producer_id: int,
        ids: IdSource,
        draw: Callable[[], float],
        spool: SendSpool | None = None,
    ) -> None:
        self._core = core_of(
            options,
            spool=spool,
            producer_id=producer_id,
            ids=ids,
            promise=PendingSend,
            monotonic=time.monotonic,
            now_ms=wall_ms,
            draw=draw,
        )
        self._spool = spool
        self._draw = draw
        self._connect = connect
        self._recovery: asyncio.Task[None] | None = None
        self.left_over = PendingSends([])
        """The promises of what the spool had left from the last run, in its order; known once
        ``recovered`` returns."""
        self._signal = self._core.signal
        self._find_targets = find_targets
        self._loop = asyncio.get_running_loop()
        self._links = SendLinks(self._core, connect, stale, draw)
        self._links.owner = self
        self._is_closed = self._has_ended = False
        self.on_closed: Callable[[Producer], None] | None = None
        """Called at its end."""
        if first_place is not None:
            self._core.add_place(first_place)
        if spool is not None:
            self._recovery = asyncio.create_task(self._recover(), name="pulque-spool")
        self._guard = Guard("producer")
        self._guard.check()
        self._signal.check_waiter = self._guard.check
        on_fork(self, Producer._after_fork)

    def _after_fork(self) -> None:
        """Refuse everything in a child: what waits here is sent by the parent."""
        self._is_closed = self._has_ended = True
        self._guard.after_fork()
        self._core.fork(self._guard.forked or forked("producer", "make another one in the child"))
        if self._spool is not None:
            self._spool.close()

    async def recovered(self) -> None:
        """Wait until it is known what became of the last run's messages, where there is a spool.

        Raises:
            UnavailableError: That could not be found out; the next call tries again.
            FencedError: The spool was used elsewhere, perhaps as a copy.
        """
        self._guard.check()
        if self._recovery is None:
            return
        if self._recovery.done() and self._recovery.exception() is not None:
            self._recovery = asyncio.create_task(self._recover(), name="pulque-spool")
        await asyncio.shield(self._recovery)
        self._recovery = None

    async def send(  # noqa: C901  # three kinds of messages, and what may be missing
        self, subject: str, body: object, **parts: Unpack[MessageParts]
    ) -> PendingSend:
        """Take in one message and return the promise of its receipt.

        Waits while too much is buffered, for at most the producer's timeout.

        Args:
            subject: Where to.
            body: Bytes or a text as they are; all else as JSON, with the header
                ``content-type: application/json``.
            **parts: What the message has beside: ``key``, ``order_key``, ``tags``, ``headers``,
                ``expires_at``, ``priority``, ``reliable``; and when it is to be delivered, if
                later: ``delay``, ``at`` or ``level``.

        Raises:
            MessageTooLargeError: The broker would refuse it; it was not taken in.
            UsageError: It is no message, or the producer is closed.
            UnavailableError: Who serves the subject could not be found out.
            SpoolFullError: The spool has no room, and got none within the producer's timeout.
        """
        self._guard.check()
        if self._recovery is not None:
            await self.recovered()
        core = self._core
        order_key = parts.get("order_key") if len(parts) == 1 else None
        message: Outgoing | None = None
        while True:
            try:
                if order_key and type(order_key) is str:
                    pending = core.add_keyed(subject, body, order_key)
                elif parts:
                    # Made once: a second one would find nothing in a generator of tags.
                    message = message or Outgoing(body, **parts)
                    pending = core.add_message(subject, message)
                else:
                    pending = core.add(subject, body)
            except TypeError:
                parse_subject(subject)  # what cannot be looked up is no subject
                raise
            except NoRouteError as unknown:
                await self._learn(unknown.way)
            except SpoolFullError:
                await self._work()
                if core.is_crowded:
                    raise
            else:
                if self._signal.is_up:
                    await self._work()
                return pending

    async def send_many(self, subject: str, messages: Iterable[object]) -> PendingSends:
        """Take in many messages, and return the promises of their receipts in order.

        The cheapest way to send bodies that are at hand. Waits and raises as ``send`` does,
        before the first is taken in where that is possible; else a note says how many were.
        """
        spans: list[Span] = []
        await self._take_in(subject, outgoing_of(messages), spans)
        return PendingSends(spans)

    async def _send_many(
        self, subject: str, messages: Iterable[object], timeout: float | None
    ) -> list[Receipt]:
        """Send many messages and return their receipts; ``Client.send_many`` calls it."""
        items = outgoing_of(messages)
        spans: list[Span] = []
        pending = PendingSends(spans)
        try:
            await self._take_in(subject, items, spans, timeout)
        except PulqueError as error:
            await wait_for(pending.batches, None)
            error.add_note(f"{pending.count_confirmed()} of {len(items)} messages are confirmed")
            raise
        return await pending.result()

    async def _send_within(self, subject: str, message: Outgoing, timeout: float) -> Receipt:
        """Send a message that has an outcome within so many seconds; ``Client.send`` calls it."""
        self._guard.check()
        while True:
            try:
                pending = self._core.add_message(subject, message, timeout)
            except NoRouteError as unknown:
                await self._learn(unknown.way, timeout)
            else:
                if self._signal.is_up:
                    await self._work(timeout)
                return await pending

    async def _take_in(
        self,
        subject: str,
        items: Sequence[bytes | Outgoing],
        spans: list[Span],
        timeout: float | None = None,
    ) -> None:
        """Accept many messages, and add the batches they travel in to ``spans`` at once."""
        await self.recovered()
        if type(subject) is not str:
            parse_subject(subject)
        for way in self._core.ways_of(subject, items):
            if not self._core.knows(way):
                await self._learn(way, timeout)
        self._core.check_many(subject, items)
        for some in self._core.add_in_steps(subject, items, timeout):
            spans += some
            if self._signal.is_up:
                await self._work(timeout)

    async def flush(self, timeout: float | None = None) -> None:
        """Send what lingers, and wait until every message so far has an outcome.

        The outcome may be an error: ask the promises, which know it by then.

        Raises:
            RequestTimeoutError: Some have none within ``timeout`` seconds.
        """
        wait_s = None if timeout is None else check_wait(timeout)
        await self.recovered()
        batches = self._core.flush()
        self._links.pump()
        await wait_for(batches, wait_s)

    async def close(self, timeout: float | None = None) -> None:
        """Flush, and end. Messages without an outcome by then get ``DisconnectedError``.

        With a spool it waits for the producer's timeout at most, if for no other time; they stay
        there, and the next producer with this spool sends them. If it is cancelled, it can be
        called again.
        """
        if self._has_ended:
            return
        self._guard.check()
        if timeout is not None:
            timeout = check_wait(timeout)
        self._is_closed = True
        if timeout is None and self._spool is not None:
            timeout = self._core.options.timeout
        try:
            await self._end_recovery()
            batches = self._core.close()
            self._links.changed.set()
            self._links.pump()
            await wait_for(batches, timeout)
        except RequestTimeoutError:
            log.info("a producer is closed with messages on their way")
        finally:
            self._core.fail_all(DisconnectedError("the producer was closed"))
            self._links.tell()
            await self._links.stop()
            if self._spool is not None:
                self._spool.close()
        if self.on_closed is not None:
            self.on_closed(self)
        self._has_ended = True

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

    async def _routes_changed(self, keys: Iterable[RouteKey]) -> None:
        """Take in that subjects are served by others; the client calls it."""
        self._links.retry_now()
        for way in {key.way for key in keys if not key.group}:
            if self._core.knows(way):
                await self._learn(way)

    async def _learn(self, way: Way, timeout: float | None = None) -> None:
        self._core.add_way(way, await self._find_targets(way, timeout))
        self._links.look()

    async def _end_recovery(self) -> None:
        if self._recovery is not None:
            self._recovery.cancel()
            await asyncio.gather(self._recovery, return_exceptions=True)

    async def _recover(self) -> None:
        """Find out about what was under way when the last run ended, and send the rest."""
        core = self._core
        assert isinstance(core, SpoolingCore)  # noqa: S101  # there is a spool
        for way, note in core.undecided():
            await self._decide(core, way, note)
        for way in core.ways_left():
            await self._learn(way)
        self.left_over = PendingSends(core.resume())
        self._links.pump()

    async def _decide(self, core: SpoolingCore[PendingSend], way: Way, note: BatchNote) -> None:
        backoff = Backoff(self._draw)
        deadline = self._loop.time() + core.options.timeout
        while True:
            try:
                await self._find_targets(way, None)
                core.decide(note, is_stored=await self._ask(core, note))
                return
            except PulqueError as error:
                wait = backoff.next_wait()
                if not error.retryable or self._loop.time() + wait > deadline:
                    raise
                await asyncio.sleep(wait)

    async def _ask(self, core: SpoolingCore[PendingSend], note: BatchNote) -> bool:
        timeout = core.options.timeout
        connection = await self._connect(note.place, timeout)
        try:
            return await connection.request(core.question(note, timeout), timeout, is_stored)
        finally:
            await connection.close()

    async def _work(self, timeout: float | None = None) -> None:
        """Send what is ready, and wait while too much is not."""
        self._links.pump()
        # Whatever happens, batches have an outcome within their timeout: that makes room.
        deadline = self._loop.time() + (timeout or self._core.options.timeout)
        while self._core.is_crowded and not self._is_closed and self._loop.time() < deadline:
            self._links.changed.clear()
            try:
                async with asyncio.timeout_at(deadline):
                    await self._links.changed.wait()
            except TimeoutError:
                return
