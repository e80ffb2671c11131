"""What a broker's answer says of each batch of a send."""

from collections.abc import Sequence

from pulque.errors import PulqueError, RemoteProtocolError, error_from_wire
from pulque.wire.responses import Outcome, Response, Sent

__all__ = ["outcomes_of"]


def outcomes_of(response: Response | PulqueError, length: int) -> Sequence[Outcome | PulqueError]:
    """Return what became of each of so many batches of a request."""
    if isinstance(response, PulqueError):
        return [response] * length
    if not isinstance(response, Sent) or len(response.outcomes) != length:
        return [RemoteProtocolError(f"a send of {length} batches got {response!r}")] * length
    return [
        error_from_wire(outcome.code, outcome.text) if outcome.code else outcome
        for outcome in response.outcomes
    ]
