"""The files in which a consumer keeps what its broker may not know: acks and nacks.

``<slot>.settled`` holds the position in every partition, and what of it the broker has not
confirmed. It is replaced in one step, at most every quarter of a second, and not synced: what a
crash takes from it is handed out again. ``<slot>.nacks`` is the spool: a nack that the broker has
not confirmed within a second goes there, with its message, synced. Only then does the position go
beyond it, so that an ack never overtakes a nack.

Whatever is wrong with these files costs a warning and a safety net, never the consumer.
"""

import logging
import os
import threading
from collections.abc import Callable, Iterable
from pathlib import Path

from pulque.client.persistence.nack_spool import NackRefuge, Spool, SpooledNack, pack_one
from pulque.client.receiving.received_message import NACKED
from pulque.client.receiving.saved_positions import (
    Kept,
    KeptPosition,
    KeptRange,
    Progress,
    SavedPosition,
    decode_positions,
    encode_positions,
)
from pulque.errors import PulqueError
from pulque.model.names import ConsumerId, Group, PartitionName
from pulque.model.positions import Tenure

__all__ = ["LocalState"]

log = logging.getLogger("pulque.client")

SAVE_EVERY = 0.25
NACK_PATIENCE = 1.0
"""A nack that is not settled after so many seconds is spooled."""

_Delivery = tuple[PartitionName, Tenure, int]


class LocalState:
    """The files of one consumer, which has them for itself. Thread-safe.

    Args:
        stem: The files' path, without the ending.
        group: Whose deliveries these are.
        consumer: Whose, in the group.
        refuge: Where nacks go that the broker cannot be told, before the spool.
    """

    def __init__(
        self, stem: Path, group: Group, consumer: ConsumerId, refuge: NackRefuge | None = None
    ) -> None:
        self._path = stem.with_name(f"{stem.name}.settled")
        self._owner = {"group": str(group), "consumer": str(consumer)}
        self._spool = Spool(stem.with_name(f"{stem.name}.nacks"))
        self._refuges: tuple[NackRefuge, ...] = (
            (self._spool,) if refuge is None else (refuge, self._spool)
        )
        self._safe: set[_Delivery] = set()
        """Nacks that are in a refuge, and that the broker does not know of."""
        self._first_seen: dict[_Delivery, float] = {}
        """Since when nacks wait for the broker's answer."""
        self._saved = b""
        self._saved_at = 0.0
        self._is_broken = False
        self._lock = threading.Lock()
        self.on_adopted: Callable[[PartitionName, Tenure, int], None] | None = None
        """Told of nacks that another broker took over: partition, tenure, pull sequence."""

    def load(self) -> Kept:
        """Return what the last run kept."""
        positions: list[KeptPosition] = []
        nacks: list[SpooledNack] = []
        try:
            self._saved = self._path.read_bytes()
            positions = decode_positions(self._saved, self._owner)
        except FileNotFoundError:
            pass
        except (OSError, ValueError) as error:
            log.warning("kept positions ignored: file=%s error=%s", self._path, error)
        try:
            nacks = self._spool.read()
        except (OSError, ValueError, TypeError, KeyError) as error:
            log.warning("kept nacks ignored: file=%s error=%s", self._path, error)
        self._safe = {(each.partition, each.tenure, each.pull) for each in nacks}
        return Kept(_together(positions, nacks))

    def is_due(self, now: float) -> bool:
        """Whether it is time to save again."""
        return now - self._saved_at >= SAVE_EVERY

    def save(self, progress: list[Progress], now: float, *, is_last: bool = False) -> None:
        """Write down how far the consumer got.

        Args:
            progress: All partitions.
            now: The monotonic clock's.
            is_last: Whether the consumer ends: what the broker does not know by now is spooled.
        """
        with self._lock:
            if now < self._saved_at:
                return  # a thread that was late: what it knows is old
            self._saved_at = now
            try:
                self._forget_passed(progress)
                self._rescue(progress, now, 0.0 if is_last else NACK_PATIENCE)
                self._write([_position(each, self._safe) for each in progress], is_last=is_last)
                self._is_broken = False
            except OSError as error:
                if not self._is_broken:
                    log.warning("nothing is kept locally: file=%s error=%s", self._path, error)
                self._is_broken = True

    def _forget_passed(self, progress: list[Progress]) -> None:
        """Empty the spool once the broker knows of all nacks in it."""
        if not self._safe:
            return
        known = {each.partition: each for each in progress}
        for partition, tenure, pull in list(self._safe):
            if partition in known and known[partition].has_passed(tenure, pull):
                self._safe.discard((partition, tenure, pull))
        if not self._safe:
            self._spool.clear()

    def _rescue(self, progress: list[Progress], now: float, patience: float) -> None:
        """Take nacks to a refuge that have waited for the broker for too long."""
        waiting = {
            _delivery(found, index): (found, index)
            for each in progress
            for found in each.finished
            for index in _nacked(found)
        }
        self._first_seen = {key: self._first_seen.get(key, now) for key in waiting}
        wanted = [
            (key, *place)
            for key, place in waiting.items()
            if key not in self._safe and now - self._first_seen[key] >= patience
        ]
        keys, nacks = [], []
        for key, found, index in wanted:
            try:
                nacks.append(_spooled(found, index))
                keys.append(key)
            except PulqueError as error:
                log.warning("a nack cannot be kept: %s", error)
                break  # those after it are not safe either, as order is kept
        for refuge in self._refuges:
            done = refuge.put(nacks) if nacks else 0
            self._put_away(refuge, keys[:done])
            keys, nacks = keys[done:], nacks[done:]

    def _put_away(self, refuge: NackRefuge, keys: Iterable[_Delivery]) -> None:
        if not refuge.takes_over:
            self._safe.update(keys)
            return
        for key in keys:
            if self.on_adopted is not None:
                self.on_adopted(*key)

    def _write(self, positions: list[KeptPosition], *, is_last: bool) -> None:
        contents = encode_positions(self._owner, positions)
        if contents == self._saved or not positions:
            return
        temporary = self._path.with_name(f"{self._path.name}.tmp")
        file = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        try:
            with open(file, "wb", closefd=False) as stream:
                stream.write(contents)
            if is_last:
                os.fsync(file)
        finally:
            os.close(file)
        temporary.replace(self._path)
        self._saved = contents


