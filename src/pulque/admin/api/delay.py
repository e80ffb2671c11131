"""``/delayed``: messages that are due later, over all delay servers."""

from collections.abc import Callable, Sequence
from typing import Annotated, TypeVar

from fastapi import APIRouter, Path, Query
from pydantic import AwareDatetime

from pulque.admin.cluster import KnownServer
from pulque.admin.context import Context, instant
from pulque.admin.models.delay import (
    Cancel,
    CancelDone,
    DelayedMessage,
    DelayedPage,
    DueCount,
    DueCountPage,
    MessageId,
    Outcome,
    Reschedule,
    RescheduleDone,
)
from pulque.admin.models.names import SubjectName
from pulque.admin.models.pagination import (
    Cursor,
    Limit,
    Unreachable,
    cut,
    read_cursor,
    write_cursor,
)
from pulque.client.inspecting import delayed_messages as scheduled
from pulque.client.inspecting.delayed_messages import (
    DelayTalk,
    Period,
    added_up,
    due_order,
    outcome_of,
    period_of,
)
from pulque.client.inspecting.stored_messages import text_or_base64
from pulque.errors import InvalidRequestError, NoDelayServerError, UnknownSubjectError
from pulque.model.names import level_of
from pulque.model.routes import Role

__all__ = ["DelayedApi"]

T = TypeVar("T")
_MOST = 100_000
_LAST_MS = 253_402_300_799_999
SubjectInQuery = Annotated[SubjectName | None, Query(description="Only of this subject.")]
Start = Annotated[AwareDatetime | None, Query(description="Due then, or later.")]
End = Annotated[AwareDatetime | None, Query(description="Due before that.")]
IdInPath = Annotated[MessageId, Path(description="A message id.")]


