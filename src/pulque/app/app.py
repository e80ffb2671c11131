"""The application class: register handlers, then run.

::

    app = pulque.App()

    @app.subscribe("order.paid", group="ticketing", concurrency=8)
    async def issue_ticket(order: Order) -> None:
        ...

    app.run()
"""

import asyncio
import os
import signal
import threading
from collections.abc import Callable
from types import TracebackType
from typing import Any, Self, TypeVar, Unpack

from pulque.app.handler import AckName, Handler, OnAbandonName, Wishes, make_handler
from pulque.app.serving import AppRun, Plan
from pulque.app.signature import Decode, Function, check_hook, check_middleware
from pulque.client.aio.client import Client, connect
from pulque.client.arguments.checks import check_number, check_path, check_timeout
from pulque.client.connection.fork_safety import forked, on_fork
from pulque.client.connection.url import addresses_of
from pulque.client.options.client_options import DEFAULT_TIMEOUT, AcksName, acks_of
from pulque.client.persistence.consumer_identity import application_name
from pulque.client.sending.outgoing_message import MessageParts, Receipt
from pulque.dedup import Checker
from pulque.errors import ForkedError, UsageError
from pulque.model.names import Pattern, overlap

__all__ = ["App"]

F = TypeVar("F", bound=Callable[..., Any])

DEFAULT_GRACE = 30.0


