"""Ask all brokers about groups: where they are, what they said, how they get on; and change them.

A change is asked about first, so that all brokers that know a group can make it, or none does.
"""

from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import TypeVar

from pulque.admin.broker_requests import BrokerRequests
from pulque.admin.cluster import KnownServer
from pulque.admin.context import Context
from pulque.admin.group_rates import Seen
from pulque.admin.models.fields import Mode
from pulque.admin.models.group import (
    ConsumerRow,
    FilterShown,
    GroupRow,
    LagRow,
    RetryShown,
    SettingsOfGroup,
)
from pulque.admin.models.pagination import Unreachable
from pulque.client.inspecting.broker_status import report_of
from pulque.client.inspecting.groups import state_of, totals_of
from pulque.client.inspecting.stored_messages import damaged_of, messages_of
from pulque.client.options.group_options import RetryPolicy, retry_of
from pulque.errors import (
    NotAllowedError,
    PulqueError,
    RemoteProtocolError,
    UnavailableError,
    UnknownGroupError,
    UnknownSubjectError,
)
from pulque.model.groups import GroupSettings, RetrySettings
from pulque.model.names import Pattern
from pulque.wire.groups import Subscription
from pulque.wire.requests import Groups, Read, Status, Subscriptions
from pulque.wire.resets import GroupPosition
from pulque.wire.responses import GroupsReport, Response, SubscriptionsListed

__all__ = [
    "Places",
    "ask_those_concerned",
    "damaged_in",
    "find_positions",
    "lag_row",
    "retry_settings",
    "said_by",
    "settings_row",
    "summed",
]

T = TypeVar("T")
Places = list[tuple[KnownServer, GroupPosition]]
"""Groups, each in each partition of each broker."""
_MODES: dict[str, Mode] = {
    "SHARED": "shared",
    "BROADCAST": "broadcast",
    "ONCE": "once",
    "ORDERED": "ordered",
}


async def find_positions(
    context: Context, subject: str | None = None, group: str | None = None
) -> tuple[Places, list[Unreachable]]:
    """Ask all brokers where groups are, and record it for the rates.

    Raises:
        NotAllowedError: There are too many to be told at once.
    """
    request = Groups(subject or "", group or "")
    answers, silent = await context.brokers.ask_all(
        await context.serving(),
        lambda server: context.brokers.ask(server, request, _positions_of),
    )
    places = [(server, each) for server, positions in answers for each in positions]
    now_ms = context.clock.now_ms()
    for server, each in places:
        context.rates.observe(_key(server, each), _seen(each, now_ms))
    return places, silent


def summed(places: Iterable[tuple[KnownServer, GroupPosition]]) -> list[GroupRow]:
    """Add up the partitions of each group."""
    states = (state_of(each) for _, each in places)
    return [GroupRow(**each._asdict()) for each in totals_of(states)]


async def damaged_in(
    context: Context, servers: Iterable[KnownServer]
) -> dict[tuple[str, str], int]:
    """Ask brokers how many messages they cannot read, by broker and partition."""
    answers, _ = await context.brokers.ask_all(
        sorted(set(servers)),
        lambda server: context.brokers.ask(server, Status(), report_of),
    )
    found: dict[tuple[str, str], int] = {}
    for server, report in answers:
        for each in damaged_of(report):
            key = (server.name, each.partition)
            found[key] = found.get(key, 0) + each.end - each.first_sequence
    return found


async def lag_row(
    context: Context, server: KnownServer, found: GroupPosition, damaged: int
) -> LagRow:
    """Return where a group is in one partition, and how fast it settles messages."""
    now_ms = context.clock.now_ms()
    pace = context.rates.pace(_key(server, found), _seen(found, now_ms))
    stored_at_ms = await _stored_at_ms(context, server, found)
    return LagRow(
        broker_group=server.broker_group,
        partition=found.partition,
        group=found.group,
        mode=_MODES[found.mode.name],
        next_sequence=found.next_sequence,
        end=found.end,
        lag=found.lag,
        damaged=damaged,
        held=found.held,
        oldest_age_seconds=(
            None if stored_at_ms is None else max(now_ms - stored_at_ms, 0) / 1000
        ),
        sent_per_second=None if pace is None else round(pace.sent, 3),
        settled_per_second=None if pace is None else round(pace.settled, 3),
        drain_seconds=None if pace is None else pace.drain_seconds,
        consumers=[
            ConsumerRow(consumer=each.consumer, held=each.held, silent_seconds=each.silent)
            for each in state_of(found).consumers
        ],
    )


