"""The answer of a broker to one request: what is damaged here, the client tries elsewhere."""

from pulque.errors import CorruptionError, PulqueError, UnavailableError
from pulque.serving.responses import Responder

__all__ = ["BrokerResponder"]


class BrokerResponder(Responder):
    """Sends the answer to one request; of what is damaged here, an error to be retried."""

    __slots__ = ()

    def refuse(self, error: PulqueError) -> None:
        """Send an error."""
        super().refuse(_to_retry(error))


def _to_retry(error: PulqueError) -> PulqueError:
    """Return how to refuse a read: what is damaged here, another broker of the group may have."""
    if isinstance(error, CorruptionError):
        return UnavailableError(
            f"what is read is damaged on this broker, and another one of its group has to lead: "
            f"{error}"
        )
    return error
