"""What a consumer is done with and its broker may not know: kept over a restart. No I/O.

A settle that found no broker is kept as *ranges*, the finished deliveries of one batch each.
After a restart the broker delivers again what it takes to be held; what a range says is finished
is settled then, not handed out. A range is known by more than its pull sequences: the tenure, the
place in the partition and the store time have to be the same. So a range can never be taken for
a delivery of another broker, or of one that lost its last second.
"""

import json
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import google_crc32c

from pulque.client.receiving.received_message import ACKED, NACKED, DeliveryGap, ReceivedBatch
from pulque.model.names import PartitionName
from pulque.model.positions import Epoch, StartCount, Tenure
from pulque.wire.requests import Nacked

__all__ = [
    "Kept",
    "KeptPosition",
    "KeptRange",
    "Progress",
    "SavedPosition",
    "decode_positions",
    "encode_positions",
    "finish",
    "finished_of",
]

VERSION = 1
_MOST_RANGES = 5000
"""Of one partition in a file; what comes after them is handed out again."""


class KeptRange(NamedTuple):
    """Finished deliveries of one batch."""

    tenure: Tenure
    first_pull: int
    length: int
    first_sequence: int
    """The consume sequence of the first of them."""
    stored_at_ms: int
    nacked: tuple[Nacked, ...] = ()
    """Those that are to be delivered again; the others are acked."""

    @property
    def end_pull(self) -> int:
        """The pull sequence after the last of them."""
        return self.first_pull + self.length

    def cut(self, end_pull: int) -> "KeptRange":
        """Return the part before a pull sequence."""
        return self._replace(
            length=end_pull - self.first_pull,
            nacked=tuple(each for each in self.nacked if each.sequence < end_pull),
        )


@dataclass(frozen=True, slots=True)
class KeptPosition:
    """How far a consumer got in one partition."""

    partition: PartitionName
    settled: int
    """The broker knows of all deliveries before this one."""
    position: int
    """All deliveries before this one are finished, and their nacks are safe."""
    ranges: tuple[KeptRange, ...]
    """What lies between the two."""


class SavedPosition(NamedTuple):
    """Messages ``start..end`` of a batch: finished, and not known to be settled."""

    batch: ReceivedBatch
    start: int
    end: int

    def as_ranges(self) -> Iterator[KeptRange]:
        """Yield what identifies them: a range for each instant at which some were stored."""
        times, start = self.batch.stored_times, self.start
        for at in range(self.start + 1, self.end) if times is not None else ():
            if times is not None and times[at] != times[start]:
                yield self._as_range(start, at)
                start = at
        yield self._as_range(start, self.end)

    def _as_range(self, start: int, end: int) -> KeptRange:
        batch, first = self.batch, self.batch.pull_of(start)
        nacked = []
        at = batch.states.find(NACKED, start, end)
        while at >= 0:
            reason, delay_ms = batch.nacks[at]
            nacked.append(Nacked(batch.pull_of(at), delay_ms, reason))
            at = batch.states.find(NACKED, at + 1, end)
        return KeptRange(
            batch.tenure,
            first,
            batch.pull_until(end) - first,
            batch.sequence_of(start),
            batch.stored_at_of(start),
            tuple(nacked),
        )


@dataclass(frozen=True, slots=True)
class Progress:
    """Where a consumer stands in one partition, at one moment."""

    partition: PartitionName
    settled: int
    expected: int
    finished: tuple[SavedPosition, ...]
    held: tuple[tuple[Tenure, int, int], ...]
    """All deliveries that are held: tenure, first pull sequence, end."""
    kept: tuple[KeptRange, ...]
    """What was finished before a restart, and has not been delivered again so far."""

    def has_passed(self, tenure: Tenure, pull: int) -> bool:
        """Whether a delivery is settled, or was given to others, for all the broker says."""
        if pull < self.settled:
            return True
        is_held = any(held == tenure and first <= pull < end for held, first, end in self.held)
        return pull < self.expected and not is_held


def finished_of(held: Iterable[ReceivedBatch | DeliveryGap]) -> Iterator[SavedPosition]:
    """Yield what is finished and not settled, up to the first message that is not."""
    for batch in held:
        until = batch.finished_until()
        if isinstance(batch, ReceivedBatch) and until > batch.settled:
            yield SavedPosition(batch, batch.settled, until)
        if until < batch.end:
            return


