"""A producer that batches underneath; by hand, as threads share it, and the process may end."""

import atexit
import logging
import threading
import time
import weakref
from collections.abc import Callable, Iterable
from types import TracebackType
from typing import Self, Unpack

from pulque.client.arguments.checks import check_wait
from pulque.client.blocking.connection import Connection
from pulque.client.blocking.pending_sends import PendingSend, PendingSends, wait_for
from pulque.client.blocking.producer_connections import SendLinks
from pulque.client.connection.backoff import Backoff
from pulque.client.connection.fork_safety import forked, on_fork
from pulque.client.persistence.message_spool import BatchNote, SendSpool
from pulque.client.routing.route_table import RouteKey
from pulque.client.routing.targets import NoRouteError, Targets, Way
from pulque.client.sending.outgoing_batch import OutgoingBatch
from pulque.client.sending.outgoing_message import MessageParts, Outgoing, outgoing_of
from pulque.client.sending.producer_options import SendOptions
from pulque.client.sending.promises import Span
from pulque.client.sending.spooled_producer_core import SpoolingCore, core_of, is_stored
from pulque.clock import wall_ms
from pulque.errors import (
    ForkedError,
    PulqueError,
    RequestTimeoutError,
    SpoolFullError,
)
from pulque.model.ids import IdSource
from pulque.model.names import parse_subject

__all__ = ["Producer", "close_in_thread"]

log = logging.getLogger("pulque.client")

_LAST_WORDS = 5.0
"""How long the end of the process waits for outcomes, in seconds."""

_open: "weakref.WeakSet[Producer]" = weakref.WeakSet()
_closing: set[threading.Thread] = set()
"""Close clients that were dropped."""


