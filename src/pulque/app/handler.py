"""A registered handler and its options: subject, group, concurrency, time-out."""

import contextlib
import difflib
import inspect
import logging
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypedDict

from pulque.app.outcomes import BatchFailed, nack, verdict_of
from pulque.app.signature import (
    Arguments,
    Call,
    Decode,
    Function,
    arguments_of,
    decode_all,
    is_async,
    name_of,
)
from pulque.client.arguments.checks import (
    check_choice,
    check_flag,
    check_number,
    check_whole,
    check_words,
)
from pulque.client.options.group_options import (
    WINDOW_LENGTH,
    ModeName,
    RetryPolicy,
    StartAt,
    mode_of,
    ordered_options,
    retry_of,
    start_of,
)
from pulque.client.ordered.window import BlocksName
from pulque.client.receiving.received_message import ReceivedMessage
from pulque.dedup import Checker
from pulque.errors import UsageError
from pulque.model.groups import Mode, tag_filter
from pulque.model.names import parse_consumer_id, parse_group, parse_pattern

__all__ = ["AckName", "Handler", "OnAbandonName", "Wishes", "make_handler"]

log = logging.getLogger("pulque.app")

AckName = Literal["auto", "manual"]
OnAbandonName = Literal["finish", "cancel"]

_MOST_AT_ONCE = 10_000
_LEAST_HELD = 1000
_HELD_PER_CALL = 100
_MOST_HELD = 1_000_000_000
_LONGEST = 7 * 24 * 3600.0
_OPTIONS = ("group", "concurrency", "timeout", "ack", "on_abandon", "decode")
"""Options of all handlers, beside those of their group."""
_OF_ONE = ("dedup",)
_OF_BATCHES = ("max_messages", "max_wait")


class Wishes(TypedDict, total=False):
    """Group options, as of ``Client.consumer``: mode, filter, start, retry policy."""

    start: StartAt
    mode: ModeName | None
    broadcast: bool | None
    ordered: bool
    blocks: BlocksName
    tags: Iterable[str]
    all_tags: Iterable[str]
    retry: RetryPolicy | None
    consumer_id: str | None
    max_held: int | None


@dataclass(frozen=True, slots=True)
class Handler:
    """One registered function.

    Attributes:
        function: The function as registered.
        subject: The subject, or a pattern.
        group: The group; None for a broadcast.
        concurrency: How many calls may run at the same time.
        timeout: How long a call may take, in seconds.
        ack: Whether returning acks, or the function acks itself.
        on_abandon: Whether to cancel a running call whose messages went to others.
        batch: The most messages of one call; None for one by one.
        max_wait: How long a batch waits for more messages, in seconds.
        consumer: Options for ``Client.consumer``.
        arguments: How to pass message and payload.
        is_async: Whether it runs on the loop; else in a thread.
        dedup: The checker that remembers handled messages.
    """

    function: Function
    subject: str
    group: str | None
    concurrency: int
    timeout: float | None
    ack: AckName
    on_abandon: OnAbandonName
    batch: int | None
    max_wait: float
    arguments: Arguments
    is_async: bool
    consumer: Mapping[str, Any]
    dedup: Checker | None = None

    @property
    def name(self) -> str:
        """The name for the log."""
        return name_of(self.function)

    @property
    def is_broadcast(self) -> bool:
        """Whether every application gets every message."""
        return _mode_of(self.consumer, self.group) is Mode.BROADCAST

    @property
    def is_once(self) -> bool:
        """Whether messages are delivered at most one time, without retries."""
        return _mode_of(self.consumer, self.group) is Mode.ONCE

    @property
    def is_ordered(self) -> bool:
        """Whether messages of one order key are handled one after the other."""
        return _mode_of(self.consumer, self.group) is Mode.ORDERED

    def prepared(self) -> Function:
        """Return a function of a message, or a list, that decodes and calls the handler."""
        handle = self._decoding()
        return handle if self.dedup is None else _checking(handle, self.dedup)

    def _decoding(self) -> Function:
        call = self.arguments.caller(self.function)
        return self._for_one(call) if self.batch is None else self._for_many(call)

    def _for_one(self, call: Call) -> Function:
        decode = self.arguments.decode
        if self.is_async:

            async def handle(message: ReceivedMessage) -> Any:
                result = await call(message, None if decode is None else decode(message))
                return result if result is None else await _awaited(result)

            return handle
        return lambda message: call(message, None if decode is None else decode(message))

    def _for_many(self, call: Call) -> Function:
        if self.is_async:

            async def handle(about: list[ReceivedMessage]) -> Any:
                messages, payloads = self._decode_all(about)
                if not messages:
                    return None
                with _named_places(messages):
                    return await _awaited(await call(messages, payloads))

            return handle

        def handle_blocking(about: list[ReceivedMessage]) -> Any:
            messages, payloads = self._decode_all(about)
            if not messages:
                return None
            with _named_places(messages):
                return call(messages, payloads)

        return handle_blocking

    def _decode_all(
        self, messages: list[ReceivedMessage]
    ) -> tuple[list[ReceivedMessage], list[object]]:
        """Return the messages that can be decoded; nack the others, as only they failed."""
        decode = self.arguments.decode
        if decode is None:
            return messages, []
        good, payloads, bad = decode_all(decode, messages)
        for message, problem in bad.items():
            log.warning("cannot be decoded: handler=%s %r: %s", self.name, message, problem)
            nack(message, verdict_of(problem))
        return good, payloads