class App:
    """An application that calls registered functions with messages.

    Args:
        url: ``pulque://host:port``, or several hosts with commas; else ``$PULQUE_URL``, else
            this machine.
        name: The application's name; else the name of its script. It is part of consumer ids
            and appears in the broker's log.
        timeout: The default time-out of sends, in seconds.
        grace: How long calls may go on when the application stops, in seconds.
        acks: When a send counts as confirmed: ``"disk"``, ``"replica"`` or ``"memory"``.
        state_dir: The folder for consumer ids and positions; else ``$PULQUE_STATE_DIR``, else
            ``~/.local/state/pulque``.

    Raises:
        ConfigError: The URL is invalid.
        UsageError: A duration is invalid.
    """

    def __init__(
        self,
        url: str | None = None,
        *,
        name: str | None = None,
        timeout: float = DEFAULT_TIMEOUT,
        grace: float = DEFAULT_GRACE,
        acks: AcksName = "disk",
        state_dir: str | os.PathLike[str] | None = None,
    ) -> None:
        if url is not None:
            addresses_of(url, {})
        if name is not None:
            application_name(name)
        if state_dir is not None:
            check_path("state_dir", state_dir)
        check_number("grace", grace, 0, 24 * 3600)
        acks_of(acks)
        self.url = url
        self.name = name
        self.grace = grace
        self._timeout = check_timeout(timeout)
        self._acks: AcksName = acks
        self._state_dir = state_dir
        self._handlers: dict[tuple[str, str | None], Handler] = {}
        self._middleware: list[Function] = []
        self._startup: list[Function] = []
        self._shutdown: list[Function] = []
        self._serving: AppRun | None = None
        self._task: asyncio.Task[BaseException | None] | None = None
        self._forked: ForkedError | None = None
        """What to raise on use in a child that was forked while the application ran."""
        on_fork(self, App._after_fork)

    # ── what to call ───────────────────────────────────────────────────────────────────────

    def subscribe(  # noqa: PLR0913  # choices by keyword, each with a default
        self,
        subject: str,
        *,
        group: str | None = None,
        concurrency: int = 1,
        timeout: float | None = None,
        ack: AckName = "auto",
        on_abandon: OnAbandonName = "finish",
        decode: Decode | None = None,
        dedup: Checker | None = None,
        **wishes: Unpack[Wishes],
    ) -> Callable[[F], F]:
        """Register a function that is called with each message of a subject; return it unchanged.

        Returning acks the message. Raising nacks it, with the error as the reason. An async
        function runs on the event loop, any other in a thread. The types of its parameters
        select their values: ``pulque.ReceivedMessage`` (or no type) the message, any other type
        the decoded body.

        Args:
            subject: The subject, or a pattern.
            group: The group; all applications with this group share the messages. Without one,
                each application gets all of them (broadcast).
            concurrency: How many calls may run at the same time. They end in any order, and
                only a completed prefix is settled.
            timeout: How long a call may take, in seconds. Then the message is nacked; an async
                call is cancelled, a thread is left running and replaced.
            ack: ``"manual"`` if the function only starts the work: call ``message.ack()`` or
                ``nack()`` later, from any thread. An exception still nacks.
            on_abandon: ``"cancel"`` cancels an async call when its message went to another
                consumer; with ``"finish"`` the function may check ``message.is_abandoned``.
            decode: A function that returns the payload of a message, for other formats.
            dedup: A checker (``pulque.dedup``); messages that it knows are acked without a call.
            **wishes: Options of ``Client.consumer``, with the same meaning: ``tags``,
                ``all_tags``, ``start``, ``retry``, ``mode``, ``broadcast``, ``ordered``,
                ``blocks``, ``consumer_id``, and
                ``max_held``: how many messages may be held unsettled, finished ones behind an
                unfinished one included.

        Raises:
            UsageError: An option is invalid, or the group has a handler here already, for
                the subject or for a pattern that covers it.
            InvalidNameError: The subject or the group is not a valid name.
        """

        def register(function: F) -> F:
            self._add(
                make_handler(
                    function,
                    subject,
                    group,
                    concurrency=concurrency,
                    timeout=timeout,
                    ack=ack,
                    on_abandon=on_abandon,
                    decode=decode,
                    dedup=dedup,
                    wishes=wishes,
                )
            )
            return function

        return register

    def subscribe_batch(  # noqa: PLR0913  # choices by keyword, each with a default
        self,
        subject: str,
        *,
        group: str | None = None,
        max_messages: int = 100,
        max_wait: float = 0.5,
        concurrency: int = 1,
        timeout: float | None = None,
        ack: AckName = "auto",
        on_abandon: OnAbandonName = "finish",
        decode: Decode | None = None,
        **wishes: Unpack[Wishes],
    ) -> Callable[[F], F]:
        """Register a function that is called with lists of messages, or of decoded bodies.

        Returning acks all of them, raising nacks all of them; ``BatchFailed`` names the failed
        ones. From its third attempt on, a message is delivered alone.

        Args:
            subject: The subject, or a pattern.
            group: The group.
            max_messages: The most messages of one call.
            max_wait: How long the first message waits for more, in seconds.
            concurrency: How many calls may run at the same time.
            timeout: As for ``subscribe``, like the following.
            ack: Whether returning acks.
            on_abandon: Whether to cancel a call when some of its messages went to others.
            decode: A function that returns the payload of a message.
            **wishes: Other options of ``Client.consumer``.

        Raises:
            UsageError: An option is invalid, or the group has a handler here already, for
                the subject or for a pattern that covers it.
            InvalidNameError: The subject or the group is not a valid name.
        """

        def register(function: F) -> F:
            self._add(
                make_handler(
                    function,
                    subject,
                    group,
                    concurrency=concurrency,
                    timeout=timeout,
                    ack=ack,
                    on_abandon=on_abandon,
                    decode=decode,
                    batch=max_messages,
                    max_wait=max_wait,
                    wishes=wishes,
                )
            )
            return function

        return register

    def middleware(self, function: F) -> F:
        """Register a function that is called around every handler, the first one outermost.

        It takes the message (a list of them for batch handlers) and ``call_next``, which takes no
        arguments and returns the handler's result. An exception that it raises counts as the
        handler's; one that it swallows does not. It may be async or not, whatever the handler is.
        """
        check_middleware(function)
        self._middleware.append(function)
        return function

    def on_startup(self, function: F) -> F:
        """Register a function without parameters, called before the first pull."""
        check_hook("on_startup", function)
        self._startup.append(function)
        return function

    def on_shutdown(self, function: F) -> F:
        """Register a function without parameters, called after the last handler has ended.

        The function that was registered last is called first.
        """
        check_hook("on_shutdown", function)
        self._shutdown.append(function)
        return function

    @property
    def handlers(self) -> list[Handler]:
        """The registered handlers."""
        return list(self._handlers.values())

    def _add(self, handler: Handler) -> None:
        known = self._handlers.get((handler.subject, handler.group))
        if known is not None:
            raise UsageError(
                f"{known.name} handles {handler.subject} for group {handler.group} here: "
                f"{handler.name} needs a group of its own, or concurrency= is what is wanted"
            )
        for each in self._handlers.values():
            if handler.group == each.group and not (handler.is_broadcast or each.is_broadcast):
                _check_apart(each, handler)
        self._handlers[handler.subject, handler.group] = handler

    # ── sending, for handlers ──────────────────────────────────────────────────────────────

    @property
    def client(self) -> Client:
        """The application's asyncio client, while the application runs.

        Raises:
            UsageError: The application does not run.
        """
        return self._running().client

    async def send(
        self,
        subject: str,
        payload: object,
        *,
        timeout: float | None = None,
        **parts: Unpack[MessageParts],
    ) -> Receipt:
        """Send a message, and return its receipt once it is confirmed.

        Args:
            subject: The subject.
            payload: Bytes or text, sent unchanged; any other value is sent as JSON.
            timeout: How long to wait, in seconds.
            **parts: Other parts of the message: ``key``, ``tags``, ``headers`` …

        Raises:
            UsageError: The application does not run, or the payload is not JSON-able.
            PulqueError: The message is not confirmed.
        """
        return await self.client.send(subject, payload, timeout=timeout, **parts)

    def send_blocking(
        self,
        subject: str,
        payload: object,
        *,
        timeout: float | None = None,
        **parts: Unpack[MessageParts],
    ) -> Receipt:
        """Send from a handler that is not async: block its thread until the confirmation."""
        loop = self._running().loop
        if _is_on_a_loop():
            raise UsageError("an async handler is to use: await app.send(…)")
        sending = self.send(subject, payload, timeout=timeout, **parts)
        return asyncio.run_coroutine_threadsafe(sending, loop).result()

    def _after_fork(self) -> None:
        """Mark the application as not running in a child: loop and threads exist in the parent."""
        if self._serving is not None:
            self._serving = self._task = None
            self._forked = forked("application's client", "use pulque.connect() in the child")

    def _running(self) -> AppRun:
        if self._forked is not None:
            raise self._forked.with_traceback(None)
        if self._serving is None:
            raise UsageError("the application does not run; outside of it, use pulque.connect")
        return self._serving

    # ── running ────────────────────────────────────────────────────────────────────────────

    def run(self) -> None:
        """Handle messages until SIGTERM or SIGINT, in this thread.

        The first signal stops gracefully: no further call starts, running calls may end within
        ``grace``, finished messages are settled, the rest is handed back at once. The second skips
        the grace. A handler that exits (``sys.exit``) has the effect of the first signal, and
        then its exit is raised here.

        Raises:
            UsageError: No handler is registered, it runs already, or this thread has a loop.
            PulqueError: An error that retries cannot cure stopped a handler.
        """
        if _is_on_a_loop():
            raise UsageError("there is an event loop in this thread: await app.serve() instead")
        asyncio.run(self._run())

    async def _run(self) -> None:
        loop = asyncio.get_running_loop()
        watched: list[signal.Signals] = []

        def told() -> None:
            if self._serving is not None and self._serving.is_stopping:
                # Whoever asks a third time gets what the system does.
                for each in watched:
                    loop.remove_signal_handler(each)
            self.stop()

        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGTERM, signal.SIGINT):
                loop.add_signal_handler(number, told)
                watched.append(number)
            # A worker outlives the terminal that started it, as servers do.
            loop.add_signal_handler(signal.SIGHUP, lambda: None)
        await self.serve()

    async def serve(self) -> None:
        """Handle messages until ``stop`` is called, or the task is cancelled.

        Raises:
            UsageError: No handler is registered, or it runs already.
            PulqueError: An error that retries cannot cure stopped a handler.
        """
        problem = await self._serve(self._begin())
        if problem is not None:
            raise problem

    def stop(self) -> None:
        """Stop gracefully; the second call skips the grace. May be called from any thread."""
        serving = self._serving
        if serving is not None:
            serving.stop()

    async def __aenter__(self) -> Self:
        """Handle messages while the block runs, which may use ``send``."""
        serving = self._begin()
        task = self._task = asyncio.create_task(self._serve(serving), name="pulque-app")
        ready = asyncio.create_task(serving.ready.wait())
        await asyncio.wait({task, ready}, return_when=asyncio.FIRST_COMPLETED)
        ready.cancel()
        if task.done():
            await task
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Stop gracefully; raise the error that stopped the application earlier, if any."""
        task, self._task = self._task, None
        self.stop()
        if task is not None and (problem := await task) is not None:
            raise problem

    def _begin(self) -> AppRun:
        if not self._handlers:
            raise UsageError("no handler is registered: use @app.subscribe")
        if self._serving is not None:
            raise UsageError("the application runs already")
        client = connect(
            self.url,
            name=self.name,
            timeout=self._timeout,
            acks=self._acks,
            state_dir=self._state_dir,
        )
        plan = Plan(
            handlers=self.handlers,
            middleware=tuple(self._middleware),
            startup=tuple(self._startup),
            shutdown=tuple(self._shutdown),
            grace=self.grace,
        )
        self._serving, self._forked = AppRun(plan, client), None
        return self._serving

    async def _serve(self, serving: AppRun) -> BaseException | None:
        try:
            return await serving.run()
        finally:
            self._serving = None


def _is_on_a_loop() -> bool:
    """Return whether the caller runs on an event loop, and would block it by waiting."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True


def _check_apart(known: Handler, handler: Handler) -> None:
    """Raise ``UsageError`` if two handlers of a group would share the messages of a subject."""
    if overlap(Pattern(known.subject), Pattern(handler.subject)):
        raise UsageError(
            f"{known.name} handles {known.subject} and {handler.name} handles {handler.subject}, "
            f"both for group {handler.group}: of what both cover, each message would come to one "
            "of them by chance; give one of them a group of its own, or subjects apart from the "
            "other's"
        )
