"""A whole broker inside the test's own process, whose time and faults the test decides.

::

    with InProcessBroker() as broker:
        client = pulque.connect(broker.url)
        broker.advance_time(3600)           # an hour later, at once
        broker.kill()
        broker.restart()                    # on the same data, as after kill -9

It is the broker that ``pulque up`` runs, on a loopback port, in a thread with an event loop of
its own. Its files are in memory unless it is given a directory. It reads a clock that stands
still; only what clients wait for (a long poll, a timeout) passes with the time on the wall.
"""

import asyncio
import logging
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from datetime import timedelta
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar

import structlog

from pulque.broker.config import BrokerSettings
from pulque.broker.server import Broker, DataDirectory
from pulque.clock import SystemClock
from pulque.errors import PulqueError, UnavailableError, UsageError
from pulque.serving.listener import LoggingListener
from pulque.storage.files import OsFileSystem
from pulque.testing.clock import ManualClock
from pulque.testing.faults import BreakableFiles, BreakableHandler
from pulque.testing.files import MemoryFileSystem

__all__ = ["InProcessBroker"]

T = TypeVar("T")
_PATIENCE_S = 20.0
_LAST_TURNS = 4
_LONGEST = timedelta(days=36_500)


class InProcessBroker:
    """One broker, its data, its clock and its faults. Used by one thread at a time.

    Args:
        directory: Where its files are, if they are not to be in memory.
        settings: Sections of settings as in a TOML file, ``consumption={"lease": "10s"}``.

    After ``kill`` or ``stop``, ``restart`` brings it back on the same data and port.
    """

    def __init__(self, directory: Path | None = None, **settings: dict[str, Any]) -> None:
        # A whole second, as what waits is due by tenths of one: a delay has passed when the test
        # says so.
        self.clock = ManualClock(SystemClock().now_ms() // 1000 * 1000)
        """Begins at the time on the wall; ``advance_time`` moves it."""
        self.url = ""
        """Where it listens."""
        self._files: DataDirectory = MemoryFileSystem()
        if directory is not None:
            directory.mkdir(parents=True, exist_ok=True)
            self._files = OsFileSystem(str(directory))
        self._sections = settings
        self._running: _Running | None = None

    # ── its life ───────────────────────────────────────────────────────────────────────────

    @property
    def is_running(self) -> bool:
        """Whether it serves, or is paused."""
        return self._running is not None and self._running.is_alive

    def start(self) -> None:
        """Recover what is there, and serve.

        Raises:
            PulqueError: It cannot, or it runs already.
        """
        if self.is_running:
            raise UsageError("the broker runs already; stop or kill it first")
        self._running = _Running(self._settings(), self.clock, self._files)
        self.url = self._running.start()

    def stop(self) -> None:
        """End as on SIGTERM, if it runs.

        Raises:
            PulqueError: Its disk had failed, or a bug had stopped it.
        """
        running, self._running = self._running, None
        if running is not None:
            running.end()

    def kill(self) -> None:
        """End as by ``kill -9``: no answer, no last write."""
        running, self._running = self._running, None
        if running is not None:
            running.kill()

    def restart(self) -> None:
        """Start again on the same data and port, after a ``stop`` if it runs.

        Raises:
            PulqueError: It cannot.
        """
        self.stop()
        self.start()

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.stop()

    # ── its time ───────────────────────────────────────────────────────────────────────────

    def advance_time(self, by: float | timedelta, *, heartbeats: bool = True) -> None:
        """Let time pass for the broker; what is due by then has happened when it returns.

        Leases run out, retries become due and wake whoever waits for them, segments grow old,
        retention deletes. What the handler of a message said (``ack``, ``nack``) has to have
        reached the broker before: ``consumer.settle()`` sees to that.

        Args:
            by: Seconds, or a timedelta.
            heartbeats: Whether consumers that are connected kept sending heartbeats all that
                time. Without them, every consumer is lost whose lease is shorter.

        Raises:
            UsageError: Time does not go back, or by that much.
        """
        span = by if isinstance(by, timedelta) else _seconds(by)
        if not timedelta() <= span <= _LONGEST:
            raise UsageError(f"time cannot advance by {by!r}; 0 s to 100 years are allowed")
        ms = span // timedelta(milliseconds=1)
        running = self._live()
        running.call(running.broker.advance(ms, heartbeats=heartbeats))

    # ── its faults ─────────────────────────────────────────────────────────────────────────

    def fail_sends(self, times: int = 1, error: PulqueError | None = None) -> None:
        """Refuse the next requests to send, each with this error; 0 ends it.

        A client repeats what a retryable error refused (the default is one) until its timeout.
        """
        self._set_failing(times, error or UnavailableError("made to fail by a test"))

    def lose_answers(self, times: int = 1) -> None:
        """Store what the next requests send, and cut the connection instead of answering."""
        self._set_failing(times, None)

    def disconnect_all(self) -> None:
        """Cut all connections; clients may connect again at once."""
        running = self._live()
        running.call(running.broker.disconnect_all())

    def pause(self) -> None:
        """Stand still, as by SIGSTOP: connections are taken, nothing is answered."""
        self._live().pause()

    def resume(self) -> None:
        """Go on after ``pause``; what was asked meanwhile is answered now."""
        if self._running is not None:
            self._running.resume()

    def fill_disk(self) -> None:
        """Leave no room for messages: sends are refused, pulling and settling go on."""
        self._set_full(is_full=True)

    def free_disk(self) -> None:
        """Make room again."""
        self._set_full(is_full=False)

    def _set_failing(self, times: int, error: PulqueError | None) -> None:
        if times < 0:
            raise UsageError(f"times is {times}; 0 or more are allowed")
        running = self._live()
        running.call(running.broker.fail_sends(times, error))

    def _set_full(self, *, is_full: bool) -> None:
        running = self._live()
        running.files.is_full = is_full
        running.call(running.broker.look_at_disk())

    def _live(self) -> "_Running":
        if self._running is None:
            raise UsageError("the broker does not run; start it first")
        return self._running

    def _settings(self) -> BrokerSettings:
        sections = {name: dict(section) for name, section in self._sections.items()}
        port = int(self.url.rpartition(":")[2] or 0)
        # The directory only has to be named; the files are given to the broker.
        storage = {"directory": "unused", "reserve": "1MiB", **sections.pop("storage", {})}
        listen = {"port": port, **sections.pop("listen", {})}
        return BrokerSettings.model_validate({**sections, "storage": storage, "listen": listen})


def _seconds(by: float) -> timedelta:
    try:
        return timedelta(seconds=by)
    except (TypeError, ValueError, OverflowError):
        raise UsageError(f"time cannot advance by {by!r}; seconds or a timedelta can") from None


class _BreakableBroker(Broker):
    """The broker, with what a test may do to it. Lives in its event loop."""

    def __init__(self, settings: BrokerSettings, clock: ManualClock, files: DataDirectory) -> None:
        super().__init__(settings, clock, files)
        self._manual = clock
        self._log = structlog.wrap_logger(
            logging.getLogger("pulque.broker"),
            wrapper_class=structlog.stdlib.BoundLogger,
            processors=[
                structlog.stdlib.filter_by_level,
                structlog.processors.KeyValueRenderer(key_order=["event"]),
            ],
        )
        self._listener = LoggingListener(self._log)

    def _build(self) -> None:
        super()._build()
        self._faults = BreakableHandler(self._server.handler)
        self._server.handler = self._faults
        # Sockets are real: they do not grow old when a test turns the clock.
        self._server.clock = SystemClock()

    def vanish(self) -> None:
        """Tell nobody anything any more, nor those whose connection is only being made."""
        self._faults.is_dead = True
        self._server.stop_listening()
        for connection in list(self._server.connections):
            connection.abort()

    async def disconnect_all(self) -> None:
        for connection in list(self._server.connections):
            connection.abort()

    async def fail_sends(self, times: int, error: PulqueError | None) -> None:
        self._faults.fail_sends(times, error)

    async def look_at_disk(self) -> None:
        self._state.engine.check_room()

    async def advance(self, ms: int, *, heartbeats: bool) -> None:
        """Move the clock in steps, the first ones small: what follows can be due by then, too."""
        step = self._settings.consumption.lease_check // timedelta(milliseconds=1)
        await self._settle_down()
        while True:
            step = min(step, ms)
            ms -= step
            self._manual.advance(step)
            if heartbeats:
                self._renew_leases()
            await self._housekeeper.tick()
            await self._settle_down()
            if not ms:
                return
            step *= 2

    def _renew_leases(self) -> None:
        """Take it that consumers with a connection have sent heartbeats."""
        leases, now_ms = self._state.leases, self._clock.monotonic_ms()
        connected = self._faults.connected
        for group, consumer in leases.expired(now_ms + leases.lease_ms + 1):
            if (group, consumer) in connected:
                leases.renew(group, consumer, now_ms)

    async def _settle_down(self) -> None:
        """Wait until what is to be redelivered waits, and what is due is there."""
        async with asyncio.timeout(_PATIENCE_S):
            while self._is_busy():  # noqa: ASYNC110  # there is nobody to set an event
                await asyncio.sleep(0.001)

    def _is_busy(self) -> bool:
        due_ms = self._state.schedule.next_due_ms()
        is_due = due_ms is not None and due_ms <= self._clock.now_ms()
        return is_due or bool(self._state.consumption.pending())


class _Running:
    """One run of a broker in its thread."""

    def __init__(self, settings: BrokerSettings, clock: ManualClock, files: DataDirectory) -> None:
        self.files = BreakableFiles(files)
        self._settings = settings
        self._clock = clock
        self._ready: Future[str] = Future()
        self._go_on = threading.Event()
        self._go_on.set()
        self._failure: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="pulque-broker", daemon=True)
        self.broker: _BreakableBroker
        self._loop: asyncio.AbstractEventLoop

    @property
    def is_alive(self) -> bool:
        return self._thread.is_alive()

    def start(self) -> str:
        self._thread.start()
        try:
            return self._ready.result(_PATIENCE_S)
        except BaseException:
            self._thread.join(_PATIENCE_S)
            raise

    def call(self, work: Coroutine[Any, Any, T]) -> T:
        """Have something done in the broker's event loop."""
        if not self._go_on.is_set():
            work.close()
            raise UsageError("the broker is paused; resume it first")
        if not self.is_alive:
            work.close()
            raise self._failure or UsageError("the broker has ended")
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(2 * _PATIENCE_S)

    def pause(self) -> None:
        if self._go_on.is_set():
            self._go_on.clear()
            stands = threading.Event()
            self._loop.call_soon_threadsafe(self._stand_still, stands)
            stands.wait(_PATIENCE_S)

    def resume(self) -> None:
        self._go_on.set()

    def _stand_still(self, stands: threading.Event) -> None:
        stands.set()
        self._go_on.wait()
        if self.files.is_cut_off:
            # Before anything that has come in meanwhile is looked at.
            self.broker.vanish()

    def end(self) -> None:
        self._end(self.broker.stop)
        if self._failure is not None:
            raise self._failure

    def kill(self) -> None:
        if not self._go_on.is_set():
            self.files.is_cut_off = True
        self._end(self._die)

    def _die(self) -> None:
        # In one turn of the loop: no answer may tell of a write that did not happen.
        self.files.is_cut_off = True
        self.broker.vanish()
        self.broker.stop()

    def _end(self, how: Callable[[], None]) -> None:
        if self.is_alive:
            self._loop.call_soon_threadsafe(how)
            self.resume()
        self._thread.join(_PATIENCE_S)
        if self.is_alive:
            raise TimeoutError(f"the broker did not end within {_PATIENCE_S:g} s")

    def _run(self) -> None:
        try:
            asyncio.run(self._serve())
        except BaseException as error:  # noqa: BLE001  # the root of a thread
            if not self._ready.done():
                self._ready.set_exception(error)
            elif not self.files.is_cut_off:
                self._failure = error

    async def _serve(self) -> None:
        self._loop = asyncio.get_running_loop()
        self.broker = _BreakableBroker(self._settings, self._clock, self.files)
        self._loop.set_exception_handler(self.broker.callback_failed)
        try:
            await self.broker.start()
        except BaseException:
            self.files.unlock()
            raise
        try:
            self._ready.set_result(self.broker.url)
            await self.broker.stopped()
        finally:
            await self.broker.close()
            for _ in range(_LAST_TURNS):
                # A process that ends closes what has just been accepted; a loop does not.
                await asyncio.sleep(0)
                self.broker.vanish()