def make_handler(  # noqa: PLR0913  # the arguments of App.subscribe and App.subscribe_batch
    function: Function,
    subject: str,
    group: str | None,
    *,
    concurrency: int,
    timeout: float | None,
    ack: str,
    on_abandon: str,
    decode: Decode | None,
    dedup: Checker | None = None,
    batch: int | None = None,
    max_wait: float = 0.0,
    wishes: Wishes,
) -> Handler:
    """Return a handler after checking its options.

    Raises:
        UsageError: An option is invalid; the text says what is allowed.
        InvalidNameError: The subject or the group is not a valid name.
    """
    check_whole("concurrency", concurrency, 1, _MOST_AT_ONCE)
    if timeout is not None:
        check_number("timeout", timeout, 0.001, _LONGEST)
    if batch is not None:
        check_whole("max_messages", batch, 1, _MOST_AT_ONCE)
        check_number("max_wait", max_wait, 0, 3600)
    check_choice("ack", ack, ("auto", "manual"))
    check_choice("on_abandon", on_abandon, ("finish", "cancel"))
    name = name_of(function)
    _check_wishes(name, wishes, _OF_ONE if batch is None else _OF_BATCHES)
    if dedup is not None:
        _check_checker(name, dedup, group, ack)
    arguments = arguments_of(function, decode, is_batch=batch is not None)
    on_loop = is_async(function)
    if on_abandon == "cancel" and not on_loop:
        raise UsageError(
            f"{name} is not async: a thread cannot be cancelled, so on_abandon must be "
            '"finish"; it may look at message.is_abandoned'
        )
    _check_effect(name, arguments, ack, decode)
    return Handler(
        function=function,
        subject=subject,
        group=group,
        concurrency=concurrency,
        timeout=timeout,
        ack="manual" if ack == "manual" else "auto",
        on_abandon="cancel" if on_abandon == "cancel" else "finish",
        batch=batch,
        max_wait=max_wait,
        arguments=arguments,
        is_async=on_loop,
        consumer=_consumer_options(subject, group, wishes, concurrency * (batch or 1)),
        dedup=dedup,
    )


def _check_wishes(
    name: str, wishes: Mapping[str, object] | Wishes, special: tuple[str, ...]
) -> None:
    """Raise ``UsageError`` for unknown options."""
    known = (*_OPTIONS, *special, *Wishes.__annotations__)
    for option in wishes:
        if option not in Wishes.__annotations__:
            close = difflib.get_close_matches(option, known, 1)
            hint = f"; did you mean {close[0]}?" if close else "."
            allowed = ", ".join(sorted(known))
            raise UsageError(f"{name}: there is no option {option}{hint} Allowed are {allowed}")


