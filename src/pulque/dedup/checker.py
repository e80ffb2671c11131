"""What a checker does: one message, one answer."""

import asyncio
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import ClassVar, TypeVar

from pulque.model.message import Message

__all__ = ["Checker"]

T = TypeVar("T")


class Checker(ABC):
    """Remembers which messages of a group were handled. Thread-safe.

    A message is *begun*, then *finished* or *given up*. What is begun and neither, as its process
    died, may be begun by another after a while: a checker never makes a message go missing.

    Attributes:
        may_block: Whether its methods may wait for something, such as a database.
    """

    may_block: ClassVar[bool] = True

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
