"""The consumer, for asyncio: pulls, and settles as it goes.

While the caller handles one batch, the next pull is already on its way, together with the settle
for what was done before. A task keeps the lease, and settles for a caller who takes long.
``pull_pool.py`` has what it does with many brokers.
"""

import time
from collections.abc import AsyncIterator, Callable, Iterable
from types import TracebackType
from typing import Self

from pulque.client.aio.broker_puller import FOR_EVER, Inlet
from pulque.client.aio.concurrency import Interruptible, sleep
from pulque.client.aio.guard import Guard
from pulque.client.aio.pull_pool import ConsumerBrokers, Inlets
from pulque.client.arguments.checks import check_callback, check_timeout, check_wait, check_whole
from pulque.client.connection.fork_safety import on_fork
from pulque.client.options.consumer_plan import ConsumerPlan
from pulque.client.receiving.prefetch import PullRate
from pulque.client.receiving.received_message import ACKED, ReceivedBatch, ReceivedMessage, expire
from pulque.client.routing.route_table import RouteKey
from pulque.errors import PulqueError, RequestTimeoutError, UsageError
from pulque.model.names import ConsumerId

__all__ = ["Consumer"]

_MOST_PULLED = 1_000_000

_SETTLE_WAIT = 0.001


class Consumer(Interruptible):
    """Receives the messages of one subject for one group. Made by ``Client.consumer``.

    One task at a time may iterate, pull or settle; any may ack, nack and close. ::

        async for message in consumer:
            await handle(message.body)
            message.ack()
    """

    _inlets: Inlets

    def __init__(
        self,
        plan: ConsumerPlan,
        *,
        brokers: ConsumerBrokers,
        timeout: float,
        prefetch: bool | None,
        draw: Callable[[], float],
    ) -> None:
        self._plan = plan
        self._brokers = brokers
        self._timeout = timeout
        self._prefetch = prefetch
        self._draw = draw
        self._pace = PullRate(plan.options.max_messages)
        self._inlets = self._make_inlets()
        self._inlets.owner = self  # asyncio only
        self.on_closed: Callable[[Consumer], None] | None = None
        """Called at its end. It holds the client: what runs for a consumer holds neither."""
        self._is_closed = self._has_ended = False
        self._handed = 0
        self._handed_at = 0.0
        self._guard = Guard(
            "consumer",
            brokers.guard,  # asyncio only
        )
        on_fork(self, Consumer._after_fork)

    def _after_fork(self) -> None:
        """Refuse everything in a child: the parent goes on as this consumer."""
        self._is_closed = self._has_ended = True
        self._plan.identity.release()

    def _check_open(self) -> None:
        self._guard.check()
        if self._is_closed:
            raise UsageError(
                "this consumer is closed, or its client is: make another with client.consumer()"
            )

    def _make_inlets(self) -> Inlets:
        return Inlets(self._plan, self._brokers, timeout=self._timeout, draw=self._draw)

    @property
    def consumer_id(self) -> ConsumerId:
        """Who the broker takes this consumer for."""
        return self._plan.options.consumer

    @property
    def held(self) -> int:
        """How many messages were delivered to this consumer and are not settled."""
        return self._inlets.held

    @property
    def abandoned(self) -> int:
        """How many messages a broker took back, after a long silence or a reset of the group."""
        return self._inlets.abandoned

    async def __aiter__(self) -> AsyncIterator[ReceivedMessage]:
        """Yield messages as they come, until the consumer is closed.

        Raises:
            DisconnectedError: No broker could be reached within the client's timeout. The
                consumer can go on: iterate again.
            FencedError: Another consumer took over this id.
        """
        self._guard.check()
        prefetch = self._prefetch is not False
        new = ReceivedMessage.__new__
        try:
            while (found := await self._next_batch(FOR_EVER, None, prefetch=prefetch)) is not None:
                inlet, batch = found
                index, may_expire = batch.start, batch.may_expire
                try:
                    for index in range(batch.start, batch.end):  # where it was left is used below
                        # Without its constructor, as this is the hot path: bench/micro/client.py.
                        message = new(ReceivedMessage)
                        message._batch = batch  # noqa: SLF001
                        message._index = index  # noqa: SLF001
                        if batch.lost and message.is_abandoned:
                            continue  # others have it by now
                        if may_expire and expire(message):
                            continue
                        yield message
                finally:
                    if self._guard.forked is None:  # else the parent may hold the lock
                        with inlet.lock:
                            inlet.core.put_back(batch, index + 1)
        except (PulqueError, GeneratorExit):
            raise
        except BaseException:
            self._interrupted()
            raise

    async def pull(
        self, max_messages: int | None = None, *, timeout: float = 1.0
    ) -> list[ReceivedMessage]:
        """Return messages that are there, at most so many; none if none come in time.

        Raises:
            DisconnectedError: No broker could be reached for the client's timeout; before
                that, there are just no messages.
            FencedError: Another consumer took over this id.
            UsageError: The consumer is closed.
        """
        self._check_open()
        limit = self._plan.options.max_messages if max_messages is None else max_messages
        check_whole("max_messages", limit, 1, _MOST_PULLED)
        timeout = check_wait(timeout)
        try:
            return await self._pull(limit, time.monotonic() + timeout)
        except PulqueError:
            raise
        except BaseException:
            self._interrupted()
            raise

    async def _pull(self, limit: int, deadline: float) -> list[ReceivedMessage]:
        found = await self._next_batch(deadline, limit, prefetch=bool(self._prefetch))
        messages: list[ReceivedMessage] = []
        while found is not None:
            inlet, batch = found
            with inlet.lock:
                messages += inlet.core.take_messages(batch, limit - len(messages))
            found = self._inlets.next_batch() if len(messages) < limit else None
        self._handed = len(messages)
        return messages

    def ack_all(self, messages: Iterable[ReceivedMessage]) -> None:
        """Ack many messages."""
        for message in messages:
            message._batch.states[message._index] = ACKED  # noqa: SLF001  # what ack() does

    async def settle(self, *, timeout: float | None = None) -> None:
        """Tell the broker now what was acked and nacked, and return when it knows.

        A message that was nacked until a certain time is at a delay server then. Otherwise the
        broker is told with the next pull, or within 200 ms. What comes after a message
        that is neither acked nor nacked has to wait for it. Called by the task that pulls.

        Raises:
            UnavailableError: The broker does not know it within the timeout, which is the
                client's if none is given. The consumer goes on trying.
            FencedError: Another consumer took over this id.
        """
        self._guard.check()
        limit = self._timeout if timeout is None else check_timeout(timeout)
        deadline = time.monotonic() + limit
        while not self._is_closed and not self._inlets.is_told():
            if time.monotonic() >= deadline:
                raise RequestTimeoutError(f"no answer to a settle within {limit:g} s")
            await self._inlets.settle_soon(deadline)
            await sleep(_SETTLE_WAIT)

    def on_abandoned(self, callback: Callable[[], None]) -> None:
        """Have ``callback`` called when messages that this consumer held went to others.

        It may look at ``is_abandoned`` of the messages it knows, and must not block. Any task
        may call it.
        """
        check_callback("callback", callback)
        self._inlets.on_abandoned(callback)

    @property
    def is_connected(self) -> bool:
        """Whether there is a connection to a broker, or no broker has had the subject yet."""
        return self._inlets.is_connected

    async def close(self) -> None:
        """Settle what is done, and hand the rest back at once. Any task may call it.

        If it is cancelled, it can be called again.
        """
        if self._has_ended:
            return
        self._guard.check()
        self._is_closed = True
        await self._inlets.close()
        self._plan.identity.release()
        if self.on_closed is not None:
            self.on_closed(self)
        self._has_ended = True  # last: if it is cancelled, ``close`` can be called again

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.close()

    async def _routes_changed(self, keys: Iterable[RouteKey]) -> None:
        """Take in that the subject is served by others; the client calls it."""
        self._inlets.routes_changed(keys)

    async def _next_batch(
        self, deadline: float, want: int | None, *, prefetch: bool
    ) -> tuple[Inlet, ReceivedBatch] | None:
        """Return the next batch to hand out and whose it is, or None at the deadline or end."""
        self._guard.check_process()  # an iteration may go on in a child
        self._is_waiting = False
        if self._handed:
            self._pace.handled(self._handed, time.monotonic() - self._handed_at)
            self._handed = 0
        inlets = self._inlets
        want = want or self._pace.want
        if inlets.may_hold_more:
            want = self._pace.of_each(want)
        while not self._is_closed:
            found = inlets.next_batch()
            if found is not None:
                _, batch = found
                if prefetch:
                    inlets.ask_ahead(want)
                self._handed = batch.end - batch.start
                self._handed_at = time.monotonic()
                return found
            self._is_waiting = True
            await inlets.exchange(deadline, want)
            self._is_waiting = False
            if time.monotonic() >= deadline and not inlets.has_waiting:
                return None
        return None
