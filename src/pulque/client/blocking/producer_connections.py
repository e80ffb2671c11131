"""A producer's connections; by hand, as callers write and a thread for each broker reads.

Whoever closes a batch writes it, in its own thread; this thread reads the answers, sends what
has lingered long enough, and connects again when the connection is lost.
"""

import contextlib
import functools
import logging
import queue
import select
import socket
import threading
import time
from collections.abc import Callable, Iterable

from pulque.client.blocking.connection import Connection
from pulque.client.blocking.pending_sends import PendingSend
from pulque.client.connection.backoff import Backoff
from pulque.client.routing.broker_health import Breaker
from pulque.client.routing.failover_rules import ANSWER_LIMIT
from pulque.client.sending.dispatch import Dispatch
from pulque.client.sending.outgoing_batch import OutgoingBatch
from pulque.client.sending.producer_core import OutgoingCore
from pulque.errors import DisconnectedError, PulqueError, RequestTimeoutError

__all__ = ["SendLinks"]

log = logging.getLogger("pulque.client")

_CONNECT_LIMIT = 5.0
_FOR_EVER = float("inf")


class SendLinks:
    """All that moves the batches of one producer. Thread-safe.

    Args:
        core: What to send.
        connect: Opens a connection to a place within so many seconds.
        stale: Told when a broker cannot be reached, or refuses what the route says is its own.
        draw: Returns a random number in ``0.0..1.0``.
    """

    def __init__(
        self,
        core: OutgoingCore[PendingSend],
        connect: Callable[[str, float], Connection],
        stale: Callable[[], None],
        draw: Callable[[], float],
    ) -> None:
        self._listeners: list[queue.SimpleQueue[None]] = []
        """Told whenever batches got their outcome. No condition: that is Python, and an interrupt
        (Ctrl-C) in the middle of it leaves its lock taken."""
        self.stale = stale
        self._core = core
        self._connect = connect
        self._draw = draw
        self._links: tuple[SendLink, ...] = ()
        self._is_stopped = False
        core.on_place = self._add
        core.signal.on_hurry = self._hurry

    def pump(self) -> None:
        """Write what is ready; the thread that writes already takes over what others bring."""
        self._core.signal.is_up = False
        for link in self._links:
            link.pump()

    def wake(self) -> None:
        """Have the threads look what there is to do: whoever should have done it did not."""
        for link in self._links:
            link.dispatch.has_work = True
            link.wake()

    def _hurry(self) -> None:
        with self._core.lock:
            try:
                self._core.let_loose()
            except BaseException:
                self._core.mend()
                raise
        self.pump()

    def look(self) -> None:
        """Have the threads send what was dealt out anew; perhaps nobody else will come."""
        if self._core.was_dealt_anew:
            self._core.was_dealt_anew = False
            for link in self._links:
                link.wake()

    def retry_now(self) -> None:
        """Have those connect that wait before another try: brokers may be elsewhere by now."""
        for link in self._links:
            link.retry_now()

    def after_fork(self) -> None:
        """Let go of the parent's threads and sockets."""
        self._is_stopped = True
        for link in self._links:
            link.after_fork()

    def stop(self) -> None:
        """End the threads and the connections; what has no outcome gets an error."""
        self._is_stopped = True
        for link in self._links:
            link.stop()
        for link in self._links:
            link.join()

    def notify(self) -> None:
        """Wake those who wait for room."""
        for each in list(self._listeners):
            each.put(None)

    def wait_while(self, is_needed: Callable[[], bool], timeout: float) -> None:
        """Wait until a condition has ended, which changes when batches get their outcome."""
        news: queue.SimpleQueue[None] = queue.SimpleQueue()
        deadline = time.monotonic() + timeout
        try:
            self._listeners.append(news)
            while is_needed() and (left := deadline - time.monotonic()) > 0:
                with contextlib.suppress(queue.Empty):
                    news.get(timeout=left)
        finally:
            self._listeners = [each for each in self._listeners if each is not news]

    def tell(self, finished: Iterable[OutgoingBatch]) -> None:
        """Call those who wait for these batches. The lock must not be held."""
        for batch in finished:
            if batch.error is not None:
                log.warning(
                    "send failed: partition=%s messages=%d error=%s",
                    batch.stream.target.partition,
                    batch.count,
                    batch.error,
                )
            batch.tell()

    def _add(self, place: str, dispatch: Dispatch) -> None:
        if self._is_stopped:
            return
        found = next((each for each in self._links if each.dispatch is dispatch), None)
        if found is None:
            connect = functools.partial(self._connect, place)
            found = SendLink(self, self._core, dispatch, connect, self._draw)
            self._links += (found,)
        found.start()


