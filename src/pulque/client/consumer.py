"""A blocking consumer: pulls in the caller's thread, settles as it goes.

While the caller handles one batch, the next pull is already on its way, together with the
settle for what was done before; its answer waits in the socket. A thread keeps the lease, and
settles for a caller who takes long.
"""

import logging
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from types import TracebackType
from typing import Self

from pulque.client.connection import Connection
from pulque.client.identity import Identity
from pulque.client.incoming import IncomingCore
from pulque.client.keeper import Keeper
from pulque.client.options import check_timeout
from pulque.client.pace import Pace
from pulque.client.received import ACKED, ReceivedBatch, ReceivedMessage
from pulque.client.route_table import RouteKey
from pulque.client.session import Answer
from pulque.client.trouble import Trouble, problem_of
from pulque.errors import (
    CorruptionError,
    DisconnectedError,
    ProtocolError,
    PulqueError,
    RequestTimeoutError,
    UsageError,
)
from pulque.model.names import ConsumerId
from pulque.wire.requests import Settle
from pulque.wire.responses import Pulled, Routed

__all__ = ["Consumer"]

log = logging.getLogger("pulque.client")

_LONG_POLL = 10.0
_NO_ROOM_WAIT = 0.02
_SETTLE_WAIT = 0.001
_FOR_EVER = float("inf")


