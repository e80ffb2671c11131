"""Time as the servers and the client see it: a port, so that tests can turn it."""

import time
from typing import Protocol

__all__ = ["Clock", "SystemClock"]


class Clock(Protocol):
    """Tells the time in two ways."""

    def now_ms(self) -> int:
        """Return milliseconds since 1970; may jump when somebody sets the clock."""

    def monotonic_ms(self) -> int:
        """Return milliseconds since some instant; never jumps, so that waits are right."""


class SystemClock:
    """The clock of this machine."""

    def now_ms(self) -> int:
        return time.time_ns() // 1_000_000

    def monotonic_ms(self) -> int:
        return time.monotonic_ns() // 1_000_000