def _check_checker(name: str, dedup: Checker, group: str | None, ack: str) -> None:
    if not isinstance(dedup, Checker):
        raise UsageError(
            f"dedup of {name} is {dedup!r}; a checker is allowed, such as "
            "pulque.dedup.MemoryChecker()"
        )
    if ack == "manual":
        raise UsageError(
            "dedup needs to know when a message is handled, and with ack='manual' only the "
            "handler does: it may use the checker itself"
        )
    if dedup.group not in {"", group}:
        raise UsageError(
            f"dedup remembers what group {dedup.group} handled, and the handler is for "
            f"{group or 'broadcast'}: give each group a checker of its own"
        )


def _check_effect(name: str, arguments: Arguments, ack: str, decode: Decode | None) -> None:
    """Raise ``UsageError`` for options that would have no effect."""
    if ack == "manual" and arguments.message is None:
        raise UsageError(f'{name} does not take the message, so with ack="manual" nobody acks it')
    if decode is not None and arguments.payload is None:
        raise UsageError(f"no parameter of {name} takes what decode= gives: give it a type")


def _checking(handle: Function, checker: Checker) -> Function:
    """Return a handler that skips messages that its checker knows."""
    if is_async(handle):

        async def once(message: Any) -> Any:
            async with checker.once_async(message) as is_first:
                return await handle(message) if is_first else None

        return once

    def once_blocking(message: Any) -> Any:
        with checker.once(message) as is_first:
            return handle(message) if is_first else None

    return once_blocking


def _consumer_options(
    subject: str, group: str | None, wishes: Wishes, at_once: int
) -> dict[str, Any]:
    """Return the consumer's options: those given, and a ``max_held`` for all concurrent calls."""
    for name in ("tags", "all_tags"):
        check_words(name, wishes.get(name, ()))
    check_flag("ordered", wishes.get("ordered", False))
    check_flag("broadcast", wishes.get("broadcast"), may_be_none=True)
    if (consumer_id := wishes.get("consumer_id")) is not None:
        parse_consumer_id(consumer_id)
    # They may be given as what can be read once only.
    tags, all_tags = _tags(wishes.get("tags", ())), _tags(wishes.get("all_tags", ()))
    parse_pattern(subject)
    mode = _mode_of(wishes, group)
    ordered_options(subject, mode, wishes.get("blocks", "key"), wishes.get("retry"))
    if mode is not Mode.BROADCAST:
        parse_group(group or "")
    start_of(wishes.get("start", "earliest"))
    retry_of(wishes.get("retry"))
    tag_filter(tags, all_tags)
    least = WINDOW_LENGTH if mode is Mode.ORDERED else _LEAST_HELD
    told = wishes.get("max_held")
    held = max(least, _HELD_PER_CALL * at_once) if told is None else told
    check_whole("max_held", held, at_once, _MOST_HELD)
    return {
        **wishes,
        "tags": tags,
        "all_tags": all_tags,
        "max_held": held,
        "max_messages": min(held, _MOST_AT_ONCE),
        "prefetch": False,
    }


def _mode_of(wishes: Mapping[str, Any] | Wishes, group: str | None) -> Mode:
    return mode_of(
        wishes.get("mode"),
        group,
        broadcast=wishes.get("broadcast"),
        ordered=wishes.get("ordered", False),
    )


def _tags(given: Iterable[str]) -> Iterable[str]:
    return given if isinstance(given, str) else tuple(given)


async def _awaited(result: Any) -> Any:
    """Await a forgotten coroutine: else the message would be acked without its work being done."""
    return await result if inspect.isawaitable(result) else result


@contextlib.contextmanager
def _named_places(messages: list[ReceivedMessage]) -> Iterator[None]:
    """Replace indexes in a ``BatchFailed`` by the messages of the handler's list."""
    try:
        yield
    except BatchFailed as error:
        places: dict[object, ReceivedMessage] = dict(enumerate(messages))
        error.reasons = {
            places.get(which, which): reason for which, reason in error.reasons.items()
        }
        raise
