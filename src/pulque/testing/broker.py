"""A whole broker inside the test's own process, whose time and faults the test decides.

::

    with InProcessBroker() as broker:
        client = pulque.connect(broker.url)
        broker.advance_time(3600)           # an hour later, at once
        broker.kill()
        broker.restart()                    # on the same data, as after kill -9

It is the broker that ``pulque up`` runs, with the delay server beside it, on loopback ports, in a
thread with an event loop of its own. Its files are in memory unless it is given a directory. It
reads a clock that stands still, and so do the clients in this process when they work out when a
message is due or expires; only what clients wait for (a long poll, a timeout) passes with the time
on the wall.
"""

import asyncio
import contextlib
import logging
import threading
from collections.abc import Callable, Coroutine, Iterator
from concurrent.futures import Future
from datetime import UTC, datetime, timedelta
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar

import structlog

from pulque.broker.config import BrokerSettings
from pulque.broker.server import Broker
from pulque.client.connection.url import Address, parse_address
from pulque.clock import SystemClock, put_back, stand_in
from pulque.delay.config import DelaySettings
from pulque.delay.dispatch.broker_connections import BrokerConnections
from pulque.delay.recovery import RecoveredSchedule
from pulque.delay.server import DelayServer
from pulque.errors import PulqueError, UnavailableError, UsageError
from pulque.model.names import PartitionName, Pattern, Subject
from pulque.model.routes import PartitionRoute, Route
from pulque.net.server import FrameServer
from pulque.serving.listener import LoggingListener
from pulque.storage.files import DataDirectory, OsFileSystem
from pulque.testing.clock import ManualClock
from pulque.testing.faults import BreakableFiles, BreakableHandler, SendFaults
from pulque.testing.files import MemoryFileSystem
from pulque.wire.adopt import Adopt

__all__ = ["InProcessBroker"]

T = TypeVar("T")
_PATIENCE_S = 20.0
_LAST_TURNS = 4
_LONGEST = timedelta(days=36_500)
_CLUSTER = "in-process"
"""Clients ask for delay servers only where there is a cluster, as with ``pulque up``."""
_DELAY_DIRECTORY = "delay"
"""As in the data directory of ``pulque up``."""


