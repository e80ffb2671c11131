"""How fast groups settle messages, from their positions over the last minutes."""

from collections import OrderedDict, deque
from typing import NamedTuple

__all__ = ["GroupPace", "PlaceKey", "Rates", "Seen"]

PlaceKey = tuple[str, str, str]
"""Broker group, partition and group."""
_WINDOW_MS = 300_000
_SHORTEST_MS = 1_000
_MOST_KEYS = 50_000
_MOST_SEEN = 16


class Seen(NamedTuple):
    """Where a group was in one partition at one time."""

    at_ms: int
    end: int
    """The next message to come …"""
    lag: int
    """… and how many of those stored are not settled."""


class GroupPace(NamedTuple):
    """How fast messages came and were settled, per second, and when all will be."""

    sent: float
    settled: float
    drain_seconds: float | None
    """None while more comes than is settled."""


class Rates:
    """Remembers the last minutes of each group and partition; of too many, the latest asked."""

    def __init__(self) -> None:
        self._seen: OrderedDict[PlaceKey, deque[Seen]] = OrderedDict()

    def observe(self, key: PlaceKey, seen: Seen) -> None:
        """Record where a group is."""
        kept = self._seen.setdefault(key, deque(maxlen=_MOST_SEEN))
        self._seen.move_to_end(key)
        while len(self._seen) > _MOST_KEYS:
            self._seen.popitem(last=False)
        if kept and _settled(seen) < _settled(kept[-1]):
            kept.clear()  # it was set back: what it did before says nothing of now
        while kept and seen.at_ms - kept[0].at_ms > _WINDOW_MS:
            kept.popleft()
        if not kept or seen.at_ms - kept[-1].at_ms >= _SHORTEST_MS:
            kept.append(seen)

    def pace(self, key: PlaceKey, now: Seen) -> GroupPace | None:
        """Return how fast a group settles messages; None if it was not seen for long enough."""
        kept = self._seen.get(key)
        if not kept:
            return None
        first = kept[0]
        ms = now.at_ms - first.at_ms
        if ms < _SHORTEST_MS or _settled(now) < _settled(first):
            return None
        sent = max(now.end - first.end, 0) * 1000 / ms
        settled = (_settled(now) - _settled(first)) * 1000 / ms
        if not now.lag:
            return GroupPace(sent, settled, 0.0)
        return GroupPace(sent, settled, now.lag / (settled - sent) if settled > sent else None)


def _settled(seen: Seen) -> int:
    return seen.end - seen.lag
