"""Middleware around a handler: each layer runs on the loop or in a thread.

The first middleware that was registered is the outermost. Async layers run on the event loop,
others in a thread, and ``call_next`` switches between them as needed; adjacent layers of
one kind call each other directly.
"""

import functools
import inspect
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from dataclasses import dataclass
from typing import Any

from pulque.app.signature import Function, is_async

__all__ = ["Worlds", "chain"]

AsyncCall = Callable[[Any], Coroutine[Any, Any, Any]]
BlockingCall = Callable[[Any], Any]


@dataclass(frozen=True, slots=True)
class Worlds:
    """Functions that switch between the loop and the threads."""

    run_in_thread: Callable[[Callable[[], Any]], Awaitable[Any]]
    """Called on the loop; runs its argument in a thread."""
    run_on_loop: Callable[[Coroutine[Any, Any, Any]], Any]
    """Called in a thread, which waits; runs its argument on the loop."""


@dataclass(frozen=True, slots=True)
class _Layer:
    function: Function
    is_async: bool


def chain(middleware: Sequence[Function], handler: Function, worlds: Worlds) -> AsyncCall:
    """Return a handler wrapped in its middleware, to be called on the loop.

    Args:
        middleware: The outermost first; each takes the message or messages, and ``call_next``.
        handler: Takes a message, or a list of them.
        worlds: How to switch between loop and threads.
    """
    layers = [_Layer(each, is_async(each)) for each in (*middleware, handler)]
    return _enter(layers, worlds)


def _enter(layers: Sequence[_Layer], worlds: Worlds) -> AsyncCall:
    """Return these layers as a function to be awaited on the loop."""
    first = layers[0]
    if not first.is_async:
        blocking = _block(layers, worlds)

        async def in_thread(about: Any) -> Any:
            result = await worlds.run_in_thread(functools.partial(blocking, about))
            # A wrapper that is not async, around a function that is.
            return await result if inspect.isawaitable(result) else result

        return in_thread
    if len(layers) == 1:
        return first.function
    rest = _enter(layers[1:], worlds)

    async def call(about: Any) -> Any:
        return await first.function(about, functools.partial(rest, about))

    return call


def _block(layers: Sequence[_Layer], worlds: Worlds) -> BlockingCall:
    """Return these layers as a function to be called in a thread."""
    first = layers[0]
    if first.is_async:
        enter = _enter(layers, worlds)
        return lambda about: worlds.run_on_loop(enter(about))
    if len(layers) == 1:
        return first.function
    rest = _block(layers[1:], worlds)
    return lambda about: first.function(about, functools.partial(rest, about))
