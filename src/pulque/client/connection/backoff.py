"""How long to wait before trying again: longer each time, and never in step with others."""

from collections.abc import Callable

from pulque.client.connection.call_outcomes import NotReachedError, out_of_time
from pulque.errors import PulqueError

__all__ = ["Backoff", "Retries", "answer_room"]

FIRST = 0.02
LARGEST = 2.0
_ROOM = 0.25
_SHARE = 0.25


def answer_room(timeout: float) -> float:
    """Return how long before the end of a call no refused request is repeated, in seconds.

    The answer would come too late, and a refusal that is known to have had no effect would
    become an unknown outcome.
    """
    return min(_ROOM, _SHARE * timeout)


class Backoff:
    """Gives waits that double up to a largest one, each shortened by chance.

    Args:
        draw: Returns a random number in ``0.0..1.0``.
        first: The first wait, in seconds.
        largest: No wait is longer.
    """

    __slots__ = ("_draw", "_first", "_largest", "_wait")

    def __init__(
        self, draw: Callable[[], float], *, first: float = FIRST, largest: float = LARGEST
    ) -> None:
        self._draw = draw
        self._first = first
        self._largest = largest
        self._wait = first

    def next_wait(self) -> float:
        """Return how long to wait now, in seconds."""
        wait = self._wait
        self._wait = min(2 * wait, self._largest)
        return wait * (0.5 + self._draw() / 2)

    def reset(self) -> None:
        """Begin again with the first wait: it went well."""
        self._wait = self._first


class Retries:
    """Decides whether a call that failed is tried again, and when.

    Args:
        draw: Returns a random number in ``0.0..1.0``.
        started: When the call began, on the clock that ``next_wait`` is told.
        deadline: When the caller wants to know.
    """

    __slots__ = ("_backoff", "_deadline", "_may_be_stored", "_refusal", "_started", "_tries")

    def __init__(self, draw: Callable[[], float], started: float, deadline: float) -> None:
        self._backoff = Backoff(draw)
        self._started = started
        self._deadline = deadline
        self._tries = 0
        self._refusal: PulqueError | None = None
        self._may_be_stored = False

    def failed(self, error: PulqueError, *, was_asked: bool = True) -> None:
        """Record how a try failed, and whether the server was asked at all."""
        self._tries += 1
        if was_asked and error.outcome_known and not isinstance(error, NotReachedError):
            self._refusal = error
        elif was_asked and not error.outcome_known:
            self._may_be_stored = True

    def final(self, error: PulqueError) -> PulqueError:
        """Return an error that ends the call, marked by what earlier tries may have done."""
        error.outcome_known = error.outcome_known and not self._may_be_stored
        return error

    def next_wait(self, error: PulqueError, now: float) -> float:
        """Return how long to wait before the next try; ``failed`` was told of the last one.

        Raises:
            PulqueError: Another try is of no use, or comes too late.
        """
        wait = self._backoff.next_wait()
        if not error.retryable:
            raise self.final(error)
        room = 0.0 if self._refusal is None else answer_room(self._deadline - self._started)
        if now + wait >= self._deadline - room:
            found = f"tried {self._tries} times in {now - self._started:.1f} s"
            raise out_of_time(
                found, self._refusal, error, may_be_stored=self._may_be_stored
            ) from error
        return wait
