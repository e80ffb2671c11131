"""What waits at the delay servers: to be cancelled, moved, counted and looked at.

Each of these is a conversation without I/O: it yields whom to ask what, and is sent the answers.
Whoever carries it, a thread or a task, does nothing but that. A message lies on one of several
delay servers: its receipt says on which, and by its id alone all of them are asked.
"""

from collections import Counter
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from datetime import UTC, datetime, timedelta
from typing import Literal, NamedTuple, TypeVar, cast

from pulque.client.arguments.due_times import AT_ONCE, due_of, instant_of
from pulque.client.sending.outgoing_message import Receipt
from pulque.errors import PulqueError, RemoteProtocolError, UnavailableError, UsageError
from pulque.model.batch import seed_of, verify_crc
from pulque.model.ids import ID_SIZE, show_id
from pulque.model.message import Message, StoredBatch
from pulque.model.names import Group, PartitionName, Subject, owner_of, parse_subject, subject_of
from pulque.model.positions import ConsumeSequence
from pulque.wire.delay import (
    ANY_DUE,
    MAX_LISTED,
    Cancel,
    Cancelled,
    Fate,
    Listing,
    Move,
    Reschedule,
    Rescheduled,
    Scheduled,
    ScheduledListed,
    ScheduledMessage,
    Ticket,
)
from pulque.wire.requests import Request
from pulque.wire.responses import Response
from pulque.wire.stuck import StuckListed, StuckMessage, StuckMessages

__all__ = [
    "DelayTalk",
    "DelayedMessage",
    "DueCount",
    "Fate",
    "Moved",
    "OutcomeName",
    "Period",
    "added_up",
    "cancelling",
    "counting",
    "due_order",
    "finding",
    "listed_messages",
    "listing",
    "listing_stuck",
    "moving",
    "outcome_of",
    "period_of",
]

T = TypeVar("T")
DelayTalk = Generator[tuple[str, Request], Response | PulqueError, T]
"""Yields a delay server and what to ask it, is sent the answer, and returns what came of it."""
OutcomeName = Literal["cancelled", "already_cancelled", "too_late", "unknown", "moved"]
"""What became of a message, as commands and the administration API say it."""
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_MOST = 100_000
_WEIGHT = (Fate.UNKNOWN, Fate.ALREADY_CANCELLED, Fate.CANCELLED, Fate.MOVED, Fate.TOO_LATE)
"""Of what several servers say about one id, the last of these counts."""


class Moved(NamedTuple):
    """What became of a message that was to be delivered at another time."""

    fate: Fate
    """``MOVED`` if it was in time; else why it was not."""
    due_at_ms: int
    """The time that was asked for, in milliseconds since 1970."""

    @property
    def due_at(self) -> datetime:
        """The time that was asked for."""
        return _instant(self.due_at_ms)


class DueCount(NamedTuple):
    """How many messages of a subject are due in an hour."""

    hour: datetime
    """When the hour begins, in UTC."""
    subject: Subject
    messages: int


class DelayedMessage(NamedTuple):
    """A message that waits for its time."""

    id: str
    """The message id: 32 hexadecimal digits."""
    due_at_ms: int
    """When it is delivered, in milliseconds since 1970."""
    partition: PartitionName
    """Where it goes then."""
    size: int
    """Bytes that it takes at the delay server."""
    delay_server: str
    """Who has it until then."""
    message: Message | None = None
    """The message itself, where one was asked for."""
    reason: str = ""
    """Why brokers refuse it, where that was asked for."""

    @property
    def due_at(self) -> datetime:
        """When it is delivered."""
        return _instant(self.due_at_ms)

    @property
    def subject(self) -> Subject:
        """The subject that it was sent to."""
        return subject_of(self.partition)

    @property
    def group(self) -> Group | None:
        """The only group that gets it, for a message that is retried; else None."""
        return owner_of(self.partition)


class Period(NamedTuple):
    """Due at ``start`` or later, and before ``end``; in milliseconds, 0 for no end."""

    start: int
    end: int


class DelayedQuery(NamedTuple):
    """A message that somebody asks about."""

    id: bytes
    due_ms: int = ANY_DUE
    server: str = ""
    """Who has it; empty if nobody knows."""

    @classmethod
    def of(cls, message: object) -> "DelayedQuery":
        """Return what a receipt or an id names.

        Raises:
            UsageError: It is neither.
        """
        if isinstance(message, Receipt):
            if message.may_be_doubled:
                return cls(_parse_id(message.id))
            return cls(_parse_id(message.id), message.due_at_ms, message.broker_group)
        if isinstance(message, DelayedMessage):
            return cls(_parse_id(message.id), message.due_at_ms, message.delay_server)
        return cls(_parse_id(message))


