"""Encode facts: the type of a fact, then its fields.

Type numbers are never reused. Texts come last, after their lengths; reasons are cut.
"""

from collections.abc import Iterator
from struct import Struct, error

import numpy as np

from pulque.model.actions import (
    Action,
    ConsumerLost,
    DeadPurged,
    GroupConfigured,
    GroupOpened,
    GroupReset,
    LockGranted,
    LockReleased,
    NackedDelivery,
    PartitionClosed,
    PassedOver,
    Pulled,
    Settled,
    Skipped,
    SubscriptionOpened,
)
from pulque.model.groups import decode_settings, encode_settings
from pulque.model.names import ConsumerId, Group, Pattern
from pulque.model.positions import Epoch, StartCount, Tenure

__all__ = ["LARGEST_FACT", "MARK", "MARK_TYPE", "decode_action", "encode_action", "size_limits"]

_GROUP = Struct("<BIQB")
_SUBSCRIPTION = Struct("<BIIQBB")
_PULLED = Struct("<BIIIQQIqI")
_SETTLED = Struct("<BIQQqH")
_NACKED = Struct("<QqH")
_LOST = Struct("<BIq?H")
MARK = Struct("<BQ")
"""Not a fact: up to where the log was on disk."""
_RESET = Struct("<BIQqH")
_CONFIGURED = Struct("<BBB")
_PURGED = Struct("<BIQQq")
_GRANTED = Struct("<BIQQ?qBB")
_RELEASED = Struct("<BIQq?B")
_SKIPPED = Struct("<BIQqBH")
_CLOSED = Struct("<BIq")
_GROUP_TYPE, _SUBSCRIPTION_TYPE, _PULLED_TYPE, _SETTLED_TYPE, _LOST_TYPE, MARK_TYPE = range(1, 7)
_CONFIGURED_TYPE, _PASSED_TYPE = 7, 8
_RESET_TYPE, _PURGED_TYPE = 9, 10
_GRANTED_TYPE, _RELEASED_TYPE, _SKIPPED_TYPE, _CLOSED_TYPE = 11, 12, 13, 14
LARGEST_FACT = 16 * 1024 * 1024
"""The most bytes of a fact."""
_MAX_REASON = 1000
_MOST_SETTINGS = 256 * 1024


def encode_action(action: Action) -> bytes:  # noqa: C901, PLR0911  # one case per fact
    """Encode a fact: its type and its fields. Reasons are cut to 1,000 bytes."""
    match action:
        case Pulled(subscription, tenure, first_pull, first_sequence, count, at_ms, matched):
            return _PULLED.pack(
                _PULLED_TYPE,
                subscription,
                *tenure,
                first_pull,
                first_sequence,
                count,
                at_ms,
                matched,
            )
        case Settled(subscription, first, last, nacked, at_ms):
            head = _SETTLED.pack(_SETTLED_TYPE, subscription, first, last, at_ms, len(nacked))
            return head + b"".join(map(_encode_nacked, nacked))
        case ConsumerLost(subscription, reason, at_ms, is_leaving):
            text = reason.encode()[:_MAX_REASON]
            return _LOST.pack(_LOST_TYPE, subscription, at_ms, is_leaving, len(text)) + text
        case GroupOpened(partition, group, next_sequence):
            name = group.encode()
            return _GROUP.pack(_GROUP_TYPE, partition, next_sequence, len(name)) + name
        case SubscriptionOpened(subscription, partition, group, consumer, incarnation):
            names = group.encode(), consumer.encode()
            head = _SUBSCRIPTION.pack(
                _SUBSCRIPTION_TYPE, subscription, partition, incarnation, *map(len, names)
            )
            return head + b"".join(names)
        case PassedOver(partition, group, next_sequence):
            name = group.encode()
            return _GROUP.pack(_PASSED_TYPE, partition, next_sequence, len(name)) + name
        case GroupConfigured(group, subject, settings):
            names = group.encode(), subject.encode()
            head = _CONFIGURED.pack(_CONFIGURED_TYPE, *map(len, names))
            return head + b"".join(names) + encode_settings(settings)
        case DeadPurged(partition, first, last, at_ms):
            return _PURGED.pack(_PURGED_TYPE, partition, first, last, at_ms)
        case GroupReset(partition, group, next_sequence, at_ms):
            name = group.encode()
            return _RESET.pack(_RESET_TYPE, partition, next_sequence, at_ms, len(name)) + name
        case LockGranted() | LockReleased() | Skipped() | PartitionClosed():
            return _encode_ordered(action)


def decode_action(data: bytes) -> Action:
    """Decode the bytes of ``encode_action``.

    Raises:
        ValueError: The bytes are invalid.
    """
    try:
        return _decode_action(data)
    except error as problem:
        raise ValueError(f"a fact of type {data[0]} has not its whole length") from problem


