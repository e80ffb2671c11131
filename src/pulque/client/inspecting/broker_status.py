"""What a broker says of itself: its status, and the end of a segment that it sealed."""

import json
from typing import Any

from pulque.errors import RemoteProtocolError
from pulque.wire.responses import Response, Sealed, StatusReport

__all__ = ["report_of", "sealed_end_of"]


def report_of(response: Response) -> dict[str, Any]:
    """Return how the broker is doing."""
    if not isinstance(response, StatusReport):
        raise RemoteProtocolError(f"a request for the status got {response!r}")
    try:
        report: dict[str, Any] = json.loads(response.report)
    except ValueError as error:
        raise RemoteProtocolError(f"a status is not JSON: {error}") from None
    return report


def sealed_end_of(response: Response) -> int:
    """Return the offset at which the next segment begins."""
    if not isinstance(response, Sealed):
        raise RemoteProtocolError(f"a request to seal got {response!r}")
    return response.end
