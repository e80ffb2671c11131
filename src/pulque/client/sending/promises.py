"""The promise of an outcome for each message that a producer was given.

Messages of one batch share their fate, so that a promise is a reference to the batch and an
index: no lock and no event for each message. Whoever waits leaves a callback with the batch.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Generic, Self, TypeVar, overload

from pulque.client.connection.call_outcomes import last_answer
from pulque.client.sending.outgoing_batch import OutgoingBatch
from pulque.client.sending.outgoing_message import Receipt
from pulque.errors import PulqueError

__all__ = ["Promise", "Promises", "Span", "last_refusal"]


class Promise:
    """The promise of an outcome for one message."""

    __slots__ = ("_batch", "_index")

    def __init__(self, batch: OutgoingBatch, index: int) -> None:
        self._batch = batch
        self._index = index

    @property
    def span(self) -> "Span":
        """Where the message travels."""
        return self._batch, self._index, self._index + 1

    def done(self) -> bool:
        """Say whether there is an outcome."""
        return self._batch.is_done

    def add_done_callback(self, callback: Callable[[Self], object]) -> None:
        """Call ``callback`` with this promise once there is an outcome.

        It is called at once if there is one already, else by the producer's own thread or
        loop, which it must not keep.
        """
        self._batch.when_done(lambda: callback(self))

    def __repr__(self) -> str:
        state = "done" if self._batch.is_done else "pending"
        return f"<{type(self).__name__} {self._batch.stream.target.partition} {state}>"


P = TypeVar("P", bound=Promise)
Span = tuple[OutgoingBatch, int, int]
"""Messages ``start..end`` of a batch."""


class Promises(Sequence[P], Generic[P]):
    """The promises of many messages, in the order in which they were handed in."""

    __slots__ = ("_kind", "_spans")

    def __init__(self, spans: list[Span], kind: Callable[[OutgoingBatch, int], P]) -> None:
        self._spans = spans
        self._kind = kind

    def __len__(self) -> int:
        return sum(end - start for _, start, end in self._spans)

    @overload
    def __getitem__(self, index: int) -> P: ...
    @overload
    def __getitem__(self, index: slice) -> list[P]: ...
    def __getitem__(self, index: int | slice) -> P | list[P]:
        if isinstance(index, slice):
            return list(self)[index]
        at = index + len(self) if index < 0 else index
        for batch, start, end in self._spans:
            if 0 <= at < end - start:
                return self._kind(batch, start + at)
            at -= end - start
        raise IndexError(index)

    def __iter__(self) -> Iterator[P]:
        for batch, start, end in self._spans:
            for index in range(start, end):
                yield self._kind(batch, index)

    @property
    def batches(self) -> list[OutgoingBatch]:
        """The batches that the messages travel in."""
        return [batch for batch, _, _ in self._spans]

    def done(self) -> bool:
        """Say whether every message has an outcome."""
        return all(batch.is_done for batch, _, _ in self._spans)

    def receipts(self) -> list[Receipt]:
        """Return the receipts, or raise the first thing that went wrong; all must be done."""
        try:
            return [
                batch.receipt(index)
                for batch, start, end in self._spans
                for index in range(start, end)
            ]
        except PulqueError as error:
            if not hasattr(error, "__notes__"):
                error.add_note(f"{self.count_confirmed()} of {len(self)} messages are confirmed")
            raise

    def count_confirmed(self) -> int:
        """Return how many messages are confirmed; all must be done."""
        confirmed = 0
        for batch, start, end in self._spans:
            if batch.pieces:
                confirmed += sum(batch.error_of(each) is None for each in range(start, end))
            else:
                confirmed += end - start if batch.error is None else 0
        return confirmed


def last_refusal(batches: Sequence[OutgoingBatch]) -> str:
    """Return why a broker did not store one of the batches without an outcome, for texts."""
    found = (each.refusal for each in batches if not each.is_done and each.refusal is not None)
    return last_answer(next(found, None))