class DelayedApi:
    """Answers for messages that are due later."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self.router = router = APIRouter(prefix="/delayed", tags=["delayed messages"])
        router.get("", summary="List messages that are due later")(self.page)
        router.get("/counts", summary="Count messages by the hour that they are due")(self.counts)
        router.get("/stuck", summary="List messages that brokers refuse, and why")(self.stuck)
        router.post("/cancel", summary="Have messages never delivered")(self.cancel)
        router.get("/{message_id}", summary="Show a message that is due later")(self.show)
        router.post(
            "/{message_id}/reschedule", summary="Have a message delivered at another time"
        )(self.reschedule)

    async def counts(
        self,
        subject: SubjectInQuery = None,
        start: Start = None,
        end: End = None,
        cursor: Cursor = None,
        limit: Limit = 100,
    ) -> DueCountPage:
        """Return how many messages of each subject are due in which hour."""
        after = read_cursor(cursor, (int, str))
        period = period_of(start, end)
        found, silent = await self._ask_each(
            lambda name: scheduled.counting([name], subject or "", period)
        )
        counts = added_up(each for _, some in found for each in some)
        rows = [DueCount(**each._asdict()) for each in counts]
        some, following = cut(
            rows, lambda row: (int(row.hour.timestamp()), row.subject), after, limit
        )
        return DueCountPage(items=some, next=following, unreachable=silent)

    async def page(
        self,
        subject: SubjectInQuery = None,
        start: Start = None,
        end: End = None,
        cursor: Cursor = None,
        limit: Limit = 100,
    ) -> DelayedPage:
        """Return the messages that are due next, without their contents."""
        after = read_cursor(cursor, (int, str))
        period = period_of(start, end)
        if after is not None:
            if not 0 <= int(after[0]) <= _LAST_MS:
                raise InvalidRequestError("the cursor is none of this list")
            period = Period(max(int(after[0]), period.start), period.end)
        wanted = limit + 1
        while True:
            found, silent = await self._some(subject or "", period, wanted)
            rest = [each for each in found if after is None or due_order(each) > after]
            if len(rest) > limit or len(found) < wanted or wanted == _MOST:
                break
            # All of one millisecond were on the page before: look further.
            wanted = min(2 * wanted, _MOST)
        following = write_cursor(due_order(rest[limit - 1])) if len(rest) > limit else None
        return DelayedPage(items=list(map(_row, rest[:limit])), next=following, unreachable=silent)

    async def stuck(
        self, subject: SubjectInQuery = None, cursor: Cursor = None, limit: Limit = 100
    ) -> DelayedPage:
        """Return the messages that are overdue, as brokers refuse them, without their contents."""
        after = read_cursor(cursor, (int, str))
        answers, silent = await self._ask_each(
            lambda name: scheduled.listing_stuck([name], subject or "", _MOST)
        )
        rows = [each for _, some in answers for each in some]
        some, following = cut(rows, due_order, after, limit)
        return DelayedPage(items=list(map(_row, some)), next=following, unreachable=silent)

    async def show(self, message_id: IdInPath) -> DelayedMessage:
        """Return one message with its content."""
        found = await self._carry(lambda servers: scheduled.finding(servers, message_id))
        if found is None:
            raise UnknownSubjectError(f"no delay server has message {message_id}")
        return _row(found)

    async def cancel(self, cancel: Cancel) -> CancelDone:
        """Have messages never delivered, and say what became of each."""
        fates = await self._carry(lambda servers: scheduled.cancelling(servers, cancel.ids))
        return CancelDone(
            outcomes=[
                Outcome(id=each, outcome=outcome_of(fate))
                for each, fate in zip(cancel.ids, fates, strict=True)
            ]
        )

    async def reschedule(self, message_id: IdInPath, reschedule: Reschedule) -> RescheduleDone:
        """Have a message delivered at another time, and say whether that was in time."""
        now_ms = self._context.clock.now_ms()
        moved = await self._carry(
            lambda servers: scheduled.moving(
                servers, message_id, reschedule.delay_seconds, reschedule.at, None, now_ms
            )
        )
        return RescheduleDone(
            id=message_id, outcome=outcome_of(moved.fate), due_at=instant(moved.due_at_ms)
        )

    async def _servers(self) -> Sequence[KnownServer]:
        found = [each for each in await self._context.cluster.servers() if each.role is Role.DELAY]
        if not found:
            raise NoDelayServerError("there is no delay server here: `pulque delay` adds one")
        return found

    async def _some(
        self, subject: str, period: Period, limit: int
    ) -> "tuple[list[scheduled.DelayedMessage], list[Unreachable]]":
        answers, silent = await self._ask_each(
            lambda name: scheduled.listing([name], subject, period, limit)
        )
        found = [each for _, some in answers for each in some]
        return sorted(found, key=due_order)[:limit], silent

    async def _ask_each(
        self, begin: Callable[[str], DelayTalk[T]]
    ) -> "tuple[list[tuple[KnownServer, T]], list[Unreachable]]":
        """Have a conversation with each delay server; those that do not answer are named."""

        async def one(server: KnownServer) -> T:
            return await self._context.brokers.talk_to_delay_servers(
                {server.name: server}, begin(server.name)
            )

        return await self._context.brokers.ask_all(await self._servers(), one)

    async def _carry(self, begin: Callable[[Sequence[str]], DelayTalk[T]]) -> T:
        """Have one conversation with all delay servers."""
        servers = {each.name: each for each in await self._servers()}
        return await self._context.brokers.talk_to_delay_servers(servers, begin(list(servers)))


def _row(each: scheduled.DelayedMessage) -> DelayedMessage:
    row = DelayedMessage(
        id=each.id,
        due_at=instant(each.due_at_ms),
        subject=each.subject,
        group=each.group,
        priority=level_of(each.partition),
        size=each.size,
        delay_server=each.delay_server,
        reason=each.reason or None,
    )
    message = each.message
    if message is None:
        return row
    row.key, row.tags, row.headers = message.key, list(message.tags), message.headers
    row.body, row.body_base64 = text_or_base64(message.body)
    return row
