"""Sending without a producer; by hand, as all tasks of a client share one underneath."""

from collections.abc import Iterable
from typing import Unpack

from pulque.client.aio.brokers import ClientConnections
from pulque.client.aio.producer import Producer
from pulque.client.arguments.checks import check_timeout
from pulque.client.routing.targets import Targets, Way
from pulque.client.sending.outgoing_message import MessageParts, Outgoing, Receipt
from pulque.model.names import parse_subject
from pulque.wire.requests import Acks

__all__ = ["Sends"]


class Sends:
    """How a client sends: each call waits until its messages are confirmed."""

    _brokers: ClientConnections
    _targets: dict[Way, Targets]
    _timeout: float
    _acks: Acks
    _sends: Producer | None = None

    def producer(self, *, linger: float, max_in_flight: int) -> Producer:
        """Return a producer that batches underneath."""
        raise NotImplementedError

    async def send(
        self,
        subject: str,
        body: object,
        *,
        timeout: float | None = None,
        **parts: Unpack[MessageParts],
    ) -> Receipt:
        """Send one message, and return its receipt once it is confirmed.

        What is safe to repeat is tried again until the timeout; the message is stored once,
        however often it had to be sent. Sends of many tasks travel together.

        Args:
            subject: Where to.
            body: Bytes or a text as they are; all else as JSON, with the header
                ``content-type: application/json``.
            timeout: How long to wait, in seconds; else the client's.
            **parts: What the message has beside: ``key``, ``order_key``, ``tags``, ``headers``,
                ``expires_at``, ``priority``, ``reliable``; and when it is to be delivered, if
                later: ``delay``, ``at`` or ``level``.

        Raises:
            UsageError: It is no message, or cannot be due then.
            PulqueError: It is not confirmed; after an ``UnavailableError`` it may be stored
                all the same.
        """
        self._brokers.guard.check()
        if type(subject) is not str:
            parse_subject(subject)
        if timeout is not None and check_timeout(timeout) != self._timeout:
            message = Outgoing(body, **parts)
            return await self._sending()._send_within(subject, message, timeout)  # noqa: SLF001
        if not parts:
            await self._find_targets(subject)
        return await (await self._sending().send(subject, body, **parts))

    async def send_many(
        self,
        subject: str,
        messages: Iterable[object],
        *,
        timeout: float | None = None,
    ) -> list[Receipt]:
        """Send messages in as few requests as possible; return their receipts in order.

        What can be refused at once is refused before the first message goes.

        Raises:
            PulqueError: Not all are confirmed; a note says how many are. Whether the outcome is
                known is said of the others. To learn the outcome of each, use ``producer``.
        """
        self._brokers.guard.check()
        if type(subject) is not str:
            parse_subject(subject)
        if timeout is not None:
            check_timeout(timeout)
        own = timeout if timeout != self._timeout else None
        return await self._sending()._send_many(subject, messages, own)  # noqa: SLF001

    def _sending(self) -> Producer:
        """Return the producer of ``send``: what many tasks send at once goes together."""
        if self._sends is None:
            self._sends = self.producer(linger=0, max_in_flight=16)
        return self._sends

    async def _find_targets(self, way: Way) -> Targets:
        targets = self._targets.get(way)
        if targets is None:
            targets = await self._brokers.find_targets(way, self._timeout, self._acks)
        return targets
