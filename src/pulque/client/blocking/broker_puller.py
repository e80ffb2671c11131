"""What a consumer has for each broker; by hand, as its caller reads and a thread keeps the lease.

The caller's thread asks and takes in answers. A thread keeps the lease, settles for a caller who
takes long, and takes in answers meanwhile. Where there are many brokers, another one connects to
a broker that is away, so that the caller need not wait for it.
"""

import logging
import threading
import time
from collections.abc import Callable

from pulque.client.blocking.arrivals import Arrivals
from pulque.client.blocking.connection import Connection
from pulque.client.blocking.deferral import Deferrals
from pulque.client.blocking.lease_keeper import Keeper
from pulque.client.connection.backoff import Backoff
from pulque.client.connection.session import Answer
from pulque.client.options.consumer_plan import ConsumerPart
from pulque.client.receiving.error_policy import Trouble, problem_of
from pulque.errors import (
    CorruptionError,
    DisconnectedError,
    PulqueError,
    RequestTimeoutError,
)
from pulque.model.names import PartitionName
from pulque.model.positions import Tenure
from pulque.wire.requests import Settle
from pulque.wire.responses import Pulled, Response

__all__ = ["FOR_EVER", "Inlet"]

log = logging.getLogger("pulque.client")

FOR_EVER = float("inf")
_LONG_POLL = 10.0
_NO_ROOM_WAIT = 0.02
_CONNECT_LIMIT = 5.0


