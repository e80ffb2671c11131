"""Sending one message at a time: who sends, and what the broker knows it by.

Every call that is under way has a *lane* of its own: a producer id, and a counter for each
partition. So a lane never has more than one batch without an outcome, and a broker always knows
a batch again that is sent a second time.
"""

import time
from collections.abc import Sequence

from pulque.client.connection import Connection
from pulque.client.receipt import Outgoing, Receipt, as_body, ms_of
from pulque.client.routes import Target
from pulque.errors import (
    ErrorCode,
    MessageTooLargeError,
    PulqueError,
    RemoteProtocolError,
    error_from_wire,
)
from pulque.model.ids import ID_SIZE, IdSource, show_id
from pulque.model.pack import BatchPacker, ProducedBy
from pulque.model.positions import ConsumeSequence
from pulque.wire.responses import Outcome, Response, Sent

__all__ = ["Lane", "Packed", "outcome_of", "receipts_of"]


class Packed:
    """A batch as it was packed, so that it can be sent again as it is."""

    __slots__ = ("data", "ids", "length", "target")

    def __init__(self, target: Target, data: bytes, ids: bytes, length: int) -> None:
        self.target = target
        self.data = data
        self.ids = ids
        self.length = length


class Lane:
    """What one call needs to send. One user at a time."""

    __slots__ = ("_ids", "_numbers", "_producer_id", "connection")

    def __init__(self, producer_id: int, ids: IdSource) -> None:
        self.connection: Connection | None = None
        self._producer_id = producer_id
        self._ids = ids
        self._numbers: dict[str, int] = {}

    def pack(self, target: Target, packer: BatchPacker) -> Packed:
        """Make a batch and give it its number."""
        partition = target.partition
        number = self._numbers.get(partition, 0)
        self._numbers[partition] = number + 1
        now_ms = time.time_ns() // 1_000_000
        length = len(packer.bodies)
        ids = self._ids.many(now_ms, length)
        data = packer.encode(
            seed=target.seed,
            ids=ids,
            created_at_ms=now_ms,
            produced_by=ProducedBy(self._producer_id, 0, number),
        )
        return Packed(target, data, ids, length)


def pack_messages(messages: Sequence[bytes | Outgoing], max_message: int) -> BatchPacker:
    """Return a packer with these messages."""
    packer = BatchPacker()
    for message in messages:
        if isinstance(message, Outgoing):
            body = as_body(message.body)
            packer.add(
                body,
                key=message.key,
                order_key=message.order_key,
                tags=message.tags,
                headers=message.headers,
                expires_at_ms=ms_of(message.expires_at),
            )
        else:
            body = as_body(message)
            packer.bodies.append(body)
        if len(body) > max_message:
            raise MessageTooLargeError(
                f"a message of {len(body)} bytes; the broker takes at most {max_message}"
            )
    return packer


def outcome_of(response: Response | PulqueError) -> Outcome:
    """Return the outcome of a send of one batch, or raise what went wrong."""
    if isinstance(response, PulqueError):
        raise response
    if not isinstance(response, Sent) or len(response.outcomes) != 1:
        raise RemoteProtocolError(f"a send of one batch got {response!r}")
    outcome = response.outcomes[0]
    if outcome.code is not ErrorCode.NONE:
        raise error_from_wire(outcome.code, outcome.text)
    return outcome


def receipts_of(packed: Packed, outcome: Outcome) -> list[Receipt]:
    """Return the receipts for the messages of a batch."""
    target = packed.target
    return [
        Receipt(
            show_id(packed.ids[ID_SIZE * index : ID_SIZE * index + ID_SIZE]),
            target.partition,
            ConsumeSequence(outcome.first_sequence + index),
            outcome.stored_at_ms,
            target.broker_group,
            outcome.is_duplicate,
        )
        for index in range(packed.length)
    ]