class Consumer:
    """Receives the messages of one subject for one group. Made by ``Client.consumer``.

    One thread at a time may iterate, pull or settle; any thread may ack, nack and close. ::

        for message in consumer:
            handle(message.body)
            message.ack()
    """

    def __init__(
        self,
        core: IncomingCore,
        identity: Identity,
        *,
        connect: Callable[[float], Connection],
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
        self._lock = threading.Lock()
        self._reading = threading.Lock()
        self._connection: Connection | None = None
        self._pull_id = 0
        self._pull_due = _FOR_EVER
        self._route_id = 0
        self._settles: dict[int, Settle] = {}
        self._is_closed = False
        self._handed = 0
        self._handed_at = 0.0
        self._keeper = Keeper(
            core,
            self._lock,
            connect=connect,
            drain=self._drain,
            save=self._save,
            interrupt=self._interrupt,
        )

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

    def __iter__(self) -> Iterator[ReceivedMessage]:
        """Yield messages as they come, until the consumer is closed.

        Raises:
            DisconnectedError: No broker could be reached within the client's timeout. The
                consumer can go on: iterate again.
            FencedError: Another consumer took over this id.
        """
        prefetch = self._prefetch is not False
        new = ReceivedMessage.__new__
        while (batch := self._next_batch(_FOR_EVER, None, prefetch=prefetch)) is not None:
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
                with self._lock:
                    self._core.put_back(batch, index + 1)

    def pull(
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
        batch = self._next_batch(deadline, limit, prefetch=bool(self._prefetch))
        with self._lock:
            messages = self._core.take_messages(batch, limit)
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
        while not self._is_closed:
            self._keeper.check()
            with self._lock:
                if self._core.is_told:
                    return
            if time.monotonic() >= deadline:
                raise RequestTimeoutError(f"no answer to a settle within {limit:g} s")
            try:
                if self._connection is None or not self._connection.is_open:
                    with self._reading:
                        self._drop_connection()
                    self._open(deadline)
            except DisconnectedError as error:
                self._recover(error, deadline)
            self._keeper.hurry()
            time.sleep(_SETTLE_WAIT)

    def on_abandoned(self, callback: Callable[[], None]) -> None:
        """Have ``callback`` called when messages that this consumer held went to others.

        It may look at ``is_abandoned`` of the messages it knows, and must not block. Any thread
        may call it.
        """
        self._core.on_abandoned = callback

    @property
    def is_connected(self) -> bool:
        """Whether there is a connection to a broker right now."""
        connection = self._connection
        return connection is not None and connection.is_open

    def _routes_changed(self, keys: Iterable[RouteKey]) -> None:
        """Take in that the subject is served by others; the client calls it."""

    def close(self) -> None:
        """Settle what is done, and hand the rest back at once. May be called from any thread."""
        if self._is_closed:
            return
        self._is_closed = True
        self._interrupt()
        with self._reading:
            self._drop_connection()
        self._keeper.leave(self._timeout)
        self._save(is_last=True)
        self._identity.release()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _save(self, *, is_last: bool = False) -> None:
        """Write down how far this consumer got, for after a restart."""
        local, now = self._identity.local, time.monotonic()
        if local is not None and (is_last or local.is_due(now)):
            with self._lock:
                progress = self._core.progress()
            local.save(progress, now, is_last=is_last)

    # ── one batch after the other ──────────────────────────────────────────────────────────

    def _next_batch(
        self, deadline: float, want: int | None, *, prefetch: bool
    ) -> ReceivedBatch | None:
        """Return the next batch to hand out, or None at the deadline or when closed."""
        now = time.monotonic()
        if self._handed:
            self._pace.handled(self._handed, now - self._handed_at)
            self._handed = 0
        while not self._is_closed:
            with self._lock:
                batch = self._core.next_batch()
            if batch is not None:
                if prefetch and not self._core.is_pulling:
                    self._ask_ahead(want)
                self._handed = batch.end - batch.start
                self._handed_at = time.monotonic()
                return batch
            self._keeper.check()
            try:
                self._exchange(deadline, want)
            except (DisconnectedError, RequestTimeoutError, CorruptionError) as error:
                self._keeper.check()
                self._recover(error, deadline)
            except ProtocolError:
                with self._reading:
                    self._drop_connection()
                raise
            if time.monotonic() >= deadline and not self._core.has_waiting:
                return None
        return None

    def _exchange(self, deadline: float, want: int | None) -> None:
        """Have a pull on its way, and take in one answer if one comes before the deadline."""
        connection = self._connection or self._open(deadline)
        if not self._core.is_pulling and not self._ask(connection, deadline, want):
            # Others ack what this consumer holds: their settles go through the keeper.
            time.sleep(min(_NO_ROOM_WAIT, max(0.0, deadline - time.monotonic())))
            return
        with self._reading:
            if not self._core.is_pulling:
                return  # the keeper took its answer in a moment ago, and no other will come
            answer = connection.wait_answer(min(deadline, self._pull_due))
            if answer is not None:
                self._take_in(answer)
            elif time.monotonic() >= self._pull_due:
                raise RequestTimeoutError(
                    f"no answer to a pull from {connection.address} within {self._timeout:g} s "
                    "of its end"
                )

    def _ask_ahead(self, want: int | None) -> None:
        """Ask for the next messages before the caller handles these."""
        if self._connection is not None:
            try:
                self._ask(self._connection, _FOR_EVER, want)
            except DisconnectedError as error:
                log.info("disconnected: %s", error)

    def _ask(self, connection: Connection, deadline: float, want: int | None) -> bool:
        """Write settles and the next pull; say whether there was room for a pull.

        Where to pull from may have to be asked first; the pull follows when that is known.
        """
        now = time.monotonic()
        wait = max(0.0, min(_LONG_POLL, deadline - now))
        with self._lock:
            buffers: list[bytes | memoryview] = []
            for settle in self._core.next_settles():
                buffers += self._settle_frame(connection, settle)
            room = min(want or self._pace.want, self._core.room)
            route = self._core.next_route()
            if route is not None:
                self._route_id, frame = connection.session.ask(route)
                self._pull_due = now + self._timeout
                buffers += frame
            elif room > 0:
                pull = self._core.next_pull(room, wait)
                self._pull_id, frame = connection.session.ask(pull)
                self._pull_due = now + wait + self._timeout
                buffers += frame
        if buffers:
            connection.write(buffers)
        return room > 0 or route is not None

    def _settle_frame(self, connection: Connection, settle: Settle) -> list[bytes | memoryview]:
        request_id, frame = connection.session.ask(settle)
        self._settles[request_id] = settle
        return frame

    def _take_in(self, answer: Answer) -> None:
        """Take in one answer; ``_reading`` is held."""
        request_id, response = answer
        with self._lock:
            settle = self._settles.pop(request_id, None)
            if settle is not None:
                self._keeper.take_in(settle, response)
            elif request_id == self._pull_id and self._core.is_pulling:
                if isinstance(response, Pulled):
                    self._core.pulled(response)
                    self._trouble.over()
                else:
                    self._core.pull_failed()
                    raise problem_of(response)
            elif request_id == self._route_id and self._core.is_pulling:
                if isinstance(response, Routed):
                    self._core.routed(response)
                else:
                    self._core.pull_failed()
                    raise problem_of(response)
            elif isinstance(response, PulqueError):
                raise response

    def _drain(self) -> None:
        """Take in what has come while the caller is busy; called by the keeper's thread."""
        connection = self._connection
        if self._reading.acquire(blocking=False):
            try:
                while connection is not None and connection.is_open:
                    answer = connection.try_answer()
                    if answer is None:
                        return
                    self._take_in(answer)
            except (DisconnectedError, RequestTimeoutError, CorruptionError) as error:
                # The caller's thread finds the connection closed and opens another.
                log.info("disconnected: %s", error)
                if connection is not None:
                    connection.abort()
            finally:
                self._reading.release()

    # ── connections come and go ────────────────────────────────────────────────────────────

    def _open(self, deadline: float) -> Connection:
        left = min(self._timeout, deadline - time.monotonic())
        connection = self._connect(max(left, 0.1))
        self._subscribe(connection)
        with self._lock:
            self._core.connected()
            self._core.limit_delays(connection.welcome.max_delay_ms)
            buffers: list[bytes | memoryview] = []
            for settle in self._core.repeat_settles():
                buffers += self._settle_frame(connection, settle)
            self._connection = connection
        if buffers:
            connection.write(buffers)
        self._keeper.start(connection.welcome.lease_ms / 1000)
        return connection

    def _subscribe(self, connection: Connection) -> None:
        """Say how the group wants the subject, before the first pull."""
        try:
            answer = connection.request(self._core.subscribe_request(), self._timeout)
            self._core.subscribed(answer)
        except PulqueError as error:
            connection.close()
            raise problem_of(error) from None

    def _recover(self, error: PulqueError, deadline: float) -> None:
        """Drop a broken connection and wait a while, or raise the error if it lasts too long."""
        with self._reading:
            self._drop_connection()
        if not self._is_closed:
            wait = self._trouble.next_wait(error, time.monotonic(), deadline)
            log.info("disconnected: %s", error)
            time.sleep(wait)

    def _interrupt(self) -> None:
        """Wake the thread that waits for an answer."""
        connection = self._connection
        if connection is not None:
            connection.abort()

    def _drop_connection(self) -> None:
        with self._lock:
            connection, self._connection = self._connection, None
            self._settles.clear()
            if self._core.is_pulling:
                self._core.pull_failed()
        if connection is not None:
            connection.close()
