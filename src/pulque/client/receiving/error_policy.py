"""What a consumer does about trouble: wait and try again, or tell the caller."""

from collections.abc import Callable

from pulque.client.connection.backoff import Backoff
from pulque.errors import CorruptionError, DisconnectedError, PulqueError, RemoteProtocolError

__all__ = ["Trouble", "problem_of"]

_MAX_CORRUPT = 1
"""Damage on the way is gone when asked again; damage at the broker is not."""


class Trouble:
    """Counts what goes wrong in a row.

    Args:
        draw: Returns a random number in ``0.0..1.0``.
        timeout: How long trouble may last before the caller is told, in seconds.
    """

    def __init__(self, draw: Callable[[], float], timeout: float) -> None:
        self._backoff = Backoff(draw)
        self._timeout = timeout
        self._since: float | None = None
        self._corrupt = 0

    def over(self) -> None:
        """Take in that things go well."""
        self._backoff.reset()
        self._since = None
        self._corrupt = 0

    def next_wait(self, error: PulqueError, now: float, deadline: float) -> float:
        """Return how long to wait before the next try, but not beyond the deadline.

        Raises:
            CorruptionError: It is damage, and not for the first time.
            DisconnectedError: It has lasted for the timeout. The count begins anew, so that
                the caller may go on.
        """
        if isinstance(error, CorruptionError):
            self._corrupt += 1
            if self._corrupt > _MAX_CORRUPT:
                self.over()
                raise error
        if self._since is None:
            self._since = now
        wait = self._backoff.next_wait()
        if now + wait >= self._since + self._timeout:
            lasted = now - self._since
            self.over()
            raise DisconnectedError(f"{error} (trouble for {lasted:.1f} s)") from error
        return max(0.0, min(wait, deadline - now))


def problem_of(response: object) -> PulqueError:
    """Return what is wrong, where something else came than the answer to a pull."""
    if not isinstance(response, PulqueError):
        return RemoteProtocolError(f"a pull got {response!r}")
    if response.retryable:
        return DisconnectedError(str(response))
    return response
