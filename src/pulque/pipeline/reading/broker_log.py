"""Reading running brokers: partitions, positions, messages. No group, no effect on anybody."""

import logging
import time
from collections.abc import Iterator, Sequence
from types import TracebackType
from typing import Self

from pulque.client.routing.targets import HOME, route_of
from pulque.errors import RemoteProtocolError, UnknownSubjectError
from pulque.model.names import EVERYTHING, PartitionName, owner_of, subject_of
from pulque.model.routes import RouteKind
from pulque.pipeline.brokers import BrokersOfUrl, held_name, split_held
from pulque.pipeline.options import At, Place, Selection
from pulque.pipeline.reading.batch_collector import Placer, place_served
from pulque.pipeline.reading.batch_decoder import BatchPlace
from pulque.pipeline.reading.ranges import (
    Bounds,
    DataLossError,
    Range,
    Split,
    split,
    unknown_subject,
)
from pulque.wire.requests import NO_TIME, Positions, Read, Route
from pulque.wire.responses import Located, ReadBack, Response

__all__ = ["LiveLog"]

_TIMEOUT_S = 30.0
_BYTES_AT_ONCE = 4 * 1024 * 1024
_ROWS_AT_ONCE = 65_536
"""A batch of Arrow: large enough to be quick, small enough for any task's memory."""
_GROUP = "pipeline"
_LOOK_AGAIN_S = 0.2
_log = logging.getLogger("pulque.pipeline")


