# Generated from aio/ordered_consumer.py by `make blocking`: edit that file, not this one.
"""The consumer of an ordered group: each order key's messages in their order."""

import time
from collections.abc import Iterable, Iterator

from pulque.client.arguments.checks import check_wait, check_whole
from pulque.client.blocking.broker_puller import FOR_EVER
from pulque.client.blocking.consumer import Consumer
from pulque.client.blocking.ordered_pull_pool import OrderedInlets
from pulque.client.ordered.window import OrderedMessage
from pulque.client.receiving.received_message import ReceivedMessage
from pulque.errors import PulqueError

__all__ = ["OrderedConsumer"]

_MOST_PULLED = 1_000_000


class OrderedConsumer(Consumer):
    """Receives the messages of the partitions that are its own, of each order key in order.

    The next message of an order key comes when the one before is acked; messages of other keys
    come meanwhile, so that many may be handled at the same time. Used as every consumer is.
    """

    _inlets: OrderedInlets

    def _make_inlets(self) -> OrderedInlets:
        return OrderedInlets(self._plan, self._brokers, timeout=self._timeout, draw=self._draw)

    def __iter__(self) -> Iterator[ReceivedMessage]:
        """Yield messages as they may be handled, until the consumer is closed.

        Raises:
            DisconnectedError: Nobody could be reached within the client's timeout. The consumer
                can go on: iterate again.
            FencedError: Another consumer took over this id.
        """
        self._guard.check()
        try:
            while found := self._take(1, FOR_EVER):
                yield found[0]
                yield from self._inlets.follow(found[0])
        except (PulqueError, GeneratorExit):
            raise
        except BaseException:
            self._interrupted()
            raise

    def pull(
        self, max_messages: int | None = None, *, timeout: float = 1.0
    ) -> list[ReceivedMessage]:
        """Return messages of different order keys, at most so many; none if none come in time.

        Raises:
            DisconnectedError: Nobody could be reached for the client's timeout.
            FencedError: Another consumer took over this id.
            UsageError: The consumer is closed.
        """
        self._check_open()
        limit = self._plan.options.max_messages if max_messages is None else max_messages
        check_whole("max_messages", limit, 1, _MOST_PULLED)
        timeout = check_wait(timeout)
        try:
            return list(self._take(limit, time.monotonic() + timeout))
        except PulqueError:
            raise
        except BaseException:
            self._interrupted()
            raise

    def ack_all(self, messages: Iterable[ReceivedMessage]) -> None:
        """Ack many messages."""
        for message in messages:
            message.ack()

    def _take(self, most: int, deadline: float) -> list[OrderedMessage]:
        self._guard.check_process()  # an iteration may go on in a child
        want = self._plan.options.max_messages
        self._is_waiting = False
        while not self._is_closed:
            messages = self._inlets.take(most, want)
            if messages:
                return messages
            self._is_waiting = True
            self._inlets.exchange(deadline, want)
            self._is_waiting = False
            if time.monotonic() >= deadline and not self._inlets.has_waiting:
                break
        return []
