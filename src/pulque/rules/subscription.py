"""A subscription: the pull log and the settled position of one consumer in one partition.

Every delivery to the consumer has a pull sequence, 0, 1, 2 …; the pull log maps it to a message
of the partition. It consists of ranges, and only of those not yet settled, so that
progress stays one number::

    settled = 4          next_pull = 9
         |                   |
         4   5   6   7   8           pull sequences
         11  12  13  30  31          consume sequences: two ranges

Deliveries carry the tenure of the broker that made them. A settle counts only for
deliveries that are held under exactly that tenure: a late ack can never settle a message that
no consumer handled.
"""

from collections import deque
from collections.abc import Iterator
from itertools import pairwise
from typing import NamedTuple

from pulque.errors import InvalidRequestError, StaleSettleError
from pulque.model.actions import NackedDelivery, SubscriptionId
from pulque.model.names import ConsumerId, Group, is_broadcast
from pulque.model.positions import ConsumeSequence, PartitionId, PullSequence, Tenure

__all__ = ["HeldRange", "Subscription"]


class HeldRange(NamedTuple):
    """Deliveries that are consecutive in the pull log and in the partition."""

    tenure: Tenure
    first_pull: PullSequence
    first_sequence: ConsumeSequence
    length: int
    matched: int
    """How many of them count as held: a filter may have skipped the others."""

    @property
    def end_pull(self) -> PullSequence:
        """The pull sequence after the last delivery."""
        return PullSequence(self.first_pull + self.length)

    def part(self, start: int, end: int) -> "HeldRange":
        """Return the deliveries of pull sequences ``start..end`` that are in this range."""
        first = max(start, self.first_pull)
        skipped = first - self.first_pull
        length = max(min(end, self.end_pull) - first, 0)
        return HeldRange(
            self.tenure,
            PullSequence(first),
            ConsumeSequence(self.first_sequence + skipped),
            length,
            # Which of them matched is not known here: a share, and never nothing of something.
            -(-self.matched * length // self.length),
        )


class Subscription:
    """One consumer's pull log. Changed only through ``Consumption.handle``."""

    __slots__ = (
        "consumer",
        "group",
        "held",
        "held_count",
        "id",
        "incarnation",
        "is_direct",
        "lost_end",
        "lost_start",
        "next_pull",
        "partition",
        "settled",
        "since_ms",
    )

    def __init__(
        self,
        subscription_id: SubscriptionId,
        partition: PartitionId,
        group: Group,
        consumer: ConsumerId,
        incarnation: int,
    ) -> None:
        self.id = subscription_id
        self.partition = partition
        self.group = group
        self.consumer = consumer
        self.incarnation = incarnation
        self.is_direct = is_broadcast(group)
        """Whether there is no pull log: the pull sequence is the consume sequence."""
        self.settled = PullSequence(0)
        """All deliveries before it are settled."""
        self.next_pull = PullSequence(0)
        """The pull sequence of the next new delivery."""
        self.held: deque[HeldRange] = deque()
        """The deliveries ``settled..next_pull``."""
        self.held_count = 0
        """The number of unsettled messages."""
        self.since_ms = 0
        """When the oldest unsettled delivery was made."""
        self.lost_start = PullSequence(0)
        self.lost_end = PullSequence(0)
        """The end of the deliveries that were last taken from the consumer."""

    def held_from(self, expected: int) -> Iterator[HeldRange]:
        """Yield held deliveries from a pull sequence on."""
        for held in self.held:
            part = held.part(expected, self.next_pull)
            if part.length:
                yield part

    def pull_of(self, sequence: ConsumeSequence) -> PullSequence:
        """Return the pull sequence of the next new delivery, which is of this message."""
        return PullSequence(sequence) if self.is_direct else self.next_pull

    def pulled(
        self, tenure: Tenure, first_sequence: ConsumeSequence, length: int, matched: int
    ) -> None:
        """Add deliveries to the pull log."""
        new = HeldRange(tenure, self.next_pull, first_sequence, length, matched)
        if self.held and _continues(self.held[-1], new):
            last = self.held.pop()
            new = last._replace(length=last.length + length, matched=last.matched + matched)
        self.held.append(new)
        self.held_count += matched
        self.next_pull = PullSequence(self.next_pull + length)

    def check_settle(
        self, tenure: Tenure, first: int, last: int, nacked: tuple[int, ...]
    ) -> PullSequence | None:
        """Return the first delivery that a settle of ``first..last`` would settle.

        Returns:
            None if it repeats an earlier settle.

        Raises:
            InvalidRequestError: The range, or the order of the nacked deliveries, is invalid.
            StaleSettleError: The settle names deliveries that the consumer does not hold.
        """
        _check_range(first, last, nacked)
        if first < self.lost_end and last >= self.lost_start:
            raise StaleSettleError(
                f"deliveries {self.lost_start}..{self.lost_end} were taken from {self.consumer}, "
                f"which was lost (they were given to others), or its group was reset: "
                f"{first}..{last} cannot be settled"
            )
        if last < self.settled:
            return None
        if first > self.settled:
            raise StaleSettleError(
                f"a settle of {first}..{last} leaves a gap: {self.settled} is the next to settle"
            )
        if last >= self.next_pull:
            raise StaleSettleError(
                f"a settle of {first}..{last}: only deliveries before {self.next_pull} are known"
            )
        for held in self.held:
            if held.first_pull <= last and held.tenure != tenure:
                raise StaleSettleError(
                    f"deliveries {held.first_pull}..{held.end_pull} were handed out under epoch "
                    f"{held.tenure.epoch} start {held.tenure.start}, not {tuple(tenure)}"
                )
        return self.settled

    def align(self, first_pull: PullSequence) -> None:
        """Make ``first_pull`` the next delivery, as a fact says it was.

        It already is, unless a fact is missing: a recovery that set the consumer back
        leaves no fact, and facts can be damaged. Unknown deliveries count as settled.
        """
        if first_pull < self.next_pull:
            self.rewind(first_pull)
            if self.is_direct and first_pull < self.settled:
                # The group was set back: these messages are to come again.
                self.settled = self.next_pull = first_pull
                self.lost_end = min(self.lost_end, first_pull)
        elif first_pull > self.next_pull:
            self.next_pull = first_pull
            if not self.held:
                self.settled = first_pull

    def settle(self, last: PullSequence) -> None:
        """Drop deliveries up to and including ``last`` from the pull log."""
        end = PullSequence(last + 1)
        while self.held and self.held[0].first_pull < end:
            held = self.held.popleft()
            self.held_count -= held.matched
            if held.end_pull > end:
                rest = held.part(end, held.end_pull)
                self.held.appendleft(rest)
                self.held_count += rest.matched
        self.next_pull = max(self.next_pull, end)
        self.settled = self.held[0].first_pull if self.held else self.next_pull

    def lose(self) -> None:
        """Take all deliveries from the consumer."""
        self.lost_start, self.lost_end = self.settled, self.next_pull
        self.held.clear()
        self.held_count = 0
        self.settled = self.next_pull

    def sequences_of(
        self, nacked: tuple[NackedDelivery, ...]
    ) -> list[tuple[ConsumeSequence, NackedDelivery]]:
        """Return the consume sequences of nacked deliveries; both ascend."""
        found = []
        ranges = iter(self.held)
        held = next(ranges, None)
        for each in nacked:
            while held is not None and held.end_pull <= each.sequence:
                held = next(ranges, None)
            if held is not None and held.first_pull <= each.sequence:
                at = ConsumeSequence(held.first_sequence + each.sequence - held.first_pull)
                found.append((at, each))
        return found

    def clip(self, end: ConsumeSequence) -> None:
        """Drop deliveries of messages at or beyond ``end``, which a power cut lost."""
        for held in self.held:
            length = max(end - held.first_sequence, 0)
            if length < held.length:
                # Pull sequences have no gaps: what follows cannot be kept either.
                self.rewind(PullSequence(held.first_pull + length))
                return

    def rewind(self, next_pull: PullSequence) -> None:
        """Drop the deliveries from ``next_pull`` on."""
        self.held = deque(part for h in self.held if (part := h.part(0, next_pull)).length)
        self.held_count = sum(held.matched for held in self.held)
        self.next_pull = max(next_pull, self.settled)


def _check_range(first: int, last: int, nacked: tuple[int, ...]) -> None:
    if first > last or any(not first <= s <= last for s in nacked):
        raise InvalidRequestError(
            f"a settle of {first}..{last} with nacked {list(nacked)[:10]}: the first must not "
            "be after the last, and the nacked ones must lie between them"
        )
    if any(a >= b for a, b in pairwise(nacked)):
        raise InvalidRequestError("nacked deliveries must be in ascending order")


def _continues(last: HeldRange, new: HeldRange) -> bool:
    return (
        last.tenure == new.tenure
        and last.first_sequence + last.length == new.first_sequence
        and last.end_pull == new.first_pull
    )
