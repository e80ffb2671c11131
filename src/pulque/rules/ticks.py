"""Ticks: the hours, or parts of one, that delayed messages are kept by until they are due.

A tick is named by the instant at which it begins, in milliseconds since 1970. They are of UTC and
of one length: time zones and daylight saving time do not exist here.
"""

__all__ = ["HOUR_MS", "LONGEST_TICK_MS", "SHORTEST_TICK_MS", "most_ticks", "tick_of"]

HOUR_MS = 3_600_000
LONGEST_TICK_MS = HOUR_MS
SHORTEST_TICK_MS = 300_000


def tick_of(due_ms: int, tick_ms: int) -> int:
    """Return the tick that a due time lies in: when that begins."""
    return due_ms - due_ms % tick_ms


def most_ticks(longest_delay_ms: int, tick_ms: int) -> int:
    """Return how many ticks there can be from now on: all of them with the one that has begun."""
    return -(-longest_delay_ms // tick_ms) + 1
