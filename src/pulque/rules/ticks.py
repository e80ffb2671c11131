"""Ticks: the hours, or parts of one, by which delayed messages are stored.

A tick is identified by its beginning, in milliseconds since 1970. Ticks are in UTC and
of one length: time zones and daylight saving time do not affect them.
"""

__all__ = ["HOUR_MS", "LONGEST_TICK_MS", "SHORTEST_TICK_MS", "most_ticks", "tick_of"]

HOUR_MS = 3_600_000
LONGEST_TICK_MS = HOUR_MS
SHORTEST_TICK_MS = 300_000


def tick_of(due_ms: int, tick_ms: int) -> int:
    """Return the tick of a due time: the time at which it begins."""
    return due_ms - due_ms % tick_ms


def most_ticks(longest_delay_ms: int, tick_ms: int) -> int:
    """Return how many ticks there can be from now on, the present one included."""
    return -(-longest_delay_ms // tick_ms) + 1
