"""What a broker's answer says of each batch of a send, and what a send ends with."""

import contextlib
import copy
from collections.abc import Iterator, Sequence

from pulque.errors import (
    DisconnectedError,
    PulqueError,
    RemoteProtocolError,
    RequestTimeoutError,
    UnavailableError,
    error_from_wire,
)
from pulque.wire.responses import Outcome, Response, Sent

__all__ = [
    "UNREACHED",
    "NotReachedError",
    "ended",
    "last_answer",
    "never_sent",
    "not_reached",
    "out_of_time",
    "outcomes_of",
    "restated",
]

_OPEN = "the outcome is unknown"
_NEVER_SENT = "it was never sent"
UNREACHED = (DisconnectedError, RequestTimeoutError)
"""Why a client has no connection: nobody is there, or nobody answers."""


class NotReachedError(DisconnectedError):
    """Nobody could be connected to: whatever was to be said, nobody has heard it."""

    outcome_known = True


def not_reached(error: PulqueError) -> PulqueError:
    """Return why ``connect`` failed, with what to try."""
    return type(error)(
        f"{error}; start a broker there with `pulque up`, check the URL, or wait for it "
        "with connect(wait=…)"
    )


@contextlib.contextmanager
def never_sent() -> Iterator[None]:
    """Mark an error of finding out where a message goes: nothing of it was sent."""
    try:
        yield
    except PulqueError as error:
        error.args = (str(error).replace(_OPEN, _NEVER_SENT),)
        error.outcome_known = True
        raise


def outcomes_of(response: Response | PulqueError, length: int) -> Sequence[Outcome | PulqueError]:
    """Return what became of each of so many batches of a request."""
    if isinstance(response, PulqueError):
        # One each: whether its outcome is known differs between batches.
        return [copy.copy(response) for _ in range(length)]
    if not isinstance(response, Sent) or len(response.outcomes) != length:
        return [RemoteProtocolError(f"a send of {length} batches got {response!r}")] * length
    return [
        error_from_wire(outcome.code, outcome.text) if outcome.code else outcome
        for outcome in response.outcomes
    ]


def out_of_time(
    found: str,
    refusal: PulqueError | None,
    problem: PulqueError | None,
    *,
    may_be_stored: bool,
) -> PulqueError:
    """Return the error of a call that was tried until its time was up.

    While nothing can have come of it, that is the server's last refusal, else why no server was
    reached. Once a try was not answered, it is an ``UnavailableError`` that names the refusal.

    Args:
        found: How long it was tried.
        refusal: What a server answered last, if one did.
        problem: What went wrong last, if that is something else.
        may_be_stored: Whether a try had no answer, or one that leaves it open.
    """
    cause: PulqueError | None
    if may_be_stored:
        unanswered = (each for each in (problem, refusal) if _leaves_open(each))
        cause, state = next(unanswered, None), _OPEN
        if refusal is not cause:
            state += last_answer(refusal)
    elif refusal is not None:
        cause, state = refusal, "it had no effect"
    else:
        cause, state = problem, _NEVER_SENT
    text = f"{found}; {state}" if cause is None else f"{cause} ({found}; {state})"
    kind = RequestTimeoutError if cause is None else type(cause)
    error = (DisconnectedError if kind is NotReachedError else kind)(text)
    error.outcome_known = not may_be_stored
    return error


def ended(error: PulqueError, refusal: PulqueError | None, *, may_be_stored: bool) -> PulqueError:
    """Return the error of a message that is not tried any more, with what is known about it.

    Args:
        error: Why it is not.
        refusal: What a server answered last, if one did.
        may_be_stored: Whether a try had no answer, or one that leaves it open.
    """
    unchanged = _NEVER_SENT if refusal is None else "it had no effect"
    text = f"{error}; {_OPEN if may_be_stored else unchanged}{last_answer(refusal)}"
    return restated(error, text, outcome_known=not may_be_stored)


def restated(error: PulqueError, text: str, *, outcome_known: bool) -> PulqueError:
    """Return an error of the same kind that says something else."""
    found = type(error)(text)
    found.outcome_known = outcome_known
    return found


def _leaves_open(error: PulqueError | None) -> bool:
    return isinstance(error, UnavailableError) and not error.outcome_known


def last_answer(refusal: PulqueError | None) -> str:
    """Return a server's last refusal for the text of another error."""
    if refusal is None:
        return ""
    name = type(refusal).__name__
    return f"; the last answer was {name} (code {refusal.code:d}): {refusal}"
