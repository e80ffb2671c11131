"""When which follower hears that a consumer lives; without I/O.

A follower that is made the leader knows then which consumers there are. A shell brings the
connections and the clock::

    for place in beats.due(now):
        try:
            beats.beaten(place, ask(place, beats.heartbeat), now)
        except PulqueError:
            beats.failed(place, now)
"""

from collections.abc import Callable, Iterable

from pulque.client.connection.backoff import Backoff
from pulque.client.receiving.pull_options import PullOptions
from pulque.errors import RemoteProtocolError
from pulque.wire.requests import Heartbeat
from pulque.wire.responses import Beaten, Response

__all__ = ["LIMIT", "Beats"]

LIMIT = 2.0
"""How long a follower may take to answer, in seconds."""
_BEATS_PER_LEASE = 3
_FIRST_WAIT = 0.2
_LONGEST_WAIT = 10.0


class Beats:
    """The followers that one consumer keeps informed.

    Args:
        options: Who the consumer is.
        draw: Returns a random number in ``0.0..1.0``.
    """

    def __init__(self, options: PullOptions, draw: Callable[[], float]) -> None:
        self.heartbeat = Heartbeat(options.group, options.consumer, options.incarnation)
        """What each of them is told."""
        self._draw = draw
        self._due: dict[str, float] = {}
        self._backoffs: dict[str, Backoff] = {}

    def follow(self, places: Iterable[str], now: float) -> list[str]:
        """Take in who the followers are; return those that were, and are no more."""
        wanted = set(places)
        gone = [place for place in self._due if place not in wanted]
        for place in gone:
            del self._due[place], self._backoffs[place]
        for place in wanted.difference(self._due):
            self._due[place] = now
            self._backoffs[place] = Backoff(self._draw, first=_FIRST_WAIT, largest=_LONGEST_WAIT)
        return gone

    def due(self, now: float) -> list[str]:
        """Return who is to be told now."""
        return [place for place, due in self._due.items() if due <= now]

    def next_due(self) -> float | None:
        """Return when somebody is to be told next; None if there is nobody."""
        return min(self._due.values(), default=None)

    def beaten(self, place: str, answer: Response, now: float) -> None:
        """Take in the answer of a follower.

        Raises:
            RemoteProtocolError: It is no answer to that.
        """
        if not isinstance(answer, Beaten):
            raise RemoteProtocolError(f"a heartbeat got {answer!r}")
        if place in self._due:
            self._backoffs[place].reset()
            self._due[place] = now + answer.lease_ms / 1000 / _BEATS_PER_LEASE

    def failed(self, place: str, now: float) -> None:
        """Take in that a follower could not be told; it is tried again later."""
        if place in self._due:
            self._due[place] = now + self._backoffs[place].next_wait()