class InProcessBroker:
    """One broker, its data, its clock and its faults. Used by one thread at a time.

    Args:
        directory: Where its files are, if they are not to be in memory.
        delays: Whether there is a delay server beside it, as ``pulque up`` has one. Without it
            there are no messages that are due later, as with a lone ``pulque broker``.
        settings: Sections of settings as in a TOML file, ``consumption={"lease": "10s"}``.

    After ``kill`` or ``stop``, ``restart`` brings it back on the same data and port.
    """

    def __init__(
        self, directory: Path | None = None, *, delays: bool = True, **settings: dict[str, Any]
    ) -> None:
        # A whole second, as what waits is due by tenths of one: a delay has passed when the test
        # says so.
        self.clock = ManualClock(SystemClock().now_ms() // 1000 * 1000)
        """Begins at the time on the wall; ``advance_time`` moves it."""
        self.url = ""
        """Where it listens."""
        self._files = _files_in(directory)
        self._delay_files: DataDirectory | None = None
        self._delay_port = 0
        if delays:
            self._delay_files = _files_in(directory and directory / _DELAY_DIRECTORY)
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
        stand_in(self.clock)
        self._running = _Running(
            self._settings(), self._delay_settings(), self.clock, self._files, self._delay_files
        )
        self.url = self._running.start()
        if self._running.delay is not None:
            self._delay_port = _port_of(self._running.delay.url)

    def stop(self) -> None:
        """End as on SIGTERM, if it runs.

        Raises:
            PulqueError: Its disk had failed, or a bug had stopped it.
        """
        running, self._running = self._running, None
        put_back(self.clock)
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

    @property
    def now(self) -> datetime:
        """What the broker's clock says, for ``send(…, at=broker.now + timedelta(hours=1))``."""
        return datetime.fromtimestamp(self.clock.now_ms() / 1000, UTC)

    def advance_time(self, by: float | timedelta, *, heartbeats: bool = True) -> None:
        """Let time pass for the broker; what is due by then has happened when it returns.

        Leases run out, retries and delayed messages become due and wake whoever waits for them,
        segments grow old, retention deletes. What is due goes by tenths of a second, rounded up.
        While the broker refuses messages (a full disk, ``fail_sends``), delayed messages that are
        due wait for it, and this does not.

        The broker has to know of an ack or nack before: ``consumer.settle()`` sees to that.

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
        for files in running.all_files:
            files.is_full = is_full
        running.call(running.broker.look_at_disk())

    def _live(self) -> "_Running":
        if self._running is None:
            raise UsageError("the broker does not run; start it first")
        return self._running

    def _settings(self) -> BrokerSettings:
        sections = {name: dict(section) for name, section in self._sections.items()}
        # The directory only has to be named; the files are given to the broker.
        storage = {"directory": "unused", "reserve": "1MiB", **sections.pop("storage", {})}
        listen = {"port": _port_of(self.url), **sections.pop("listen", {})}
        return BrokerSettings.model_validate({**sections, "storage": storage, "listen": listen})

    def _delay_settings(self) -> DelaySettings:
        storage = {"directory": "unused", "reserve": "1MiB"}
        listen = {"port": self._delay_port}
        of_broker = self._settings().limits.model_dump()
        limits = {name: of_broker[name] for name in ("max_message", "max_batch", "open_records")}
        sections = {"storage": storage, "listen": listen, "limits": limits}
        return DelaySettings.model_validate(sections)


def _files_in(directory: Path | None) -> DataDirectory:
    if directory is None:
        return MemoryFileSystem()
    directory.mkdir(parents=True, exist_ok=True)
    return OsFileSystem(str(directory))


def _port_of(url: str) -> int:
    return int(url.rpartition(":")[2] or 0)


def _logger(name: str) -> Any:
    """Return a log for a server's events, where ``caplog`` finds them."""
    return structlog.wrap_logger(
        logging.getLogger(name),
        wrapper_class=structlog.stdlib.BoundLogger,
        processors=[
            structlog.stdlib.filter_by_level,
            structlog.processors.KeyValueRenderer(key_order=["event"]),
        ],
    )


def _cut(server: FrameServer) -> None:
    for connection in list(server.connections):
        connection.abort()


def _seconds(by: float) -> timedelta:
    try:
        return timedelta(seconds=by)
    except (TypeError, ValueError, OverflowError):
        raise UsageError(f"time cannot advance by {by!r}; seconds or a timedelta can") from None


class _BreakableBroker(Broker):
    """The broker, with what a test may do to it. Lives in its event loop."""

    def __init__(
        self,
        settings: BrokerSettings,
        clock: ManualClock,
        files: DataDirectory,
        send_faults: SendFaults,
    ) -> None:
        super().__init__(settings, clock, files)
        self._manual = clock
        self._send_faults = send_faults
        self._delay: _BreakableDelay | None = None
        self._log = _logger("pulque.broker")
        self._listener = LoggingListener(self._log)

    def _build(self) -> None:
        super()._build()
        self._faults = BreakableHandler(self._server.handler, self._send_faults)
        self._server.handler = self._faults
        # Sockets are real: they do not grow old when a test turns the clock.
        self._server.clock = SystemClock()

    def serve_beside(self, delay: "_BreakableDelay") -> None:
        """Tell clients where messages go that are due later, and that this is a cluster."""
        self._delay = delay
        gate = self._cluster.gate
        gate.update(gate.standing._replace(cluster=_CLUSTER))
        name, address = delay.name_and_address
        self._handler.routes.delay_server = (name, *address)

    def vanish(self) -> None:
        """Tell nobody anything any more, nor those whose connection is only being made."""
        self._faults.is_dead = True
        self._server.stop_listening()
        _cut(self._server)
        if self._delay is not None:
            self._delay.vanish()

    async def disconnect_all(self) -> None:
        _cut(self._server)
        if self._delay is not None:
            self._delay.disconnect_all()

    async def fail_sends(self, times: int, error: PulqueError | None) -> None:
        self._send_faults.left, self._send_faults.error = times, error

    async def look_at_disk(self) -> None:
        self._state.engine.check_room()
        if self._delay is not None:
            self._delay.look_at_disk()

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
        if self._delay is not None:
            self._delay.clock_turned()
        async with asyncio.timeout(_PATIENCE_S):
            while self._is_busy():  # noqa: ASYNC110  # there is nobody to set an event
                await asyncio.sleep(0.001)

    def _is_busy(self) -> bool:
        due_ms = self._state.schedule.next_due_ms()
        is_due = due_ms is not None and due_ms <= self._clock.now_ms()
        if self._delay is not None and self._delay.is_busy:
            return True
        return is_due or bool(self._state.consumption.pending())


class _OneBroker(BrokerConnections):
    """The broker beside a delay server, which needs no meta server to find it."""

    def __init__(
        self, url: str, broker_group: str, clock: ManualClock, settings: DelaySettings
    ) -> None:
        timeout_s = settings.delivery.timeout.total_seconds()
        super().__init__([], settings.name, clock, timeout_s=timeout_s)
        self._address = parse_address(url.removeprefix("pulque://"), default_port=0)
        self._broker_group = broker_group
        self.has_refused = False
        """Whether a message that was due could not be delivered."""

    async def route(self, subject: Subject) -> Route:
        here = PartitionRoute(PartitionName(subject), self._broker_group, *self._address)
        return Route(Pattern(subject), 0, (here,))

    async def send(self, target: PartitionRoute, partition: str, batch: bytes) -> None:
        with self._noting():
            await super().send(target, partition, batch)

    async def adopt(self, target: PartitionRoute, request: Adopt) -> None:
        with self._noting():
            await super().adopt(target, request)

    @contextlib.contextmanager
    def _noting(self) -> Iterator[None]:
        try:
            yield
        except PulqueError:
            self.has_refused = True
            raise


class _BreakableDelay(DelayServer):
    """The delay server beside a broker. Lives in its event loop."""

    def __init__(
        self,
        settings: DelaySettings,
        clock: ManualClock,
        files: DataDirectory,
        broker: _OneBroker,
        send_faults: SendFaults,
    ) -> None:
        super().__init__(settings, clock, files, broker)
        self._one_broker = broker
        self._send_faults = send_faults
        self._log = _logger("pulque.delay")
        self._listener = LoggingListener(self._log)

    def _build(self, recovered: RecoveredSchedule) -> None:
        super()._build(recovered)
        self._faults = BreakableHandler(self._server.handler, self._send_faults)
        self._server.handler = self._faults
        self._server.clock = SystemClock()

    @property
    def name_and_address(self) -> tuple[str, Address]:
        return self._settings.name, self._address

    @property
    def is_busy(self) -> bool:
        """Whether what is due is on its way, as far as the broker takes it."""
        return self.has_due and not self._one_broker.has_refused

    def clock_turned(self) -> None:
        self._one_broker.has_refused = False
        self._dispatcher.wake()

    def vanish(self) -> None:
        self._faults.is_dead = True
        self._server.stop_listening()
        _cut(self._server)

    def disconnect_all(self) -> None:
        _cut(self._server)

    def look_at_disk(self) -> None:
        self._engine.check_room()


class _Running:
    """One run of a broker, and of the delay server beside it, in their thread."""

    def __init__(
        self,
        settings: BrokerSettings,
        delay_settings: DelaySettings,
        clock: ManualClock,
        files: DataDirectory,
        delay_files: DataDirectory | None,
    ) -> None:
        self.files = BreakableFiles(files)
        self._delay_files = None if delay_files is None else BreakableFiles(delay_files)
        self.all_files = [each for each in (self.files, self._delay_files) if each is not None]
        self._settings = settings
        self._delay_settings = delay_settings
        self.delay: _BreakableDelay | None = None
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
            self._cut_off()
        self._end(self._die)

    def _die(self) -> None:
        # In one turn of the loop: no answer may tell of a write that did not happen.
        self._cut_off()
        self.broker.vanish()
        self.broker.stop()

    def _cut_off(self) -> None:
        for files in self.all_files:
            files.is_cut_off = True

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
        send_faults = SendFaults()
        self.broker = _BreakableBroker(self._settings, self._clock, self.files, send_faults)
        self._loop.set_exception_handler(self.broker.callback_failed)
        try:
            await self.broker.start()
        except BaseException:
            self.files.unlock()
            raise
        try:
            await self._serve_delay(send_faults)
            self._ready.set_result(self.broker.url)
            await self._stopped()
        finally:
            if self.delay is not None:
                # Who is killed waits for nothing.
                is_killed = self.files.is_cut_off
                await self.delay.close(**({"catch_up_s": 0} if is_killed else {}))
            await self.broker.close()
            for _ in range(_LAST_TURNS):
                # A process that ends closes what has just been accepted; a loop does not.
                await asyncio.sleep(0)
                self.broker.vanish()

    async def _serve_delay(self, send_faults: SendFaults) -> None:
        """Start the delay server, if there is to be one."""
        if self._delay_files is None:
            return
        settings, clock = self._delay_settings, self._clock
        broker = _OneBroker(self.broker.url, self._settings.broker_group, clock, settings)
        delay = _BreakableDelay(settings, clock, self._delay_files, broker, send_faults)
        try:
            await delay.start()
        except BaseException:
            self._delay_files.unlock()
            raise
        self.delay = delay
        self.broker.serve_beside(delay)

    async def _stopped(self) -> None:
        """Wait until the broker is asked to stop, or one of the two has to."""
        servers = [each for each in (self.broker, self.delay) if each is not None]
        tasks = [asyncio.ensure_future(each.stopped()) for each in servers]
        done, others = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for each in others:
            each.cancel()
        for each in done:
            each.result()
