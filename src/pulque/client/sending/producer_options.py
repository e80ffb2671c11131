"""How a producer sends, and the signal that it has something to do."""

from collections.abc import Callable
from dataclasses import dataclass

from pulque.model.batch import Codec
from pulque.wire.requests import Acks

__all__ = ["SendOptions", "Signal"]


@dataclass(frozen=True, slots=True)
class SendOptions:
    """How a producer sends."""

    acks: Acks
    linger: float
    """How long a batch waits for more messages, in seconds."""
    max_batch: int
    """A batch of this many messages goes at once."""
    max_batch_bytes: int
    """So does one of this many bytes."""
    max_in_flight: int
    """How many batches of one partition may wait for their answer."""
    max_buffered_bytes: int
    """How much may wait altogether before ``send`` blocks."""
    timeout: float
    """How long until a message has an outcome, in seconds."""
    codec: Codec


class Signal:
    """Says that some dispatch of a producer may have something to do."""

    __slots__ = ("check_waiter", "is_ahead", "is_up", "on_hurry")

    def __init__(self) -> None:
        self.is_up = False
        self.is_ahead = False
        """Batches are made faster than answers come: whoever reads them should have a turn."""
        self.on_hurry: Callable[[], None] | None = None
        """Called when what was held should go now, without the lock."""
        self.check_waiter: Callable[[], None] | None = None
        """Raises where nobody may wait for an outcome: in another event loop."""
