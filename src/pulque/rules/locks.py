"""Pull locks: which consumer of an ordered group a partition belongs to, and for how long.

Holder and token of a lock are facts: they survive a restart, and no token is granted twice.
The remaining time is not a fact: like a lease it runs on the
monotonic clock, and after a restart every holder has the full time again. When a lock's time is
over, nothing happens by itself: another consumer may then get the lock.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from struct import Struct

from pulque.model.actions import LockGranted, LockReleased
from pulque.model.names import (
    DEFAULT_LEVEL,
    ConsumerId,
    Group,
    PartitionName,
    level_of,
    owner_of,
)
from pulque.model.positions import ConsumeSequence, PartitionId

__all__ = ["NOBODY", "LockKey", "LockTimes", "Locks", "PullLock", "can_be_locked"]

LockKey = tuple[PartitionId, Group]
"""One group in one partition."""
NOBODY = ConsumerId("")
_PREFIX = b"l"
_KEY = Struct("<1sI")
_LOCK = Struct("<QQ??B")
_CLOSED_PREFIX = b"z"


def can_be_locked(partition: PartitionName) -> bool:
    """Return whether a partition may belong to one consumer of an ordered group.

    Partitions of a group (retries) and of a priority are unordered: all consumers of the group
    share them.
    """
    return owner_of(partition) is None and level_of(partition) == DEFAULT_LEVEL


@dataclass(slots=True)
class PullLock:
    """The newest lock of one group in one partition."""

    token: int
    """Grows with every grant."""
    holder: ConsumerId = NOBODY
    incarnation: int = 0
    is_strict: bool = False
    """Failed messages are retried in place, not later."""
    is_exclusive: bool = True
    """False after the group was switched to another mode."""


class Locks:
    """All locks of one broker, and which partitions are closed. Changed by facts only."""

    def __init__(self) -> None:
        self.by_key: dict[LockKey, PullLock] = {}
        self.closed: set[PartitionId] = set()
        """Partitions that take no more sends."""
        self._changed: set[LockKey] = set()
        self._changed_closed: set[PartitionId] = set()

    def is_exclusive(self, key: LockKey) -> bool:
        """Return whether a group has no pull log in a partition."""
        found = self.by_key.get(key)
        return found is not None and found.is_exclusive

    def is_held_by(self, key: LockKey, consumer: ConsumerId, token: int) -> bool:
        """Return whether this consumer has the newest lock, with this token."""
        found = self.by_key.get(key)
        return found is not None and (found.token, found.holder) == (token, consumer)

    def next_token(self, key: LockKey) -> int:
        """Return the token of the next grant."""
        found = self.by_key.get(key)
        return 1 if found is None else found.token + 1

    def granted(self, fact: LockGranted) -> None:
        """Record a granted lock."""
        key = (fact.partition, fact.group)
        self.by_key[key] = PullLock(fact.token, fact.consumer, fact.incarnation, fact.is_strict)
        self._changed.add(key)

    def released(self, fact: LockReleased) -> None:
        """Record a released lock."""
        self.vacate((fact.partition, fact.group))
        found = self.by_key.get((fact.partition, fact.group))
        if found is not None and fact.is_end:
            found.is_exclusive = False

    def vacate(self, key: LockKey) -> None:
        """Take a lock from its holder."""
        found = self.by_key.get(key)
        if found is not None:
            found.holder = NOBODY
            self._changed.add(key)

    def close(self, partition: PartitionId) -> None:
        """Record that a partition is closed: it takes no more sends."""
        self.closed.add(partition)
        self._changed_closed.add(partition)

    def clip(self, ends: Mapping[PartitionId, ConsumeSequence]) -> bool:
        """Drop the locks of deleted partitions; return whether there were any."""
        gone = {key for key in self.by_key if key[0] not in ends}
        for key in gone:
            del self.by_key[key]
        reopened = {each for each in self.closed if each not in ends}
        self.closed -= reopened
        self._changed |= gone
        self._changed_closed |= reopened
        return bool(gone or reopened)

    def encode_changes(self) -> dict[bytes, bytes | None]:
        """Return the changes since the last call; None for deleted names."""
        changes: dict[bytes, bytes | None] = {}
        for key in self._changed:
            partition, group = key
            found = self.by_key.get(key)
            name = _KEY.pack(_PREFIX, partition) + group.encode()
            changes[name] = None if found is None else _encode(found)
        for partition in self._changed_closed:
            is_closed = partition in self.closed
            changes[_KEY.pack(_CLOSED_PREFIX, partition)] = b"" if is_closed else None
        self._changed = set()
        self._changed_closed = set()
        return changes

    def load(self, state: Mapping[bytes, bytes]) -> None:
        """Load the state of a checkpoint."""
        for key, value in state.items():
            if key[:1] == _PREFIX:
                partition = PartitionId(_KEY.unpack_from(key)[1])
                self.by_key[partition, Group(key[_KEY.size :].decode())] = _decode(value)
            elif key[:1] == _CLOSED_PREFIX:
                self.closed.add(PartitionId(_KEY.unpack(key)[1]))


class LockTimes:
    """When each lock was last used. Not stored: after a restart all count as just used.

    Args:
        lock_ms: How long a lock lasts after its last use.
        now_ms: When the broker started, on the monotonic clock.
    """

    def __init__(self, lock_ms: int, now_ms: int) -> None:
        self.lock_ms = lock_ms
        self._began_ms = now_ms
        self._used_at_ms: dict[LockKey, int] = {}

    def renew(self, key: LockKey, now_ms: int) -> None:
        """Record a use of a lock."""
        self._used_at_ms[key] = now_ms

    def left_ms(self, key: LockKey, now_ms: int) -> int:
        """Return the remaining time of a lock; 0 if others may get it."""
        used_at_ms = self._used_at_ms.get(key, self._began_ms)
        return max(used_at_ms + self.lock_ms - now_ms, 0)


def _encode(lock: PullLock) -> bytes:
    holder = lock.holder.encode()
    head = _LOCK.pack(lock.token, lock.incarnation, lock.is_strict, lock.is_exclusive, len(holder))
    return head + holder


def _decode(value: bytes) -> PullLock:
    token, incarnation, is_strict, is_exclusive, size = _LOCK.unpack_from(value)
    holder = ConsumerId(value[_LOCK.size : _LOCK.size + size].decode())
    return PullLock(token, holder, incarnation, is_strict, is_exclusive)
