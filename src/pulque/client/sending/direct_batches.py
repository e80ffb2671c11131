"""Sending one message at a time: who sends, and what the broker knows it by.

Every call that is under way has a *lane* of its own: a producer id, and a counter for each
partition. So a lane never has more than one batch without an outcome, and a broker always knows
a batch again that is sent a second time.
"""

from collections.abc import Iterator, Sequence
from itertools import repeat

from pulque.client.arguments.due_times import AT_ONCE, ms_of
from pulque.client.routing.targets import Target, Targets
from pulque.client.sending.outgoing_message import Outgoing, Receipt, as_body, check_priority
from pulque.errors import MessageTooLargeError
from pulque.model.ids import ID_SIZE
from pulque.model.names import DEFAULT_LEVEL
from pulque.model.pack import BatchPacker
from pulque.model.positions import ConsumeSequence
from pulque.wire.single import SingleStored

_MAX_MANY = 1000
_MAX_BYTES = 1024 * 1024

__all__ = [
    "NumberedBatch",
    "check_size",
    "deal",
    "due_instants",
    "pack_messages",
    "receipt_of",
    "receipts_of",
]


class NumberedBatch:
    """A batch as it was packed, so that it can be sent again as it is."""

    __slots__ = ("data", "dues", "ids", "length", "target")

    def __init__(
        self, target: Target, data: bytes, ids: bytes, length: int, dues: Sequence[int] = ()
    ) -> None:
        self.target = target
        self.data = data
        self.ids = ids
        self.length = length
        self.dues = dues
        """When each of them is due; empty where all are at once."""


def pack_messages(
    messages: Sequence[bytes | Outgoing], max_message: int, dues: Sequence[int] = ()
) -> BatchPacker:
    """Return a packer with these messages.

    Args:
        messages: They.
        max_message: The largest that there may be.
        dues: When each is due; empty where all are at once.
    """
    packer = BatchPacker()
    for message, due_at_ms in zip(messages, dues or repeat(AT_ONCE), strict=False):
        extra = 0
        if isinstance(message, Outgoing):
            body = as_body(message.body)
            extra = packer.add(
                body,
                key=message.key,
                order_key=message.order_key,
                tags=message.tags,
                headers=message.all_headers(),
                expires_at_ms=ms_of(message.expires_at),
                due_at_ms=due_at_ms,
            )
        else:
            body = as_body(message)
            packer.bodies.append(body)
        check_size(len(body) + extra, max_message)
    return packer


def check_size(size: int, max_message: int) -> None:
    """Raise ``MessageTooLargeError`` if the broker would refuse a message of ``size``."""
    if size > max_message:
        raise MessageTooLargeError(
            f"a message of {size} bytes; the broker takes at most {max_message}"
        )


def receipt_of(
    packed: NumberedBatch, stored: SingleStored, index: int, *, may_be_doubled: bool = False
) -> Receipt:
    """Return the receipt of one message of a batch."""
    target = packed.target
    at = ID_SIZE * index
    return Receipt(
        packed.ids[at : at + ID_SIZE].hex(),
        target.partition,
        ConsumeSequence(stored.first_sequence + index),
        stored.stored_at_ms,
        target.broker_group,
        stored.is_duplicate,
        may_be_doubled,
        packed.dues[index] if packed.dues else AT_ONCE,
    )


def receipts_of(
    packed: NumberedBatch, stored: SingleStored, *, may_be_doubled: bool = False
) -> list[Receipt]:
    """Return the receipts of all messages of a batch."""
    return [
        receipt_of(packed, stored, index, may_be_doubled=may_be_doubled)
        for index in range(packed.length)
    ]


def due_instants(items: Sequence[bytes | Outgoing], now_ms: int) -> list[int]:
    """Return when each message is due; 0 for at once.

    Raises:
        UsageError: One of them says what cannot be.
    """
    return [item.due_at_ms(now_ms) if isinstance(item, Outgoing) else AT_ONCE for item in items]


def deal(
    targets: Targets, items: Sequence[bytes | Outgoing], now: float = 0.0
) -> Iterator[tuple[Target, list[int]]]:
    """Deal messages to partitions, in batches that are not too large."""
    batches: dict[Target, tuple[list[int], int]] = {}
    others: dict[int, Target] = {}
    for place, item in enumerate(items):
        order_key, level = None, DEFAULT_LEVEL
        if isinstance(item, Outgoing):
            order_key, level = item.order_key, check_priority(item.priority)
        if level not in others:
            others[level] = targets.pick(None, level, now)
        target = targets.pick(order_key, level, now) if order_key else others[level]
        size = len(as_body(item.body) if isinstance(item, Outgoing) else item)
        places, total = batches.get(target, ([], 0))
        if places and (len(places) >= _MAX_MANY or total + size > _MAX_BYTES):
            yield target, places
            places, total = [], 0
            if not order_key:
                del batches[target]
                others[level] = target = targets.pick(None, level, now)
                places, total = batches.get(target, ([], 0))
        places.append(place)
        batches[target] = (places, total + size)
    for target, (places, _) in batches.items():
        if places:
            yield target, places
