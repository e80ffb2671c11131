"""A checker in memory: it forgets the oldest messages, and everything when the process ends."""

import threading
import time
from collections import OrderedDict
from collections.abc import Callable

from pulque.dedup.checker import Checker, on_fork
from pulque.errors import UnavailableError, UsageError
from pulque.model.message import Message

__all__ = ["MemoryChecker"]

_Key = tuple[str, str]
"""The group that a message was delivered to, and its id."""


def _key(message: Message) -> _Key:
    return message.group, message.id


class MemoryChecker(Checker):
    """Remembers the messages that this process handled last, per group.

    Args:
        size: How many messages to remember, about 150 bytes each.
        keep: How long to remember one, in seconds.
        monotonic: The clock, in seconds.

    Raises:
        UsageError: ``size`` or ``keep`` is not more than 0.
    """

    may_block = False

    def __init__(
        self,
        *,
        size: int = 100_000,
        keep: float = 3600.0,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        if not size > 0 or not keep > 0:
            raise UsageError(f"size is {size!r} and keep is {keep!r}; more than 0 are allowed")
        self._size = size
        self._keep = keep
        self._now = monotonic
        self._handled: OrderedDict[_Key, float] = OrderedDict()
        """When each message was handled, the latest at the end."""
        self._begun: set[_Key] = set()
        self._lock = threading.Lock()
        on_fork(self, MemoryChecker._after_fork)

    def _after_fork(self) -> None:
        # What other threads have begun ends in the parent alone, and one may hold the lock.
        self._begun = set()
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._handled)

    def begin(self, message: Message) -> bool:
        """Begin a message; return False if it was handled before.

        Raises:
            UnavailableError: Another thread handles it now.
        """
        key = _key(message)
        with self._lock:
            handled_at = self._handled.get(key)
            if handled_at is not None and self._now() - handled_at < self._keep:
                self._handled.move_to_end(key)
                return False
            if key in self._begun:
                raise UnavailableError(f"message {message.id} is being handled by another thread")
            self._begun.add(key)
            return True

    def finish(self, message: Message) -> None:
        """Record that a message was handled."""
        key = _key(message)
        with self._lock:
            self._begun.discard(key)
            self._handled[key] = self._now()
            self._handled.move_to_end(key)
            while len(self._handled) > self._size:
                self._handled.popitem(last=False)

    def give_up(self, message: Message) -> None:
        """Allow a message that was begun to be begun again."""
        with self._lock:
            self._begun.discard(_key(message))
