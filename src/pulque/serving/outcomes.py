"""What a send waits for, what becomes of its batches, and who is told."""

from collections.abc import Callable, Iterator, Sequence
from typing import Protocol, cast

from pulque.errors import ErrorCode, NotAllowedError, PulqueError
from pulque.model.positions import ConsumeSequence
from pulque.storage.logs.message_log import Appended
from pulque.wire.requests import Acks
from pulque.wire.responses import Outcome, Sent

__all__ = [
    "Waiter",
    "WaitingSend",
    "outcome_of",
    "put_again",
    "refused",
    "take_in_steps",
    "tell",
    "wants_disk",
]

_NO_SEQUENCE = ConsumeSequence(0)
_LONGEST_TEXT = 2000
_MEMORY = int(Acks.MEMORY)
_REPLICA = int(Acks.REPLICA)
_new_outcome = tuple.__new__
"""Without the keywords of a named tuple's own constructor, which cost as much again."""


class Waiter(Protocol):
    """Who waits for the outcomes of a send."""

    def put(self, index: int, outcome: Outcome) -> None:
        """Take the outcome of one batch."""


class WaitingSend:
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


def take_in_steps(
    batches: Sequence[tuple[str, bytes | memoryview]],
    take_in: Callable[[str, bytes, Waiter, int], None],
    answer: Callable[[Sent], None],
    refusal: Callable[[], PulqueError | None],
    per_step: int,
) -> Iterator[None]:
    """Take in the batches of one send, some in each step, and answer once all have an outcome.

    Args:
        batches: Partition name and batch.
        take_in: Stores one of them, or says why not.
        answer: Called once, after the last step or later.
        refusal: Says why nothing may be stored any more, if that is so.
        per_step: How many batches a step takes in.
    """
    pending = WaitingSend(len(batches), answer)
    for start in range(0, len(batches), per_step):
        error = refusal()
        for index, (name, batch) in enumerate(batches[start : start + per_step], start):
            if error is None:
                take_in(name, bytes(batch), pending, index)
            else:
                pending.put(index, refused(error))
        yield


def wants_disk(acks: int, *, has_followers: bool) -> bool:
    """Return whether a send is confirmed only once it is synced; with followers, there as well.

    Raises:
        NotAllowedError: The send waits for followers, and there are none.
    """
    if acks == _REPLICA and not has_followers:
        raise NotAllowedError(
            'acks is "replica", and this server has no followers: "disk" and "memory" are '
            "allowed here"
        )
    return acks != _MEMORY


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


def put_again(
    waiter: Waiter,
    index: int,
    outcome: Outcome,
    sync: Callable[[Callable[[PulqueError | None], None]], None] | None,
) -> None:
    """Tell who sent a batch again that it is stored; the first send may have wanted less.

    Args:
        waiter: Who waits.
        index: Which batch of its send it is.
        outcome: What became of it.
        sync: Calls what it is given when all that is stored is on disk; None to answer at once.
    """
    if sync is None:
        waiter.put(index, outcome)
    else:
        sync(lambda error: waiter.put(index, outcome if error is None else refused(error)))


def tell(waiting: list[tuple[Waiter, int]], outcome: Outcome) -> None:
    """Tell those who wait for a batch: the first brought it, all others sent it again."""
    if not waiting:
        return  # they were told before that nobody knows
    waiter, index = waiting[0]
    waiter.put(index, outcome)
    if len(waiting) == 1:
        return
    repeated = outcome if outcome.code else outcome._replace(is_duplicate=True)
    for waiter, index in waiting[1:]:
        waiter.put(index, repeated)