class SendLink:
    """Moves the batches of one producer to one broker. Thread-safe."""

    def __init__(
        self,
        links: SendLinks,
        core: OutgoingCore[PendingSend],
        dispatch: Dispatch,
        connect: Callable[[float], Connection],
        draw: Callable[[], float],
    ) -> None:
        self._links = links
        self._core = core
        self.dispatch = self._dispatch = dispatch
        self._connect = connect
        self._backoff = Backoff(draw)
        self._connection: Connection | None = None
        self._writing = threading.Lock()
        self._stopped = False
        self._wake_at = 0.0
        self._woken, self._waker = socket.socketpair()
        self._woken.setblocking(False)
        self._waker.setblocking(False)
        self._thread = threading.Thread(target=self._run, name="pulque-producer", daemon=True)

    def start(self) -> None:
        """Begin, if it has not; the core's lock is held."""
        if self._thread.ident is None:
            self._thread.start()

    def pump(self) -> None:
        """Write what is ready; the thread that writes already takes over what others bring."""
        dispatch = self._dispatch
        while dispatch.has_work and self._connection is not None:
            if self._writing.locked():
                return
            # An interrupt (Ctrl-C) between ``acquire()`` and ``try`` would leave it taken.
            with self._writing:
                if not self._write_ready():
                    return

    def _pump_here(self) -> None:
        """Do the same in this link's own thread, which is never interrupted and must not wait.

        It has to read answers while another thread writes.
        """
        dispatch = self._dispatch
        while dispatch.has_work and self._connection is not None:
            if not self._writing.acquire(blocking=False):
                return
            try:
                if not self._write_ready():
                    return
            finally:
                self._writing.release()

    def stop(self) -> None:
        """Have the thread and the connection end."""
        self._stopped = True
        self.wake()

    def join(self) -> None:
        """Wait for the end of the thread, if it ever began."""
        if self._thread.ident is not None and threading.current_thread() is not self._thread:
            self._thread.join()

    def after_fork(self) -> None:
        """Let go of the parent's sockets; its thread is not here."""
        self._stopped = True
        self._connection = None
        self._woken.close()
        self._waker.close()

    def retry_now(self) -> None:
        """Connect now, if it waits before another try."""
        self._backoff.reset()
        self.wake()

    def _write_ready(self) -> bool:
        """Write until nothing is ready; say whether the connection is there."""
        connection: Connection | None = None
        try:
            while True:
                with self._core.lock:
                    connection = self._connection
                    if connection is None or not connection.is_open:
                        return False
                    request = self._next_request(connection)
                if request is None:
                    return True
                connection.write(request)
        except PulqueError as error:
            self._dispatch.problem = error
            self.wake()
            return False
        except BaseException:
            # Interrupted: perhaps what counts as sent was not written. After the connection's
            # end it is sent again.
            if connection is not None:
                connection.abort()
            self.wake()
            raise

    def _next_request(self, connection: Connection) -> list[bytes | memoryview] | None:
        """Return what to write now, if anything; the core's lock is held."""
        dispatch = self._dispatch
        try:
            now = time.monotonic()
            batches = dispatch.take(now)
            if not batches:
                wake = dispatch.next_wake()
                if wake is not None and wake < self._wake_at:
                    self.wake()
                return None
            request_id, buffers = connection.session.ask(dispatch.request(batches, now))
            dispatch.sent(request_id, batches)
        except BaseException:
            dispatch.mend()
            raise
        return buffers

    def wake(self) -> None:
        """Have the thread look what there is to do."""
        self._wake_at = 0.0
        try:
            self._waker.send(b"\0")
        except (BlockingIOError, OSError):
            return  # it is full of such bytes, or the thread has ended

    def _run(self) -> None:
        try:
            while not self._stopped:
                connection = self._open()
                if connection is not None:
                    self._serve(connection)
                if not self._stopped:
                    self._rest()
        finally:
            with self._core.lock:
                self._dispatch.fail_all(DisconnectedError("the producer was closed"))
            self._settle_finished()
            self._woken.close()
            self._waker.close()

    def _open(self) -> Connection | None:
        with self._core.lock:
            self._dispatch.expire(time.monotonic())
            wake = self._dispatch.next_wake()
        self._settle_finished()
        started = time.monotonic()
        left = _CONNECT_LIMIT if wake is None else wake - started
        try:
            connection = self._connect(max(0.1, min(left, _CONNECT_LIMIT)))
        except PulqueError as error:
            self._not_connected(error, started)
            return None
        except Exception as error:
            log.exception("a producer cannot connect")
            self._not_connected(DisconnectedError(str(error)), started)
            return None
        connection.set_timeout(self._core.options.timeout)
        with self._core.lock:
            self._dispatch.problem = None
            self._dispatch.is_led = connection.welcome.tenure.epoch > 0
            if self._dispatch.health is not None:
                self._dispatch.health.answered(time.monotonic(), 0.0)
            self._core.limit_messages(connection.welcome.max_message)
            self._dispatch.has_work = True
            self._connection = connection
        return connection

    def _not_connected(self, error: PulqueError, started: float) -> None:
        log.info("not connected: %s", error)
        self._dispatch.problem = error
        self._give_up(time.monotonic() - started)
        if not error.retryable:
            with self._core.lock:
                self._dispatch.fail_all(error)
        self._settle_finished()

    def _give_up(self, lasted: float) -> None:
        """Let other brokers have what this one cannot be sent, if there are any."""
        with self._core.lock:
            has_moved = self._core.unreachable(self._dispatch, time.monotonic(), lasted)
        if has_moved:
            self._links.pump()
        self._links.look()
        self._links.stale()

    def _rest(self) -> None:
        select.select([self._woken], [], [], self._backoff.next_wait())
        # A wake is for batches that linger; here they wait for a connection.
        self._drain()

    def _serve(self, connection: Connection) -> None:
        poller = select.poll()
        poller.register(connection, select.POLLIN)
        poller.register(self._woken, select.POLLIN)
        is_stuck = False
        try:
            while not self._stopped and connection.is_open:
                self._pump_here()
                poller.poll(self._prepare_to_wait())
                self._wake_at = 0.0
                self._drain()
                self._read(connection)
        except PulqueError as error:
            log.info("disconnected: %s", error)
            self._dispatch.problem = error
            is_stuck = isinstance(error, RequestTimeoutError)
        except Exception as error:
            log.exception("a producer's connection failed")
            self._dispatch.problem = DisconnectedError(str(error))
        finally:
            with self._core.lock:
                self._connection = None
                self._dispatch.disconnected()
            with self._writing:
                connection.close()
            self._settle_finished()
            if is_stuck:
                self._give_up(max(ANSWER_LIMIT, Breaker.LONG))

    def _prepare_to_wait(self) -> float | None:
        """Return how many milliseconds there is nothing to do but to wait."""
        with self._core.lock:
            now = time.monotonic()
            is_overdue = self._dispatch.expire(now)
            wake = self._dispatch.next_wake()
            patience_ends = self._patience_ends()
            if patience_ends is not None:
                is_overdue = is_overdue or patience_ends <= now
                wake = patience_ends if wake is None else min(wake, patience_ends)
            if wake is not None and wake <= now:
                self._dispatch.has_work = True
            has_work = self._dispatch.has_work
            self._wake_at = 0.0 if has_work else _FOR_EVER if wake is None else wake
        self._settle_finished()
        if is_overdue:
            raise RequestTimeoutError("the broker owes an answer for too long")
        if has_work:
            return 0
        return None if wake is None else max(0.0, (wake - now) * 1000 + 0.5)

    def _patience_ends(self) -> float | None:
        """Return when to give the broker up for others, if it does not answer until then."""
        sent_at = self._dispatch.oldest_in_flight()
        if self._dispatch.health is None or sent_at is None:
            return None
        return sent_at + ANSWER_LIMIT

    def _read(self, connection: Connection) -> None:
        answer = connection.try_answer()
        while answer is not None:
            self._backoff.reset()
            with self._core.lock:
                self._dispatch.answered(*answer, time.monotonic())
                was_refused, self._dispatch.was_refused = self._dispatch.was_refused, False
            if was_refused:
                # What it did not take is with other brokers by now.
                self._links.stale()
                self._links.pump()
            answer = connection.buffered_answer()
        self._settle_finished()

    def _settle_finished(self) -> None:
        with self._core.lock:
            finished = self._dispatch.take_finished()
        if finished:
            self._links.notify()
            self._links.tell(finished)
        self._links.look()

    def _drain(self) -> None:
        try:
            self._woken.recv(4096)
        except BlockingIOError:
            return
