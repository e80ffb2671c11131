"""A dispatch whose batches are written down before they go, and wait for as long as it takes."""

from typing import Protocol

from pulque.client.connection.call_outcomes import last_answer, restated
from pulque.client.sending.dispatch import Dispatch
from pulque.client.sending.outgoing_batch import OutgoingBatch
from pulque.errors import PulqueError, StorageError
from pulque.model.pack import ProducedBy

__all__ = ["KeepingDispatch", "Ledger"]

_GRACE = 1.0
"""How much longer an answer may take than the request says, in seconds."""
_FOR_EVER = float("inf")


class Ledger(Protocol):
    """Writes down what becomes of batches, so that a restart knows it."""

    incarnation: int
    """Which start of the producer this is."""

    def numbered(self, batch: OutgoingBatch) -> None:
        """Take note of a batch that will be sent now; if this raises, it is not."""

    def finished(self, batch: OutgoingBatch) -> None:
        """Take note that a batch has its outcome."""


class KeepingDispatch(Dispatch):
    """The batches of a producer with a spool. No batch of it has a deadline."""

    ledger: Ledger

    def _encode(self, batch: OutgoingBatch) -> bool:
        if not super()._encode(batch):
            return False
        try:
            self.ledger.numbered(batch)
        except StorageError as error:
            self._fail(batch, error)
            return False
        return True

    def _pack(self, batch: OutgoingBatch) -> bytes:
        target = batch.stream.target
        number = batch.stream.next_number
        return batch.packer.encode(
            seed=target.seed,
            ids=batch.ids,
            created_at_ms=batch.opened_at_ms,
            # A name: brokers remember it, however long the producer is away.
            produced_by=ProducedBy(self._producer_id, self.ledger.incarnation, number, named=True),
            priority=target.level,
            codec=self.options.codec,
        )

    def expire(self, now: float) -> bool:
        """Say whether the broker owes an answer for too long."""
        ends = self._answer_ends()
        return super().expire(now) or (ends is not None and ends <= now)

    def next_wake(self) -> float | None:
        """Return when ``take`` or ``expire`` will have something to do, if nothing else comes."""
        wakes = (super().next_wake(), self._answer_ends())
        found = min((each for each in wakes if each is not None), default=_FOR_EVER)
        return None if found == _FOR_EVER else found

    def _answer_ends(self) -> float | None:
        sent_at = self.oldest_in_flight()
        return None if sent_at is None else sent_at + self.options.timeout + _GRACE

    def _ended(self, batch: OutgoingBatch, error: PulqueError) -> PulqueError:
        # Nobody may send it anew: the next producer with this spool does.
        text = f"{error}; the spool keeps it{last_answer(batch.refusal)}"
        return restated(error, text, outcome_known=False)

    def _finish(self, batch: OutgoingBatch) -> None:
        super()._finish(batch)
        self.ledger.finished(batch)