async def said_by(
    context: Context, group: str = ""
) -> tuple[dict[Subscription, list[str]], list[Unreachable]]:
    """Ask all brokers for the settings of groups; return them with the broker groups they are at.

    Args:
        context: Who can be asked.
        group: Only what this one said; empty for all of them.
    """

    async def of_one(server: KnownServer) -> list[Subscription]:
        found: list[Subscription] = []
        while True:
            after = found[-1][:2] if found else ("", "")
            some = await context.brokers.ask(server, Subscriptions(group, *after), _listed_of)
            if not some:
                return found
            found += some

    answers, silent = await context.brokers.ask_all(await context.serving(), of_one)
    told: dict[Subscription, list[str]] = {}
    for server, said in answers:
        for each in said:
            told.setdefault(each, []).append(server.broker_group)
    return dict(sorted(told.items(), key=lambda item: item[0][:2])), silent


async def ask_those_concerned(
    brokers: BrokerRequests,
    servers: Sequence[KnownServer],
    question: Callable[[KnownServer], Awaitable[T]],
    *,
    is_change: bool = False,
) -> list[tuple[KnownServer, T]]:
    """Ask brokers something that only some of them know about.

    Args:
        brokers: The connections to them.
        servers: Which ones.
        question: What to ask each of them.
        is_change: Whether they change something when they are asked.

    Raises:
        UnavailableError: One of them does not answer, so that nobody knows.
        RejectedError: None of them knows about it, or one said no.
    """
    unknown: list[PulqueError] = []

    async def ask(server: KnownServer) -> T | None:
        try:
            return await question(server)
        except (UnknownGroupError, UnknownSubjectError) as error:
            unknown.append(error)
            return None

    answers, silent = await brokers.ask_all(servers, ask)
    if silent:
        names = ", ".join(each.broker for each in silent)
        outcome = (
            "so whether it was changed there is not known, and others may be"
            if is_change
            else "so nothing was changed"
        )
        raise UnavailableError(f"no answer of {names}, {outcome}: {silent[0].message}")
    found = [(server, answer) for server, answer in answers if answer is not None]
    if found:
        return found
    if unknown:
        raise unknown[0]
    raise UnavailableError("there is no broker yet")


def settings_row(
    pattern: Pattern, found: GroupSettings, broker_groups: Iterable[str]
) -> SettingsOfGroup:
    """Return the settings of a group for a subject or pattern, and where they are known."""
    return SettingsOfGroup(
        subject=pattern,
        mode=_MODES[found.mode.name],
        filter=FilterShown(any_of=list(found.filter.any_of), all_of=list(found.filter.all_of)),
        retry=_retry_shown(found.retry),
        broker_groups=sorted(broker_groups),
    )


def retry_settings(shown: RetryShown) -> RetrySettings:
    """Return the retry settings of a group.

    Raises:
        UsageError: It cannot be.
    """
    return retry_of(RetryPolicy(shown.delays_seconds, shown.jitter, shown.max_attempts))


def _retry_shown(retry: RetrySettings) -> RetryShown:
    return RetryShown(
        delays_seconds=[ms / 1000 for ms in retry.delays_ms],
        jitter=retry.jitter_percent / 100 if retry.names_jitter else None,
        max_attempts=retry.max_attempts or None,
    )


def _listed_of(response: Response) -> tuple[Subscription, ...]:
    if not isinstance(response, SubscriptionsListed):
        raise RemoteProtocolError(f"{type(response).__name__} came instead of the subscriptions")
    return response.subscriptions


async def _stored_at_ms(context: Context, server: KnownServer, found: GroupPosition) -> int | None:
    """Ask when the first message was stored that no consumer of the group was handed."""
    first = max(found.next_sequence, found.start)
    if first >= found.end:
        return None

    def convert(response: Response) -> int | None:
        messages = messages_of(found.partition, response)
        return messages[0].stored_at_ms if messages else None

    try:
        return await context.brokers.ask(server, Read(found.partition, first, 1, 1, 0), convert)
    except (UnavailableError, UnknownSubjectError):
        return None


def _positions_of(response: Response) -> tuple[GroupPosition, ...]:
    if not isinstance(response, GroupsReport):
        raise RemoteProtocolError(f"a request for groups got {response!r}")
    if response.is_cut:
        raise NotAllowedError(
            f"there are more than {len(response.positions)} groups and partitions: name a "
            "subject, a pattern or a group"
        )
    return response.positions


def _key(server: KnownServer, found: GroupPosition) -> tuple[str, str, str]:
    return server.broker_group, found.partition, found.group


def _seen(found: GroupPosition, now_ms: int) -> Seen:
    return Seen(now_ms, found.end, found.lag)
