"""What becomes of the batches of a send, and who is told."""

from collections.abc import Callable
from typing import Protocol, cast

from pulque.errors import ErrorCode, PulqueError
from pulque.model.positions import ConsumeSequence
from pulque.storage.message_log import Appended
from pulque.wire.responses import Outcome, Sent

__all__ = ["PendingSend", "Waiter", "outcome_of", "refused", "tell"]

_NO_SEQUENCE = ConsumeSequence(0)
_LONGEST_TEXT = 2000
_new_outcome = tuple.__new__
"""Without the keywords of a named tuple's own constructor, which cost as much again."""


class Waiter(Protocol):
    """Who waits for the outcomes of a send."""

    def put(self, index: int, outcome: Outcome) -> None:
        """Take the outcome of one batch."""


class PendingSend:
    """One send whose outcomes come in."""

    __slots__ = ("_answer", "_missing", "_outcomes")

    def __init__(self, count: int, answer: Callable[[Sent], None]) -> None:
        self._outcomes: list[Outcome | None] = [None] * count
        self._missing = count
        self._answer = answer

    def put(self, index: int, outcome: Outcome) -> None:
        """Take the outcome of one batch; answer after the last."""
        self._outcomes[index] = outcome
        self._missing -= 1
        if not self._missing:
            self._answer(Sent(tuple(cast("list[Outcome]", self._outcomes))))


def outcome_of(appended: Appended, error: PulqueError | None) -> Outcome:
    """Return what became of a batch that was appended."""
    if error is not None:
        return refused(error)
    entry = appended.entry
    return _new_outcome(
        Outcome, (ErrorCode.NONE, False, entry.first_sequence, entry.stored_at_ms, "")
    )


def refused(error: PulqueError) -> Outcome:
    """Return the outcome of a batch that is not stored."""
    return Outcome(
        error.code,
        is_duplicate=False,
        first_sequence=_NO_SEQUENCE,
        stored_at_ms=0,
        text=str(error)[:_LONGEST_TEXT],
    )


def tell(waiting: list[tuple[Waiter, int]], outcome: Outcome) -> None:
    """Tell those who wait for a batch: the first brought it, all others sent it again."""
    waiter, index = waiting[0]
    waiter.put(index, outcome)
    if len(waiting) == 1:
        return
    repeated = outcome if outcome.code else outcome._replace(is_duplicate=True)
    for waiter, index in waiting[1:]:
        waiter.put(index, repeated)