class Kept:
    """What was kept, until the broker has been told of it."""

    def __init__(self, positions: Iterable[KeptPosition] = ()) -> None:
        self._positions = {each.partition: each for each in positions if each.ranges}

    def __bool__(self) -> bool:
        return bool(self._positions)

    def remaining(self, partition: PartitionName, expected: int) -> tuple[KeptRange, ...]:
        """Return what of a partition has not been delivered again before ``expected``."""
        found = self._positions.get(partition)
        if found is None:
            return ()
        return tuple(each for each in found.ranges if each.end_pull > expected)

    def unheard_of(self, known: Collection[PartitionName]) -> Iterator[Progress]:
        """Yield the partitions that the broker has told nothing of so far."""
        for partition, each in self._positions.items():
            if partition not in known:
                yield Progress(partition, each.settled, each.settled, (), (), each.ranges)

    def compare(self, partition: PartitionName, settled: int) -> None:
        """Take in where the broker sees this consumer.

        It was set back, if that is before what it knew once: what was finished is wanted again.
        """
        found = self._positions.get(partition)
        if found is not None and settled < found.settled:
            del self._positions[partition]
        self.pass_over(partition, settled)

    def pass_over(self, partition: PartitionName, pull: int) -> None:
        """Forget a partition if all that was kept lies before a pull sequence."""
        found = self._positions.get(partition)
        if found is not None and all(each.end_pull <= pull for each in found.ranges):
            del self._positions[partition]

    def windows(self, batch: ReceivedBatch) -> Iterator[tuple[int, int, KeptRange | None]]:
        """Divide what was delivered of a batch; yield start, end, and the range it is in."""
        at = batch.start
        for start, end, found in sorted(self._matches(batch), key=lambda match: match[0]):
            if at < start:
                yield at, start, None
            if at < end:
                yield max(at, start), end, found
                at = end
        if at < batch.end:
            yield at, batch.end, None

    def _matches(self, batch: ReceivedBatch) -> Iterator[tuple[int, int, KeptRange]]:
        position = self._positions.get(batch.partition)
        for each in position.ranges if position is not None else ():
            start = max(batch.index_at(each.first_pull), batch.start)
            end = min(batch.index_at(each.end_pull), batch.end)
            is_same = (
                each.tenure == batch.tenure
                and _is_stored_at(batch, start, end, each.stored_at_ms)
                and each.first_sequence - each.first_pull == batch.first_sequence - batch.pull_base
            )
            if is_same and start < end:
                yield start, end, each


def _is_stored_at(batch: ReceivedBatch, start: int, end: int, at_ms: int) -> bool:
    if batch.stored_times is None:
        return batch.stored_at_ms == at_ms
    return all(each == at_ms for each in batch.stored_times[start:end])


def finish(batch: ReceivedBatch, found: KeptRange) -> None:
    """Give the messages of a batch the states that they had before the restart."""
    batch.states[batch.start : batch.end] = bytes([ACKED]) * (batch.end - batch.start)
    for nacked in found.nacked:
        index = batch.index_at(nacked.sequence)
        if batch.start <= index < batch.end and batch.pull_of(index) == nacked.sequence:
            batch.nacks[index] = nacked.reason, nacked.delay_ms
            batch.states[index] = NACKED


# ── the file ───────────────────────────────────────────────────────────────────────────────


def encode_positions(owner: Mapping[str, str], positions: Iterable[KeptPosition]) -> bytes:
    """Return the contents of a file: a line with a crc, a line of JSON that it covers."""
    told = {
        each.partition: {
            "settled": each.settled,
            "position": each.position,
            "ranges": [_told(found) for found in each.ranges[:_MOST_RANGES]],
        }
        for each in positions
    }
    text = json.dumps({"version": VERSION, **owner, "partitions": told}, separators=(",", ":"))
    data = text.encode()
    return b"%08x\n%s\n" % (google_crc32c.value(data), data)


def decode_positions(contents: bytes, owner: Mapping[str, str]) -> list[KeptPosition]:
    """Return what a file holds.

    Raises:
        ValueError: It is damaged, of another version, or another consumer's.
    """
    crc, _, data = contents.removesuffix(b"\n").partition(b"\n")
    if crc != b"%08x" % google_crc32c.value(data):
        raise ValueError("the crc does not match")
    found = json.loads(data)
    if found["version"] != VERSION:
        raise ValueError(f"version {found['version']} is unknown; this is {VERSION}")
    if any(found[name] != value for name, value in owner.items()):
        raise ValueError(f"it belongs to {found['consumer']} of {found['group']}")
    try:
        return [
            KeptPosition(
                PartitionName(name),
                each["settled"],
                each["position"],
                tuple(map(_heard, each["ranges"])),
            )
            for name, each in found["partitions"].items()
        ]
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{type(error).__name__}: {error}") from None


def _told(found: KeptRange) -> list[object]:
    nacked = [[each.sequence, each.delay_ms, each.reason] for each in found.nacked]
    return [*found.tenure, *found[1:5], nacked]


def _heard(told: list[object]) -> KeptRange:
    *numbers, nacked = told
    epoch, start, pull, length, sequence, stored = (_number(each) for each in numbers)
    assert isinstance(nacked, list)  # noqa: S101  # the crc says that we wrote it
    return KeptRange(
        Tenure(Epoch(epoch), StartCount(start)),
        pull,
        length,
        sequence,
        stored,
        tuple(Nacked(*each) for each in nacked),
    )


def _number(value: object) -> int:
    if type(value) is not int:
        raise TypeError(f"{value!r} is no number")
    return value
