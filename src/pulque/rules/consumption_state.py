"""Encode consumption for checkpoints: named values, and only those that changed."""

from array import array
from collections.abc import Mapping
from itertools import groupby
from operator import attrgetter
from struct import Struct

from pulque.model.actions import SubscriptionId
from pulque.model.groups import decode_settings, encode_settings
from pulque.model.names import ConsumerId, Group, Pattern
from pulque.model.positions import (
    ConsumeSequence,
    Epoch,
    PartitionId,
    PullSequence,
    StartCount,
    Tenure,
)
from pulque.rules.consumption import Consumption, Redelivery, RedeliveryState
from pulque.rules.subscription import HeldRange, Subscription

__all__ = ["encode_changes", "load_state"]

_GROUP_KEY = Struct("<1sI")
_GROUP = Struct("<QI")
_SETTINGS_KEY = Struct("<1sB")
_PENDING = Struct("<Iqq?H")
_RANGE = Struct("<QIIqq?H")
_how = attrgetter("delay_ms", "reason", "at_ms", "is_failure")
_SUBSCRIPTION_KEY = Struct("<1sI")
_SUBSCRIPTION = Struct("<IQQQQQqBBI")
_HELD = Struct("<IIQQII")


def encode_changes(consumption: Consumption) -> dict[bytes, bytes | None]:
    """Return the changes since the last call; None for deleted names."""
    changes: dict[bytes, bytes | None] = {}
    for key in consumption.changed_groups:
        partition, group = key
        state = consumption.groups.get(key)
        name = _GROUP_KEY.pack(b"g", partition) + group.encode()
        changes[name] = None if state is None else _encode_group(state)
    for number in consumption.changed_subscriptions:
        each = consumption.subscriptions.get(number)
        name = _SUBSCRIPTION_KEY.pack(b"s", number)
        changes[name] = None if each is None else _encode_subscription(each)
    settings = consumption.settings
    for group_name, subject in settings.changed:
        recorded = settings.recorded(group_name, subject)
        head = _SETTINGS_KEY.pack(b"c", len(group_name.encode()))
        name = head + group_name.encode() + subject.encode()
        changes[name] = None if recorded is None else encode_settings(recorded)
    changes.update(consumption.locks.encode_changes())
    settings.changed = set()
    consumption.changed_groups = set()
    consumption.changed_subscriptions = set()
    return changes


def load_state(state: Mapping[bytes, bytes]) -> Consumption:
    """Return the consumption that a checkpoint contains."""
    consumption = Consumption()
    for key, value in state.items():
        if key[:1] == b"g":
            partition = PartitionId(_GROUP_KEY.unpack_from(key)[1])
            group = Group(key[_GROUP_KEY.size :].decode())
            consumption.groups[partition, group] = _decode_group(value)
        elif key[:1] == b"s":
            number = SubscriptionId(_SUBSCRIPTION_KEY.unpack(key)[1])
            consumption.put(_decode_subscription(number, value))
        elif key[:1] == b"c":
            end = _SETTINGS_KEY.size + _SETTINGS_KEY.unpack_from(key)[1]
            group = Group(key[_SETTINGS_KEY.size : end].decode())
            pattern = Pattern(key[end:].decode())
            consumption.settings.put(group, pattern, decode_settings(value))
    consumption.settings.changed = set()
    consumption.locks.load(state)
    for each in consumption.subscriptions.values():
        consumption.set_direct(each)
    return consumption


def _encode_group(state: RedeliveryState) -> bytes:
    parts = [_GROUP.pack(state.next_sequence, len(state.pending))]
    # Those that were nacked together differ in nothing but their sequence.
    for how, run in groupby(state.pending.values(), key=_how):
        sequences = array("Q", [each.sequence for each in run])
        delay_ms, text, at_ms, is_failure = how
        reason = text.encode()[:1000]
        head = _PENDING.pack(len(sequences), delay_ms, at_ms, is_failure, len(reason))
        parts += (head, reason, sequences.tobytes())
    for each in state.ranges:
        reason = each.reason.encode()[:1000]
        how = (each.delay_ms, each.at_ms, each.is_failure, len(reason))
        parts += (_RANGE.pack(each.sequence, each.length, each.matched, *how), reason)
    return b"".join(parts)


def _decode_group(value: bytes) -> RedeliveryState:
    next_sequence, count = _GROUP.unpack_from(value)
    state = RedeliveryState(ConsumeSequence(next_sequence))
    at = _GROUP.size
    while len(state.pending) < count:
        length, delay_ms, at_ms, is_failure, size = _PENDING.unpack_from(value, at)
        at += _PENDING.size
        reason = value[at : at + size].decode(errors="replace")
        at += size
        sequences = array("Q", value[at : at + 8 * length])
        at += 8 * length
        for number in sequences:
            sequence = ConsumeSequence(number)
            state.pending[sequence] = Redelivery(sequence, delay_ms, reason, at_ms, is_failure)
    while at < len(value):
        first, length, matched, delay_ms, at_ms, is_failure, size = _RANGE.unpack_from(value, at)
        at += _RANGE.size
        reason = value[at : at + size].decode(errors="replace")
        at += size
        like = (delay_ms, reason, at_ms, is_failure)
        state.ranges.append(Redelivery(ConsumeSequence(first), *like, length, matched))
    return state


def _encode_subscription(each: Subscription) -> bytes:
    group, consumer = each.group.encode(), each.consumer.encode()
    head = _SUBSCRIPTION.pack(
        each.partition,
        each.incarnation,
        each.settled,
        each.next_pull,
        each.lost_start,
        each.lost_end,
        each.since_ms,
        len(group),
        len(consumer),
        len(each.held),
    )
    held = (_HELD.pack(*h.tenure, *h[1:]) for h in each.held)
    return b"".join((head, group, consumer, *held))


def _decode_subscription(number: SubscriptionId, value: bytes) -> Subscription:
    partition, incarnation, settled, next_pull, lost_start, lost_end, since_ms, *sizes = (
        _SUBSCRIPTION.unpack_from(value)
    )
    at = _SUBSCRIPTION.size
    group = Group(value[at : at + sizes[0]].decode())
    at += sizes[0]
    consumer = ConsumerId(value[at : at + sizes[1]].decode())
    at += sizes[1]
    found = Subscription(number, PartitionId(partition), group, consumer, incarnation)
    found.settled, found.next_pull = PullSequence(settled), PullSequence(next_pull)
    found.lost_start, found.lost_end = PullSequence(lost_start), PullSequence(lost_end)
    found.since_ms = since_ms
    for epoch, start, pull, sequence, length, matched in _HELD.iter_unpack(value[at:]):
        tenure = Tenure(Epoch(epoch), StartCount(start))
        first = (PullSequence(pull), ConsumeSequence(sequence))
        found.held.append(HeldRange(tenure, *first, length, matched))
        found.held_count += matched
    return found
