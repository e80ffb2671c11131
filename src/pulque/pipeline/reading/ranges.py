"""Which messages a read covers, and how they are dealt to tasks.

A range is ``first..end`` of one partition, in consume sequences. An offset of a stream is the next
sequence of each partition; the messages between two offsets are always the same.
"""

import logging
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from pulque.errors import PulqueError, UnknownSubjectError
from pulque.model.names import PartitionName
from pulque.pipeline.brokers import split_held
from pulque.pipeline.options import At, Place

__all__ = [
    "Bounds",
    "DataLossError",
    "Range",
    "Split",
    "advance",
    "check_not_shorter",
    "resolve",
    "split",
    "unknown_subject",
    "whole_range",
]

Offsets = Mapping[str, int]

_log = logging.getLogger("pulque.pipeline")


class DataLossError(PulqueError):
    """Messages that were to be read are not stored any more."""


def unknown_subject(subject: str) -> UnknownSubjectError:
    """Return the error of a read that names a subject which does not exist."""
    return UnknownSubjectError(
        f"there is no subject {subject}: nothing was ever sent to it; check its name, or read "
        "with failOnDataLoss=false, which gives no rows for it"
    )


class Bounds(NamedTuple):
    """Where a partition begins and ends."""

    start: int
    end: int


class Range(NamedTuple):
    """Messages of one partition."""

    partition: PartitionName
    """Of a cluster, as ``pulque.pipeline.brokers`` names it."""
    first: int
    end: int

    @property
    def length(self) -> int:
        """How many."""
        return self.end - self.first


@dataclass(frozen=True, slots=True)
class Split:
    """What one task reads."""

    ranges: tuple[Range, ...]


def resolve(at: At, partition: PartitionName, bounds: Bounds, at_time: int | None) -> int:
    """Return the sequence that a place means in one partition.

    Args:
        at: The place.
        partition: Where.
        bounds: What is stored.
        at_time: The first message of the place's instant, if it has one.
    """
    match at.place:
        case Place.EARLIEST:
            return bounds.start
        case Place.LATEST:
            return bounds.end
        case Place.TIME:
            return bounds.end if at_time is None else at_time
        case Place.SEQUENCES:
            # A partition that is not named begins at its start, as one that comes later does.
            given = at.sequences or {}
            sequence = given.get(partition, given.get(split_held(partition)[1], -2))
            if sequence < 0:
                return bounds.start if sequence == -2 else bounds.end
            return sequence


def whole_range(wanted: Range, bounds: Bounds, *, must_be_whole: bool) -> Range:
    """Return the part of a range that is stored; log what is missing.

    Raises:
        DataLossError: Some of it is gone, and it must be whole.
    """
    first, end = max(wanted.first, bounds.start), min(wanted.end, bounds.end)
    if first > wanted.first or end < wanted.end:
        found = (
            f"messages {wanted.first} to {wanted.end} of {wanted.partition} were to be read, and "
            f"{bounds.start} to {bounds.end} are stored: retention removed some, or it is another "
            "broker"
        )
        if must_be_whole:
            raise DataLossError(
                f"{found}; with failOnDataLoss=false the read goes on with what there is"
            )
        _log.warning("%s; the read goes on with what there is", found)
    return Range(wanted.partition, first, max(first, end))


def check_not_shorter(start: Offsets, ends: Offsets) -> None:
    """Refuse to go on where messages were read that are not stored any more.

    Raises:
        DataLossError: A partition ends before what was read: it is another one of that name.
    """
    for name, end in ends.items():
        if end < start.get(name, 0):
            raise DataLossError(
                f"{name} was read up to {start[name]} and ends at {end} now: it vanished, or this "
                "is another broker; with failOnDataLoss=false the read begins anew there"
            )


def split(ranges: Iterable[Range], *, least: int, most_rows: int) -> list[Split]:
    """Deal ranges to tasks of about the same size, at least so many if there are enough rows."""
    present = [each for each in ranges if each.length > 0]
    total = sum(each.length for each in present)
    if not total:
        return []
    size = max(1, min(most_rows, -(-total // least)))
    splits: list[Split] = []
    current: list[Range] = []
    room = size
    for each in present:
        first = each.first
        while first < each.end:
            end = min(each.end, first + room)
            current.append(Range(each.partition, first, end))
            room -= end - first
            first = end
            if not room:
                splits.append(Split(tuple(current)))
                current, room = [], size
    if current:
        splits.append(Split(tuple(current)))
    return splits


def advance(start: Offsets, ends: Offsets, most_rows: int | None) -> dict[str, int]:
    """Return how far a trigger reads: to the ends, or a fair share of each within the limit.

    Every partition that has messages moves, so that none starves.
    """
    waiting = {name: max(end - start.get(name, 0), 0) for name, end in ends.items()}
    total = sum(waiting.values())
    if most_rows is None or total <= most_rows:
        return {name: max(end, start.get(name, 0)) for name, end in ends.items()}
    moved = {}
    for name, count in waiting.items():
        share = max(1, most_rows * count // total) if count else 0
        moved[name] = start.get(name, 0) + min(share, count)
    return moved
