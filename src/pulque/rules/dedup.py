"""Producer deduplication: a batch that is sent again is stored once.

A producer numbers its batches per partition. ``Dedup`` remembers the last 64
numbers of each producer and partition, with the place of each batch. A number that is missing
among them was never stored (its send was refused) and may still arrive.
"""

from array import array
from collections.abc import Mapping
from struct import Struct

from pulque.errors import FencedError, InvalidRequestError
from pulque.model.batch import BatchHeader, Flag
from pulque.model.positions import ConsumeSequence, PartitionId

__all__ = ["WINDOW", "Dedup"]

WINDOW = 64
"""How many batches to remember per producer and partition."""
IDLE_MS = 600_000
"""How long to remember a producer without a name."""

MOST_PRODUCERS = 500_000
"""The most producers to remember, counted once for each partition that they send to."""

_ABSENT = -1
_KEY = Struct("<1sIQ")
_STATE = Struct("<IQq?")


class _ProducerWindow:
    """The last numbers of one producer in one partition."""

    __slots__ = ("base", "firsts", "incarnation", "is_named", "seen_at_ms")

    def __init__(self, incarnation: int, base: int, *, is_named: bool) -> None:
        self.incarnation = incarnation
        self.base = base
        self.firsts = array("q")
        """The first consume sequence of batches ``base..``; -1 if a batch is not stored."""
        self.is_named = is_named
        self.seen_at_ms = 0


class Dedup:
    """Remembers the batches of producers. Sees every stored batch, live and in replay."""

    def __init__(self) -> None:
        self._windows: dict[tuple[PartitionId, int], _ProducerWindow] = {}
        self._changed: set[tuple[PartitionId, int]] = set()

    def __len__(self) -> int:
        return len(self._windows)

    def find(self, partition: PartitionId, header: BatchHeader) -> ConsumeSequence | None:
        """Return where a batch is stored already, or None if it is new.

        Raises:
            FencedError: A newer incarnation of the producer is known.
            InvalidRequestError: The batch is older than what is remembered.
        """
        if not header.producer_id:
            return None
        window = self._windows.get((partition, header.producer_id))
        if window is None or header.incarnation > window.incarnation:
            return None
        if header.incarnation < window.incarnation:
            raise FencedError(
                f"the producer was started again (incarnation {window.incarnation}); "
                f"this is incarnation {header.incarnation} and must stop"
            )
        at = header.producer_sequence - window.base
        if at >= len(window.firsts):
            return None
        if at < 0:
            if window.is_named:
                # It sends in order, one after the other: what is older is stored somewhere.
                return ConsumeSequence(0)
            raise InvalidRequestError(
                f"batch {header.producer_sequence} is older than the last {WINDOW} batches of its "
                f"producer, which begin at {window.base}: whether it is stored is not known"
            )
        first = window.firsts[at]
        return None if first == _ABSENT else ConsumeSequence(first)

    def stored(
        self,
        partition: PartitionId,
        header: BatchHeader,
        first_sequence: ConsumeSequence,
        now_ms: int,
    ) -> None:
        """Record a stored batch."""
        if not header.producer_id:
            return
        key = (partition, header.producer_id)
        window = self._windows.get(key)
        sequence = header.producer_sequence
        if window is None or window.incarnation != header.incarnation:
            is_named = bool(header.flags & Flag.NAMED_PRODUCER)
            window = _ProducerWindow(
                header.incarnation, max(sequence - WINDOW + 1, 0), is_named=is_named
            )
            self._windows[key] = window
        firsts = window.firsts
        at = sequence - window.base
        if at == len(firsts):
            firsts.append(first_sequence)
        elif at > len(firsts):
            # What was skipped was refused or is on its way; what is too old to matter goes.
            firsts.extend([_ABSENT] * min(at - len(firsts), WINDOW))
            firsts.append(first_sequence)
            window.base = sequence - len(firsts) + 1
        elif at >= 0:
            firsts[at] = first_sequence
        if len(firsts) > WINDOW:
            surplus = len(firsts) - WINDOW
            del firsts[:surplus]
            window.base += surplus
        window.seen_at_ms = now_ms
        self._changed.add(key)

    def take_back(self, partition: PartitionId, header: BatchHeader) -> None:
        """Forget a batch whose write failed: the producer may send it again."""
        window = self._windows.get((partition, header.producer_id))
        if window is not None and window.incarnation == header.incarnation:
            at = header.producer_sequence - window.base
            if 0 <= at < len(window.firsts):
                window.firsts[at] = _ABSENT
                self._changed.add((partition, header.producer_id))

    def forget_idle(self, now_ms: int) -> None:
        """Forget producers without a name that were silent for ten minutes.

        If there are still too many, those that were silent longest are forgotten.
        """
        idle = [
            key
            for key, window in self._windows.items()
            if not window.is_named and now_ms - window.seen_at_ms > IDLE_MS
        ]
        for key in idle:
            self._forget(key)
        surplus = len(self._windows) - MOST_PRODUCERS
        if surplus > 0:
            by_age = sorted(self._windows, key=lambda key: self._windows[key].seen_at_ms)
            for key in by_age[:surplus]:
                self._forget(key)

    def _forget(self, key: tuple[PartitionId, int]) -> None:
        del self._windows[key]
        self._changed.add(key)

    def encode_changes(self) -> dict[bytes, bytes | None]:
        """Return the changes since the last call, for a checkpoint."""
        changes: dict[bytes, bytes | None] = {}
        for key in self._changed:
            window = self._windows.get(key)
            changes[_KEY.pack(b"d", *key)] = None if window is None else _encode(window)
        self._changed = set()
        return changes

    def load(self, state: Mapping[bytes, bytes]) -> None:
        """Load the state of a checkpoint."""
        for key, value in state.items():
            if key[:1] == b"d" and len(key) == _KEY.size:
                _, partition, producer_id = _KEY.unpack(key)
                self._windows[PartitionId(partition), producer_id] = _decode(value)


def _encode(window: _ProducerWindow) -> bytes:
    head = _STATE.pack(window.incarnation, window.base, window.seen_at_ms, window.is_named)
    return head + window.firsts.tobytes()


def _decode(value: bytes) -> _ProducerWindow:
    incarnation, base, seen_at_ms, is_named = _STATE.unpack_from(value)
    window = _ProducerWindow(incarnation, base, is_named=is_named)
    window.firsts.frombytes(value[_STATE.size :])
    window.seen_at_ms = seen_at_ms
    return window
