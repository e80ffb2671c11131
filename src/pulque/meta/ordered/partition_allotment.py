"""Who consumes in order, and what is allotted to whom.

Every word of a consumer is in the database before it is answered, so its time runs from there:
no meta server takes partitions from a consumer whose time is not over, whichever of them it
speaks to. Partitions are allotted when consumers come, go or fall silent, when partitions are
added or drained, and by the clock.
"""

import asyncio
import contextlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from pulque.errors import FencedError, PulqueError, UnavailableError
from pulque.meta.components import Background, MetaParts
from pulque.meta.database.allotment_store import (
    Allotment,
    AttendingConsumer,
    AttendingStore,
    OrderKey,
    Word,
)
from pulque.meta.directory_refresh import Refresher
from pulque.meta.fairness import share
from pulque.model.names import PartitionName, retry_partition
from pulque.model.ordered import Allotted, ConsumeStrategy, OrderStrategy
from pulque.rules.allocation import allocate
from pulque.rules.ranges import servable
from pulque.serving.attended import (
    Attending,
    AttendingWaits,
    Authorisation,
    attended,
    attending_of,
)
from pulque.wire.ordered import Attend, Attended

__all__ = ["PartitionAllotment"]

_TRIES = 5
_LOOKS = 10
"""How often to look for silent consumers, while one may be silent."""
_AT_ONCE = 16
"""How many words of one connection are written down before others' are."""
_ALLOTTED_AT_ONCE = 4
"""How many groups of one connection are allotted partitions before others' are."""


_NEW = Word(is_new=True)


@dataclass(eq=False, slots=True)
class _AttendRequest:
    request: Attend
    who: Attending
    owner: object
    answer: Callable[[Attended], None]
    refuse: Callable[[PulqueError], None]

    @property
    def row(self) -> AttendingConsumer:
        return AttendingConsumer(*self.who, self.request.incarnation, self.request.is_online)


