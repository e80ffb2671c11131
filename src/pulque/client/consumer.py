"""A blocking consumer: pulls in the caller's thread, settles as it goes.

While the caller handles one batch, the next pull is already on its way, together with the
settle for what was done before; its answer waits in the socket. A thread keeps the lease, and
settles for a caller who takes long. ``inlets.py`` has what it does with many brokers.
"""

import time
from collections.abc import Callable, Iterable, Iterator
from types import TracebackType
from typing import Self

from pulque.client.consumer_plan import ConsumerPlan
from pulque.client.inlet import FOR_EVER, Inlet
from pulque.client.inlets import ConsumerBrokers, Inlets
from pulque.client.options import check_timeout
from pulque.client.pace import Pace
from pulque.client.received import ACKED, ReceivedBatch, ReceivedMessage
from pulque.client.route_table import RouteKey
from pulque.errors import RequestTimeoutError, UsageError
from pulque.model.names import ConsumerId

__all__ = ["Consumer"]

_SETTLE_WAIT = 0.001


class Consumer:
    """Receives the messages of one subject for one group. Made by ``Client.consumer``.

    One thread at a time may iterate, pull or settle; any thread may ack, nack and close. ::

        for message in consumer:
            handle(message.body)
            message.ack()
    """

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
        self._pace = Pace(plan.options.max_messages)
        self._inlets = self._make_inlets()
        self._inlets.owner = self
        self._is_closed = False
        self._handed = 0
        self._handed_at = 0.0

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

    def __iter__(self) -> Iterator[ReceivedMessage]:
        """Yield messages as they come, until the consumer is closed.

        Raises:
            DisconnectedError: No broker could be reached within the client's timeout. The
                consumer can go on: iterate again.
            FencedError: Another consumer took over this id.
        """
        prefetch = self._prefetch is not False
        new = ReceivedMessage.__new__
        while (found := self._next_batch(FOR_EVER, None, prefetch=prefetch)) is not None:
            inlet, batch = found
            index = batch.start
            try:
                for index in range(batch.start, batch.end):  # where it was left is used below
                    # Without its constructor, as this is the hot path: bench/micro/client.py.
                    message = new(ReceivedMessage)
                    message._batch = batch  # noqa: SLF001
                    message._index = index  # noqa: SLF001
                    if batch.lost and message.is_abandoned:
                        continue  # others have it by now
                    yield message
            finally:
                with inlet.lock:
                    inlet.core.put_back(batch, index + 1)

    def pull(
        self, max_messages: int | None = None, *, timeout: float = 1.0
    ) -> list[ReceivedMessage]:
        """Return messages that are there, at most so many; none if none come in time.

        Raises:
            DisconnectedError: No broker could be reached for the client's timeout; before
                that, there are just no messages.
            FencedError: Another consumer took over this id.
        """
        limit = max_messages or self._plan.options.max_messages
        if limit < 1:
            raise UsageError(f"max_messages is {max_messages}; at least 1 must be asked for")
        deadline = time.monotonic() + timeout
        found = self._next_batch(deadline, limit, prefetch=bool(self._prefetch))
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

    def settle(self, *, timeout: float | None = None) -> None:
        """Tell the broker now what was acked and nacked, and return when it knows.

        Otherwise it is told with the next pull, or within 200 ms. What comes after a message
        that is neither acked nor nacked has to wait for it. Called by the thread that pulls.

        Raises:
            UnavailableError: The broker does not know it within the timeout, which is the
                client's if none is given. The consumer goes on trying.
            FencedError: Another consumer took over this id.
        """
        limit = self._timeout if timeout is None else check_timeout(timeout)
        deadline = time.monotonic() + limit
        while not self._is_closed and not self._inlets.is_told():
            if time.monotonic() >= deadline:
                raise RequestTimeoutError(f"no answer to a settle within {limit:g} s")
            self._inlets.settle_soon(deadline)
            time.sleep(_SETTLE_WAIT)

    def on_abandoned(self, callback: Callable[[], None]) -> None:
        """Have ``callback`` called when messages that this consumer held went to others.

        It may look at ``is_abandoned`` of the messages it knows, and must not block. Any thread
        may call it.
        """
        self._inlets.on_abandoned(callback)

    @property
    def is_connected(self) -> bool:
        """Whether there is a connection to a broker right now."""
        return self._inlets.is_connected

    def close(self) -> None:
        """Settle what is done, and hand the rest back at once. May be called from any thread."""
        if self._is_closed:
            return
        self._is_closed = True
        self._inlets.close()
        self._plan.identity.release()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _routes_changed(self, keys: Iterable[RouteKey]) -> None:
        """Take in that the subject is served by others; the client calls it."""
        self._inlets.routes_changed(keys)

    def _next_batch(
        self, deadline: float, want: int | None, *, prefetch: bool
    ) -> tuple[Inlet, ReceivedBatch] | None:
        """Return the next batch to hand out and whose it is, or None at the deadline or end."""
        now = time.monotonic()
        if self._handed:
            self._pace.handled(self._handed, now - self._handed_at)
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
            inlets.exchange(deadline, want)
            if time.monotonic() >= deadline and not inlets.has_waiting:
                return None
        return None
