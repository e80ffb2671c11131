"""The options of the data source, in the manner of Spark's Kafka source.

Spark hands options over as text. They are checked here, once, before anything is asked of a
broker: an option that nobody knows is refused, as it is a typing error that would go unnoticed.
"""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any, NoReturn, cast

from pulque.client.options.client_options import AcksName, acks_of
from pulque.errors import UsageError
from pulque.model.names import (
    PartitionName,
    is_pattern,
    owner_of,
    parse_group,
    parse_partition,
    parse_pattern,
    parse_subject,
    patterns_of,
    subject_of,
)
from pulque.pipeline.brokers import held_name, split_held
from pulque.pipeline.columns import ALL_COLUMNS, schema_of

__all__ = ["At", "Place", "ReadOptions", "Selection", "WriteOptions"]

_READ = (
    "url",
    "path",
    "subscribe",
    "subscribePattern",
    "assign",
    "startingOffsets",
    "startingTimestamp",
    "endingOffsets",
    "endingTimestamp",
    "maxOffsetsPerTrigger",
    "minPartitions",
    "rowsPerPartition",
    "failOnDataLoss",
    "includeHeaders",
    "columns",
)
_WRITE = ("url", "subject", "acks", "maxBatch", "staging", "checkpointLocation", "path")
_WAYS = ("subscribe", "subscribePattern", "assign")
_EARLIEST, _LATEST = -2, -1
"""In JSON, for one partition, as Kafka's source has it."""
_MOST = 2**63 - 1


class Place(Enum):
    """Where to begin or to end."""

    EARLIEST = "earliest"
    LATEST = "latest"
    SEQUENCES = "sequences"
    TIME = "time"


@dataclass(frozen=True, slots=True)
class At:
    """A place in every partition."""

    place: Place
    at_ms: int = 0
    """For ``TIME``: the first message stored then or later."""
    sequences: Mapping[PartitionName, int] | None = None
    """For ``SEQUENCES``: by partition; -2 is the earliest, -1 the latest."""


@dataclass(frozen=True, slots=True)
class Selection:
    """Which partitions are read; exactly one of these is given."""

    subjects: tuple[str, ...] = ()
    """Subjects and prefix patterns such as ``order.*``."""
    expression: "re.Pattern[str] | None" = None
    """Subjects whose whole name it matches."""
    partitions: tuple[PartitionName, ...] = ()

    def covers(self, name: PartitionName) -> bool:
        """Return whether a partition is read; without a broker's name, that of any broker."""
        place, partition = split_held(name)
        for each in self.partitions:
            assigned_place, assigned = split_held(each)
            if partition == assigned and (
                not place or not assigned_place or place == assigned_place
            ):
                return True
        if owner_of(partition) is not None:
            return False  # what groups own must be assigned
        subject = subject_of(partition)
        if self.expression is not None:
            return self.expression.fullmatch(subject) is not None
        return any(pattern in self.subjects for pattern in patterns_of(subject))

    def named_subjects(self) -> tuple[str, ...]:
        """Return the subjects that must exist; a pattern may cover none."""
        assigned = (subject_of(split_held(each)[1]) for each in self.partitions)
        given = (each for each in self.subjects if not is_pattern(each))
        return tuple(dict.fromkeys([*given, *assigned]))


@dataclass(frozen=True, slots=True)
class ReadOptions:
    """What a read was told."""

    url: str | None
    path: str | None
    selection: Selection
    starting: At
    ending: At
    max_rows: int | None
    """Per trigger of a stream."""
    min_partitions: int
    rows_per_partition: int
    must_be_whole: bool
    """Whether messages that retention removed fail the read."""
    columns: tuple[str, ...]

    @classmethod
    def parse(cls, options: Mapping[str, str], *, is_stream: bool = False) -> "ReadOptions":
        """Check what Spark was told.

        Raises:
            UsageError: Something is unknown, contradicts itself, or cannot be.
        """
        given = _known(options, _READ, "read")
        if given.get("url") and given.get("path"):
            raise UsageError("both url and path are given: a live broker, or files, not both")
        if is_stream:
            _refuse_endings(given)
        default = Place.LATEST if is_stream else Place.EARLIEST
        starting = _at(given, "starting", At(default))
        ending = _at(given, "ending", At(Place.LATEST))
        if ending.place is Place.EARLIEST:
            raise UsageError("endingOffsets is 'earliest': nothing would be read")
        for name, sequence in (ending.sequences or {}).items():
            if sequence == _EARLIEST:
                raise UsageError(
                    f"endingOffsets has -2, the earliest, for {name!r}: nothing would be read"
                )
        has_headers = _flag(given, "includeHeaders", default=False)
        selection = _selection(given)
        told = next(f"{way} is {given[way]!r}" for way in _WAYS if given.get(way))
        _check_selected("startingOffsets", starting, selection, told)
        _check_selected("endingOffsets", ending, selection, told)
        return cls(
            url=given.get("url"),
            path=given.get("path"),
            selection=selection,
            starting=starting,
            ending=ending,
            max_rows=_count(given, "maxOffsetsPerTrigger"),
            min_partitions=_count(given, "minPartitions") or 1,
            rows_per_partition=_count(given, "rowsPerPartition") or 1_000_000,
            must_be_whole=_flag(given, "failOnDataLoss", default=True),
            columns=_columns(given, has_headers=has_headers),
        )


