"""``/subjects/…/ordered``: who has which partition, what a group waits for, and skipping that."""

from fastapi import APIRouter

from pulque.admin.cluster import KnownServer
from pulque.admin.context import Context, instant
from pulque.admin.models.names import GroupInQuery, PlainGroupInPath, SubjectInPath
from pulque.admin.models.ordered import OrderedPage, OrderedPartition, SkipDone, SkipOne
from pulque.admin.models.pagination import Cursor, Limit, cut, read_cursor
from pulque.errors import InvalidRequestError, RemoteProtocolError
from pulque.model.names import PartitionName, subject_of
from pulque.wire.ordered import NO_TOKEN, Ordered, OrderedReport, OrderedRow, Skip, Skipped
from pulque.wire.responses import Response

__all__ = ["OrderedApi"]


class OrderedApi:
    """Answers for ordered groups."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self.router = router = APIRouter(prefix="/subjects", tags=["ordered"])
        router.get("/{subject}/ordered", summary="Where ordered groups are")(self.page)
        router.post("/{subject}/ordered/{group}/skip", summary="Make a dead letter of a message")(
            self.skip
        )

    async def page(
        self,
        subject: SubjectInPath,
        group: GroupInQuery = None,
        cursor: Cursor = None,
        limit: Limit = 100,
    ) -> OrderedPage:
        """Return who has which partition of a subject, and what each group waits for."""
        after = read_cursor(cursor, (str, str, str))
        request = Ordered(subject, group or "")
        answers, silent = await self._context.brokers.ask_all(
            await self._context.serving(),
            lambda server: self._context.brokers.ask(server, request, _reported),
        )
        rows = [_row(server, each) for server, report in answers for each in report.rows]
        if all(row.token == NO_TOKEN for row in rows):
            rows = []  # brokers answer for any group that is named
        some, following = cut(
            rows, lambda row: (row.broker_group, row.partition, row.group), after, limit
        )
        return OrderedPage(items=some, next=following, unreachable=silent)

    async def skip(
        self, subject: SubjectInPath, group: PlainGroupInPath, one: SkipOne
    ) -> SkipDone:
        """Make a dead letter of the message that a group waits for; it goes on with the next."""
        if subject_of(PartitionName(one.partition)) != subject:
            raise InvalidRequestError(f"{one.partition} is no partition of {subject}")
        (server, *_) = await self._context.serving(one.broker_group)
        request = Skip(one.partition, group, one.sequence, one.reason)
        done = await self._context.brokers.ask(server, request, _skipped)
        return SkipDone(next_sequence=done.next_sequence)


def _row(server: KnownServer, found: OrderedRow) -> OrderedPartition:
    return OrderedPartition(
        broker_group=server.broker_group,
        partition=found.partition,
        group=found.group,
        closed=found.is_closed,
        settled=found.settled,
        end=found.end,
        lag=max(found.end - found.settled, 0),
        held=found.held,
        holder=found.holder or None,
        token=found.token,
        lock_seconds=found.left_ms / 1000,
        stuck_since=instant(found.stuck_since_ms) if found.stuck_since_ms else None,
    )


def _reported(response: Response) -> OrderedReport:
    if not isinstance(response, OrderedReport):
        raise RemoteProtocolError(f"{type(response).__name__} came instead of OrderedReport")
    return response


def _skipped(response: Response) -> Skipped:
    if not isinstance(response, Skipped):
        raise RemoteProtocolError(f"{type(response).__name__} came instead of Skipped")
    return response
