"""How a producer sends."""

from dataclasses import dataclass

from pulque.model.batch import Codec
from pulque.wire.requests import Acks

__all__ = ["SendOptions"]


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