class LiveLog:
    """The message log of a broker, or those of all brokers of a cluster, over the network.

    Partitions of a cluster go by the names of ``held_name``.

    Args:
        url: Where a broker or meta servers listen; else ``$PULQUE_URL``, else this machine.
        timeout_s: How long a broker may be away, restarting for one, before a read fails.
    """

    def __init__(self, url: str | None, *, timeout_s: float = _TIMEOUT_S) -> None:
        self._timeout_s = timeout_s
        self._brokers = BrokersOfUrl(url, timeout_s=timeout_s)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close all connections."""
        self._brokers.close()

    def partitions(
        self, selection: Selection, *, must_be_whole: bool = False
    ) -> list[PartitionName]:
        """Return the partitions that a selection covers now, in order.

        Args:
            selection: Which ones are wanted.
            must_be_whole: Whether a broker that is away, since when ever, is missed.

        Raises:
            UnavailableError: One is away, and all must be there.
        """
        if selection.partitions:
            held = (self._held(name, must_be_whole) for name in selection.partitions)
            return sorted({each for some in held for each in some})
        if selection.expression is not None:
            everything = self._route(EVERYTHING, must_be_whole)
            return sorted(filter(selection.covers, everything))
        routes = (self._route(subject, must_be_whole) for subject in selection.subjects)
        return sorted({each for some in routes for each in some})

    def check_whole(self, selection: Selection) -> None:
        """Wait until all brokers are there that have messages of a selection.

        Whoever is away has messages of its own, and nobody else can tell which.

        Raises:
            DataLossError: One is away for too long.
        """
        deadline = time.monotonic() + self._timeout_s
        for subject, place in _asked(selection):
            while away := self._away(subject, place):
                if time.monotonic() > deadline:
                    raise DataLossError(
                        f"{_is_away(away, subject)}; "
                        "with failOnDataLoss=false the read goes on with those that are there"
                    )
                time.sleep(_LOOK_AGAIN_S)

    def missing(self, selection: Selection) -> Iterator[str]:
        """Yield what a read does without that goes on with what is there."""
        for subject, place in _asked(selection):
            if away := self._away(subject, place):
                yield _is_away(away, subject)
        for subject in selection.named_subjects():
            if not self._exists(subject):
                yield f"there is no subject {subject}"

    def _away(self, subject: str, place: str) -> list[str]:
        """Return the broker groups that nobody reaches now; of a place, only itself."""
        placed = self._brokers.placed(subject) or ()
        groups = sorted({each.broker_group for each in placed if not each.host})
        return [group for group in groups if place in {HOME, group}]

    def check_known(self, selection: Selection) -> None:
        """Refuse subjects, also of assigned partitions, that do not exist.

        Raises:
            UnknownSubjectError: One does not.
        """
        for subject in selection.named_subjects():
            if not self._exists(subject):
                raise unknown_subject(subject)

    def _exists(self, subject: str) -> bool:
        placed = self._brokers.placed(subject)
        if placed is not None:
            return bool(placed)
        return any(map(self._has, self._route(subject)))

    def _has(self, partition: PartitionName) -> bool:
        try:
            self._locate(partition, NO_TIME)
        except UnknownSubjectError:
            return False
        return True

    def _held(self, name: PartitionName, must_be_whole: bool) -> list[PartitionName]:  # noqa: FBT001
        """Return the partitions that are meant: one of a broker, or of all that have it."""
        place, partition = split_held(name)
        if place:
            return [name]
        places = self._brokers.places(EVERYTHING, with_absent=must_be_whole)
        return [held_name(each, partition) for each in places]

    def bounds(self, partition: PartitionName) -> Bounds:
        """Return where a partition begins and ends; one that was never sent to has nothing."""
        try:
            found = self._locate(partition, NO_TIME)
        except UnknownSubjectError:
            return Bounds(0, 0)
        return Bounds(found.start, found.end)

    def at_time(self, partition: PartitionName, at: At) -> int | None:
        """Return the first message of a place's instant, if it has one."""
        if at.place is not Place.TIME:
            return None
        try:
            return self._locate(partition, at.at_ms).at
        except UnknownSubjectError:
            return None

    def refresh(self) -> None:
        """There is nothing to refresh: the broker is asked every time."""

    def plan(
        self, ranges: Sequence[Range], *, least: int, most_rows: int, must_be_whole: bool
    ) -> list[Split]:
        """Deal the messages of ranges to tasks. Whether all are there is seen when they read."""
        del must_be_whole
        return split(ranges, least=least, most_rows=most_rows)

    def read(self, ranges: Sequence[Range], *, must_be_whole: bool) -> Iterator[BatchPlace]:
        """Yield the messages of ranges, some at a time.

        Raises:
            DataLossError: Some are not stored any more, and they must all be there.
        """
        placer = Placer()
        for each in ranges:
            at = each.first
            partition = split_held(each.partition)[1]
            while at < each.end:
                answer, records = self._read(each.partition, Range(partition, at, each.end))
                if answer.first_sequence > at or not answer.count:
                    found = (
                        f"message {at} of {each.partition} is not stored any more, or damaged; "
                        f"the oldest is {answer.start}"
                    )
                    _miss(found, must_be_whole=must_be_whole)
                if not answer.count:
                    break
                at = max(answer.first_sequence, at)
                after = answer.first_sequence + answer.count
                wanted = Range(partition, at, min(after, each.end))
                placed = yield from place_served(
                    placer, records, wanted, source=each.partition, most_bytes=_BYTES_AT_ONCE
                )
                missing = wanted.length - placed
                if missing > 0:
                    found = (
                        f"{missing} of the messages {wanted.first} to {wanted.end} of "
                        f"{each.partition} are damaged on their broker"
                    )
                    _miss(found, must_be_whole=must_be_whole)
                at = after
                if placer.messages >= _ROWS_AT_ONCE:
                    yield placer.take()
        if not placer.is_empty:
            yield placer.take()

    def _route(self, subject: str, must_be_whole: bool = False) -> list[PartitionName]:  # noqa: FBT001, FBT002
        """Return the partitions of a subject or pattern that belong to nobody."""
        # Only who consumes may ask for a pattern; the group's own partitions are left out below.
        request = Route(subject, _GROUP, RouteKind.LOCAL)
        return [
            held_name(place, each.partition)
            for place in self._brokers.places(subject, with_absent=must_be_whole)
            for each in self._brokers.at(place).ask(request, self._timeout_s, route_of).partitions
            if owner_of(each.partition) is None
        ]

    def _locate(self, name: PartitionName, at_ms: int) -> Located:
        def convert(answer: Response) -> Located:
            if not isinstance(answer, Located):
                raise RemoteProtocolError(f"a request for positions got {answer!r}")
            return answer

        place, partition = split_held(name)
        request = Positions(partition, at_ms)
        return self._brokers.at(place).ask(request, self._timeout_s, convert)

    def _read(self, name: PartitionName, wanted: Range) -> tuple[ReadBack, bytes]:
        """Return an answer, and a copy of its records: they are the connection's own."""

        def convert(answer: Response) -> tuple[ReadBack, bytes]:
            if not isinstance(answer, ReadBack) or isinstance(answer.records, tuple):
                raise RemoteProtocolError(f"a read got {answer!r}")
            return answer, bytes(answer.records)

        most = min(wanted.length, _ROWS_AT_ONCE)
        request = Read(wanted.partition, wanted.first, most, _BYTES_AT_ONCE, 0)
        return self._brokers.at(split_held(name)[0]).ask(request, self._timeout_s, convert)


def _is_away(broker_groups: Sequence[str], subject: str) -> str:
    return f"broker group {', '.join(broker_groups)} has messages of {subject} and is away"


def _asked(selection: Selection) -> list[tuple[str, str]]:
    """Return the subjects and patterns of a selection, each with the only place that is meant."""
    if selection.expression is not None:
        return [(EVERYTHING, HOME)]
    held = map(split_held, selection.partitions)
    named = {(subject_of(partition), place) for place, partition in held}
    return sorted({*named, *((subject, HOME) for subject in selection.subjects)})


def _miss(found: str, *, must_be_whole: bool) -> None:
    """Log what a read goes without.

    Raises:
        DataLossError: It must have all.
    """
    if must_be_whole:
        raise DataLossError(f"{found}; with failOnDataLoss=false the read goes on without")
    _log.warning("%s; the read goes on without", found)
