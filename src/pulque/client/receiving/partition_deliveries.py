"""What a consumer holds of one partition, and how it comes to hold less than it thought."""

from collections import deque

from pulque.client.receiving.received_message import ACKED, Hole, ReceivedBatch
from pulque.model.names import PartitionName
from pulque.model.positions import Tenure
from pulque.wire.requests import FROM_SETTLED, Settle

__all__ = ["UNKNOWN", "Subscription"]

UNKNOWN = -1
"""As a pull sequence: nobody has said yet."""


class Subscription:
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
        self.held: deque[ReceivedBatch | Hole] = deque()
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