def period_of(start: datetime | None, end: datetime | None) -> Period:
    """Return a period of due times.

    Raises:
        UsageError: A time has no zone, or the end comes before the start.
    """
    first = 0 if start is None else instant_of(start, "start")
    last = 0 if end is None else instant_of(end, "end")
    if last and last <= first:
        raise UsageError(f"from {start} until {end}: the end must come after the start")
    return Period(max(first, 0), last)


def outcome_of(fate: Fate) -> OutcomeName:
    """Return the name of what became of a message."""
    return cast("OutcomeName", fate.name.lower())


# ── cancelling and moving ──────────────────────────────────────────────────────────────────


def listed_messages(messages: object) -> list[Receipt | str]:
    """Return receipts and message ids as a list.

    Raises:
        UsageError: It is one of them, or none at all.
    """
    if isinstance(messages, str | Receipt) or not isinstance(messages, Iterable):
        raise UsageError(f"messages is {messages!r}; a list of receipts or message ids is allowed")
    return list(messages)


def cancelling(servers: Sequence[str], messages: Sequence[object]) -> DelayTalk[list[Fate]]:
    """Have messages never delivered; return what became of each."""
    wanted = [DelayedQuery.of(each) for each in messages]

    def request(some: Sequence[DelayedQuery]) -> Request:
        return Cancel(tuple(Ticket(each.id, each.due_ms) for each in some))

    return (yield from _fates(servers, wanted, _went_at_once(messages), request))


def moving(
    servers: Sequence[str], message: object, delay: object, at: object, level: object, now_ms: int
) -> DelayTalk[Moved]:
    """Have a message delivered at another time."""
    if delay is None and at is None and level is None:
        raise UsageError("when is it to be delivered? one of delay, at and level is wanted")
    new_due_ms = due_of(delay, at, level, now_ms) or now_ms
    wanted = [DelayedQuery.of(message)]

    def request(some: Sequence[DelayedQuery]) -> Request:
        return Reschedule(tuple(Move(each.id, each.due_ms, new_due_ms) for each in some))

    (fate,) = yield from _fates(servers, wanted, _went_at_once([message]), request)
    return Moved(fate, new_due_ms)


def _went_at_once(messages: Iterable[object]) -> list[bool]:
    """Say which of them never were at a delay server, by their receipts."""
    return [isinstance(each, Receipt) and each.due_at_ms == AT_ONCE for each in messages]


def _fates(
    servers: Sequence[str],
    wanted: Sequence[DelayedQuery],
    went_at_once: Sequence[bool],
    request: Callable[[Sequence[DelayedQuery]], Request],
) -> DelayTalk[list[Fate]]:
    """Ask those who have the messages, then all for what was not found."""
    fates = [Fate.TOO_LATE if gone else Fate.UNKNOWN for gone in went_at_once]
    by_server: dict[str, list[int]] = {}
    for place, each in enumerate(wanted):
        if each.server and not went_at_once[place]:
            by_server.setdefault(each.server, []).append(place)
    for server, places in by_server.items():
        if server not in servers:
            raise UnavailableError(
                f"delay server {server} has the message, and is away; "
                f"{', '.join(servers)} can be asked now"
            )
        yield from _ask_about(server, wanted, places, fates, request)
    left = [place for place, fate in enumerate(fates) if fate is Fate.UNKNOWN]
    anywhere = [each._replace(due_ms=ANY_DUE) for each in wanted]
    problem: PulqueError | None = None
    for server in servers if left else ():
        try:
            yield from _ask_about(server, anywhere, left, fates, request)
        except UnavailableError as error:
            problem = error
    if problem is not None and Fate.UNKNOWN in fates:
        raise problem
    return fates


def _ask_about(
    server: str,
    wanted: Sequence[DelayedQuery],
    places: Sequence[int],
    fates: list[Fate],
    request: Callable[[Sequence[DelayedQuery]], Request],
) -> DelayTalk[None]:
    for at in range(0, len(places), MAX_LISTED):
        some = places[at : at + MAX_LISTED]
        answer = _answered((yield server, request([wanted[place] for place in some])))
        if not isinstance(answer, Cancelled | Rescheduled) or len(answer.fates) != len(some):
            raise RemoteProtocolError(f"a question about {len(some)} messages got {answer!r}")
        for place, fate in zip(some, answer.fates, strict=True):
            fates[place] = max(fates[place], fate, key=_WEIGHT.index)


# ── looking ────────────────────────────────────────────────────────────────────────────────


def counting(servers: Sequence[str], subject: str, period: Period) -> DelayTalk[list[DueCount]]:
    """Ask how many messages are due in which hour."""
    counts: list[DueCount] = []
    for server in servers:
        query = Scheduled(Listing.COUNTS, _subject(subject), *period, MAX_LISTED)
        page = yield from _page(server, query)
        while True:
            counts += [
                DueCount(_instant(each.hour_ms), Subject(each.subject), each.messages)
                for each in page.counts
            ]
            if not page.next:
                break
            page = yield from _page(server, query, page.next)
    return added_up(counts)


