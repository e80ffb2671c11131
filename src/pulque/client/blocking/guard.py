"""Keeps what belongs to one process from being used in a child of fork; by hand."""

from pulque.client.connection.fork_safety import forked, on_fork
from pulque.errors import ForkedError

__all__ = ["Guard"]


class Guard:
    """Belongs to the process that it was made in.

    Args:
        what: What is guarded, for the texts of errors.
    """

    def __init__(self, what: str) -> None:
        self.forked: ForkedError | None = None
        """What to raise in a child."""
        self._what = what
        on_fork(self, Guard.after_fork)

    def after_fork(self) -> None:
        """Refuse everything in a child."""
        self.forked = forked(
            self._what, f"make a {self._what} in the child, and settle where messages were pulled"
        )

    def check(self) -> None:
        """Raise ``ForkedError`` in a child of fork."""
        if self.forked is not None:
            raise self.forked.with_traceback(None)

    check_process = check
