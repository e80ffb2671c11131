"""Messages that are due later, for asyncio: cancel them, move them, see what is due when."""

from collections.abc import Iterable, Mapping
from datetime import datetime, timedelta
from typing import TypeVar

from pulque.client.aio.conversation import Asker, FindAskers, talk_to_many
from pulque.client.arguments.checks import check_text
from pulque.client.inspecting.delayed_messages import (
    DelayedMessage,
    DueCount,
    Fate,
    Moved,
    cancelling,
    counting,
    finding,
    listed_messages,
    listing,
    listing_stuck,
    moving,
    period_of,
)
from pulque.client.sending.outgoing_message import Receipt
from pulque.clock import wall_ms

__all__ = ["DelayedMessages", "Delaying"]

T = TypeVar("T")


class Delaying:
    """What a client can do with messages that it sent to be delivered later."""

    async def _delay_askers(self) -> Mapping[str, Asker]:
        """Return all delay servers, by name."""
        raise NotImplementedError

    async def cancel(self, message: Receipt | str) -> Fate:
        """Have a message never delivered, and say whether that was in time.

        It is on disk when this returns; to ask again does no harm.

        Args:
            message: The receipt, or the message id alone: then all is searched for it.

        Returns:
            ``Fate.CANCELLED`` or ``ALREADY_CANCELLED``: it is never delivered. ``TOO_LATE``: it
            is, or is about to be. ``UNKNOWN``: no delay server has such a message.

        Raises:
            UsageError: That is neither a receipt nor an id.
            NoDelayServerError: There is no delay server.
            UnavailableError: The one that has it is away.
        """
        return (await self.cancel_many([message]))[0]

    async def cancel_many(self, messages: Iterable[Receipt | str]) -> list[Fate]:
        """Have messages never delivered; return what became of each, as ``cancel`` does."""
        wanted = listed_messages(messages)
        return await talk_to_many(self._delay_askers, lambda servers: cancelling(servers, wanted))

    async def reschedule(
        self,
        message: Receipt | str,
        *,
        delay: float | timedelta | None = None,
        at: datetime | None = None,
        level: int | None = None,
    ) -> Moved:
        """Have a message delivered at another time; say whether that was in time.

        Args:
            message: The receipt, or the message id alone: then all is searched for it.
            delay: How long from now it is to be delivered, in seconds or as a timedelta.
            at: When it is to be delivered; with a time zone. What is past goes at once.
            level: 1 to 18, as for ``send``.

        Raises:
            UsageError: That is neither a receipt nor an id, or no time.
            NoDelayServerError: There is no delay server.
            UnavailableError: The one that has it is away.
            InvalidRequestError: The time is further ahead than it allows.
        """
        now_ms = wall_ms()
        return await talk_to_many(
            self._delay_askers,
            lambda servers: moving(servers, message, delay, at, level, now_ms),
        )

    def delayed(self, subject: str | None = None) -> "DelayedMessages":
        """Return what waits at the delay servers, of a subject or of all: count, list, show."""
        check_text("subject", subject, may_be_none=True)
        return DelayedMessages(subject or "", self._delay_askers)


class DelayedMessages:
    """What waits at the delay servers. Made by ``client.delayed()``."""

    def __init__(self, subject: str, find_askers: FindAskers) -> None:
        self._subject = subject
        self._find_askers = find_askers

    async def counts(
        self, start: datetime | None = None, end: datetime | None = None
    ) -> list[DueCount]:
        """Return how many messages are due in which hour, by subject.

        Args:
            start: Due at this time or later; with a time zone.
            end: Due before this time.
        """
        period = period_of(start, end)
        return await talk_to_many(
            self._find_askers, lambda servers: counting(servers, self._subject, period)
        )

    async def next(
        self, limit: int = 100, *, start: datetime | None = None, end: datetime | None = None
    ) -> list[DelayedMessage]:
        """Return the messages that are due next, without their contents.

        Args:
            limit: At most so many.
            start: Due at this time or later; with a time zone.
            end: Due before this time.
        """
        period = period_of(start, end)
        return await talk_to_many(
            self._find_askers, lambda servers: listing(servers, self._subject, period, limit)
        )

    async def stuck(self, limit: int = 100) -> list[DelayedMessage]:
        """Return the messages that brokers refuse, each with the reason; they are overdue.

        Args:
            limit: At most so many.
        """
        return await talk_to_many(
            self._find_askers, lambda servers: listing_stuck(servers, self._subject, limit)
        )

    async def show(self, message: Receipt | str) -> DelayedMessage | None:
        """Return one message with its content; None if it is not, or no longer, waiting.

        Args:
            message: The receipt, or the message id alone: then all is searched for it.
        """
        return await talk_to_many(self._find_askers, lambda servers: finding(servers, message))
