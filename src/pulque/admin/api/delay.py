"""``/delayed``: messages that are due later, over all delay servers."""

import base64
from collections import Counter
from collections.abc import Callable, Sequence
from datetime import datetime
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
    OutcomeName,
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
from pulque.client.inspecting.delayed_messages import DelayTalk, Fate, Period
from pulque.errors import InvalidRequestError, NoDelayServerError, PulqueError, UnknownSubjectError
from pulque.model.names import level_of
from pulque.model.routes import Role
from pulque.wire.responses import Response

__all__ = ["DelayedApi"]

T = TypeVar("T")
_MOST = 100_000
_LAST_MS = 253_402_300_799_999
_OUTCOMES: dict[Fate, OutcomeName] = {
    Fate.CANCELLED: "cancelled",
    Fate.ALREADY_CANCELLED: "already_cancelled",
    Fate.TOO_LATE: "too_late",
    Fate.UNKNOWN: "unknown",
    Fate.MOVED: "moved",
}
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
        period = _period(start, end)
        found, silent = await self._ask_each(
            lambda name: scheduled.counting([name], subject or "", period)
        )
        total: Counter[tuple[datetime, str]] = Counter()
        for _, counts in found:
            for each in counts:
                total[each.hour, each.subject] += each.messages
        rows = [
            DueCount(hour=hour, subject=name, messages=messages)
            for (hour, name), messages in total.items()
        ]
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
        period = _period(start, end)
        if after is not None:
            if not 0 <= int(after[0]) <= _LAST_MS:
                raise InvalidRequestError("the cursor is none of this list")
            period = Period(max(int(after[0]), period.start), period.end)
        wanted = limit + 1
        while True:
            found, silent = await self._some(subject or "", period, wanted)
            rest = [each for each in found if after is None or _key(each) > after]
            if len(rest) > limit or len(found) < wanted or wanted == _MOST:
                break
            # All of one millisecond were on the page before: look further.
            wanted = min(2 * wanted, _MOST)
        following = write_cursor(_key(rest[limit - 1])) if len(rest) > limit else None
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
        some, following = cut(rows, _key, after, limit)
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
                Outcome(id=each, outcome=_OUTCOMES[fate])
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
            id=message_id, outcome=_OUTCOMES[moved.fate], due_at=instant(moved.due_at_ms)
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
        return sorted(found, key=_key)[:limit], silent

    async def _ask_each(
        self, begin: Callable[[str], DelayTalk[T]]
    ) -> "tuple[list[tuple[KnownServer, T]], list[Unreachable]]":
        """Have a conversation with each delay server; those that do not answer are named."""

        async def one(server: KnownServer) -> T:
            return await self._talk({server.name: server}, begin(server.name))

        return await self._context.brokers.ask_all(await self._servers(), one)

    async def _carry(self, begin: Callable[[Sequence[str]], DelayTalk[T]]) -> T:
        """Have one conversation with all delay servers."""
        servers = {each.name: each for each in await self._servers()}
        return await self._talk(servers, begin(list(servers)))

    async def _talk(self, servers: "dict[str, KnownServer]", talk: DelayTalk[T]) -> T:
        try:
            name, request = next(talk)
            while True:
                try:
                    answer: Response | PulqueError = await self._context.brokers.ask(
                        servers[name], request, _as_it_is
                    )
                except PulqueError as error:
                    answer = error
                name, request = talk.send(answer)
        except StopIteration as end:
            found: T = end.value
            return found


def _period(start: datetime | None, end: datetime | None) -> Period:
    return scheduled.period_of(start, end)


def _key(each: scheduled.DelayedMessage) -> tuple[int | str, ...]:
    return each.due_at_ms, each.id


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
    try:
        row.body = message.body.decode()
    except UnicodeDecodeError:
        row.body_base64 = base64.b64encode(message.body).decode()
    return row


def _as_it_is(response: Response) -> Response:
    # Nothing in the answers of delay servers points into the connection's buffer.
    return response
