"""Reading running brokers: partitions, positions, messages. No group, no effect on anybody."""

import time
from collections.abc import Iterable, Iterator, Sequence
from types import TracebackType
from typing import Self

from pulque.client.routes import route_of
from pulque.errors import RemoteProtocolError, UnknownSubjectError
from pulque.model.names import EVERYTHING, PartitionName, owner_of, subject_of
from pulque.model.routes import SLOTS, RouteKind
from pulque.pipeline.brokers import BrokersOfUrl, held_name, split_held
from pulque.pipeline.decode import Placed
from pulque.pipeline.options import At, Place, Selection
from pulque.pipeline.placing import Placer, place_served
from pulque.pipeline.ranges import Bounds, DataLossError, Range, Split, split
from pulque.wire.requests import NO_TIME, Positions, Read, Route
from pulque.wire.responses import Located, ReadBack, Response

__all__ = ["LiveLog"]

_TIMEOUT_S = 30.0
_BYTES_AT_ONCE = 4 * 1024 * 1024
_ROWS_AT_ONCE = 65_536
"""A batch of Arrow: large enough to be quick, small enough for any task's memory."""
_GROUP = "pipeline"
_LOOK_AGAIN_S = 0.2


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

    def partitions(self, selection: Selection) -> list[PartitionName]:
        """Return the partitions that a selection covers now, in order."""
        if selection.partitions:
            return sorted({each for name in selection.partitions for each in self._held(name)})
        if selection.expression is not None:
            matches = selection.expression.fullmatch
            everything = self._route(EVERYTHING)
            return sorted(each for each in everything if matches(_subject(each)))
        found = {each for subject in selection.subjects for each in self._route(subject)}
        return sorted(found)

    def check_whole(self, partitions: Iterable[PartitionName]) -> None:
        """Wait until all brokers of these partitions' subjects are there.

        Whoever is away has messages of its own, and nobody else can tell which.

        Raises:
            DataLossError: One is away for too long.
        """
        deadline = time.monotonic() + self._timeout_s
        for subject in sorted({_subject(each) for each in partitions if split_held(each)[0]}):
            while not self._is_whole(subject):
                if time.monotonic() > deadline:
                    raise DataLossError(
                        f"a broker that has messages of {subject} is away; with "
                        "failOnDataLoss=false the read goes on with those that are there"
                    )
                time.sleep(_LOOK_AGAIN_S)

    def _is_whole(self, subject: str) -> bool:
        slots = [each.slots for each in self._brokers.route(subject).partitions]
        return sum(end - start for start, end in slots) == SLOTS

    def _held(self, name: PartitionName) -> list[PartitionName]:
        """Return the partitions that are meant: one of a broker, or of all that have it."""
        place, partition = split_held(name)
        if place:
            return [name]
        return [held_name(each, partition) for each in self._brokers.places(EVERYTHING)]

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

    def read(self, ranges: Sequence[Range], *, must_be_whole: bool) -> Iterator[Placed]:
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
                if must_be_whole and (answer.first_sequence > at or not answer.count):
                    raise DataLossError(
                        f"message {at} of {each.partition} is not stored any more; the oldest is "
                        f"{answer.start}; with failOnDataLoss=false the read goes on from there"
                    )
                if not answer.count:
                    break
                at = max(answer.first_sequence, at)
                after = answer.first_sequence + answer.count
                wanted = Range(partition, at, min(after, each.end))
                place_served(placer, records, wanted, source=each.partition)
                at = after
                if placer.messages >= _ROWS_AT_ONCE or placer.size >= _BYTES_AT_ONCE:
                    yield placer.take()
        if placer.messages:
            yield placer.take()

    def _route(self, subject: str) -> list[PartitionName]:
        """Return the partitions of a subject or pattern that belong to nobody."""
        # Only who consumes may ask for a pattern; the group's own partitions are left out below.
        request = Route(subject, _GROUP, RouteKind.LOCAL)
        return [
            held_name(place, each.partition)
            for place in self._brokers.places(subject)
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


def _subject(name: PartitionName) -> str:
    return subject_of(split_held(name)[1])
