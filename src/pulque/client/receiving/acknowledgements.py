"""How far a consumer is done with what it holds of a partition, and what a settle says of it."""

from typing import NamedTuple

from pulque.client.receiving.partition_deliveries import Subscription
from pulque.client.receiving.pull_options import PullOptions
from pulque.client.receiving.received_message import NACKED, Hole, ReceivedBatch
from pulque.model.names import PartitionName
from pulque.model.positions import PullSequence, Tenure
from pulque.wire.ordered import NO_TOKEN
from pulque.wire.requests import Nacked, Settle

__all__ = ["Finished", "finished_in"]

_MAX_NACKS = 1000
"""In one settle."""


class Finished(NamedTuple):
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


def finished_in(each: Subscription, max_delay_ms: int) -> Finished | None:
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
    return Finished(tenure, first, last, tuple(nacked), messages)


def _limit_nacks(
    batch: ReceivedBatch | Hole, until: int, nacked: list[Nacked], max_delay_ms: int
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
