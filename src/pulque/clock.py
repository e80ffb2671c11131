"""Time as the servers and the client see it: a port, so that tests can turn it."""

import time
import weakref
from typing import Protocol

__all__ = ["Clock", "SystemClock", "put_back", "stand_in", "wall_ms"]


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


_stand_ins: list["weakref.ref[Clock]"] = []
"""Clocks of tests, the latest last; those that nobody holds any more are gone."""


def wall_ms() -> int:
    """Return milliseconds since 1970 as clients see it: when is *now*, what is due, what is over.

    It is the clock of this machine, unless a test has put another one in its place.
    """
    if not _stand_ins:
        return time.time_ns() // 1_000_000
    clock = _stand_ins[-1]()
    return clock.now_ms() if clock is not None else time.time_ns() // 1_000_000


def stand_in(clock: Clock) -> None:
    """Let clients in this process read a test's clock, until ``put_back`` or its end."""
    put_back(clock)
    _stand_ins.append(weakref.ref(clock, _stand_ins.remove))


def put_back(clock: Clock) -> None:
    """Let clients read again what they read before ``stand_in``; does nothing after that."""
    _stand_ins[:] = [each for each in _stand_ins if each() is not clock]
