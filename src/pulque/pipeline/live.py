"""Reading a running broker: partitions, positions, messages. No group, no effect on anybody."""

import os
import secrets
from collections.abc import Iterator, Sequence
from types import TracebackType
from typing import Self

from pulque.client.calls import Calls
from pulque.client.url import addresses_of
from pulque.errors import RemoteProtocolError, UnknownSubjectError
from pulque.model.names import PartitionName, owner_of, subject_of
from pulque.model.routes import RouteKind
from pulque.pipeline.decode import Placed
from pulque.pipeline.options import At, Place, Selection
from pulque.pipeline.placing import Placer, place_served
from pulque.pipeline.ranges import Bounds, DataLossError, Range, Split, split
from pulque.wire.requests import NO_TIME, Positions, Read, Route
from pulque.wire.responses import Located, ReadBack, Response, Routed

__all__ = ["LiveLog"]

_TIMEOUT_S = 30.0
_BYTES_AT_ONCE = 4 * 1024 * 1024
_ROWS_AT_ONCE = 65_536
"""A batch of Arrow: large enough to be quick, small enough for any task's memory."""
_EVERYTHING = "*"
_GROUP = "pipeline"


class LiveLog:
    """The message log of a broker, over the network.

    Args:
        url: Where it listens; else ``$PULQUE_URL``, else this machine.
        timeout_s: How long a broker may be away, restarting for one, before a read fails.
    """

    def __init__(self, url: str | None, *, timeout_s: float = _TIMEOUT_S) -> None:
        self._timeout_s = timeout_s
        draw = secrets.SystemRandom().random
        self._calls = Calls(addresses_of(url, os.environ), client="pulque-pipeline", draw=draw)

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
        """Close the connection."""
        self._calls.close()

    def partitions(self, selection: Selection) -> list[PartitionName]:
        """Return the partitions that a selection covers now, in order."""
        if selection.partitions:
            return sorted(selection.partitions)
        if selection.expression is not None:
            matches = selection.expression.fullmatch
            everything = self._route(_EVERYTHING)
            return sorted(each for each in everything if matches(subject_of(each)))
        found = {each for subject in selection.subjects for each in self._route(subject)}
        return sorted(found)

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
            while at < each.end:
                answer, records = self._read(Range(each.partition, at, each.end))
                if must_be_whole and (answer.first_sequence > at or not answer.count):
                    raise DataLossError(
                        f"message {at} of {each.partition} is not stored any more; the oldest is "
                        f"{answer.start}; with failOnDataLoss=false the read goes on from there"
                    )
                if not answer.count:
                    break
                at = max(answer.first_sequence, at)
                after = answer.first_sequence + answer.count
                wanted = Range(each.partition, at, min(after, each.end))
                place_served(placer, records, wanted, source=each.partition)
                at = after
                if placer.messages >= _ROWS_AT_ONCE or placer.size >= _BYTES_AT_ONCE:
                    yield placer.take()
        if placer.messages:
            yield placer.take()

    def _route(self, subject: str) -> list[PartitionName]:
        """Return the partitions of a subject or pattern that belong to nobody."""

        def convert(answer: Response) -> list[PartitionName]:
            if not isinstance(answer, Routed):
                raise RemoteProtocolError(f"a request for a route got {answer!r}")
            names = (each.partition for each in answer.route.partitions)
            return [name for name in names if owner_of(name) is None]

        # Only who consumes may ask for a pattern; the group's own partitions are left out above.
        request = Route(subject, _GROUP, RouteKind.LOCAL)
        return self._calls.ask(request, self._timeout_s, convert)

    def _locate(self, partition: PartitionName, at_ms: int) -> Located:
        def convert(answer: Response) -> Located:
            if not isinstance(answer, Located):
                raise RemoteProtocolError(f"a request for positions got {answer!r}")
            return answer

        return self._calls.ask(Positions(partition, at_ms), self._timeout_s, convert)

    def _read(self, wanted: Range) -> tuple[ReadBack, bytes]:
        """Return an answer, and a copy of its records: they are the connection's own."""

        def convert(answer: Response) -> tuple[ReadBack, bytes]:
            if not isinstance(answer, ReadBack) or isinstance(answer.records, tuple):
                raise RemoteProtocolError(f"a read got {answer!r}")
            return answer, bytes(answer.records)

        most = min(wanted.length, _ROWS_AT_ONCE)
        request = Read(wanted.partition, wanted.first, most, _BYTES_AT_ONCE, 0)
        return self._calls.ask(request, self._timeout_s, convert)
