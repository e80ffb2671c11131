"""Dead letters for asyncio: the blocking one's twin, with the same names."""

from collections.abc import Awaitable, Callable, Mapping
from typing import TypeVar

from pulque.client.dead import Letters, Messages, ResentLetters, Talk
from pulque.model.message import Message
from pulque.wire.requests import Request
from pulque.wire.responses import Response

__all__ = ["DeadLetters"]

T = TypeVar("T")


class DeadLetters:
    """The dead letters of one group and subject. Made by ``client.dead(subject, group)``."""

    def __init__(self, letters: Letters, ask: Callable[[Request], Awaitable[Response]]) -> None:
        self._letters = letters
        self._ask = ask

    async def count(self) -> int:
        """Return how many nobody has dealt with."""
        return await self._talk(self._letters.count())

    async def show(self, sequence: int) -> Message | None:
        """Return one letter; None if it was dealt with, or is not stored any more."""
        return await self._talk(self._letters.one(sequence))

    async def resend(
        self,
        *sequences: int,
        body: bytes | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> ResentLetters:
        """Deliver letters to their group again, as first attempts; to no other group.

        Each is resent once: to ask again does no harm.

        Args:
            sequences: Which ones.
            body: In the place of its own, for a single one.
            headers: In the place of its own, for a single one.
        """
        return await self._talk(self._letters.resend(sequences, body, headers))

    async def resend_all(self) -> int:
        """Deliver all letters that there are now to their group again; return how many."""
        return await self._talk(self._letters.resend_all())

    async def purge(self, until: int | None = None) -> int:
        """Give up letters, up to and including a sequence, or all; return how many.

        They are not shown any more, and their bytes go with their segment.
        """
        return await self._talk(self._letters.purge(until))

    async def list(self, first: int = 0, limit: int = 100) -> Messages:
        """Return letters that nobody has dealt with, oldest first.

        Args:
            first: From this sequence on.
            limit: At most so many, up to 1000.
        """
        return await self._talk(self._letters.some(first, limit))

    async def _talk(self, talk: Talk[T]) -> T:
        try:
            request = next(talk)
            while True:
                request = talk.send(await self._ask(request))
        except StopIteration as end:
            found: T = end.value
            return found
