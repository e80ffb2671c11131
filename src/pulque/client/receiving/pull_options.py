"""Who pulls, what, and how: what a consumer was told when it was made."""

from dataclasses import dataclass

from pulque.model.groups import (
    BROKERS_CHOICE,
    EVERYTHING,
    FROM_EARLIEST,
    Filter,
    Mode,
    RetrySettings,
    Start,
)
from pulque.model.names import ConsumerId, Group
from pulque.wire.requests import Subscribe

__all__ = ["PullOptions"]


@dataclass(frozen=True, slots=True)
class PullOptions:
    """Who pulls, and how."""

    subject: str
    group: Group
    consumer: ConsumerId
    incarnation: int
    max_messages: int
    max_bytes: int
    max_held: int
    mode: Mode = Mode.SHARED
    filter: Filter = EVERYTHING
    start: Start = FROM_EARLIEST
    retry: RetrySettings = BROKERS_CHOICE
    least_share: int = 1
    """How many messages of each broker may be held at least, however many there are."""

    def share_of(self, brokers: int) -> int:
        """Return how many messages may be held of each of so many brokers."""
        return max(self.max_held // max(1, brokers), self.least_share)

    def subscribe_request(self) -> Subscribe:
        """Return what must be said on each connection before the first pull."""
        return Subscribe(
            "" if self.mode is Mode.BROADCAST else self.group,
            self.consumer,
            self.incarnation,
            self.subject,
            self.mode,
            self.filter,
            self.start,
            self.retry,
        )