class Producer:
    """Sends messages in batches, and finds an outcome for each of them.

    Made by ``Client.producer``. Any number of threads may send through one producer. Messages
    that one thread sends to one subject arrive in that order, unless a batch has to be sent
    again after the broker refused it for a while (``max_in_flight=1`` keeps it even then).
    """

    def __init__(  # noqa: PLR0913  # ports, by keyword
        self,
        options: SendOptions,
        *,
        connect: Callable[[str, float], Connection],
        find_targets: Callable[[Way, float | None], Targets],
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
        self.left_over = PendingSends([])
        """The promises of what the spool had left from the last run, in its order."""
        self._signal = self._core.signal
        self._add = self._core.add
        self._add_keyed = self._core.add_keyed
        self._find_targets = find_targets
        self._links = SendLinks(self._core, connect, stale, draw)
        if first_place is not None:
            self._core.add_place(first_place)
        self._is_closed = self._has_ended = False
        if isinstance(self._core, SpoolingCore):
            self._recover(self._core)
        self.on_closed: Callable[[Producer], None] | None = None
        """Called at its end. It holds the client: the threads of a producer hold neither."""
        self._close_at_exit()

    def _close_at_exit(self) -> None:
        """Register the producer to be closed at the end of the process, and told of forks.

        Both hold it weakly: the garbage collector makes them forget it before the client, which
        is dropped with it, can have it closed.
        """
        _open.add(self)
        on_fork(self, Producer._after_fork)

    def _after_fork(self) -> None:
        """Refuse everything in a child: what waits here is sent by the parent."""
        self._is_closed = self._has_ended = True
        _open.discard(self)
        self._core.fork(forked("producer", "make a producer in the child, with client.producer()"))
        self._links.after_fork()
        if self._spool is not None:
            self._spool.close()

    def recovered(self) -> None:
        """Return once it is known what became of the last run's messages: at once.

        A blocking producer with a spool finds that out when it is made; the one for asyncio
        cannot, and has to be asked.
        """

    def send(  # noqa: C901  # one way for each shape of message, and one for each trouble
        self, subject: str, body: object, **parts: Unpack[MessageParts]
    ) -> PendingSend:
        """Take in one message and return the promise of its receipt.

        Blocks while too much is buffered, for at most the producer's timeout.

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
        message: Outgoing | None = None
        while True:
            try:
                if not parts:
                    pending = self._add(subject, body)
                elif (
                    len(parts) == 1
                    and type(order_key := parts.get("order_key")) is str
                    and order_key
                ):
                    pending = self._add_keyed(subject, body, order_key)
                else:
                    # Made once: a second one would find nothing in a generator of tags.
                    message = message or Outgoing(body, **parts)
                    pending = self._core.add_message(subject, message)
            except TypeError:
                parse_subject(subject)  # what cannot be looked up is no subject
                raise
            except NoRouteError as unknown:
                self._learn(unknown.way)
            except SpoolFullError:
                self._work()
                if self._core.is_crowded:
                    raise
            except BaseException:
                self._links.wake()  # interrupted: perhaps a message came in nobody knows of
                raise
            else:
                if self._signal.is_up:
                    self._work()
                return pending

    def send_many(self, subject: str, messages: Iterable[object]) -> PendingSends:
        """Take in many messages, and return the promises of their receipts in order.

        The cheapest way to send bodies that are at hand. Blocks and raises as ``send`` does,
        before the first is taken in where that is possible; else a note says how many were.
        """
        if type(subject) is not str:
            parse_subject(subject)
        items = outgoing_of(messages)
        for way in self._core.ways_of(subject, items):
            if not self._core.knows(way):
                self._learn(way)
        self._core.check_many(subject, items)
        spans: list[Span] = []
        try:
            for some in self._core.add_in_steps(subject, items):
                spans += some
                if self._signal.is_up:
                    self._work()
        except BaseException:
            self._links.wake()
            raise
        return PendingSends(spans)

    def flush(self, timeout: float | None = None) -> None:
        """Send what lingers, and wait until every message so far has an outcome.

        The outcome may be an error: ask the promises, which know it by then.

        Raises:
            RequestTimeoutError: Some have none within ``timeout`` seconds.
        """
        if isinstance(self._core.closed_by, ForkedError):
            raise self._core.closed_by.with_traceback(None)
        wait_s = None if timeout is None else check_wait(timeout)
        with self._core.lock:
            batches = self._flush()
        self._links.pump()
        wait_for(batches, wait_s)

    def _flush(self, *, is_last: bool = False) -> list[OutgoingBatch]:
        try:
            return self._core.close() if is_last else self._core.flush()
        except BaseException:
            self._core.mend()
            raise

    def close(self, timeout: float | None = None) -> None:
        """Flush, and end. Messages without an outcome by then get ``DisconnectedError``.

        With a spool it waits for the producer's timeout at most, if for no other time; they stay
        there, and the next producer with this spool sends them.
        """
        if self._has_ended:
            return
        if timeout is not None:
            timeout = check_wait(timeout)
        self._is_closed = True
        if timeout is None and self._spool is not None:
            timeout = self._core.options.timeout
        try:
            with self._core.lock:
                batches = self._flush(is_last=True)
            self._links.notify()
            self._links.pump()
            wait_for(batches, timeout)
        except RequestTimeoutError:
            log.info("a producer is closed with messages on their way")
        finally:
            # Also when interrupted: whoever presses Ctrl-C does not want to wait any more. And if
            # this is interrupted, too, ``close`` can be called again.
            self._links.stop()
            if self._spool is not None:
                self._spool.close()
            _open.discard(self)
            if self.on_closed is not None:
                self.on_closed(self)
            self._has_ended = True

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
        """Take in that subjects are served by others; the client calls it."""
        self._links.retry_now()
        for way in {key.way for key in keys if not key.group}:
            if self._core.knows(way):
                self._learn(way)

    def _learn(self, way: Way) -> None:
        targets = self._find_targets(way, None)
        with self._core.lock:
            self._core.add_way(way, targets)
        self._links.look()

    def _recover(self, core: SpoolingCore[PendingSend]) -> None:
        """Find out about what was under way when the last run ended, and send the rest."""
        try:
            for way, note in core.undecided():
                self._decide(core, way, note)
            for way in core.ways_left():
                self._learn(way)
            self.left_over = PendingSends(core.resume())
        except BaseException:
            self._is_closed = self._has_ended = True
            self._links.stop()
            if self._spool is not None:
                self._spool.close()
            raise
        self._links.pump()

    def _decide(self, core: SpoolingCore[PendingSend], way: Way, note: BatchNote) -> None:
        backoff = Backoff(self._draw)
        deadline = time.monotonic() + core.options.timeout
        while True:
            try:
                self._find_targets(way, None)
                core.decide(note, is_stored=self._ask(core, note))
                return
            except PulqueError as error:
                wait = backoff.next_wait()
                if not error.retryable or time.monotonic() + wait > deadline:
                    raise
                time.sleep(wait)

    def _ask(self, core: SpoolingCore[PendingSend], note: BatchNote) -> bool:
        timeout = core.options.timeout
        connection = self._connect(note.place, timeout)
        try:
            return connection.request(core.question(note, timeout), timeout, is_stored)
        finally:
            connection.close()

    def _work(self) -> None:
        """Send what is ready, and wait while too much is not."""
        core = self._core
        try:
            self._links.pump()
        except BaseException:
            self._links.wake()
            raise
        if self._signal.is_ahead:
            # Else a loop that only sends keeps the thread that reads answers from running, for
            # five milliseconds each time (the interpreter's switch interval).
            self._signal.is_ahead = False
            time.sleep(0)
        if core.is_crowded:
            # Whatever happens, batches have an outcome within their timeout: that makes room.
            self._links.wait_while(
                lambda: not self._is_closed and core.is_crowded, core.options.timeout
            )


def close_in_thread(close: Callable[[], None]) -> None:
    """Close what was dropped in a thread of its own, which the end of the process waits for."""

    def run() -> None:
        try:
            close()
        finally:
            _closing.discard(thread)

    thread = threading.Thread(target=run, name="pulque-closer", daemon=True)
    _closing.add(thread)
    try:
        thread.start()
    except BaseException:
        _closing.discard(thread)
        raise


def _close_all() -> None:
    """Flush what is still open at the end of the process, and what is being closed."""
    for producer in list(_open):
        producer.close(_LAST_WORDS)
    deadline = time.monotonic() + _LAST_WORDS
    for thread in list(_closing):
        thread.join(max(0.0, deadline - time.monotonic()))


atexit.register(_close_all)
