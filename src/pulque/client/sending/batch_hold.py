"""The next batch is held for a moment, so that those may add to it who waited for the last one.

Whoever waits for a batch is likely to add to the next one as soon as it is told: a caller with 64
messages under way would else have batches of 1 and of 63 in turn, and pay for both. So the next
one stays until somebody waits for it, too, and never for longer than ``_LONGEST`` nor than half
of what the last one took.
"""

from pulque.client.sending.outgoing_batch import OutgoingBatch, Stream

__all__ = ["HeldStreams"]

_LONGEST = 0.0005
"""In seconds."""


class HeldStreams:
    """The streams of one broker whose open batch is held. Its owner's lock guards it."""

    def __init__(self) -> None:
        self._streams: list[Stream] = []
        self._until = 0.0

    @property
    def ends_at(self) -> float | None:
        """When they are let go at the latest; None if there are none."""
        return self._until if self._streams else None

    def confirmed(self, batch: OutgoingBatch, now: float) -> None:
        """Take in that a batch is about to have its outcome; hold what comes after it."""
        stream = batch.stream
        if batch.callbacks and batch.count > 1 and not stream.in_flight and not stream.is_held:
            if not self._streams:
                self._until = now + min(_LONGEST, (now - batch.sent_at) / 2)
            stream.is_held = True
            self._streams.append(stream)

    def let_go(self) -> list[Stream]:
        """Hold nothing any more; return what was held."""
        streams, self._streams = self._streams, []
        for stream in streams:
            stream.is_held = False
        return streams
