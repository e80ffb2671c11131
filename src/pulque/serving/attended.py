"""Consumers of ordered groups that wait to hear which partitions are theirs."""

import asyncio
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from hashlib import blake2b
from typing import NamedTuple

from pulque.model.names import (
    ConsumerId,
    Group,
    Subject,
    parse_consumer_id,
    parse_group,
    parse_subject,
)
from pulque.model.ordered import Allotted, ConsumeStrategy, OrderStrategy
from pulque.wire.ordered import Attend, Attended

__all__ = ["Attending", "AttendingWaits", "Authorisation", "attended", "attending_of"]

HEARTBEATS = 3
"""How often a consumer says that it is there, before it counts as gone."""


class Attending(NamedTuple):
    """A consumer that asks for its partitions."""

    subject: Subject
    group: Group
    consumer: ConsumerId


@dataclass(frozen=True, slots=True)
class Authorisation:
    """How long consumers may go on without a word from the server."""

    authorised_ms: int
    """Also how long a consumer may be silent before it counts as gone."""

    @property
    def heartbeat_ms(self) -> int:
        """How long an answer may take, so that several heartbeats fit in."""
        return self.authorised_ms // HEARTBEATS


def attending_of(request: Attend) -> Attending:
    """Return who asks.

    Raises:
        InvalidNameError: It names what is no subject, group or consumer.
    """
    return Attending(
        parse_subject(request.subject),
        parse_group(request.group),
        parse_consumer_id(request.consumer),
    )


def attended(
    strategy: ConsumeStrategy,
    order: OrderStrategy,
    authorisation: Authorisation,
    partitions: Iterable[Allotted],
) -> Attended:
    """Return an answer with its version: a hash of all that it says."""
    found = tuple(sorted(partitions))
    times = (authorisation.authorised_ms, authorisation.heartbeat_ms)
    content = repr((int(strategy), int(order), times, [tuple(each) for each in found]))
    digest = blake2b(content.encode(), digest_size=8).digest()
    version = int.from_bytes(digest, "little") or 1
    return Attended(strategy, order, version, *times, found)


@dataclass(eq=False, slots=True)
class _Waiter:
    who: Attending
    version: int
    owner: object
    answer: Callable[[Attended], None]
    timer: asyncio.TimerHandle | None = None


class AttendingWaits:
    """Holds questions until their answer differs. Lives in one event loop.

    Args:
        answer_for: Makes the answer of now.
        authorisation: How long a consumer may wait.
    """

    def __init__(
        self, answer_for: Callable[[Attending], Attended], authorisation: Authorisation
    ) -> None:
        self._answer_for = answer_for
        self._authorisation = authorisation
        self._waiting: dict[_Waiter, None] = {}

    def __len__(self) -> int:
        return len(self._waiting)

    def hold(
        self, request: Attend, who: Attending, owner: object, answer: Callable[[Attended], None]
    ) -> None:
        """Answer at once if the answer is not what the consumer knows, else when it differs."""
        waiter = _Waiter(who, request.version, owner, answer)
        if request.wait_ms == 0 or not request.is_online:
            answer(self._answer_for(who))
        elif not self._try(waiter):
            self._waiting[waiter] = None
            wait_s = min(request.wait_ms, self._authorisation.heartbeat_ms) / 1000
            loop = asyncio.get_running_loop()
            waiter.timer = loop.call_later(wait_s, self._time_is_up, waiter)

    def changed(self) -> None:
        """Answer those who would be told something else now."""
        for waiter in list(self._waiting):
            if waiter in self._waiting and self._try(waiter):
                self._remove(waiter)

    def closed(self, owner: object) -> None:
        """Forget the questions of a connection that is gone."""
        for waiter in [each for each in self._waiting if each.owner is owner]:
            self._remove(waiter)

    def close(self) -> None:
        """Answer all that wait."""
        for waiter in list(self._waiting):
            self._time_is_up(waiter)

    def _try(self, waiter: _Waiter) -> bool:
        found = self._answer_for(waiter.who)
        if found.version == waiter.version:
            return False
        waiter.answer(found)
        return True

    def _time_is_up(self, waiter: _Waiter) -> None:
        self._remove(waiter)
        waiter.answer(self._answer_for(waiter.who))

    def _remove(self, waiter: _Waiter) -> None:
        if waiter.timer is not None:
            waiter.timer.cancel()
        self._waiting.pop(waiter, None)