@dataclass(frozen=True, slots=True)
class WriteOptions:
    """What a write was told."""

    url: str | None
    subject: str | None
    """Where rows go that have no subject of their own; it wins over a column."""
    acks: AcksName
    max_batch: int
    staging: str | None
    """Where the tasks of a streaming write leave their batches for the driver."""

    @classmethod
    def parse(cls, options: Mapping[str, str]) -> "WriteOptions":
        """Check what Spark was told.

        Raises:
            UsageError: Something is unknown, or cannot be.
        """
        given = _known(options, _WRITE, "write")
        subject = given.get("subject")
        acks = given.get("acks", "disk")
        acks_of(acks)
        return cls(
            url=given.get("url"),
            subject=None if subject is None else parse_subject(subject),
            acks=cast("AcksName", acks),
            max_batch=min(_count(given, "maxBatch") or 1000, 10_000),
            staging=_staging(given.get("staging")),
        )


def _staging(text: str | None) -> str | None:
    """Check where a streaming write stages its batches."""
    if text is None:
        return None
    path = text.removeprefix("file://")
    if not path.startswith("/"):
        raise UsageError(
            f"staging is {text!r}; an absolute path of a local or mounted directory is allowed, "
            "such as /shared/query.staging: the driver and its workers write files there and "
            "sync them, and each has a working directory of its own"
        )
    return path


def _known(options: Mapping[str, str], names: tuple[str, ...], verb: str) -> dict[str, str]:
    by_lower = {name.lower(): name for name in names}
    given = {}
    for name, value in options.items():
        if name.lower() not in by_lower:
            raise UsageError(f"no option {name!r} to {verb}; there are {', '.join(names)}")
        given[by_lower[name.lower()]] = value
    return given


def _refuse_endings(given: Mapping[str, str]) -> None:
    for name in ("endingOffsets", "endingTimestamp"):
        if name in given:
            raise UsageError(f"{name} is for batch reads; a stream has no end")


def _selection(given: Mapping[str, str]) -> Selection:
    ways = [name for name in _WAYS if given.get(name)]
    if len(ways) != 1:
        found = " and ".join(ways) or "none of them"
        raise UsageError(
            f"exactly one of subscribe, subscribePattern and assign is needed; found {found}"
        )
    value = given[ways[0]]
    if ways[0] == "subscribe":
        return Selection(subjects=tuple(map(parse_pattern, _listed(ways[0], value))))
    if ways[0] == "assign":
        return Selection(partitions=tuple(map(_partition, _listed(ways[0], value))))
    try:
        return Selection(expression=re.compile(value))
    except re.error as problem:
        raise UsageError(
            f"subscribePattern {value!r} is not a regular expression: {problem}"
        ) from None


def _check_selected(option: str, at: At, selection: Selection, told: str) -> None:
    """Refuse places in partitions that are not read: nobody would notice the typing error."""
    for name in at.sequences or ():
        if not selection.covers(name):
            raise UsageError(
                f"{option} names {name!r}, which is not read: {told}; only partitions that this "
                "covers are allowed"
            )


def _partition(text: str) -> PartitionName:
    """Check a partition's name; that of a broker of a cluster is ``broker-1/orders``."""
    place, partition = split_held(text)
    return held_name(parse_group(place) if place else "", parse_partition(partition))


def _listed(option: str, text: str) -> list[str]:
    found = [name.strip() for name in text.split(",") if name.strip()]
    if not found:
        raise UsageError(f"{option} is {text!r}; at least one name is needed")
    return found


def _at(given: Mapping[str, str], which: str, default: At) -> At:
    """Return a place; a time wins over offsets, as in Kafka's source."""
    time, offsets = given.get(f"{which}Timestamp"), given.get(f"{which}Offsets")
    if time is not None:
        return At(Place.TIME, at_ms=_integer(f"{which}Timestamp", time, least=0))
    if offsets is None:
        return default
    if offsets in {"earliest", "latest"}:
        return At(Place(offsets))
    return At(Place.SEQUENCES, sequences=_sequences(f"{which}Offsets", offsets))


def _sequences(name: str, text: str) -> dict[PartitionName, int]:
    try:
        found: Any = json.loads(text)
    except ValueError:
        _refuse_offsets(name, text)
    if not isinstance(found, dict):
        _refuse_offsets(name, text)
    sequences = {}
    for partition, sequence in found.items():
        is_whole = isinstance(sequence, int) and not isinstance(sequence, bool)
        if not is_whole or not _EARLIEST <= sequence <= _MOST:
            _refuse_offsets(name, text)
        sequences[_partition(partition)] = sequence
    return sequences


def _refuse_offsets(name: str, text: str) -> NoReturn:
    raise UsageError(
        f"{name} is {text!r}; 'earliest', 'latest', or JSON such as "
        '{"orders": 1200, "orders#p7": -2} is allowed, where -2 is the earliest, -1 the latest'
    )


def _columns(given: Mapping[str, str], *, has_headers: bool) -> tuple[str, ...]:
    if given.get("columns"):
        wanted = tuple(_listed("columns", given["columns"]))
        schema_of(wanted)
        return wanted
    return tuple(name for name in ALL_COLUMNS if has_headers or name != "headers")


def _count(given: Mapping[str, str], name: str) -> int | None:
    return _integer(name, given[name], least=1) if given.get(name) else None


def _integer(name: str, text: str, *, least: int) -> int:
    try:
        value = int(text)
    except ValueError:
        value = least - 1
    if not least <= value <= _MOST:
        raise UsageError(
            f"{name} is {text!r}; a whole number of at least {least}, below 2**63, is allowed"
        )
    return value


def _flag(given: Mapping[str, str], name: str, *, default: bool) -> bool:
    text = given.get(name)
    if text is None:
        return default
    if text.lower() not in {"true", "false"}:
        raise UsageError(f"{name} is {text!r}; 'true' and 'false' are allowed")
    return text.lower() == "true"
