"""``/groups``: who consumes, how far it is behind, and how it is set to another place."""

import asyncio
import functools

from fastapi import APIRouter

from pulque.admin.cluster import KnownServer
from pulque.admin.context import Context
from pulque.admin.group_requests import (
    ask_those_concerned,
    damaged_in,
    find_positions,
    lag_row,
    retry_settings,
    said_by,
    settings_row,
    summed,
)
from pulque.admin.models.group import (
    GroupChange,
    GroupDetail,
    GroupPage,
    GroupRow,
    LagPage,
    Reset,
    ResetDone,
    ResetRow,
    SettingsOfGroup,
)
from pulque.admin.models.names import GroupInPath, GroupInQuery, PatternInQuery
from pulque.admin.models.pagination import Cursor, Limit, cut, read_cursor
from pulque.client.inspecting.groups import PartitionReset, reset_request, resets_of
from pulque.client.options.group_options import StartAt, changed_of, look_request, mode_of
from pulque.errors import InvalidRequestError, UnknownGroupError
from pulque.model.groups import BROKERS_CHOICE, EVERYTHING, GroupSettings, Mode, tag_filter
from pulque.model.names import Pattern, Subject, is_broadcast, is_pattern, patterns_of
from pulque.wire.requests import ChangeGroup

__all__ = ["GroupsApi"]


class GroupsApi:
    """Answers for groups."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self.router = router = APIRouter(prefix="/groups", tags=["groups"])
        router.get("", summary="List groups")(self.page)
        # A broadcast consumer's group may hold a slash, so that the longer paths come first.
        router.get("/{group:path}/lag", summary="Lag by broker group and partition")(self.lag)
        router.post("/{group:path}/reset", summary="Go on from another place")(self.reset)
        router.get("/{group:path}", summary="Show a group")(self.show)
        router.patch("/{group:path}", summary="Change a group")(self.change)

    async def page(
        self,
        subject: PatternInQuery = None,
        group: GroupInQuery = None,
        cursor: Cursor = None,
        limit: Limit = 100,
    ) -> GroupPage:
        """Return groups with what they have not settled, all partitions added up."""
        after = read_cursor(cursor, (str,))
        places, silent = await find_positions(self._context, subject, group)
        rows, following = cut(summed(places), lambda row: (row.group,), after, limit)
        return GroupPage(items=rows, next=following, unreachable=silent)

    async def show(self, group: GroupInPath, subject: PatternInQuery = None) -> GroupDetail:
        """Return one group, with the mode, the filter and the retries of each subscription."""
        places, silent = await find_positions(self._context, subject, group)
        said, unheard = await said_by(self._context, group)
        settings = [
            settings_row(each.subject, each.settings, known)
            for each, known in said.items()
            if not is_broadcast(each.group) and _may_concern(each.subject, subject)
        ]
        if not places and not settings:
            raise UnknownGroupError(f"group {group} never consumed {subject or 'here'}")
        row = summed(places)[0] if places else _without_messages(group, settings)
        away = {each.broker: each for each in (*silent, *unheard)}
        return GroupDetail(**row.model_dump(), settings=settings, unreachable=list(away.values()))

    async def lag(
        self,
        group: GroupInPath,
        subject: PatternInQuery = None,
        cursor: Cursor = None,
        limit: Limit = 100,
    ) -> LagPage:
        """Return where a group is in each partition, and when it will be done."""
        after = read_cursor(cursor, (str, str))
        places, silent = await find_positions(self._context, subject, group)
        if not places:
            raise UnknownGroupError(f"group {group} never consumed {subject or 'here'}")
        some, following = cut(
            places, lambda place: (place[0].broker_group, place[1].partition), after, limit
        )
        damaged = await damaged_in(self._context, (server for server, _ in some))
        rows = await asyncio.gather(
            *(
                lag_row(
                    self._context, server, found, damaged.get((server.name, found.partition), 0)
                )
                for server, found in some
            )
        )
        return LagPage(items=list(rows), next=following, unreachable=silent)

    async def change(self, group: GroupInPath, change: GroupChange) -> SettingsOfGroup:
        """Change what a group said, on every broker that knows it.

        Consumers that run are refused from then on, until they are started anew.
        """
        look = look_request(change.subject, group)
        request = ChangeGroup(
            group,
            change.subject,
            change.mode is not None,
            Mode.SHARED if change.mode is None else mode_of(change.mode, group, broadcast=None),
            change.filter is not None,
            EVERYTHING
            if change.filter is None
            else tag_filter(change.filter.any_of, change.filter.all_of),
            BROKERS_CHOICE if change.retry is None else retry_settings(change.retry),
        )
        known = await ask_those_concerned(
            self._context.brokers,
            await self._context.serving(),
            functools.partial(self._change, look),
        )
        changed = await ask_those_concerned(
            self._context.brokers,
            [server for server, _ in known],
            functools.partial(self._change, request),
            is_change=True,
        )
        broker_groups = [server.broker_group for server, _ in changed]
        return settings_row(Pattern(change.subject), changed[0][1], broker_groups)

    async def _change(self, request: ChangeGroup, server: KnownServer) -> GroupSettings:
        return await self._context.brokers.ask(server, request, changed_of)

    async def reset(self, group: GroupInPath, reset: Reset) -> ResetDone:
        """Have a group go on from another place; with `dry_run`, only say what that would mean.

        All brokers are asked first: if one of them does not answer, nothing is done.
        """
        servers = await self._context.serving(reset.broker_group)
        found = await ask_those_concerned(
            self._context.brokers,
            servers,
            functools.partial(self._reset, reset, group, dry_run=True),
        )
        if reset.to.sequence is not None and len(found) > 1:
            names = ", ".join(server.broker_group for server, _ in found[:10])
            raise InvalidRequestError(
                f"sequence {reset.to.sequence} of which broker group? there are {names}"
            )
        if not reset.dry_run:
            found = await ask_those_concerned(
                self._context.brokers,
                [server for server, _ in found],
                functools.partial(self._reset, reset, group, dry_run=False),
                is_change=True,
            )
        rows = [
            ResetRow(**each._replace(broker_group=server.broker_group)._asdict())
            for server, partitions in found
            for each in partitions
        ]
        rows.sort(key=lambda row: (row.broker_group, row.partition))
        return ResetDone(dry_run=reset.dry_run, rows=rows)

    async def _reset(
        self, reset: Reset, group: str, server: KnownServer, *, dry_run: bool
    ) -> list[PartitionReset]:
        request = reset_request(
            reset.subject, group, _place(reset), reset.partition, dry_run=dry_run
        )
        return await self._context.brokers.ask(server, request, resets_of)


def _place(reset: Reset) -> StartAt:
    to = reset.to
    if to.at is not None:
        return to.at
    if to.time is not None:
        return to.time
    assert to.sequence is not None  # noqa: S101  # the model sees to it
    return to.sequence


def _may_concern(said_of: str, asked_for: str | None) -> bool:
    """Return whether settings for one subject or pattern may count for another."""
    if asked_for is None or asked_for == said_of or is_pattern(asked_for):
        return True
    return said_of in patterns_of(Subject(asked_for))


def _without_messages(group: str, settings: list[SettingsOfGroup]) -> GroupRow:
    """Return the row of a group that subscribed to what nothing was ever sent to."""
    return GroupRow(group=group, mode=settings[0].mode, partitions=0, lag=0, held=0, consumers=0)
