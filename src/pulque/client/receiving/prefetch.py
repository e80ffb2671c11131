"""How much to ask for: what was handled in the last tenth of a second.

A slow consumer holds little, so that others can have the rest; a fast one asks for much.
"""

__all__ = ["HORIZON", "PullRate"]

HORIZON = 0.1
"""How far ahead to ask, in seconds."""
FIRST = 10
"""Asked for before anything is known."""


class PullRate:
    """Measures one consumer.

    Args:
        max_messages: It never asks for more.
    """

    __slots__ = ("_max_messages", "_reach", "want")

    def __init__(self, max_messages: int) -> None:
        self._max_messages = max_messages
        self._reach = 0
        """How many are handled within the horizon, as far as known."""
        self.want = min(FIRST, max_messages)

    def handled(self, count: int, seconds: float) -> None:
        """Take in that ``count`` messages were handled in ``seconds``."""
        if count:
            rate = count / max(seconds, 1e-6)
            self._reach = int(rate * HORIZON)
            self.want = max(1, min(self._max_messages, self._reach))

    def of_each(self, want: int) -> int:
        """Return how many to ask a broker for where asking has its price, if so many are wanted.

        Twice as many, if these are handled within the horizon: half as many requests, and each
        of the brokers sleeps longer in between. See decision 0017.
        """
        return 2 * want if 2 * want <= self._reach else want
