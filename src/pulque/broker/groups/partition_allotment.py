"""Who consumes in order at a broker that stands alone: it allots its own partitions.

Nothing of this is written down: after a restart consumers come again, and their locks, which are,
keep them apart until then.
"""

import asyncio
from collections.abc import Callable, Collection
from dataclasses import dataclass

from pulque.broker.cluster.partition_coverage import PartitionCoverage
from pulque.clock import Clock
from pulque.errors import FencedError
from pulque.model.names import (
    ConsumerId,
    Group,
    PartitionName,
    Pattern,
    Subject,
    patterns_of,
)
from pulque.model.ordered import Allotted, ConsumeStrategy, OrderStrategy
from pulque.rules.allocation import allocate
from pulque.rules.locks import can_be_locked
from pulque.serving.attended import (
    Attending,
    AttendingWaits,
    Authorisation,
    attended,
    attending_of,
)
from pulque.wire.ordered import Attend, Attended

__all__ = ["LoneAttendance"]

_OrderKey = tuple[Subject, Group]


@dataclass(slots=True)
class _There:
    incarnation: int
    seen_at_ms: int


class LoneAttendance:
    """Allots the partitions of a lone broker. Lives in one event loop.

    Args:
        places: Its partitions.
        broker_group: Whose they are.
        clock: For how long consumers are silent.
        authorisation: How long they may be.
        strict: Subjects and patterns whose order is strict.
    """

    def __init__(
        self,
        places: PartitionCoverage,
        broker_group: str,
        clock: Clock,
        authorisation: Authorisation,
        strict: Collection[str],
    ) -> None:
        self._places = places
        self._broker_group = broker_group
        self._clock = clock
        self._authorisation = authorisation
        self._strict = frozenset(strict)
        self._waits = AttendingWaits(self._answer_for, authorisation)
        self._there: dict[_OrderKey, dict[ConsumerId, _There]] = {}
        self._newest: dict[Attending, int] = {}
        """The incarnations of consumers that were here."""
        self._allotted: dict[_OrderKey, dict[int, ConsumerId]] = {}
        self._names: dict[_OrderKey, list[PartitionName]] = {}
        """In the order of their places; those that come later are added at the end."""
        self._timer: asyncio.TimerHandle | None = None

    def order_of(self, subject: Pattern) -> OrderStrategy:
        """Return what a failure may do to the order of a subject's messages."""
        is_strict = not self._strict.isdisjoint(patterns_of(Subject(subject)))
        return OrderStrategy.STRICT if is_strict else OrderStrategy.BEST_EFFORT

    def attend(self, request: Attend, owner: object, answer: Callable[[Attended], None]) -> None:
        """Take note that a consumer is there, or goes, and tell it what is its own.

        Raises:
            InvalidNameError: It names what is no subject, group or consumer.
            FencedError: A newer incarnation of the consumer was here.
        """
        who = attending_of(request)
        newest = self._newest.get(who, 0)
        if request.incarnation < newest:
            raise FencedError(
                f"consumer {who.consumer} was started again (incarnation {newest}); this is "
                f"incarnation {request.incarnation} and must stop"
            )
        self._newest[who] = request.incarnation
        there = self._there.setdefault(who[:2], {})
        if request.is_online:
            there[who.consumer] = _There(request.incarnation, self._clock.monotonic_ms())
            self._look_later()
        else:
            there.pop(who.consumer, None)
        self._allot(who[:2])
        self._waits.changed()
        self._waits.hold(request, who, owner, answer)

    def partition_added(self) -> None:
        """Take note that there is another partition."""
        for key in self._there:
            self._allot(key)
        self._waits.changed()

    def closed(self, owner: object) -> None:
        """Forget the questions of a connection that is gone."""
        self._waits.closed(owner)

    def _look_later(self) -> None:
        if self._timer is None:
            pause_s = self._authorisation.heartbeat_ms / 1000
            self._timer = asyncio.get_running_loop().call_later(pause_s, self._look)

    def _look(self) -> None:
        """Notice who is silent."""
        self._timer = None
        oldest_ms = self._clock.monotonic_ms() - self._authorisation.authorised_ms
        for key, there in self._there.items():
            silent = [each for each, found in there.items() if found.seen_at_ms <= oldest_ms]
            for each in silent:
                del there[each]
            if silent:
                self._allot(key)
        if any(self._there.values()):
            self._look_later()
        self._waits.changed()

    def _allot(self, key: _OrderKey) -> None:
        names = self._names.setdefault(key, [])
        covered = self._places.covered(Pattern(key[0]), None)
        names += [each for each in covered if can_be_locked(each) and each not in names]
        current = self._allotted.get(key, {})
        self._allotted[key] = allocate(range(len(names)), self._there.get(key, {}), current)

    def _answer_for(self, who: Attending) -> Attended:
        names = self._names.get(who[:2], [])
        mine = [
            Allotted(self._broker_group, names[place], "", 0)
            for place, consumer in self._allotted.get(who[:2], {}).items()
            if consumer == who.consumer
        ]
        order = self.order_of(Pattern(who.subject))
        return attended(ConsumeStrategy.EXCLUSIVE, order, self._authorisation, mine)