def _decode_action(data: bytes) -> Action:  # noqa: C901, PLR0911, PLR0915  # one case per fact
    match data[0]:
        case 3:
            _, subscription, epoch, start, *fields = _PULLED.unpack(data)
            return Pulled(subscription, Tenure(Epoch(epoch), StartCount(start)), *fields)
        case 4:
            _, subscription, first, last, at_ms, count = _SETTLED.unpack_from(data)
            nacked = tuple(_decode_nacked(data, _SETTLED.size, count))
            return Settled(subscription, first, last, nacked, at_ms)
        case 5:
            _, subscription, at_ms, is_leaving, size = _LOST.unpack_from(data)
            text = data[_LOST.size : _LOST.size + size].decode(errors="replace")
            return ConsumerLost(subscription, text, at_ms, is_leaving)
        case 1:
            _, partition, sequence, size = _GROUP.unpack_from(data)
            group = data[_GROUP.size : _GROUP.size + size].decode()
            return GroupOpened(partition, Group(group), sequence)
        case 2:
            _, subscription, partition, incarnation, *sizes = _SUBSCRIPTION.unpack_from(data)
            at = _SUBSCRIPTION.size
            group = data[at : at + sizes[0]].decode()
            consumer = data[at + sizes[0] : at + sum(sizes)].decode()
            return SubscriptionOpened(
                subscription, partition, Group(group), ConsumerId(consumer), incarnation
            )
        case 7:
            _, *sizes = _CONFIGURED.unpack_from(data)
            at = _CONFIGURED.size
            group = data[at : at + sizes[0]].decode()
            pattern = Pattern(data[at + sizes[0] : at + sum(sizes)].decode())
            return GroupConfigured(Group(group), pattern, decode_settings(data[at + sum(sizes) :]))
        case 8:
            _, partition, sequence, size = _GROUP.unpack_from(data)
            group = data[_GROUP.size : _GROUP.size + size].decode()
            return PassedOver(partition, Group(group), sequence)
        case 9:
            _, partition, sequence, at_ms, size = _RESET.unpack_from(data)
            group = data[_RESET.size : _RESET.size + size].decode()
            return GroupReset(partition, Group(group), sequence, at_ms)
        case 10:
            return DeadPurged(*_PURGED.unpack(data)[1:])
        case 11 | 12 | 13 | 14:
            return _decode_ordered(data)
        case kind:
            raise ValueError(f"a fact of type {kind} is unknown")


def _encode_ordered(action: LockGranted | LockReleased | Skipped | PartitionClosed) -> bytes:
    match action:
        case LockGranted(partition, group, consumer, incarnation, token, is_strict, at_ms):
            names = group.encode(), consumer.encode()
            numbers = (partition, incarnation, token, is_strict, at_ms)
            return _GRANTED.pack(_GRANTED_TYPE, *numbers, *map(len, names)) + b"".join(names)
        case LockReleased(partition, group, token, at_ms, is_end):
            name = group.encode()
            return (
                _RELEASED.pack(_RELEASED_TYPE, partition, token, at_ms, is_end, len(name)) + name
            )
        case Skipped(partition, group, sequence, at_ms, reason):
            name, text = group.encode(), reason.encode()[:_MAX_REASON]
            sizes = (len(name), len(text))
            return _SKIPPED.pack(_SKIPPED_TYPE, partition, sequence, at_ms, *sizes) + name + text
        case PartitionClosed(partition, at_ms):
            return _CLOSED.pack(_CLOSED_TYPE, partition, at_ms)


def _decode_ordered(data: bytes) -> Action:
    match data[0]:
        case 11:
            _, partition, incarnation, token, is_strict, at_ms, *sizes = _GRANTED.unpack_from(data)
            at = _GRANTED.size
            group = Group(data[at : at + sizes[0]].decode())
            consumer = ConsumerId(data[at + sizes[0] : at + sum(sizes)].decode())
            return LockGranted(partition, group, consumer, incarnation, token, is_strict, at_ms)
        case 12:
            _, partition, token, at_ms, is_end, size = _RELEASED.unpack_from(data)
            group = Group(data[_RELEASED.size : _RELEASED.size + size].decode())
            return LockReleased(partition, group, token, at_ms, is_end)
        case 13:
            _, partition, sequence, at_ms, *sizes = _SKIPPED.unpack_from(data)
            at = _SKIPPED.size
            group = Group(data[at : at + sizes[0]].decode())
            reason = data[at + sizes[0] : at + sum(sizes)].decode(errors="replace")
            return Skipped(partition, group, sequence, at_ms, reason)
        case _:
            return PartitionClosed(*_CLOSED.unpack(data)[1:])


def _encode_nacked(nacked: NackedDelivery) -> bytes:
    reason = nacked.reason.encode()[:_MAX_REASON]
    return _NACKED.pack(nacked.sequence, nacked.delay_ms, len(reason)) + reason


def _decode_nacked(data: bytes, at: int, count: int) -> Iterator[NackedDelivery]:
    for _ in range(count):
        sequence, delay_ms, size = _NACKED.unpack_from(data, at)
        at += _NACKED.size
        yield NackedDelivery(sequence, delay_ms, data[at : at + size].decode(errors="replace"))
        at += size


def size_limits() -> tuple[np.ndarray, np.ndarray]:
    """Return the smallest and the largest size of a record of each type."""
    least = np.full(256, LARGEST_FACT + 1, np.uint32)
    most = np.zeros(256, np.uint32)
    for kind, size, more in (
        (_GROUP_TYPE, _GROUP.size, 255),
        (_SUBSCRIPTION_TYPE, _SUBSCRIPTION.size, 510),
        (_PULLED_TYPE, _PULLED.size, 0),
        (_SETTLED_TYPE, _SETTLED.size, LARGEST_FACT - _SETTLED.size),
        (_LOST_TYPE, _LOST.size, _MAX_REASON),
        (MARK_TYPE, MARK.size, 0),
        (_CONFIGURED_TYPE, _CONFIGURED.size, _MOST_SETTINGS),
        (_PASSED_TYPE, _GROUP.size, 255),
        (_PURGED_TYPE, _PURGED.size, 0),
        (_RESET_TYPE, _RESET.size, 256),
        (_GRANTED_TYPE, _GRANTED.size, 511),
        (_RELEASED_TYPE, _RELEASED.size, 256),
        (_SKIPPED_TYPE, _SKIPPED.size, 256 + _MAX_REASON),
        (_CLOSED_TYPE, _CLOSED.size, 0),
    ):
        least[kind], most[kind] = size, size + more
    return least, most
