"""How a broker is doing, as one client sees it: whether to send to it, or rather to another.

Two things keep messages away from a broker for a while. *Latency back-off*: an answer that took
long says that the next one may, too. A *circuit breaker*: after failures in a row nobody tries,
until one call may find out whether the broker is back::

    closed ──(failures in a row, or one that took long)──→ open ──(a while later)──→ half-open
       ↑                                                     ↑                          │
       └──────────────────(an answer)────────────────────────┴────(another failure)─────┘

No clock and no lock: callers say what time it is, and a race between threads costs one call at
most.
"""

from enum import Enum
from typing import NamedTuple

__all__ = [
    "LATENCY_TABLE",
    "Breaker",
    "BreakerState",
    "BrokerHealth",
    "LatencyRow",
    "wait_after",
]


class LatencyRow(NamedTuple):
    """An answer that took longer than ``limit`` seconds keeps messages away for ``wait``."""

    limit: float
    wait: float


LATENCY_TABLE = (LatencyRow(0.55, 3.0), LatencyRow(1.0, 60.0))
"""What is done about slow answers, unless the application says otherwise."""


def wait_after(table: tuple[LatencyRow, ...], seconds: float) -> float:
    """Return for how long to stay away from a broker whose answer took so many seconds."""
    return max((row.wait for row in table if seconds > row.limit), default=0.0)


class BreakerState(Enum):
    """Whether calls go through."""

    CLOSED = "closed"
    OPEN = "open"
    HALF_OPEN = "half-open"


class Breaker:
    """The circuit breaker of one broker."""

    __slots__ = ("_failures", "_open_until", "_wait")

    MOST_FAILURES = 3
    """So many in a row open it."""
    LONG = 1.0
    """A single failure that took so many seconds opens it."""
    FIRST_WAIT = 1.0
    LONGEST_WAIT = 15.0

    def __init__(self) -> None:
        self._failures = 0
        self._open_until = 0.0
        self._wait = self.FIRST_WAIT

    def state(self, now: float) -> BreakerState:
        """Return whether calls go through now; half-open lets one of them."""
        if self._failures < self.MOST_FAILURES:
            return BreakerState.CLOSED
        return BreakerState.OPEN if now < self._open_until else BreakerState.HALF_OPEN

    @property
    def open_until(self) -> float:
        """When it lets a call through, if it is open."""
        return self._open_until if self._failures >= self.MOST_FAILURES else 0.0

    def probe(self, now: float) -> None:
        """Take note that a call goes through a half-open breaker: no other does for a while."""
        if self.state(now) is BreakerState.HALF_OPEN:
            self._open_until = now + self._wait

    def succeeded(self) -> None:
        """Take in an answer."""
        self._failures = 0
        self._wait = self.FIRST_WAIT

    def failed(self, now: float, lasted: float = 0.0) -> None:
        """Take in a failure, and how many seconds it took."""
        was_open = self._failures >= self.MOST_FAILURES
        self._failures = self.MOST_FAILURES if lasted >= self.LONG else self._failures + 1
        if self._failures >= self.MOST_FAILURES:
            if was_open:
                self._wait = min(2 * self._wait, self.LONGEST_WAIT)
            self._open_until = now + self._wait


class BrokerHealth:
    """What a client knows about one broker."""

    __slots__ = ("_slow_until", "_table", "breaker")

    def __init__(self, table: tuple[LatencyRow, ...] = LATENCY_TABLE) -> None:
        self.breaker = Breaker()
        self._table = table
        self._slow_until = 0.0

    def is_open(self, now: float) -> bool:
        """Say whether nobody may try it now."""
        return self.breaker.state(now) is BreakerState.OPEN

    def is_usable(self, now: float) -> bool:
        """Say whether messages that may go anywhere should go there."""
        return now >= self._slow_until and not self.is_open(now)

    def waits_until(self, now: float) -> tuple[bool, float]:
        """Return how bad it is, to find the least bad of all: closed before open, sooner first."""
        until = self.breaker.open_until if self.is_open(now) else self._slow_until
        return self.is_open(now), max(until, now)

    def answered(self, now: float, took: float) -> None:
        """Take in an answer that took so many seconds."""
        self.breaker.succeeded()
        wait = wait_after(self._table, took)
        if wait:
            self._slow_until = max(self._slow_until, now + wait)

    def forget(self) -> None:
        """Begin anew: another broker is there by now, which did nothing wrong."""
        self.breaker = Breaker()
        self._slow_until = 0.0

    def failed(self, now: float, lasted: float = 0.0) -> None:
        """Take in that there was no answer, for so many seconds."""
        self.breaker.failed(now, lasted)
        self._slow_until = max(self._slow_until, now + wait_after(self._table, lasted))
