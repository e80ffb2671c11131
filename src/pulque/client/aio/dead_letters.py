"""Dead letters, for asyncio: list, show, resend and purge what nobody could process."""

import builtins
from collections.abc import Awaitable, Callable, Mapping
from typing import TypeVar

from pulque.client.aio.conversation import Asker, talk_to
from pulque.client.inspecting.broker_answers import Said, of_all, of_one, with_broker
from pulque.client.inspecting.dead_letters import DeadLetterTalks, Messages, ResentLetters, Talk
from pulque.errors import RejectedError
from pulque.model.message import Message

__all__ = ["DeadLetters"]

T = TypeVar("T")


class DeadLetters:
    """The dead letters of one group and subject. Made by ``client.dead(subject, group)``."""

    def __init__(
        self, letters: DeadLetterTalks, find_askers: Callable[[], Awaitable[Mapping[str, Asker]]]
    ) -> None:
        self._letters = letters
        self._find_askers = find_askers

    async def brokers(self) -> "builtins.list[str]":
        """Return the broker groups that may have some; that of a lone broker is empty."""
        return [*await self._find_askers()]

    async def count(self) -> int:
        """Return how many nobody has dealt with."""
        return sum(found for _, found in await self._talk_to_all(self._letters.count))

    async def show(self, sequence: int, *, broker: str | None = None) -> Message | None:
        """Return one letter; None if it was dealt with, or is not stored any more.

        Args:
            sequence: Which one.
            broker: Whose, if several brokers have letters.
        """
        askers = await self._find_askers()
        name = of_one(askers, broker, "a dead letter")
        found = await talk_to(self._letters.one(sequence), askers[name])
        return None if found is None else with_broker([found], name)[0]

    async def resend(
        self,
        *sequences: int,
        body: object = None,
        headers: Mapping[str, str] | None = None,
        broker: str | None = None,
    ) -> ResentLetters:
        """Deliver letters to their group again, as first attempts; to no other group.

        Each is resent once: to ask again does no harm.

        Args:
            sequences: Which ones.
            body: In the place of its own, for a single one; what ``send`` takes. The headers
                stay as they are, unless ``headers`` replaces them.
            headers: In the place of its own, for a single one.
            broker: Whose, if several brokers have letters.
        """
        talk = self._letters.resend(sequences, body, headers)
        return await self._talk_to_one(talk, broker, "dead letters to resend")

    async def resend_all(self) -> int:
        """Deliver all letters that there are now to their group again; return how many."""
        return await self._change_all(self._letters.resend_all)

    async def purge(self, until: int | None = None, *, broker: str | None = None) -> int:
        """Give up letters, up to and including a sequence, or all; return how many.

        They are not shown any more, and their bytes go with their segment.
        """
        if until is not None:
            talk = self._letters.purge(until)
            return await self._talk_to_one(talk, broker, "dead letters to purge")
        return await self._change_all(lambda: self._letters.purge(None), broker)

    async def list(
        self, first: int = 0, limit: int = 100, *, broker: str | None = None
    ) -> Messages:
        """Return letters that nobody has dealt with, oldest first.

        Args:
            first: From this sequence on.
            limit: At most so many, up to 1000.
            broker: Only this broker group's; else those of all, as they were stored.
        """
        found = await self._talk_to_all(lambda: self._letters.some(first, limit), broker)
        letters = [each for name, some in found for each in with_broker(some, name)]
        if len(found) > 1:
            letters.sort(key=lambda letter: letter.stored_at_ms)
        return letters[:limit]

    async def _change_all(self, talk: Callable[[], Talk[int]], broker: str | None = None) -> int:
        # Nothing is done if one of them does not answer.
        await self._talk_to_all(self._letters.count, broker)
        return sum(count for _, count in await self._talk_to_all(talk, broker))

    async def _talk_to_one(self, talk: Talk[T], broker: str | None, what: str) -> T:
        askers = await self._find_askers()
        return await talk_to(talk, askers[of_one(askers, broker, what)])

    async def _talk_to_all(
        self, talk: Callable[[], Talk[T]], broker: str | None = None
    ) -> "builtins.list[tuple[str, T]]":
        askers = await self._find_askers()
        names = askers if broker is None else (of_one(askers, broker, "dead letters"),)
        said: builtins.list[Said[T]] = []
        for name in names:
            try:
                said.append((name, await talk_to(talk(), askers[name])))
            except RejectedError as error:
                said.append((name, error))
        return of_all(said)