class PartitionAllotment:
    """Answers the consumers of ordered groups. Lives in one event loop.

    Args:
        parts: What is known of the cluster.
        store: Where attendance is written down.
        refresher: Reads what was written.
        background: Runs the writing.
        authorisation: How long consumers may go on without a word.
        is_exclusive: Whether consumers get partitions of their own at all.
    """

    def __init__(
        self,
        parts: MetaParts,
        store: AttendingStore,
        refresher: Refresher,
        background: Background,
        authorisation: Authorisation,
        *,
        is_exclusive: bool,
    ) -> None:
        self._directory = parts.directory
        self._clock = parts.clock
        self._warn = parts.warn
        self._store = store
        self._refresher = refresher
        self._background = background
        self._authorisation = authorisation
        self._strategy = ConsumeStrategy.EXCLUSIVE if is_exclusive else ConsumeStrategy.SHARED
        self._waits = AttendingWaits(self._answer_for, authorisation)
        self._asked: list[_AttendRequest] = []
        self._is_writing = False
        self._came: list[_AttendRequest] = []
        """Written down, and not allotted anything yet: that takes longer than a heartbeat may."""
        self._is_allotting = False
        self._beats: dict[AttendingConsumer, tuple[int, int]] = {}
        """How often a consumer that is online was counted, and when that was first seen."""
        self._is_stopping = asyncio.Event()

    def attend(
        self,
        request: Attend,
        owner: object,
        answer: Callable[[Attended], None],
        refuse: Callable[[PulqueError], None],
    ) -> None:
        """Take note that a consumer is there, or goes, and tell it what is its own.

        Raises:
            InvalidNameError: It names what is no subject, group or consumer.
            UnavailableError: The database was never read.
        """
        asked = _AttendRequest(request, attending_of(request), owner, answer, refuse)
        self._refresher.check_loaded()
        self._asked.append(asked)
        if not self._is_writing:
            self._is_writing = True
            self._background.start(self._write())

    def changed(self) -> None:
        """Take note that the cluster is not what it was."""
        self._waits.changed()

    def closed(self, owner: object) -> None:
        """Forget the questions of a connection that is gone, but not that somebody goes."""
        self._waits.closed(owner)
        self._asked = [
            each for each in self._asked if each.owner is not owner or not each.request.is_online
        ]

    def stop(self) -> None:
        """Answer all that wait, and have ``run`` end."""
        self._is_stopping.set()
        self._waits.close()

    async def run(self) -> None:
        """Notice who is silent, and allot what is not as it should be, until stopped."""
        pause_s = self._authorisation.authorised_ms / 1000 / _LOOKS
        while not self._is_stopping.is_set():
            with contextlib.suppress(UnavailableError):  # the refresher says it
                await self._look()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._is_stopping.wait(), pause_s)

    async def drained(self, key: OrderKey, place: int) -> None:
        """Take note that a partition is closed, and empty for a group.

        Raises:
            UnavailableError: The database is away.
        """
        await self._allot(key, frozenset([place]))

    # -- words -------------------------------------------------------------------------------

    async def _write(self) -> None:
        """Write down all that came while the writing before was under way."""
        try:
            while self._asked:
                # A farewell must not be overtaken by its consumer's older heartbeat, which may
                # have come over another connection.
                some, self._asked = share(self._asked, _AT_ONCE, lambda each: each.who)
                try:
                    words = await self._store.attend([each.row for each in some])
                except PulqueError as error:
                    _refuse(some, error)
                    continue
                for each, word in zip(some, words, strict=True):
                    if word.is_new:
                        self._came.append(each)
                    else:
                        self._answer(each, word)
                if self._came and not self._is_allotting:
                    self._is_allotting = True
                    self._background.start(self._allot_new())
        finally:
            self._is_writing = False

    async def _allot_new(self) -> None:
        """Allot partitions to groups that somebody came to, or left, and answer then."""
        try:
            while self._came:
                some, rest = share(self._came, _ALLOTTED_AT_ONCE)
                keys = {each.row.key for each in some}
                # Whoever came to the same group is done by that, too.
                some += [each for each in rest if each.row.key in keys]
                self._came = [each for each in rest if each.row.key not in keys]
                try:
                    await self._refresher.refresh()
                    for key in sorted(keys):
                        await self._allot(key)
                except PulqueError as error:
                    _refuse(some, error)
                else:
                    for each in some:
                        self._answer(each, _NEW)
        finally:
            self._is_allotting = False

    def _answer(self, asked: _AttendRequest, word: Word) -> None:
        if word.newer is None:
            self._waits.hold(asked.request, asked.who, asked.owner, asked.answer)
            return
        asked.refuse(
            FencedError(
                f"consumer {asked.who.consumer} was started again (incarnation {word.newer}); "
                f"this is incarnation {asked.request.incarnation} and must stop"
            )
        )

    def _answer_for(self, who: Attending) -> Attended:
        order = self._directory.order_of(who.subject)
        mine: list[Allotted] = []
        if self._strategy is ConsumeStrategy.EXCLUSIVE:
            mine = self._allotted_to(who)
            if order is OrderStrategy.BEST_EFFORT:
                mine += self._left_behind_for(who)
        return attended(self._strategy, order, self._authorisation, mine)

    def _allotted_to(self, who: Attending) -> list[Allotted]:
        """Return the partitions of a consumer, as far as their brokers can be reached."""
        placed = self._directory.subjects.get(who.subject, ())
        allotted = self._directory.allotment(who[:2]).allotted
        return self._reachable(
            (placed[place].broker_group, placed[place].partition)
            for place, consumer in allotted.items()
            if consumer == who.consumer and place < len(placed)
        )

    def _left_behind_for(self, who: Attending) -> list[Allotted]:
        """Return the retry partitions of brokers that nobody has another partition of.

        Who has one pulls what has to come again there, too. Where all partitions were merged
        away, or moved on, one of the consumers does it for all.
        """
        placed = self._directory.subjects.get(who.subject, ())
        allotted = self._directory.allotment(who[:2]).allotted
        if who.consumer != min(allotted.values(), default=None):
            return []
        served = {placed[place].broker_group for place in allotted if place < len(placed)}
        name = retry_partition(who.subject, who.group)
        rest = dict.fromkeys(each.broker_group for each in placed)
        return self._reachable((each, name) for each in rest if each not in served)

    def _reachable(self, places: Iterable[tuple[str, PartitionName]]) -> list[Allotted]:
        found = []
        for broker_group, partition in places:
            there = self._directory.brokers.get(broker_group)
            if there is not None:
                found.append(Allotted(broker_group, partition, there.host, there.port))
        return found

    # -- allotting ---------------------------------------------------------------------------

    async def _look(self) -> None:
        if not any(self._directory.online.values()):
            self._beats = {}
            return
        await self._lose_silent()
        for key in list(self._directory.online):
            await self._allot(key)

    async def _lose_silent(self) -> None:
        found = await self._store.beats()
        now_ms = self._clock.monotonic_ms()
        before = self._beats
        self._beats = {
            each: before[each] if before.get(each, (-1, 0))[0] == beats else (beats, now_ms)
            for each, beats in found.items()
        }
        oldest_ms = now_ms - self._authorisation.authorised_ms
        silent = {
            each: beats for each, (beats, since_ms) in self._beats.items() if since_ms <= oldest_ms
        }
        if silent and await self._store.lose(silent):
            for each in list(silent)[:_LOOKS]:
                self._warn(
                    "consumer_silent",
                    subject=each.subject,
                    group=each.group,
                    consumer=each.consumer,
                )
            await self._refresher.refresh()

    async def _allot(self, key: OrderKey, drained: frozenset[int] = frozenset()) -> None:
        """See to it that what is allotted is what should be."""
        for _ in range(_TRIES):
            now = self._directory.allotment(key)
            wanted = self._wanted(key, now, drained)
            if (wanted.allotted, wanted.drained) == (now.allotted, now.drained):
                return
            await self._store.allot(key, now.version, wanted)
            # Whether it was done or another was faster, the database says what holds.
            await self._refresher.refresh()

    def _wanted(self, key: OrderKey, now: Allotment, drained: frozenset[int]) -> Allotment:
        empty = now.drained | drained
        places = servable(self._directory.subjects.get(key[0], ()), empty)
        there = self._directory.online.get(key, set())
        return Allotment(now.version, allocate(places, there, now.allotted), empty)


def _refuse(some: Iterable[_AttendRequest], error: PulqueError) -> None:
    for each in some:
        each.refuse(error)
