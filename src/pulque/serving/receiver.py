"""Sends of producers, batch by batch: each is stored on its own and has an outcome of its own."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from functools import partial

from pulque.errors import InvalidRequestError, PulqueError
from pulque.model.positions import ConsumeSequence
from pulque.net.server import Work
from pulque.serving.commit import Committer
from pulque.serving.outcomes import (
    Waiter,
    WaitingSend,
    refused,
    take_in_steps,
    wants_disk,
)
from pulque.storage.logs.message_log import Appended
from pulque.wire.requests import MAX_BATCHES, Send
from pulque.wire.responses import Sent
from pulque.wire.single import SingleSend

__all__ = ["BatchReceiver"]


class BatchReceiver(ABC):
    """Stores what producers send.

    Args:
        committer: Confirms what is appended.
        batches_per_step: How many batches of one send are stored in one step.
    """

    def __init__(self, committer: Committer, batches_per_step: int) -> None:
        self._committer = committer
        self.batches_per_step = batches_per_step
        """A send of more batches is stored in steps."""
        self.messages = 0
        self.batches = 0
        self.refused = 0
        self._unconfirmed: dict[tuple[int, int], Appended] = {}
        """Appends that are not confirmed, by their place: the same batch may be sent again."""

    def send(
        self, request: Send, answer: Callable[[Sent], None], owner: object | None = None
    ) -> None:
        """Store the batches of a send, and answer once each has its outcome.

        Args:
            request: What to store.
            answer: Called once, now or later.
            owner: Who has more to send at once and says ``pause`` after that; None for nobody.
        """
        batches = request.batches
        if not batches:
            raise InvalidRequestError(f"a send of 0 batches; 1 to {MAX_BATCHES} are allowed")
        pending = WaitingSend(len(batches), answer)
        to_disk = wants_disk(request.acks, has_followers=self._committer.has_followers)
        for index, (name, batch) in enumerate(batches):
            self._take_in(name, bytes(batch), pending, index, wants_disk=to_disk)
        if owner is None:
            self._committer.schedule()

    def send_in_steps(
        self,
        request: Send,
        answer: Callable[[Sent], None],
        refusal: Callable[[], PulqueError | None] = lambda: None,
    ) -> Work:
        """Store the batches of a send, a few at a time, and answer once each has its outcome.

        Args:
            request: What to store.
            answer: Called once, after the last step or later.
            refusal: Returns why nothing may be stored any more, if that is so.
        """
        to_disk = wants_disk(request.acks, has_followers=self._committer.has_followers)
        take_in = partial(self._take_in, wants_disk=to_disk)
        return take_in_steps(request.batches, take_in, answer, refusal, self.batches_per_step)

    def send_single(self, request: SingleSend, waiter: Waiter) -> None:
        """Store the only batch of a send; who sent it says ``pause`` when there are no more."""
        acks, _, name, batch = request
        to_disk = wants_disk(acks, has_followers=self._committer.has_followers)
        self._take_in(name, batch, waiter, 0, wants_disk=to_disk)

    def pause(self, owner: object) -> None:
        """Take note that a connection has sent all that it had."""
        self._committer.hurry(owner)

    @abstractmethod
    def _take_in(
        self, name: str, batch: bytes, waiter: Waiter, index: int, *, wants_disk: bool
    ) -> None:
        """Store one batch, or refuse it."""

    def _refuse(self, waiter: Waiter, index: int, error: PulqueError) -> None:
        """Give a batch that is not stored its outcome."""
        self.refused += 1
        waiter.put(index, refused(error))

    def _joins(
        self,
        partition: int,
        first: ConsumeSequence,
        waiter: Waiter,
        index: int,
        *,
        wants_disk: bool,
    ) -> bool:
        """Return whether a batch that was sent again waits together with the first one."""
        unconfirmed = self._unconfirmed.get((partition, first))
        if unconfirmed is None:
            return False
        unconfirmed.wants_disk |= wants_disk
        unconfirmed.waiting.append((waiter, index))
        return True
