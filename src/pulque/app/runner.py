"""Run one handler: pull messages that can start soon, call the handler, settle.

Calls run concurrently, up to the handler's concurrency, and end in any order. The consumer
settles only the completed prefix, so the broker never gets an ack before those of earlier
messages. No more messages wait here than would start within the next 0.1 s.
"""

import asyncio
import contextvars
import logging
import time
from collections import deque
from collections.abc import Callable, Coroutine, Iterator, Sequence
from typing import Any, Literal

from pulque.app.chain import Worlds, chain
from pulque.app.handler import Handler
from pulque.app.outcomes import (
    BatchFailed,
    Reject,
    Retry,
    RetryAt,
    Verdict,
    nack,
    verdict_of,
    verdicts_of,
)
from pulque.app.payload import PayloadError
from pulque.app.signature import Function
from pulque.app.threads import HandlerJob, Threads
from pulque.client.aio.consumer import Consumer
from pulque.client.receiving.prefetch import HORIZON
from pulque.client.receiving.received_message import ReceivedMessage, expire
from pulque.errors import PulqueError, StorageError, UsageError

__all__ = ["Runner"]

log = logging.getLogger("pulque.app")

_LONG_POLL = 10.0
_MOST_AHEAD = 1000
_LEAST_STUCK = 4
_TRY_AGAIN = 2.0
_LAST_WORDS = 1.0
_LOOK = 0.05
_ALONE_FROM = 3
"""From this attempt on, a message is a batch by itself, so that it fails no others."""

Ending = Literal["", "timeout", "abandoned", "stopping"]


class Call:
    """One running call of a handler."""

    __slots__ = ("ending", "jobs", "messages", "nested", "task", "timer")

    def __init__(self, messages: list[ReceivedMessage]) -> None:
        self.messages = messages
        self.ending: Ending = ""
        """Why the runner cancelled it."""
        self.jobs: list[HandlerJob] = []
        self.nested: list[Any] = []
        self.task: asyncio.Task[None] | None = None
        self.timer: asyncio.TimerHandle | None = None


_current: contextvars.ContextVar[Call] = contextvars.ContextVar("pulque_call")


