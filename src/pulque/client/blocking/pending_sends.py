"""Promises of receipts; by hand, as the threads that wait for them wait on a queue."""

import functools
import queue
import time
from collections.abc import Sequence

from pulque.client.arguments.checks import check_wait
from pulque.client.sending.outgoing_batch import OutgoingBatch
from pulque.client.sending.outgoing_message import Receipt
from pulque.client.sending.promises import Promise, Promises, Span, last_refusal
from pulque.errors import PulqueError, RequestTimeoutError

__all__ = ["PendingSend", "PendingSends", "wait_for"]


class PendingSend(Promise):
    """The promise of a receipt for one message. Safe to share between threads."""

    __slots__ = ()

    def result(self, timeout: float | None = None) -> Receipt:
        """Return the receipt, or raise what went wrong; wait for it if need be.

        The producer itself gives every message an outcome within its own timeout, so that
        even without a ``timeout`` this does not wait for ever.

        Raises:
            RequestTimeoutError: There was no outcome within ``timeout`` seconds.
            PulqueError: The message could not be sent.
        """
        batch = self._batch
        if not batch.is_done:
            wait_for((batch,), timeout)
        return batch.receipt(self._index)

    def exception(self, timeout: float | None = None) -> PulqueError | None:
        """Return what went wrong, or None for a confirmed message; wait for it if need be."""
        if not self._batch.is_done:
            wait_for((self._batch,), timeout)
        return self._batch.error_of(self._index)


class PendingSends(Promises[PendingSend]):
    """The promises of receipts for many messages. Safe to share between threads."""

    __slots__ = ()

    def __init__(self, spans: list[Span]) -> None:
        super().__init__(spans, PendingSend)

    def result(self, timeout: float | None = None) -> list[Receipt]:
        """Return the receipts in order, or raise the first thing that went wrong.

        Raises:
            RequestTimeoutError: Not all had an outcome within ``timeout`` seconds.
            PulqueError: A message could not be sent; a note says how many were.
        """
        wait_for(self.batches, timeout)
        return self.receipts()


def wait_for(batches: Sequence[OutgoingBatch], timeout: float | None) -> None:
    """Block this thread until all batches are done.

    Raises:
        RequestTimeoutError: They are not, within ``timeout`` seconds.
    """
    todo = [batch for batch in batches if not batch.is_done]
    if not todo:
        return
    if timeout is not None:
        timeout = check_wait(timeout)
    # Unlike a semaphore, which is Python, it stays whole when this thread is interrupted: who
    # brings the outcome would wait for the semaphore's lock for ever.
    done: queue.SimpleQueue[None] = queue.SimpleQueue()
    for batch in todo:
        batch.when_done(functools.partial(done.put, None))
        batch.hurry()
    if not _wait(done, len(todo), timeout):
        raise RequestTimeoutError(
            f"{sum(not batch.is_done for batch in todo)} batches have no outcome "
            f"within {timeout} s; they are still on their way{last_refusal(todo)}"
        )


def _wait(done: "queue.SimpleQueue[None]", count: int, timeout: float | None) -> bool:
    deadline = None if timeout is None else time.monotonic() + timeout
    try:
        for _ in range(count):
            done.get(timeout=None if deadline is None else max(0.0, deadline - time.monotonic()))
    except queue.Empty:
        return False
    return True
