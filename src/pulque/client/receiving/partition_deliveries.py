"""What a consumer holds of one partition, how it comes to hold less, and what may be settled."""

from collections import deque
from typing import NamedTuple

from pulque.client.receiving.pull_options import PullOptions
from pulque.client.receiving.received_message import ACKED, NACKED, DeliveryGap, ReceivedBatch
from pulque.model.names import PartitionName
from pulque.model.positions import PullSequence, Tenure
from pulque.wire.ordered import NO_TOKEN
from pulque.wire.requests import FROM_SETTLED, Nacked, Settle

__all__ = ["UNKNOWN", "PartitionDeliveries", "SettleRange", "finished_in"]

UNKNOWN = -1
"""As a pull sequence: nobody has said yet."""
_MAX_NACKS = 1000
"""In one settle."""


class PartitionDeliveries:
    """What this consumer holds of one partition."""

    __slots__ = (
        "asked",
        "expected",
        "floor",
        "held",
        "on_the_way",
        "partition",
        "settled",
        "settling",
    )

    def __init__(self, partition: PartitionName) -> None:
        self.partition = partition
        self.expected = FROM_SETTLED
        """The pull sequence of the next delivery."""
        self.settled = UNKNOWN
        """All before it are settled, as far as we know."""
        self.asked = UNKNOWN
        """All before it may be settled, as we asked for it; never beyond ``expected``."""
        self.floor = UNKNOWN
        """What was settled when the pull on its way was asked."""
        self.held: deque[ReceivedBatch | DeliveryGap] = deque()
        self.on_the_way: Settle | None = None
        self.settling = 0
        """How many messages it is for."""

    def sent(self, settle: Settle, messages: int) -> None:
        """Take in that a settle for so many messages is on its way."""
        self.on_the_way, self.settling = settle, messages
        self.asked = settle.last + 1

    def nothing_on_the_way(self) -> None:
        """Take in that the settle was answered, or does not count any more."""
        self.on_the_way, self.settling = None, 0

    def forget(self) -> int:
        """Abandon everything and begin anew; return how many are abandoned."""
        lost = 0
        for batch in self.held:
            lost += batch.lose(batch.settled, batch.end)
            batch.end = batch.settled
        self.held.clear()
        self.expected = FROM_SETTLED
        self.settled = self.asked = self.floor = UNKNOWN
        self.nothing_on_the_way()
        return lost

    def finish(self, tenure: Tenure, pull: int) -> None:
        """Turn a nack into an ack: another broker has taken over the message."""
        for batch in self.held:
            index = batch.index_at(pull)
            is_it = batch.tenure == tenure and batch.settled <= index < batch.end
            if isinstance(batch, ReceivedBatch) and is_it:
                batch.states[index] = ACKED
        # What was asked says that it is nacked: it is asked anew.
        self.nothing_on_the_way()

    def lose_below(self, pull: int) -> int:
        """Abandon what the broker gave to others: all before ``pull``."""
        lost = 0
        while self.held and self.held[0].pull_until(self.held[0].settled) < pull:
            batch = self.held[0]
            until = min(batch.index_at(pull), batch.end)
            lost += batch.lose(batch.settled, until)
            batch.settled = until
            if until < batch.end:
                break
            self.held.popleft()
        self.settled = self.asked = pull
        self.expected = max(self.expected, pull)
        self.nothing_on_the_way()
        return lost

    def lose_from(self, pull: int) -> int:
        """Abandon what the broker does not know: all from ``pull`` on."""
        lost = 0
        while self.held and self.held[-1].pull_until(self.held[-1].end) > pull:
            batch = self.held[-1]
            end = batch.end
            batch.cut(pull)
            lost += batch.lose(batch.end, end)
            if batch.end > batch.settled:
                break
            self.held.pop()
        self.expected = pull
        if self.asked > pull:
            # A settle asked for some of them: the broker refuses it, and what it settles from
            # here on it settled for other reasons, such as a lease that ran out.
            self.asked = pull
            self.nothing_on_the_way()
        return lost


class SettleRange(NamedTuple):
    """The deliveries ``first..last``, which may be settled together."""

    tenure: Tenure
    first: int
    last: int
    nacked: tuple[Nacked, ...]
    messages: int
    """How many messages they are; the others are holes."""

    def settle(
        self, partition: PartitionName, options: PullOptions, token: int = NO_TOKEN
    ) -> Settle:
        """Return the request that says so; with the token of the lock, if there is one."""
        return Settle(
            partition,
            options.group,
            options.consumer,
            options.incarnation,
            self.tenure,
            PullSequence(self.first),
            PullSequence(self.last),
            self.nacked,
            token,
        )


def finished_in(each: PartitionDeliveries, max_delay_ms: int) -> SettleRange | None:
    """Return the prefix of what is held that is acked or nacked, of one tenure; None if empty.

    Args:
        each: What is held.
        max_delay_ms: The longest delay that a nack may ask for.
    """
    first = each.settled
    last, messages = first - 1, 0
    nacked: list[Nacked] = []
    tenure: Tenure | None = None
    for batch in each.held:
        if batch.tenure is not tenure and tenure is not None and batch.tenure != tenure:
            break
        tenure = batch.tenure
        until = batch.finished_until()
        if batch.nacks:
            until = _limit_nacks(batch, until, nacked, max_delay_ms)
        if isinstance(batch, ReceivedBatch):
            messages += until - batch.settled
        last = batch.pull_until(until) - 1
        if until < batch.end:
            break
    if tenure is None or last < first:
        return None
    return SettleRange(tenure, first, last, tuple(nacked), messages)


def _limit_nacks(
    batch: ReceivedBatch | DeliveryGap, until: int, nacked: list[Nacked], max_delay_ms: int
) -> int:
    """Collect the nacked ones of ``settled..until``; return where the settle has to end."""
    at = batch.states.find(NACKED, batch.settled, until)
    while at >= 0:
        if len(nacked) >= _MAX_NACKS:
            return at
        reason, delay_ms = batch.nacks[at]
        # The broker may allow less by now, and would refuse the whole settle.
        delay_ms = min(delay_ms, max_delay_ms)
        nacked.append(Nacked(batch.pull_until(at), delay_ms, reason))
        at = batch.states.find(NACKED, at + 1, until)
    return until
