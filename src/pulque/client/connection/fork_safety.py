"""What a client's parts do in the child of a fork.

A child has the memory of its parent, but none of its other threads, and it shares the parent's
sockets and file locks. Whatever must not be used by both registers here, and is told in the child
before anything else runs there. A blocking client goes on with connections and an identity of its
own; producers, consumers and clients for asyncio raise ``ForkedError``.
"""

import logging
import os
import threading
import weakref
from collections.abc import Callable
from typing import Any, TypeVar

from pulque.errors import ForkedError

__all__ = ["forked", "free", "on_fork"]


log = logging.getLogger("pulque.client")

T = TypeVar("T")
_parts: "weakref.WeakKeyDictionary[object, Callable[[Any], None]]" = weakref.WeakKeyDictionary()


def on_fork(part: T, let_go: Callable[[T], None]) -> None:
    """Have ``let_go(part)`` called in every child, as long as the part lives.

    It gives up what belongs to the parent, and sends nothing to anybody.
    """
    _parts[part] = let_go


def forked(what: str, remedy: str) -> ForkedError:
    """Return what to raise when a child uses what its parent made."""
    return ForkedError(f"this {what} was made before a fork and belongs to the parent: {remedy}")


def free(lock: threading.Lock) -> None:
    """Free a lock that a thread may hold which the child does not have.

    To release it is not enough: that thread may have been about to take it. The standard library
    does the same for its own locks.
    """
    lock._at_fork_reinit()  # type: ignore[attr-defined]  # noqa: SLF001


def _in_child() -> None:
    for part, let_go in list(_parts.items()):
        try:
            let_go(part)
        except Exception:
            log.exception("after a fork: %s", type(part).__name__)  # the others must be told


os.register_at_fork(after_in_child=_in_child)
