"""Promises of receipts, for asyncio; by hand, as they can be awaited themselves."""

import asyncio
from collections.abc import Generator, Sequence

from pulque.client.arguments.checks import check_wait
from pulque.client.sending.outgoing_batch import OutgoingBatch
from pulque.client.sending.outgoing_message import Receipt
from pulque.client.sending.promises import Promise, Promises, Span, last_refusal
from pulque.errors import PulqueError, RequestTimeoutError

__all__ = ["PendingSend", "PendingSends", "wait_for"]


class PendingSend(Promise):
    """The promise of a receipt for one message; ``await`` it."""

    __slots__ = ()

    async def result(self, timeout: float | None = None) -> Receipt:
        """Return the receipt, or raise what went wrong; wait for it if need be.

        Raises:
            RequestTimeoutError: There was no outcome within ``timeout`` seconds.
            PulqueError: The message could not be sent.
        """
        await wait_for((self._batch,), timeout)
        return self._batch.receipt(self._index)

    async def exception(self, timeout: float | None = None) -> PulqueError | None:
        """Return what went wrong, or None for a confirmed message; wait for it if need be."""
        await wait_for((self._batch,), timeout)
        return self._batch.error_of(self._index)

    def __await__(self) -> Generator[object, None, Receipt]:
        return self.result().__await__()


class PendingSends(Promises[PendingSend]):
    """The promises of receipts for many messages; ``await`` them together."""

    __slots__ = ()

    def __init__(self, spans: list[Span]) -> None:
        super().__init__(spans, PendingSend)

    async def result(self, timeout: float | None = None) -> list[Receipt]:
        """Return the receipts in order, or raise the first thing that went wrong.

        Raises:
            RequestTimeoutError: Not all had an outcome within ``timeout`` seconds.
            PulqueError: A message could not be sent; a note says how many were.
        """
        await wait_for(self.batches, timeout)
        return self.receipts()

    def __await__(self) -> Generator[object, None, list[Receipt]]:
        return self.result().__await__()


async def wait_for(batches: Sequence[OutgoingBatch], timeout: float | None) -> None:
    todo = [batch for batch in batches if not batch.is_done]
    if not todo:
        return
    todo[0].stream.dispatch.check_waiter()
    if timeout is not None:
        timeout = check_wait(timeout)
    done = asyncio.Event()
    left = len(todo)

    def finished() -> None:
        nonlocal left
        left -= 1
        if not left:
            done.set()

    for batch in todo:
        batch.when_done(finished)
        batch.hurry()
    try:
        async with asyncio.timeout(timeout):
            await done.wait()
    except TimeoutError:
        raise RequestTimeoutError(
            f"{left} batches have no outcome within {timeout} s; they are still on their way"
            f"{last_refusal(todo)}"
        ) from None