class Inlet:
    """The part of one consumer that deals with one broker.

    One thread at a time asks and takes in; any may ack, nack and close.

    Args:
        part: What is held, and what is kept.
        connect: Opens a connection to the broker within so many seconds.
        timeout: The client's.
        draw: Returns a random number in ``0.0..1.0``.
        arrived: Set when something came, or there is a connection, while the caller may wait.
        deferrals: Take messages to a delay server that are wanted again at a certain time.
    """

    def __init__(
        self,
        part: ConsumerPart,
        *,
        connect: Callable[[float], Connection],
        timeout: float,
        draw: Callable[[], float],
        arrived: Arrivals,
        deferrals: Deferrals,
    ) -> None:
        self.core, self._local = part
        self.lock = threading.Lock()
        self.fatal: PulqueError | None = None
        """Why there is no way to go on, as found while connecting."""
        self.lost_at = time.monotonic()
        """Since when there is no connection, if there is none."""
        self.problem: PulqueError | None = None
        """Why there is no connection."""
        self.owner: object = None
        """Lives as long as this does, which a thread holds: a dropped consumer can be closed."""
        self._connect = connect
        self._timeout = timeout
        self._wake = arrived.set
        self._trouble = Trouble(draw, timeout)
        self._backoff = Backoff(draw)
        self._retry_at = 0.0
        self._opener: threading.Thread | None = None
        self._reading = threading.Lock()
        self._connection: Connection | None = None
        self._pull_id = 0
        self._pull_due = FOR_EVER
        self._route_id = 0
        self._settles: dict[int, Settle] = {}
        self._is_closed = False
        self._keeper = Keeper(
            self.core,
            self.lock,
            connect=connect,
            drain=self._drain,
            save=self.save,
            deferrals=deferrals,
            interrupt=self.interrupt,
        )
        if self._local is not None:
            self._local.on_adopted = self._adopted

    @property
    def connection(self) -> Connection | None:
        """The connection, if there is an open one."""
        found = self._connection
        return found if found is not None and found.is_open else None

    @property
    def pull_due(self) -> float:
        """When the answer to the pull on its way is overdue."""
        return self._pull_due if self.core.is_pulling else FOR_EVER

    def check(self) -> None:
        """Raise why there is no way to go on, if so."""
        self._keeper.check()
        if self.fatal is not None:
            raise self.fatal.with_traceback(None)

    def is_gone(self) -> bool:
        """Say whether the broker has been away for so long that nothing of it is ours any more."""
        return self.connection is None and self._keeper.has_lost_contact(self.lost_at)

    def hurry(self) -> None:
        """Settle what is done now."""
        self._keeper.hurry()

    def is_told(self) -> bool:
        """Say whether the broker has all that may be settled."""
        with self.lock:
            return self.core.is_told

    def save(self, *, is_last: bool = False) -> None:
        """Write down how far the consumer got with this broker, for after a restart."""
        local, now = self._local, time.monotonic()
        if local is not None and (is_last or local.is_due(now)):
            with self.lock:
                progress = self.core.progress()
            local.save(progress, now, is_last=is_last)

    def close(self) -> None:
        """Settle what is done, and hand the rest back at once. May be called from any thread."""
        self._is_closed = True
        self.interrupt()
        with self._reading:
            self.drop_connection()
        self._keeper.leave(self._timeout)
        self.save(is_last=True)

    def begin_anew(self) -> None:
        """Abandon what is held, as the caller's thread was interrupted in the middle of it."""
        with self.lock:
            self.core.begin_anew()
        connection = self._connection
        if connection is not None:
            connection.abort()

    def interrupt(self) -> None:
        """Wake the thread that waits for an answer."""
        connection = self._connection
        if connection is not None:
            connection.abort()
        self._wake()

    def _adopted(self, partition: PartitionName, tenure: Tenure, pull: int) -> None:
        log.info("nack adopted by another broker: %s %d", partition, pull)
        with self.lock:
            self.core.adopted(partition, tenure, pull)

    # ── the only broker: the caller's thread waits for it ──────────────────────────────────

    def exchange(self, deadline: float, want: int) -> None:
        """Have a pull on its way, and take in one answer if one comes before the deadline."""
        connection = self._connection or self.open(deadline)
        if not self.core.is_pulling and not self.ask(connection, deadline, want):
            # Others ack what this consumer holds: their settles go through the keeper.
            time.sleep(min(_NO_ROOM_WAIT, max(0.0, deadline - time.monotonic())))
            return
        with self._reading:
            if not self.core.is_pulling:
                return  # the keeper took its answer in a moment ago, and no other will come
            if self._take_in_next(connection, min(deadline, self._pull_due)):
                return
            if time.monotonic() >= self._pull_due:
                raise self._late(connection)

    def _take_in_next(self, connection: Connection, until: float) -> bool:
        """Wait for an answer and take it in; return whether one came in time."""
        try:
            answer = connection.wait_answer(until)
            if answer is not None:
                self._take_in(answer)
        except PulqueError:
            raise
        except BaseException:
            # A signal handler raised it: perhaps an answer was read and not taken in.
            connection.abort()
            raise
        return answer is not None

    def recover(self, error: PulqueError, deadline: float) -> None:
        """Drop a broken connection and wait a while, or raise the error if it lasts too long."""
        with self._reading:
            self.drop_connection()
        if not self._is_closed:
            wait = self._trouble.next_wait(error, time.monotonic(), deadline)
            log.info("disconnected: %s", error)
            time.sleep(wait)

    # ── one of many brokers: the caller's thread waits for all of them ─────────────────────

    def keep_going(self, want: int, deadline: float = FOR_EVER) -> bool:
        """Have a pull on its way if possible, without waiting; say whether it wants to be called.

        It does not, if there is no room for more messages: then somebody has to settle first.

        Raises:
            PulqueError: There is no way to go on.
        """
        connection = self._connection
        if connection is None or not connection.is_open:
            self._open_soon()
            return True
        if self.core.is_pulling:
            return True
        try:
            return self.ask(connection, deadline, want)
        except UNREACHABLE as error:
            self._lose(error)
            return True

    def take_in_all(self) -> None:
        """Take in what has come, without waiting.

        Raises:
            PulqueError: There is no way to go on.
        """
        with self._reading:
            connection = self._connection
            try:
                while connection is not None and connection.is_open:
                    answer = connection.try_answer()
                    if answer is None:
                        break
                    self._take_in(answer)
                if connection is not None and time.monotonic() >= self.pull_due:
                    raise self._late(connection)
                return
            except UNREACHABLE as error:
                problem = error
            except BaseException:
                if connection is not None:
                    connection.abort()
                raise
        self._lose(problem)

    def retry_now(self) -> None:
        """Connect with the next call, if it waits before another try. Any thread may."""
        self._backoff.reset()
        self._retry_at = 0.0

    def _lose(self, error: PulqueError) -> None:
        log.info("disconnected: %s", error)
        with self._reading:
            self.drop_connection()
        self.problem = error
        if isinstance(error, CorruptionError):
            try:
                self._trouble.next_wait(error, time.monotonic(), FOR_EVER)
            except PulqueError as final:
                self.fatal = final

    def _open_soon(self) -> None:
        """Connect in a thread of its own, if none is at it and it is time."""
        if time.monotonic() < self._retry_at or self._is_closed:
            return
        if self._opener is None or not self._opener.is_alive():
            self._opener = threading.Thread(
                target=self._open_quietly, name="pulque-opener", daemon=True
            )
            self._opener.start()

    def _open_quietly(self) -> None:
        with self._reading:
            self.drop_connection()
        try:
            self.open(time.monotonic() + _CONNECT_LIMIT)
            self._backoff.reset()
        except UNREACHABLE as error:
            self.problem = error
            self._retry_at = time.monotonic() + self._backoff.next_wait()
        except PulqueError as error:
            self.fatal = error
        if self._is_closed:
            with self._reading:
                self.drop_connection()
        self._wake()

    # ── asking and taking in ───────────────────────────────────────────────────────────────

    def ask_ahead(self, want: int) -> None:
        """Ask for the next messages before the caller handles these, if there is room for many."""
        if self._connection is not None and not self.core.is_pulling:
            try:
                self.ask(self._connection, FOR_EVER, want, is_early=True)
            except DisconnectedError as error:
                log.info("disconnected: %s", error)

    def ask(
        self, connection: Connection, deadline: float, want: int, *, is_early: bool = False
    ) -> bool:
        """Write settles and the next pull; say whether there was room for a pull.

        Where to pull from may have to be asked first; the pull follows when that is known.
        """
        now = time.monotonic()
        wait = max(0.0, min(_LONG_POLL, deadline - now))
        try:
            with self.lock:
                buffers: list[bytes | memoryview] = []
                for settle in self.core.next_settles():
                    buffers += self._settle_frame(connection, settle)
                room = self.core.room_for(want, is_early=is_early)
                route = self.core.next_route()
                if route is not None:
                    self._route_id, frame = connection.session.ask(route)
                    self._pull_due = now + self._timeout
                    buffers += frame
                elif room > 0:
                    pull = self.core.next_pull(room, wait)
                    self._pull_id, frame = connection.session.ask(pull)
                    self._pull_due = now + wait + self._timeout
                    buffers += frame
            if buffers:
                connection.write(buffers)
        except BaseException:
            # Interrupted, perhaps before it was written: it is asked again on the next one.
            connection.abort()
            raise
        return room > 0 or route is not None

    def _settle_frame(self, connection: Connection, settle: Settle) -> list[bytes | memoryview]:
        request_id, frame = connection.session.ask(settle)
        self._settles[request_id] = settle
        return frame

    def _take_in(self, answer: Answer) -> None:
        """Take in one answer; ``_reading`` is held."""
        with self.lock:
            try:
                self._match(*answer)
            except PulqueError:
                raise
            except BaseException:  # by a signal handler, in the middle of a change
                self.core.begin_anew()
                if self._connection is not None:
                    self._connection.abort()
                raise

    def _match(self, request_id: int, response: Response | PulqueError) -> None:
        """Have an answer taken in by what asked; the lock is held."""
        settle = self._settles.pop(request_id, None)
        if settle is not None:
            self._keeper.take_in(settle, response)
        elif request_id == self._pull_id and self.core.is_pulling:
            if isinstance(response, Pulled):
                self.core.pulled(response)
                self._trouble.over()
            else:
                self.core.pull_failed()
                raise problem_of(response)
        elif request_id == self._route_id and self.core.is_pulling:
            self.core.routed(response)
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
                    self._wake()
            except UNREACHABLE as error:
                # The caller's thread finds the connection closed and opens another.
                log.info("disconnected: %s", error)
                if connection is not None:
                    connection.abort()
                self._wake()
            finally:
                self._reading.release()

    # ── connections come and go ────────────────────────────────────────────────────────────

    def open_again(self, deadline: float) -> None:
        """Connect, if there is no open connection."""
        if self.connection is None:
            with self._reading:
                self.drop_connection()
            self.open(deadline)

    def open(self, deadline: float) -> Connection:
        """Connect, subscribe, and ask again what has no answer.

        Raises:
            DisconnectedError: Nobody answers there.
            PulqueError: The broker refuses.
        """
        left = min(self._timeout, deadline - time.monotonic())
        connection = self._connect(max(left, 0.1))
        try:
            self._subscribe(connection)
            with self.lock:
                self._forget_requests()  # Ctrl-C may have kept drop_connection from it
                self.core.connected()
                self.core.limit_delays(connection.welcome.max_delay_ms)
                self.core.broker_group = self.core.broker_group or connection.welcome.broker
                buffers: list[bytes | memoryview] = []
                for settle in self.core.repeat_settles():
                    buffers += self._settle_frame(connection, settle)
                self._connection = connection
            if buffers:
                connection.write(buffers)
            self._keeper.start(connection.welcome.lease_ms / 1000)
        except BaseException:
            connection.abort()
            if self._connection is not connection:
                connection.close()
            raise
        return connection

    def _subscribe(self, connection: Connection) -> None:
        """Say how the group wants the subject, before the first pull."""
        try:
            request = self.core.subscribe_request()
            connection.request(request, self._timeout, self.core.subscribed)
        except PulqueError as error:
            raise problem_of(error) from None

    def drop_connection(self) -> None:
        """Close the connection; ``_reading`` is held."""
        with self.lock:
            connection, self._connection = self._connection, None
            self._forget_requests()
        if connection is not None:
            self.lost_at = time.monotonic()
            connection.close()

    def _forget_requests(self) -> None:
        """Wait for no answer of the last connection; the lock is held."""
        # The next connection counts from the beginning: its numbers mean something else.
        self._pull_id = self._route_id = 0
        self._settles.clear()
        if self.core.is_pulling:
            self.core.pull_failed()

    def drop_broken(self) -> None:
        """Close the connection, after it brought what makes no sense."""
        with self._reading:
            self.drop_connection()

    def _late(self, connection: Connection) -> RequestTimeoutError:
        return RequestTimeoutError(
            f"no answer to a pull from {connection.address} within {self._timeout:g} s of its end"
        )


UNREACHABLE = (DisconnectedError, RequestTimeoutError, CorruptionError)
"""What another connection may mend."""
