"""Sending without a producer; by hand, as each thread that sends has a connection of its own."""

import time
from collections.abc import Callable, Iterable, Mapping
from datetime import datetime, timedelta
from typing import NamedTuple

from pulque.client.arguments.checks import check_timeout
from pulque.client.arguments.due_times import check_longest
from pulque.client.blocking.brokers import ClientConnections
from pulque.client.blocking.connection import Connection
from pulque.client.blocking.connection_pool import Calls, DirectProducer
from pulque.client.blocking.failover import Spread
from pulque.client.routing.targets import HOME, Delayed, Target, Targets, Way
from pulque.client.sending.direct_batches import (
    NumberedBatch,
    check_size,
    deal,
    due_instants,
    pack_messages,
    receipt_of,
    receipts_of,
)
from pulque.client.sending.outgoing_message import (
    Outgoing,
    Receipt,
    check_priorities,
    check_priority,
    outgoing_of,
)
from pulque.clock import wall_ms
from pulque.errors import PulqueError
from pulque.model.names import DEFAULT_LEVEL, parse_subject
from pulque.wire.requests import Acks
from pulque.wire.single import SingleStored

__all__ = ["Sends"]

_ANY_SIZE = 2**31


class Sends:
    """How a blocking client sends: each call waits until its messages are confirmed."""

    _brokers: ClientConnections
    _spread: Spread
    _calls: Calls
    _targets: dict[Way, Targets]
    _timeout: float
    _acks: Acks

    def send(  # noqa: PLR0913  # a message has many parts, all by keyword
        self,
        subject: str,
        body: object,
        *,
        key: str | None = None,
        order_key: str | None = None,
        tags: Iterable[str] = (),
        headers: Mapping[str, str] | None = None,
        expires_at: datetime | None = None,
        priority: int = DEFAULT_LEVEL,
        reliable: bool = True,
        delay: float | timedelta | None = None,
        at: datetime | None = None,
        level: int | None = None,
        timeout: float | None = None,
    ) -> Receipt:
        """Send one message, and return its receipt once it is confirmed.

        What is safe to repeat is tried again until the timeout; the message is stored once,
        however often it had to be sent. To send many, use ``producer`` or ``send_many``.

        Args:
            subject: Where to.
            body: Bytes or a text as they are; all else as JSON, with the header
                ``content-type: application/json``.
            key: What the message is about; it can be found by it.
            order_key: Messages of one order key stay in one partition, in order.
            tags: Words that consumers may filter by.
            headers: Names and values that travel with it.
            expires_at: When it is no longer worth delivering; with a time zone.
            priority: 0 to 9, higher first.
            reliable: False for a message that is delivered once, whatever becomes of it.
            delay: How long from now it is to be delivered, in seconds or as a timedelta.
            at: When it is to be delivered; with a time zone. What is past goes at once.
            level: 1 to 18: a delay of 1, 5, 10 or 30 seconds, 1 to 10, 20 or 30 minutes, 1 or 2
                hours.
            timeout: How long to wait, in seconds; else the client's.

        Raises:
            UsageError: It is no message, or cannot be due then.
            PulqueError: It is not confirmed; after an ``UnavailableError`` it may be stored
                all the same.
        """
        if type(subject) is not str:
            parse_subject(subject)
        if timeout is not None:
            check_timeout(timeout)
        is_usual = type(body) is bytes and reliable is True and priority == DEFAULT_LEVEL
        if delay is not None or at is not None or level is not None:
            is_usual = False
        if key is not None or order_key is not None or tags or headers is not None:
            is_usual = False
        if expires_at is not None or not is_usual:
            message = Outgoing(
                body,
                key,
                order_key,
                tags,
                headers,
                expires_at,
                priority,
                reliable=reliable,
                delay=delay,
                at=at,
                level=level,
            )
            return self._send_message(subject, message, timeout)
        targets = self._targets.get(subject) or self._find_targets(subject, timeout)
        assert isinstance(body, bytes)  # noqa: S101  # looked at above
        if not targets.is_home:
            target = self._pick(targets, None, DEFAULT_LEVEL)
            check_size(len(body), self._max_message(target))
            return self._send_far(
                subject, None, target, lambda lane: lane.pack_body(target, body), timeout
            )[0]
        check_size(len(body), self._calls.max_message)
        lane = self._calls.take_lane()
        packed = lane.pack_body(targets.pick(None), body)
        return receipt_of(packed, self._send_packed(lane, packed, timeout), 0)

    def send_many(
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
        if type(subject) is not str:
            parse_subject(subject)
        if timeout is not None:
            check_timeout(timeout)
        items = outgoing_of(messages)
        now_ms = wall_ms()
        dues = due_instants(items, now_ms)
        receipts: dict[int, Receipt] = {}
        try:
            check_priorities(items)
            ways = {
                way: self._targets.get(way) or self._find_targets(way, timeout)
                for way in dict.fromkeys(_way(subject, due) for due in dues)
            }
            for due in dues:
                check_longest(due, now_ms, ways[_way(subject, due)].longest_delay_ms)
            for way, targets in ways.items():
                chosen = [n for n, due in enumerate(dues) if _way(subject, due) == way]
                some = [items[n] for n in chosen]
                for target, places in deal(targets, some, time.monotonic()):
                    batch = _Together(
                        way, target, [some[n] for n in places], [dues[chosen[n]] for n in places]
                    )
                    found = self._send_together(batch, timeout)
                    receipts.update(zip((chosen[n] for n in places), found, strict=True))
        except PulqueError as error:
            error.add_note(f"{len(receipts)} of {len(items)} messages are confirmed")
            raise
        return [receipts[n] for n in range(len(items))]

    # ── underneath ─────────────────────────────────────────────────────────────────────────

    def _find_targets(self, way: Way, timeout: float | None = None) -> Targets:
        return self._brokers.find_targets(way, timeout or self._timeout, self._acks)

    @staticmethod
    def _pick(targets: Targets, order_key: str | None, level: int) -> Target:
        now = 0.0 if targets.is_single else time.monotonic()
        return targets.pick(order_key, level, now)

    def _max_message(self, target: Target) -> int:
        """Return the largest message that a broker takes, as far as known."""
        return self._brokers.calls_at(target.place).max_message or _ANY_SIZE

    def _send_message(self, subject: str, message: Outgoing, timeout: float | None) -> Receipt:
        """Send one message that is more than a body."""
        level = check_priority(message.priority)
        now_ms = wall_ms()
        due_ms = message.due_at_ms(now_ms)
        way = _way(subject, due_ms)
        targets = self._targets.get(way) or self._find_targets(way, timeout)
        check_longest(due_ms, now_ms, targets.longest_delay_ms)
        target = self._pick(targets, message.order_key, level)
        together = _Together(way, target, [message], [due_ms])
        return self._send_together(together, timeout)[0]

    def _send_together(self, batch: "_Together", timeout: float | None) -> list[Receipt]:
        """Send messages as one batch."""
        way, target, messages, all_dues = batch
        dues = all_dues if isinstance(way, Delayed) else ()
        packer = pack_messages(messages, self._max_message(target), dues)
        if target.place != HOME:
            order_key = next(
                (each.order_key for each in messages if isinstance(each, Outgoing)), None
            )
            return self._send_far(
                way, order_key, target, lambda lane: lane.pack(target, packer, dues), timeout
            )
        lane = self._calls.take_lane()
        packed = lane.pack(target, packer, dues)
        return receipts_of(packed, self._send_packed(lane, packed, timeout))

    def _send_far(
        self,
        way: Way,
        order_key: str | None,
        target: Target,
        pack: Callable[[DirectProducer], NumberedBatch],
        timeout: float | None,
    ) -> list[Receipt]:
        """Send a batch to a broker of the cluster, or to another if that does not take it."""
        stored = self._spread.send(
            way, order_key, target, pack, acks=self._acks, timeout=timeout or self._timeout
        )
        return receipts_of(stored.packed, stored.outcome, may_be_doubled=stored.may_be_doubled)

    def _send_packed(
        self, lane: DirectProducer, packed: NumberedBatch, timeout: float | None
    ) -> SingleStored:
        partition, data, acks = packed.target.partition, packed.data, self._acks

        def call(connection: Connection, left: float) -> SingleStored:
            stored = connection.send_single(partition, data, acks=acks, timeout=left)
            if isinstance(stored, PulqueError):
                raise stored
            return stored

        return self._calls.repeat(lane, call, timeout or self._timeout)


class _Together(NamedTuple):
    """Messages that travel as one batch."""

    way: Way
    target: Target
    messages: list[bytes | Outgoing]
    dues: list[int]
    """When each of them is due."""


def _way(subject: str, due_at_ms: int) -> Way:
    return Delayed(subject) if due_at_ms else subject
