"""``/subjects`` and ``/partitions``: what there is, where it lies, and what it may take."""

import asyncio

from fastapi import APIRouter, Response

from pulque.admin.cluster import KnownServer, PlacedPartition, PlacedSubject
from pulque.admin.context import Context
from pulque.admin.models.names import PatternInPath, SubjectInPath
from pulque.admin.models.pagination import Cursor, Limit, cut, read_cursor, write_cursor
from pulque.admin.models.subject import (
    ORDER_NAMES,
    ORDERS,
    Extension,
    Growth,
    Marks,
    NewSubject,
    Order,
    PartitionPage,
    PartitionRow,
    PositionPage,
    PositionRow,
    ReadOnly,
    SubjectPage,
    SubjectRow,
)
from pulque.client.inspecting.stored_messages import positions_of, positions_request
from pulque.errors import RemoteProtocolError, UnknownSubjectError
from pulque.model.names import PartitionName, Pattern, Subject
from pulque.model.routes import RouteKind
from pulque.wire.requests import Route
from pulque.wire.responses import Response as Answer
from pulque.wire.responses import Routed

__all__ = ["SubjectsApi"]

_CREATED = 201


class SubjectsApi:
    """Answers for subjects and their partitions."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self._cluster = context.cluster
        self.router = router = APIRouter(tags=["subjects"])
        router.get("/subjects", summary="List subjects")(self.page)
        router.post(
            "/subjects",
            summary="Create a subject",
            responses={_CREATED: {"model": SubjectRow, "description": "It was not there."}},
        )(self.create)
        router.get("/subjects/{subject}", summary="Show a subject")(self.show)
        router.post("/subjects/{subject}/extend", summary="Split partitions")(self.extend)
        router.post("/subjects/{subject}/merge", summary="Merge partitions")(self.merge)
        router.put("/subjects/{subject}/order", summary="Set the strategy of order")(self.order)
        router.put("/subjects/{subject}/read-only", summary="Refuse sends")(self.mark)
        router.get("/subjects/{subject}/partitions", summary="Partitions on brokers")(
            self.positions
        )
        router.get("/partitions", summary="List partitions")(self.partitions)
        router.get("/read-only", summary="List what is read-only")(self.marks)

    async def page(self, cursor: Cursor = None, limit: Limit = 100) -> SubjectPage:
        """Return subjects in the order of their names, with where they lie."""
        after = read_cursor(cursor, (str,))
        found = await self._cluster.subjects(str(after[0]) if after else "", limit + 1)
        rows = [_row(each) for each in found[:limit]]
        following = write_cursor((rows[-1].subject,)) if len(found) > limit else None
        return SubjectPage(items=rows, next=following)

    async def create(self, new: NewSubject, response: Response) -> SubjectRow:
        """Place a subject ahead of its first send; one that exists is left as it is."""
        subject = Subject(new.subject)
        if await self._cluster.subject(subject) is None:
            response.status_code = _CREATED
        return _row(await self._cluster.create_subject(subject, new.broker_groups))

    async def show(self, subject: SubjectInPath) -> SubjectRow:
        """Return one subject."""
        return _row(await self._find(subject))

    async def extend(self, subject: SubjectInPath, growth: Growth) -> SubjectRow:
        """Split partitions until so many take messages; those that are split are closed."""
        found = await self._cluster.extend_subject(
            Subject(subject), growth.partitions, growth.broker_groups
        )
        return _row(found)

    async def merge(self, subject: SubjectInPath, extension: Extension) -> SubjectRow:
        """Merge partitions until so many take messages; those that are merged are closed."""
        found = await self._cluster.merge_subject(Subject(subject), extension.partitions)
        return _row(found)

    async def order(self, subject: SubjectInPath, wanted: Order) -> SubjectRow:
        """Decide what a failure may do to the order of a subject's messages."""
        return _row(await self._cluster.order_subject(Subject(subject), ORDERS[wanted.order]))

    async def mark(self, subject: PatternInPath, mark: ReadOnly) -> Marks:
        """Have a subject, or all of a pattern, take no sends, or take them again."""
        pattern = Pattern(subject)
        await self._cluster.mark_subject(pattern, is_read_only=mark.read_only)
        return await self.marks()

    async def marks(self) -> Marks:
        """Return the subjects and patterns that take no sends."""
        return Marks(read_only=list(await self._cluster.read_only_marks()))

    async def partitions(self, cursor: Cursor = None, limit: Limit = 100) -> PartitionPage:
        """Return partitions in the order of their subjects."""
        after = read_cursor(cursor, (str, str, str))
        found: list[PlacedSubject] = []
        if after:
            # The page before may have ended within a subject.
            begun = await self._cluster.subject(Subject(str(after[0])))
            found = [] if begun is None else [begun]
        found += await self._cluster.subjects(str(after[0]) if after else "", limit + 1)
        rows = [partition for each in found for partition in _row(each).partitions]
        some, following = cut(
            rows, lambda row: (row.subject, row.broker_group, row.partition), after, limit
        )
        return PartitionPage(items=some, next=following)

    async def positions(
        self, subject: SubjectInPath, cursor: Cursor = None, limit: Limit = 100
    ) -> PositionPage:
        """Return where each partition begins and ends on its broker, each priority by itself."""
        after = read_cursor(cursor, (str, str))
        answers, silent = await self._context.brokers.ask_all(
            await self._context.serving(), lambda server: self._ask(server, subject)
        )
        rows = [row for _, found in answers for row in found]
        if not rows:
            await self._find(subject)
        some, following = cut(rows, lambda row: (row.broker_group, row.partition), after, limit)
        return PositionPage(items=some, next=following, unreachable=silent)

    async def _find(self, subject: str) -> PlacedSubject:
        found = await self._cluster.subject(Subject(subject))
        if found is None:
            raise UnknownSubjectError(f"there is no subject {subject}")
        return found

    async def _ask(self, server: KnownServer, subject: str) -> list[PositionRow]:
        route = Route(subject, kind=RouteKind.LOCAL)
        names = await self._context.brokers.ask(server, route, _names_of)
        found = await asyncio.gather(*(self._position(server, name) for name in names))
        return [row for row in found if row is not None]

    async def _position(self, server: KnownServer, name: PartitionName) -> PositionRow | None:
        try:
            found = await self._context.brokers.ask(
                server,
                positions_request(name, None),
                lambda response: positions_of(name, None, server.broker_group, response),
            )
        except UnknownSubjectError:
            return None  # nothing was ever sent there
        return PositionRow(
            broker_group=server.broker_group, partition=name, start=found.start, end=found.end
        )


def _row(found: PlacedSubject) -> SubjectRow:
    return SubjectRow(
        subject=found.subject,
        read_only=found.is_read_only,
        order=ORDER_NAMES[found.order],
        taking=found.taking,
        partitions=[
            PartitionRow(
                subject=found.subject,
                partition=each.partition,
                broker_group=each.broker_group,
                slots=each.slots,
                closed=each.is_closed,
                parents=[_full_name(found.partitions[place]) for place in each.parents],
            )
            for each in found.partitions
        ],
    )


def _full_name(partition: PlacedPartition) -> str:
    return f"{partition.partition}@{partition.broker_group}"


def _names_of(response: Answer) -> list[PartitionName]:
    if not isinstance(response, Routed):
        raise RemoteProtocolError(f"a request for a route got {response!r}")
    return [each.partition for each in response.route.partitions]