def _position(each: Progress, safe: set[_Delivery]) -> KeptPosition:
    """Return how far the finished ones reach without leaving an unsafe nack behind."""
    position = each.settled
    ranges: list[KeptRange] = []
    finished = (kept for found in each.finished for kept in found.as_ranges())
    for kept in finished:
        unsafe = next(
            (
                nacked.sequence
                for nacked in kept.nacked
                if (each.partition, kept.tenure, nacked.sequence) not in safe
            ),
            None,
        )
        safe_part = kept if unsafe is None else kept.cut(unsafe)
        if safe_part.length:
            ranges.append(safe_part)
            position = safe_part.end_pull
        if unsafe is not None:
            break
    else:
        position = max(position, *(kept.end_pull for kept in each.kept), 0)
    return KeptPosition(each.partition, each.settled, position, (*ranges, *each.kept))


def _together(
    positions: Iterable[KeptPosition], nacks: Iterable[SpooledNack]
) -> Iterable[KeptPosition]:
    """Add the spooled nacks to the positions; one that is in both counts once."""
    found = {each.partition: each for each in positions}
    for nack in nacks:
        here = found.get(nack.partition) or KeptPosition(nack.partition, 0, 0, ())
        found[nack.partition] = KeptPosition(
            here.partition, here.settled, here.position, (*here.ranges, nack.as_range())
        )
    return found.values()


def _nacked(found: SavedPosition) -> Iterable[int]:
    at = found.batch.states.find(NACKED, found.start, found.end)
    while at >= 0:
        yield at
        at = found.batch.states.find(NACKED, at + 1, found.end)


def _delivery(found: SavedPosition, index: int) -> _Delivery:
    return found.batch.partition, found.batch.tenure, found.batch.pull_of(index)


def _spooled(found: SavedPosition, index: int) -> SpooledNack:
    batch = found.batch
    reason, delay_ms = batch.nacks[index]
    return SpooledNack(
        batch.partition,
        batch.tenure,
        batch.pull_of(index),
        batch.sequence_of(index),
        batch.stored_at_of(index),
        delay_ms,
        reason,
        pack_one(batch, index),
    )