class Runner:
    """One handler at work. Lives in one event loop.

    Args:
        handler: The handler.
        consumer: The source of messages.
        middleware: The middleware, the outermost first.
        on_exit: Called when a handler wants the process to exit, or cannot continue.
    """

    def __init__(
        self,
        handler: Handler,
        consumer: Consumer,
        middleware: Sequence[Function],
        on_exit: Callable[[BaseException], None],
    ) -> None:
        self.handler = handler
        self.consumer = consumer
        self._is_ordered = handler.is_ordered
        retry = handler.consumer.get("retry")
        self._most_attempts = None if retry is None else retry.max_attempts
        """After so many attempts a message becomes a dead letter, if the handler sets it."""
        self._on_exit = on_exit
        self._loop = asyncio.get_running_loop()
        self._threads = Threads(handler.name, self._late)
        worlds = Worlds(self._run_in_thread, self._run_on_loop)
        self._call = chain(middleware, handler.prepared(), worlds)
        self._ahead = 0
        self._paced_at = time.monotonic()
        self._ended = 0
        self._waiting: deque[ReceivedMessage] = deque()
        self._waiting_since = 0.0
        self._begin_timer: asyncio.TimerHandle | None = None
        self._running: set[Call] = set()
        self._manual: list[ReceivedMessage] = []
        self._manual_limit = 64
        self._has_room = asyncio.Event()
        self._is_stopping = False
        self._has_warned = False
        consumer.on_abandoned(self._abandoned)

    # ── pulling ────────────────────────────────────────────────────────────────────────────

    async def run(self) -> None:
        """Pull and call until cancelled.

        Raises:
            PulqueError: The runner cannot continue: another consumer took over this id, say.
        """
        while True:
            room = self._room()
            if room <= 0:
                self._has_room.clear()
                await self._has_room.wait()
                continue
            try:
                messages = await self.consumer.pull(room, timeout=_LONG_POLL)
            except PulqueError as error:
                if not error.retryable and not isinstance(error, StorageError):
                    raise
                log.warning("%s gets no messages: %s; trying on", self.handler.name, error)
                await asyncio.sleep(_TRY_AGAIN)
                continue
            if messages and not self._waiting:
                self._waiting_since = time.monotonic()
            self._waiting.extend(messages)
            if not self._is_stopping:
                self._begin()

    def _room(self) -> int:
        """Return how many more messages could start soon."""
        now = time.monotonic()
        if now - self._paced_at >= HORIZON:
            self._ahead = min(_MOST_AHEAD, int(self._ended / (now - self._paced_at) * HORIZON))
            self._ended = 0
            self._paced_at = now
        # Of an ordered group only what can begin at once: it must be ours when it begins.
        ahead = 0 if self._is_ordered else self._ahead
        if len(self._waiting) > ahead // 2 and len(self._running) >= self.handler.concurrency:
            return 0
        free = self.handler.concurrency - len(self._running)
        return free * (self.handler.batch or 1) + ahead - len(self._waiting)

    # ── calling ────────────────────────────────────────────────────────────────────────────

    def _begin(self) -> None:
        """Start as many calls as may run."""
        while self._waiting and len(self._running) < self.handler.concurrency:
            messages = self._next_messages()
            if not messages:
                break
            call = Call(messages)
            self._running.add(call)
            context = contextvars.copy_context()
            context.run(_current.set, call)
            call.task = self._loop.create_task(self._run(call), context=context)
            if self.handler.timeout is not None:
                call.timer = self._loop.call_later(self.handler.timeout, self._time_out, call)
        if len(self._waiting) <= self._ahead // 2:
            self._has_room.set()

    def _next_messages(self) -> list[ReceivedMessage]:
        """Remove and return the next call's messages; none if the batch should wait for more."""
        batch = self.handler.batch
        if not self._has_next():
            return []
        if batch is None or self._waiting[0].attempt >= _ALONE_FROM:
            return [self._waiting.popleft()]
        left = self._waiting_since + self.handler.max_wait - time.monotonic()
        if len(self._waiting) < batch and left > 0 and not self._is_ordered:
            if self._begin_timer is None:
                self._begin_timer = self._loop.call_later(left, self._wait_is_over)
            return []
        taken: list[ReceivedMessage] = []
        while len(taken) < batch and self._has_next() and self._waiting[0].attempt < _ALONE_FROM:
            taken.append(self._waiting.popleft())
        self._waiting_since = time.monotonic()
        return taken

    def _has_next(self) -> bool:
        """Drop messages that expired while they waited for a call; return whether one is left."""
        while self._waiting and expire(self._waiting[0]):
            self._waiting.popleft()
        return bool(self._waiting)

    def _wait_is_over(self) -> None:
        self._begin_timer = None
        if not self._is_stopping:
            self._begin()

    async def _run(self, call: Call) -> None:
        about = call.messages[0] if self.handler.batch is None else call.messages
        try:
            result = await self._call(about)
        except BaseException as error:  # noqa: BLE001  # whatever it is, it is the handler's
            self._failed(call, error)
        else:
            self._succeeded(call, result)
        finally:
            self._end(call)

    def _end(self, call: Call) -> None:
        if call.timer is not None:
            call.timer.cancel()
        self._running.discard(call)
        self._ended += len(call.messages)
        if not self._is_stopping:
            self._begin()

    async def _run_in_thread(self, function: Callable[[], Any]) -> Any:
        job = self._threads.submit(function)
        _current.get().jobs.append(job)
        return await job.done

    def _run_on_loop(self, coroutine: Coroutine[Any, Any, Any]) -> Any:
        waiting = asyncio.run_coroutine_threadsafe(_capture(coroutine), self._loop)
        _current.get().nested.append(waiting)
        result, error = waiting.result()
        if error is not None:
            raise error
        return result

    # ── what becomes of the messages ───────────────────────────────────────────────────────

    def _succeeded(self, call: Call, result: object) -> None:
        if call.ending == "timeout":
            return  # nacked then
        if result is not None and not self._has_warned:
            self._has_warned = True
            log.warning(
                "%s returned a %s, which nobody gets; to return is to ack",
                self.handler.name,
                type(result).__name__,
            )
        if self.handler.ack == "manual":
            self._remember(call.messages)
            return
        for message in call.messages:
            if not message.is_finished:
                message.ack()

    def _failed(self, call: Call, error: BaseException) -> None:
        if isinstance(error, asyncio.CancelledError) and call.ending:
            return  # by us, and whatever had to be said was said then
        if isinstance(error, BatchFailed) and self.handler.batch is not None:
            try:
                self._failed_in_part(call, error)
            except UsageError as problem:
                self._failed(call, problem)
            return
        self._tell(call, error)
        verdict = verdict_of(error)
        for message in call.messages:
            nack(message, verdict)
        if isinstance(error, SystemExit | KeyboardInterrupt):
            self._exit(error)

    def _failed_in_part(self, call: Call, error: BatchFailed) -> None:
        verdicts = verdicts_of(error, call.messages)
        log.warning(
            "failed in part: handler=%s messages=%d failed=%d",
            self.handler.name,
            len(call.messages),
            len(verdicts),
        )
        for message, verdict in verdicts.items():
            nack(message, verdict)
        self._succeeded(call, None)

    def _tell(self, call: Call, error: BaseException) -> None:
        """Log a failure; with a traceback unless the handler raised one of our outcomes."""
        first, verdict = call.messages[0], verdict_of(error)
        limit = self._most_attempts
        limit_text = "" if limit is None else f" of {limit}"
        is_meant = isinstance(error, Retry | RetryAt | Reject | PayloadError)
        log.log(
            logging.WARNING if is_meant else logging.ERROR,
            "failed: handler=%s subject=%s id=%s attempt=%d%s messages=%d: %s%s",
            self.handler.name,
            first.subject,
            first.id,
            first.attempt,
            limit_text,
            len(call.messages),
            verdict.reason,
            self._end_of(call.messages, verdict),
            exc_info=None if is_meant else error,
        )

    def _end_of(self, messages: list[ReceivedMessage], verdict: Verdict) -> str:
        """Return the log text for messages that are not retried."""
        limit = self._most_attempts
        is_last = limit is not None and all(each.attempt >= limit for each in messages)
        if self.handler.is_once or not (verdict.is_dead or is_last):
            return ""
        return "; now a dead letter" if len(messages) == 1 else "; now dead letters"

    def _remember(self, messages: list[ReceivedMessage]) -> None:
        """Record messages that the application acks later, to wait for them at the end."""
        self._manual += messages
        if len(self._manual) > self._manual_limit:
            self._manual = [each for each in self._manual if _is_open(each)]
            self._manual_limit = max(64, 2 * len(self._manual))

    # ── calls that end otherwise ───────────────────────────────────────────────────────────

    def _time_out(self, call: Call) -> None:
        handler = self.handler
        log.error(
            "takes too long: handler=%s subject=%s id=%s timeout=%g",
            handler.name,
            call.messages[0].subject,
            call.messages[0].id,
            handler.timeout,
        )
        for message in call.messages:
            nack(message, verdict_of(f"TimeoutError: no end after {handler.timeout:g} s"))
        self._cancel(call, "timeout")
        limit = max(handler.concurrency, _LEAST_STUCK)
        if self._threads.stuck:
            log.error("threads that hang: handler=%s count=%d", handler.name, self._threads.stuck)
        if self._threads.stuck > limit:
            self._exit(
                UsageError(
                    f"{handler.name} hangs in {self._threads.stuck} threads, and {limit} is the "
                    "most that are replaced; give what it waits for a timeout of its own"
                )
            )

    def _exit(self, error: BaseException) -> None:
        self._is_stopping = True
        self._on_exit(error)

    def _cancel(self, call: Call, why: Ending) -> None:
        call.ending = why
        # First, as the task takes along what it waits for.
        for job in call.jobs:
            self._threads.give_up(job)
        for waiting in call.nested:
            waiting.cancel()
        if call.task is not None:
            call.task.cancel()

    def _late(self) -> None:
        log.warning("ended after it was given up: handler=%s", self.handler.name)

    def _abandoned(self) -> None:
        """Drop messages that went to other consumers, and cancel their calls if so configured."""
        before = len(self._waiting)
        self._waiting = deque(each for each in self._waiting if not each.is_abandoned)
        running = [c for c in self._running if any(m.is_abandoned for m in c.messages)]
        log.warning(
            "abandoned: handler=%s not begun=%d running=%d",
            self.handler.name,
            before - len(self._waiting),
            len(running),
        )
        if self.handler.on_abandon == "cancel":
            for call in running:
                if not call.ending:
                    self._cancel(call, "abandoned")
        self._has_room.set()

    # ── the end ────────────────────────────────────────────────────────────────────────────

    async def finish(self, hurry: asyncio.Event, grace: float) -> None:
        """Start no more calls; wait for running ones, and settle.

        Args:
            hurry: Set to skip the rest of the grace.
            grace: How long to wait for running calls, in seconds.
        """
        self._is_stopping = True
        self._waiting.clear()
        deadline = time.monotonic() + grace
        while (  # noqa: ASYNC110  # other threads make it true
            self._is_busy() and time.monotonic() < deadline and not hurry.is_set()
        ):
            await asyncio.sleep(_LOOK)
        if left := list(self._running):
            log.warning("not finished in time: handler=%s calls=%d", self.handler.name, len(left))
            for call in left:
                self._cancel(call, "stopping")
            await asyncio.wait(list(_tasks_of(left)), timeout=_LAST_WORDS)
        # What is not finished is handed back at once.
        await self.consumer.close()
        self._threads.close()

    def _is_busy(self) -> bool:
        return bool(self._running) or any(map(_is_open, self._manual))


def _is_open(message: ReceivedMessage) -> bool:
    return not message.is_finished and not message.is_abandoned


def _tasks_of(calls: Sequence[Call]) -> Iterator[asyncio.Task[None]]:
    for call in calls:
        if call.task is not None:
            yield call.task


async def _capture(coroutine: Coroutine[Any, Any, Any]) -> tuple[Any, BaseException | None]:
    """Return the result or the exception: a ``SystemExit`` raised in a task would end the loop."""
    try:
        return await coroutine, None
    except asyncio.CancelledError:
        raise
    except BaseException as error:  # noqa: BLE001  # the thread that waits raises it
        return None, error
