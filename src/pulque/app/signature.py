"""Which parameters of a handler get the message and the payload, by their type hints."""

import collections.abc
import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from inspect import Parameter
from typing import Any, get_args, get_origin

from pulque.app.payload import decoder_of
from pulque.client.receiving.received_message import ReceivedMessage
from pulque.errors import UsageError

__all__ = [
    "Arguments",
    "Call",
    "Decode",
    "Function",
    "arguments_of",
    "check_hook",
    "check_middleware",
    "decode_all",
    "is_async",
    "name_of",
]

Function = Callable[..., Any]
Decode = Callable[[ReceivedMessage], object]
Call = Callable[[Any, Any], Any]
"""Takes the message and the payload, or lists of them."""

_LISTS = (list, collections.abc.Sequence, collections.abc.Iterable, collections.abc.Collection)
_FILLED = (Parameter.POSITIONAL_ONLY, Parameter.POSITIONAL_OR_KEYWORD, Parameter.KEYWORD_ONLY)


@dataclass(frozen=True, slots=True)
class Arguments:
    """What a handler is called with.

    Attributes:
        message: The name of the parameter for the message, or for the list of them.
        payload: The same for the decoded body.
        decode: Returns the payload of a message.
        is_positional: Whether to pass them by position, in the order of the parameters.
    """

    message: str | None
    payload: str | None
    decode: Decode | None
    is_positional: bool

    def caller(self, function: Function) -> Call:
        """Return a function of message and payload that calls the handler with its arguments."""
        message, payload = self.message, self.payload
        if self.is_positional:
            return lambda *given: function(*self._wanted(given))
        if message is not None and payload is not None:
            return lambda about, value: function(**{message: about, payload: value})
        if message is not None:
            return lambda about, _: function(**{message: about})
        assert payload is not None  # noqa: S101  # it takes one of them
        return lambda _, value: function(**{payload: value})

    def _wanted(self, given: tuple[object, ...]) -> list[object]:
        names = (self.message, self.payload)
        return [each for each, name in zip(given, names, strict=True) if name is not None]


def name_of(function: Function) -> str:
    """Return a handler's name for the log."""
    return getattr(function, "__qualname__", None) or type(function).__name__


def is_async(function: Function) -> bool:
    """Return whether calling a function returns a coroutine.

    Raises:
        UsageError: It is a generator: calling it would do nothing.
    """
    call = type(function).__call__ if not inspect.isroutine(function) else function
    for each in (function, call):
        if inspect.isgeneratorfunction(each) or inspect.isasyncgenfunction(each):
            raise UsageError(f"{name_of(function)} yields; it is to be a plain function, or async")
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(call)


def check_middleware(function: Function) -> None:
    """Check that a function can be middleware.

    Raises:
        UsageError: It is not a function, yields, or does not take the message and ``call_next``.
    """
    if not callable(function):
        raise UsageError(f"middleware {function!r} is not a function")
    is_async(function)
    try:
        inspect.signature(function).bind("message", "call_next")
    except ValueError:
        return  # written in C: nobody can tell
    except TypeError as problem:
        raise UsageError(
            f"middleware {name_of(function)} must take two arguments, the message and call_next: "
            f"{problem}"
        ) from None


def check_hook(name: str, function: Function) -> None:
    """Check that a function can be a startup or shutdown hook.

    Raises:
        UsageError: It is not a function, yields, or needs arguments.
    """
    if not callable(function):
        raise UsageError(f"{name} got {function!r}; a function is allowed")
    is_async(function)
    try:
        inspect.signature(function).bind()
    except ValueError:
        return  # written in C: nobody can tell
    except TypeError as problem:
        raise UsageError(
            f"{name_of(function)} is called by {name} without arguments: {problem}"
        ) from None


def arguments_of(function: Function, decode: Decode | None, *, is_batch: bool) -> Arguments:
    """Return which parameters of a handler get the message and the payload.

    Raises:
        UsageError: The hints are ambiguous, or a type cannot be decoded.
    """
    name = name_of(function)
    if not callable(function):
        raise UsageError(f"{function!r} is not a function")
    wanted = _wanted(function, name)
    found: dict[str, str] = {}
    kind: Any = None
    for parameter in wanted:
        what, of = _purpose(parameter, name, is_batch=is_batch)
        if what in found:
            raise UsageError(
                f"{name} has two parameters for the {what}: {found[what]} and {parameter.name}; "
                "it may have one for the message and one for the payload"
            )
        found[what] = parameter.name
        kind = of if what == "payload" else kind
    if decode is None and "payload" in found:
        decode = _decode_into(kind)
    return Arguments(
        found.get("message"),
        found.get("payload"),
        decode if "payload" in found else None,
        is_positional=_is_in_order(wanted, found),
    )


def _wanted(function: Function, name: str) -> list[Parameter]:
    try:
        signature = inspect.signature(function, eval_str=True)
    except NameError as problem:
        raise UsageError(
            f"a type hint of {name} cannot be resolved: {problem}; "
            "what it names must be importable where the handler is defined"
        ) from problem
    except (TypeError, ValueError) as problem:
        raise UsageError(f"the parameters of {name} cannot be read: {problem}") from problem
    filled = [
        each
        for each in signature.parameters.values()
        if each.kind in _FILLED and each.default is Parameter.empty
    ]
    if not filled:
        raise UsageError(
            f"{name} takes no parameter; it must take the message, its payload or both"
        )
    return filled


def _purpose(parameter: Parameter, name: str, *, is_batch: bool) -> tuple[str, Any]:
    """Return "message" or "payload", and the type of one payload."""
    hint = parameter.annotation
    if is_batch:
        if hint in {Parameter.empty, list}:
            return "message", None
        if get_origin(hint) not in _LISTS:
            raise UsageError(
                f"{parameter.name} of {name} is a {hint!r}; a batch handler takes a list: "
                "list[pulque.ReceivedMessage], or of what the bodies hold"
            )
        hint = get_args(hint)[0]
    if hint is Parameter.empty:
        return "message", None
    if isinstance(hint, type) and hint is not object and issubclass(ReceivedMessage, hint):
        return "message", None
    return "payload", hint


def _decode_into(kind: Any) -> Decode:
    decode = decoder_of(kind)
    return lambda message: decode(message.body)


def _is_in_order(wanted: Sequence[Parameter], found: dict[str, str]) -> bool:
    """Return whether both can be passed by position: some functions allow only that."""
    if not any(each.kind is Parameter.POSITIONAL_ONLY for each in wanted):
        return False
    if [each.name for each in wanted] != [
        found[what] for what in ("message", "payload") if what in found
    ]:
        raise UsageError("positional-only parameters must be the message, then the payload")
    return True


def decode_all(
    decode: Decode, messages: Sequence[ReceivedMessage]
) -> tuple[list[ReceivedMessage], list[object], dict[ReceivedMessage, Exception]]:
    """Return the messages that can be decoded, their payloads, and the errors of the others."""
    good: list[ReceivedMessage] = []
    payloads: list[object] = []
    bad: dict[ReceivedMessage, Exception] = {}
    for message in messages:
        try:
            payloads.append(decode(message))
        except Exception as problem:  # noqa: BLE001  # the caller tells
            bad[message] = problem
        else:
            good.append(message)
    return good, payloads, bad
