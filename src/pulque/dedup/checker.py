"""What a checker does: one message, one answer."""

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

    A message is *begun*, then *finished* or *given up*. What is begun and neither, as its process
    died, may be begun by another after a while: a checker never makes a message go missing.

    Attributes:
        may_block: Whether its methods may wait for something, such as a database.
        group: The only group whose messages it takes; empty for any.
    """

    may_block: ClassVar[bool] = True
    group: str = ""

    @contextmanager
    def once(self, message: Message) -> Iterator[bool]:
        """Begin a message, and finish it at the end of the block; an exception gives it up.

        Yields:
            Whether the message is to be handled; False if it was before.

        Raises:
            UnavailableError: Another handles it right now: nack it, it comes again.
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
        """As ``once``, for asyncio: what may wait for a database does so in a thread."""
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
        """Say whether a message is to be handled; False if it was before.

        Raises:
            UnavailableError: Another handles it right now.
        """

    @abstractmethod
    def finish(self, message: Message) -> None:
        """Remember that a message was handled."""

    @abstractmethod
    def give_up(self, message: Message) -> None:
        """Let a message that was begun be begun again."""


def on_fork(checker: C, let_go: Callable[[C], None]) -> None:
    """Call ``let_go(checker)`` in every child of fork, where none of the parent's threads runs."""
    _let_go[checker] = let_go


def _in_child() -> None:
    for checker, let_go in list(_let_go.items()):
        let_go(checker)


os.register_at_fork(after_in_child=_in_child)
