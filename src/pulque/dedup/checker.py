"""The base class of checkers."""

import asyncio
import os
import weakref
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Any, ClassVar, TypeVar

from pulque.model.message import Message

__all__ = ["Checker", "on_fork"]

T = TypeVar("T")
C = TypeVar("C", bound="Checker")
_let_go: "weakref.WeakKeyDictionary[Checker, Callable[[Any], None]]" = weakref.WeakKeyDictionary()


class Checker(ABC):
    """Remembers which messages of a group were handled. Thread-safe.

    A message is *begun*, then *finished* or *given up*. If its process dies in between, another
    consumer may begin it after a while: a checker never loses a message.

    Attributes:
        may_block: Whether its methods may block, for example on a database.
        group: The only group whose messages it accepts; empty for any.
    """

    may_block: ClassVar[bool] = True
    group: str = ""

    @contextmanager
    def once(self, message: Message) -> Iterator[bool]:
        """Begin a message, and finish it at the end of the block; an exception gives it up.

        Yields:
            True if the message is to be handled, False if it was handled before.

        Raises:
            UnavailableError: Another consumer handles it now: nack it, to have it retried.
        """
        is_first = self.begin(message)
        try:
            yield is_first
        except BaseException:
            if is_first:
                self.give_up(message)
            raise
        if is_first:
            self.finish(message)

    @asynccontextmanager
    async def once_async(self, message: Message) -> AsyncIterator[bool]:
        """Do the same as ``once`` for asyncio; methods that may block run in a thread."""
        is_first = await self._call(self.begin, message)
        try:
            yield is_first
        except BaseException:
            if is_first:
                await self._call(self.give_up, message)
            raise
        if is_first:
            await self._call(self.finish, message)

    async def _call(self, step: Callable[[Message], T], message: Message) -> T:
        return await asyncio.to_thread(step, message) if self.may_block else step(message)

    @abstractmethod
    def begin(self, message: Message) -> bool:
        """Begin a message; return False if it was handled before.

        Raises:
            UnavailableError: Another consumer handles it now.
        """

    @abstractmethod
    def finish(self, message: Message) -> None:
        """Record that a message was handled."""

    @abstractmethod
    def give_up(self, message: Message) -> None:
        """Allow a message that was begun to be begun again."""


def on_fork(checker: C, let_go: Callable[[C], None]) -> None:
    """Register ``let_go(checker)`` for children of fork, which have none of our threads."""
    _let_go[checker] = let_go


def _in_child() -> None:
    for checker, let_go in list(_let_go.items()):
        let_go(checker)


os.register_at_fork(after_in_child=_in_child)
