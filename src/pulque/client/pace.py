"""How much to ask for: what was handled in the last tenth of a second.

A slow consumer holds little, so that others can have the rest; a fast one asks for much.
"""

__all__ = ["HORIZON", "Pace"]

HORIZON = 0.1
"""How far ahead to ask, in seconds."""
FIRST = 10
"""Asked for before anything is known."""


class Pace:
    """Measures one consumer.

    Args:
        max_messages: It never asks for more.
    """

    __slots__ = ("_max_messages", "want")

    def __init__(self, max_messages: int) -> None:
        self._max_messages = max_messages
        self.want = min(FIRST, max_messages)

    def handled(self, count: int, seconds: float) -> None:
        """Take in that ``count`` messages were handled in ``seconds``."""
        if count:
            rate = count / max(seconds, 1e-6)
            self.want = max(1, min(self._max_messages, int(rate * HORIZON)))
