"""Keeps a consumer's lease while its caller is busy; by hand, as only threads need it.

It has a connection of its own, because the consumer's may be held by a waiting pull.
"""

import logging
import threading
import time
from collections.abc import Callable

from pulque.client.blocking.connection import Connection
from pulque.client.blocking.deferral import Deferrals
from pulque.client.connection.session import as_it_is
from pulque.client.receiving.consumer_core import IncomingCore
from pulque.errors import PulqueError, RemoteProtocolError, UnavailableError
from pulque.wire.requests import Settle
from pulque.wire.responses import Beaten, Response

__all__ = ["Keeper"]

log = logging.getLogger("pulque.client")

_TICK = 0.1
_REQUEST_TIMEOUT = 5.0
_BEATS_PER_LEASE = 3


class Keeper:
    """The background thread of one consumer. Thread-safe.

    Args:
        core: What is held.
        lock: Guards ``core``.
        connect: Opens a connection within so many seconds.
        drain: Takes in answers that wait on the consumer's own connection.
        save: Writes down how far the consumer got, if it is time to.
        deferrals: Take to a delay server what is wanted again at a certain time.
        interrupt: Wakes the consumer's caller, to be told that there is no way to go on.
    """

    def __init__(  # noqa: PLR0913  # ports, by keyword
        self,
        core: IncomingCore,
        lock: threading.Lock,
        *,
        connect: Callable[[float], Connection],
        drain: Callable[[], None],
        save: Callable[[], None],
        deferrals: Deferrals,
        interrupt: Callable[[], None],
    ) -> None:
        self._core = core
        self._lock = lock
        self._connect = connect
        self._drain = drain
        self._save = save
        self._deferrals = deferrals
        self._interrupt = interrupt
        self._connection: Connection | None = None
        self._error: PulqueError | None = None
        self._stop = threading.Event()
        self._turn = threading.Event()
        """Set when there is something to do before the next tick."""
        self._lease = 0.0
        self._beat_at = 0.0
        self._contact_at = 0.0
        self._unanswered: list[Settle] = []
        self._thread: threading.Thread | None = None
        self._starting = threading.Lock()
        """One thread may connect while another closes."""

    def start(self, lease: float) -> None:
        """Begin, if it has not; the lease is in seconds."""
        self._lease = lease
        # Before that there was nothing to lose, or it is lost by now.
        self._contact_at = time.monotonic()
        with self._starting:
            if self._thread is None and not self._stop.is_set():
                self._beat_at = time.monotonic() + lease / _BEATS_PER_LEASE
                thread = threading.Thread(target=self._run, name="pulque-keeper", daemon=True)
                thread.start()
                self._thread = thread

    def has_lost_contact(self, lost_at: float) -> bool:
        """Say whether the lease has run out, with no connection since ``lost_at``."""
        since = max(lost_at, self._contact_at)
        return time.monotonic() - since > (self._lease or _REQUEST_TIMEOUT)

    def check(self) -> None:
        """Raise what made it stop."""
        if self._error is not None:
            raise self._error.with_traceback(None)

    def take_in(self, settle: Settle, response: Response | PulqueError) -> None:
        """Take in the answer to a settle; the lock is held."""
        try:
            self._core.settle_answered(settle, response)
        except PulqueError as error:
            self._error = error
            self._interrupt()

    def hurry(self) -> None:
        """Settle what is done now, not with the next tick."""
        self._turn.set()

    def leave(self, timeout: float) -> None:
        """Settle what is done, hand back the rest, and end."""
        with self._starting:
            self._stop.set()
        self._turn.set()
        if self._thread is None:
            return
        if self._thread is not threading.current_thread():
            self._thread.join(timeout)
        if self._error is None:
            self._last_words(time.monotonic() + timeout)
        self._disconnect()

    def _last_words(self, deadline: float) -> None:
        for is_last in (False, True):
            try:
                self._say_last_words(deadline)
                return
            except PulqueError as error:
                self._disconnect()
                if is_last or not error.retryable:
                    log.warning("left without a word: %s", error)
                    return

    def _say_last_words(self, deadline: float) -> None:
        self._deferrals.finish()
        with self._lock:
            # The consumer's own connection is closed: whatever it asked gets no answer there.
            self._unanswered = self._core.repeat_settles()
        # A change of tenure, or very many nacks, take more than one round.
        while time.monotonic() < deadline and self._settle_all():
            pass
        with self._lock:
            farewell = self._core.farewell()
        if farewell is not None:
            self._connected().request(farewell, _REQUEST_TIMEOUT, as_it_is)

    def _run(self) -> None:
        while True:
            self._turn.wait(min(_TICK, self._lease / _BEATS_PER_LEASE))
            self._turn.clear()
            if self._stop.is_set():
                return
            self._check_contact()
            try:
                # First, as the broker may be away or hang.
                self._save()
                self._drain()
                self._deferrals.go_on()
                self._settle_all()
                self._keep_up()
                if time.monotonic() >= self._beat_at:
                    self._beat()
            except UnavailableError as error:
                log.info("keeper disconnected: %s", error)
                self._disconnect()
            except PulqueError as error:
                log.warning("keeper stopped: %s", error)
                self._error = error
                self._interrupt()
                return
            except Exception as error:
                log.exception("keeper stopped")
                self._error = RemoteProtocolError(f"{type(error).__name__}: {error}")
                self._interrupt()
                return

    def _check_contact(self) -> None:
        """Abandon what is held if the broker did not hear of us for the lease."""
        if time.monotonic() - self._contact_at > self._lease:
            with self._lock:
                self._core.lose_contact()

    def _settle_all(self) -> bool:
        """Settle what is done; say whether there was anything."""
        with self._lock:
            # What got no answer last time is still on its way, as far as the core knows.
            self._unanswered += self._core.next_settles()
        asked = len(self._unanswered)
        while self._unanswered:
            settle = self._unanswered[0]
            if not self._core.is_on_the_way(settle):
                self._unanswered.pop(0)
                continue
            connection = self._connected()
            request_id, frame = connection.session.ask(settle)
            response = connection.exchange(request_id, frame, _REQUEST_TIMEOUT)
            self._unanswered.pop(0)
            with self._lock:
                self.take_in(settle, response)
        return asked > 0

    def _keep_up(self) -> None:
        with self._lock:
            upkeep = self._core.next_upkeep()
        if upkeep is not None:
            connection = self._connected()
            request_id, frame = connection.session.ask(upkeep)
            response = connection.exchange(request_id, frame, _REQUEST_TIMEOUT)
            with self._lock:
                self._core.upkept(response)

    def _beat(self) -> None:
        sent_at = time.monotonic()
        answer = self._connected().request(self._core.heartbeat(), _REQUEST_TIMEOUT, as_it_is)
        if isinstance(answer, Beaten):
            self._lease = answer.lease_ms / 1000
            self._contact_at = max(self._contact_at, sent_at)
        self._beat_at = time.monotonic() + self._lease / _BEATS_PER_LEASE

    def _connected(self) -> Connection:
        if self._connection is None:
            self._connection = self._connect(_REQUEST_TIMEOUT)
        return self._connection

    def _disconnect(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None