def added_up(counts: Iterable[DueCount]) -> list[DueCount]:
    """Return one count for each hour and subject, in the order of time."""
    total: Counter[tuple[datetime, Subject]] = Counter()
    for each in counts:
        total[each.hour, each.subject] += each.messages
    return [
        DueCount(*hour_and_subject, count) for hour_and_subject, count in sorted(total.items())
    ]


def due_order(message: DelayedMessage) -> tuple[int, str]:
    """Return what messages are sorted by: when they are due, then their id."""
    return message.due_at_ms, message.id


def listing(
    servers: Sequence[str], subject: str, period: Period, limit: int
) -> DelayTalk[list[DelayedMessage]]:
    """Ask which messages are due next."""
    _check_limit(limit)
    found: list[DelayedMessage] = []
    for server in servers:
        left, after = limit, b""
        while left > 0:
            rows = min(left, MAX_LISTED)
            query = Scheduled(Listing.NEXT, _subject(subject), *period, rows)
            page = yield from _page(server, query, after)
            found += _messages(server, page)
            left, after = left - len(page.messages), page.next
            if not after:
                break
    found.sort(key=due_order)
    return found[:limit]


def listing_stuck(
    servers: Sequence[str], subject: str, limit: int
) -> DelayTalk[list[DelayedMessage]]:
    """Ask which messages are overdue, as brokers refuse them, and why."""
    _check_limit(limit)
    found: list[DelayedMessage] = []
    for server in servers:
        left, after = limit, b""
        while left > 0:
            query = StuckMessages(_subject(subject), min(left, MAX_LISTED), after)
            page = _answered((yield server, query))
            if not isinstance(page, StuckListed):
                raise RemoteProtocolError(f"a question about stuck messages got {page!r}")
            found += [_stuck(server, each) for each in page.messages]
            left, after = left - len(page.messages), page.next
            if not after:
                break
    found.sort(key=due_order)
    return found[:limit]


def finding(servers: Sequence[str], message: object) -> DelayTalk[DelayedMessage | None]:
    """Ask for one message, with its content."""
    wanted = DelayedQuery.of(message)
    asked = [(wanted.server, wanted.due_ms)] if wanted.server in servers else []
    asked += [(server, ANY_DUE) for server in servers]
    for server, due_ms in asked:
        query = Scheduled(Listing.ONE, from_ms=due_ms, max_rows=1, id=wanted.id)
        page = yield from _page(server, query)
        for each in _messages(server, page):
            return each
    return None


def _page(server: str, query: Scheduled, after: bytes = b"") -> DelayTalk[ScheduledListed]:
    asked = Scheduled(
        query.listing,
        query.subject,
        query.from_ms,
        query.until_ms,
        query.max_rows,
        after,
        query.id,
    )
    answer = _answered((yield server, asked))
    if not isinstance(answer, ScheduledListed):
        raise RemoteProtocolError(f"a question about delayed messages got {answer!r}")
    return answer


def _messages(server: str, page: ScheduledListed) -> Iterator[DelayedMessage]:
    for each in page.messages:
        content = _content(each) if each.batch else None
        yield DelayedMessage(
            show_id(each.id), each.due_ms, each.partition, each.size, server, content
        )


def _stuck(server: str, each: StuckMessage) -> DelayedMessage:
    return DelayedMessage(
        show_id(each.id), each.due_ms, each.partition, each.size, server, reason=each.reason
    )


def _check_limit(limit: object) -> None:
    if type(limit) is not int or not 1 <= limit <= _MOST:
        raise UsageError(f"{limit!r} delayed messages at once; 1 to {_MOST} are allowed")


def _content(each: ScheduledMessage) -> Message:
    if not verify_crc(each.batch, seed_of(each.partition)):
        raise RemoteProtocolError(f"the crc of delayed message {show_id(each.id)} does not match")
    batch = StoredBatch(
        each.batch,
        partition=each.partition,
        first_sequence=ConsumeSequence(0),
        stored_at_ms=0,
    )
    return Message(batch, 0)


def _answered(answer: Response | PulqueError) -> Response:
    if isinstance(answer, PulqueError):
        raise answer
    return answer


def _subject(subject: str) -> str:
    return parse_subject(subject) if subject else ""


def _parse_id(text: object) -> bytes:
    try:
        found = bytes.fromhex(text.replace("-", "")) if isinstance(text, str) else b""
    except ValueError:
        found = b""
    if len(found) != ID_SIZE:
        raise UsageError(
            f"{text!r} is no message; a receipt, or an id of {2 * ID_SIZE} hexadecimal digits is "
            "allowed"
        )
    return found


def _instant(instant_ms: int) -> datetime:
    return _EPOCH + timedelta(milliseconds=instant_ms)
