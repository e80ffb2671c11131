"""Brokers that ask who leads their group, and leaders that say who has everything.

A question is a sign of life. It is in the database before it is answered, so the time that the
answer gives a leader runs from there, whichever meta server it asked. While the database is away,
what is known is answered, and nothing changes.
"""

import asyncio
import contextlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from pulque.errors import (
    InvalidRequestError,
    NotAllowedError,
    PulqueError,
    UnavailableError,
)
from pulque.meta.components import Background, MetaParts
from pulque.meta.database.leadership_store import LeadershipStore, Replica
from pulque.meta.directory_refresh import Refresher
from pulque.meta.fairness import share
from pulque.meta.leadership.elections import Elections
from pulque.model.cluster import Server, ServerState
from pulque.model.leadership import Leadership
from pulque.model.names import parse_group
from pulque.model.routes import Role
from pulque.rules.leadership import (
    ElectionCandidate,
    asked,
    beat_within,
    change_in_sync,
    found,
    hand_over,
    set_min_in_sync,
)
from pulque.wire.leadership import ChangeInSync, InSyncChanged, Lead, Led

__all__ = ["LeaderLeases"]

_TRIES = 5
_LONGEST = 255
_LARGEST = 2**63 - 1


@dataclass(eq=False, slots=True)
class _LeadRequest:
    request: Lead
    owner: object
    answer: Callable[[Led], None]
    refuse: Callable[[PulqueError], None]
    timer: asyncio.TimerHandle | None = None
    judged: Replica | None = None
    """What the database has of the broker."""

    @property
    def replica(self) -> Replica:
        if self.judged is not None:
            return self.judged
        request = self.request
        return Replica(
            request.directory,
            request.broker_group,
            request.name,
            request.token,
            request.message_end,
            request.is_fit,
        )


class LeaderLeases:
    """Answers the brokers of groups that have followers. Lives in one event loop.

    Args:
        parts: What is known of the cluster.
        store: Where leaderships are written down.
        refresher: Reads what was written.
        elections: Changes who leads.
        background: Runs the writing.
    """

    def __init__(
        self,
        parts: MetaParts,
        store: LeadershipStore,
        refresher: Refresher,
        elections: Elections,
        background: Background,
    ) -> None:
        self._parts = parts
        self._directory = parts.directory
        self._store = store
        self._refresher = refresher
        self._elections = elections
        self._background = background
        self._unwritten: list[_LeadRequest] = []
        self._is_writing = False
        self._unknown: list[_LeadRequest] = []
        """Of brokers that this meta server has not heard of."""
        self._is_looking = False
        self._waiting: dict[_LeadRequest, None] = {}
        self._gone: set[object] = set()

    @property
    def waiting(self) -> int:
        """How many questions wait for something to change."""
        return len(self._waiting)

    def lead(
        self,
        request: Lead,
        owner: object,
        answer: Callable[[Led], None],
        refuse: Callable[[PulqueError], None],
    ) -> None:
        """Take note that a broker lives, and tell it who leads once that is not what it knows.

        Raises:
            InvalidNameError: It names what is no broker or group.
            InvalidRequestError: Another field makes no sense.
            UnavailableError: The database was never read.
        """
        _check(request)
        self._refresher.check_loaded()
        self._put(_LeadRequest(request, owner, answer, refuse))

    def change_in_sync(
        self,
        request: ChangeInSync,
        answer: Callable[[InSyncChanged], None],
        refuse: Callable[[PulqueError], None],
    ) -> None:
        """Write down who has all that was confirmed, if the leader says so.

        Raises:
            InvalidNameError: It names what is no group.
            UnavailableError: The database was never read.
        """
        parse_group(request.broker_group)
        self._refresher.check_loaded()

        async def change() -> None:
            try:
                answer(await self._change_in_sync(request))
            except PulqueError as error:
                refuse(error)

        self._background.start(change())

    def changed(self) -> None:
        """Take note that the cluster is not what it was."""
        for each in list(self._waiting):
            if each in self._waiting and self._is_news(each):
                self._end(each)

    def closed(self, owner: object) -> None:
        """Forget the questions of a connection that is gone."""
        for each in [each for each in self._waiting if each.owner is owner]:
            self._remove(each)
        self._unwritten = [each for each in self._unwritten if each.owner is not owner]
        self._unknown = [each for each in self._unknown if each.owner is not owner]
        if self._is_writing:
            # What is being written now must not wait for anything afterwards.
            self._gone.add(owner)

    def close(self) -> None:
        """Answer all that wait."""
        for each in list(self._waiting):
            self._end(each)

    # -- questions ---------------------------------------------------------------------------

    def _put(self, each: _LeadRequest) -> None:
        self._unwritten.append(each)
        if not self._is_writing:
            self._is_writing = True
            self._background.start(self._write())

    async def _write(self) -> None:
        """Write down what came while the writing before was under way, and answer it."""
        try:
            while self._unwritten:
                # One of each: a leader's lease must not wait for a crowd from somewhere else.
                some, self._unwritten = share(self._unwritten, 1)
                known = [each for each in some if self._server_of(each.request) is not None]
                self._look_up(each for each in some if each not in known)
                if known:
                    await self._take_in(known)
                self._gone.clear()
        finally:
            self._is_writing = False

    async def _take_in(self, some: list[_LeadRequest]) -> None:
        is_written = await self._write_down(some)
        now_ms = self._parts.clock.monotonic_ms()
        for each in some:
            self._directory.heard.hear(each.request.name, now_ms)
        self._refresher.look()
        for each in some:
            try:
                if is_written:
                    request = each.request
                    self._elections.check_newest(
                        request.broker_group, request.name, request.version
                    )
                    await self._try_to_decide(each)
                    self._check_has_all(each)
                else:
                    self._check_may_be_told(each)
                self._hold(each)
            except PulqueError as error:
                each.refuse(error)

    def _check_has_all(self, each: _LeadRequest) -> None:
        """Refuse a broker that led, came back with less, and that nobody can replace yet."""
        request, known = each.request, each.replica
        row = self._directory.leaderships.get(request.broker_group)
        is_old = request.is_fit and not known.is_fit
        if is_old and row is not None and request.directory in row.in_sync:
            others = [name for name in row.in_sync if name != request.directory]
            raise NotAllowedError(
                f"data directory {request.directory} of {request.name} had {known.message_end} "
                f"bytes of its logs on disk, and has {request.message_end}: it is an older copy, "
                "or its disk lost what may have been confirmed, so it does not "
                f"lead broker group {request.broker_group}. Put the newer directory back, or "
                f"start a broker that is in sync ({', '.join(others) or 'there is none'}) and "
                "this one copies from it"
            )

    def _check_may_be_told(self, each: _LeadRequest) -> None:
        """Refuse to answer a leader that the database does not know to live.

        The answer would be a lease, and another meta server may have somebody else elected
        meanwhile. Its followers keep it, if all of them are there.
        """
        row = self._directory.leaderships.get(each.request.broker_group)
        if row is not None and row.leader == each.request.directory:
            raise UnavailableError(
                f"{each.request.name} leads broker group {row.broker_group}, and this meta server "
                "cannot tell the others that it lives: " + (self._refresher.away or "try again")
            )

    async def _write_down(self, some: list[_LeadRequest]) -> bool:
        """Have the database know who was heard of; say whether it does."""
        if not self._refresher.away:  # else every answer would come late
            try:
                judged = await self._store.hear(each.replica for each in some)
                for each in some:
                    each.judged = judged[each.request.directory]
                await self._refresher.refresh()
            except UnavailableError:
                pass
            else:
                return True
        for each in some:
            self._refresher.heard(each.request.name)
        return False

    def _look_up(self, some: Iterable[_LeadRequest]) -> None:
        """Find out whether brokers are registered that nobody knows here."""
        self._unknown += some
        if self._unknown and not self._is_looking:
            self._is_looking = True
            self._background.start(self._ask_database())

    async def _ask_database(self) -> None:
        """Go on with those that are registered; the others are refused."""
        try:
            while self._unknown:
                some, self._unknown = self._unknown, []
                with contextlib.suppress(UnavailableError):  # then only what is known counts
                    await self._refresher.refresh()
                for each in some:
                    self._go_on_with(each)
        finally:
            self._is_looking = False

    def _go_on_with(self, each: _LeadRequest) -> None:
        request = each.request
        if self._server_of(request) is not None:
            self._put(each)
            return
        each.refuse(
            NotAllowedError(
                f"no broker {request.name} of broker group {request.broker_group} "
                f"with data directory {request.directory} is registered: it has to "
                "register first"
            )
        )

    def _server_of(self, request: Lead) -> Server | None:
        server = self._directory.servers.get(request.name)
        asked_as = (request.directory, request.broker_group, Role.BROKER, False)
        if server is None or asked_as != (
            server.directory,
            server.broker_group,
            server.role,
            server.is_removed,
        ):
            return None
        return server

    async def _try_to_decide(self, each: _LeadRequest) -> None:
        try:
            await self._decide(each)
        except UnavailableError:
            # The database went away in the middle: then what is known holds, if anything is.
            if each.request.broker_group not in self._directory.leaderships:
                raise

    async def _decide(self, each: _LeadRequest) -> None:
        """See to it that the leadership is what it should be, now that a broker has asked."""
        asker = ElectionCandidate(*_candidate(each.replica))
        for _ in range(_TRIES):
            row = self._directory.leaderships.get(each.request.broker_group)
            if row is None:
                if await self._found(each, asker):
                    return
                continue
            # A leader that lost something, or was started anew, may have to make room.
            is_asking_others = asker.directory == row.leader and (
                not asker.is_fit or asker.token != row.token
            )
            others = await self._elections.candidates(row.broker_group) if is_asking_others else ()
            wanted = asked(row, asker, others) or self._told_otherwise(row, asker, each.request)
            if wanted is None or await self._elections.change(row, *wanted):
                return

    def _told_otherwise(
        self, row: Leadership, asker: ElectionCandidate, request: Lead
    ) -> tuple[Leadership, str] | None:
        """Return the leadership with the setting that its leader was started with, if changed."""
        wanted = set_min_in_sync(row, asker, request.min_in_sync)
        if wanted is None:
            return None
        self._parts.warn(
            "min_in_sync_changed",
            broker_group=row.broker_group,
            leader=asker.name,
            before=row.min_in_sync,
            now=wanted.min_in_sync,
        )
        return wanted, ""

    async def _found(self, each: _LeadRequest, asker: ElectionCandidate) -> bool:
        """Make the first leader of a group, unless somebody else has its messages."""
        group = each.request.broker_group
        if not asker.is_fit:
            raise UnavailableError(
                f"nobody leads broker group {group} yet, and the logs of {asker.name} are not "
                "whole: another broker of the group has to come first"
            )
        await self._check_first(group, asker)
        first = found(group, asker, each.request.min_in_sync)
        is_done = await self._store.create(first)
        if is_done:
            self._elections.tell_elected(first, "the first of its group")
        await self._refresher.refresh()
        return is_done

    async def _check_first(self, group: str, asker: ElectionCandidate) -> None:
        ends = {
            each.directory: each.message_end for each in await self._elections.candidates(group)
        }
        for other in list(self._directory.servers.values()):
            if (
                other.role is not Role.BROKER
                or other.broker_group != group
                or other.directory == asker.directory
                or other.is_removed
            ):
                continue
            told = ends.get(other.directory)
            if other.state is not ServerState.FOLLOWING or (told and not asker.message_end):
                raise NotAllowedError(
                    f"{other.name} at {other.address} served broker group {group} before, and "
                    "has its messages: start it first, or remove it with `pulque broker remove`"
                )
            if told is None and not asker.message_end and self._directory.is_living(other):
                raise UnavailableError(
                    f"nobody leads broker group {group} yet: {other.name} at {other.address} has "
                    "not asked, and may have messages, while this broker has none; try again"
                )

    # -- waiting -----------------------------------------------------------------------------

    def _hold(self, each: _LeadRequest) -> None:
        """Answer at once if that is news, else when it is, or when the time is up."""
        if each.owner in self._gone:
            return
        # Checked first: there may be nothing to tell.
        answer = self._answer(each)
        wait_ms = min(each.request.wait_ms, beat_within(self._elections.lease_ms))
        if self._is_news(each) or not wait_ms:
            each.answer(answer)
            return
        self._waiting[each] = None
        loop = asyncio.get_running_loop()
        each.timer = loop.call_later(wait_ms / 1000, self._end, each)

    def _is_news(self, each: _LeadRequest) -> bool:
        row = self._directory.leaderships.get(each.request.broker_group)
        # Who knows more than this meta server has to wait until it has caught up.
        return row is not None and row.version > each.request.version

    def _answer(self, each: _LeadRequest) -> Led:
        group = each.request.broker_group
        row = self._directory.leaderships.get(group)
        if row is None:
            raise UnavailableError(
                f"nobody leads broker group {group} as far as this meta server knows, and "
                + (self._refresher.away or "others changed it at the same time; try again")
            )
        leader = self._directory.broker_in(group, row.leader)
        name, host, port = (leader.name, leader.host, leader.port) if leader else ("", "", 0)
        return Led(row, name, host, port, self._elections.lease_ms)

    def _end(self, each: _LeadRequest) -> None:
        self._remove(each)
        try:
            each.answer(self._answer(each))
        except PulqueError as error:  # all was of another cluster
            each.refuse(error)

    def _remove(self, each: _LeadRequest) -> None:
        if each.timer is not None:
            each.timer.cancel()
        self._waiting.pop(each, None)

    # -- who is in sync ----------------------------------------------------------------------

    async def _change_in_sync(self, request: ChangeInSync) -> InSyncChanged:
        await self._refresher.refresh()
        row = self._directory.leaderships.get(request.broker_group)
        if row is None:
            raise InvalidRequestError(f"nobody leads broker group {request.broker_group}")
        said = (request.token, request.epoch, request.version)
        if said != (row.token, row.epoch, row.version):
            return InSyncChanged(is_done=False, leadership=row)
        in_sync = self._known_in_sync(row, request)
        wanted: Leadership | None
        if row.leader in in_sync:
            wanted = change_in_sync(row, in_sync)
        else:
            others = await self._elections.candidates(row.broker_group)
            wanted = hand_over(row, in_sync, others, in_sync[0])
        is_done = wanted is not None and await self._elections.change(
            row, wanted, "the leader handed over"
        )
        return InSyncChanged(is_done, self._directory.leaderships[row.broker_group])

    def _known_in_sync(self, row: Leadership, request: ChangeInSync) -> list[str]:
        """Return who is to be in sync, without those that nobody knows.

        Those must not keep the others from being taken in or out.
        """
        found = [
            each
            for each in request.in_sync
            if each in row.in_sync or self._directory.broker_in(row.broker_group, each) is not None
        ]
        if not found:
            raise InvalidRequestError(
                f"somebody has to be in sync in broker group {row.broker_group}, and nobody knows "
                f"{', '.join(map(ascii, request.in_sync[:3])) or 'anybody'}"
            )
        return found


def _candidate(replica: Replica) -> tuple[str, str, str, int, bool]:
    return (
        replica.directory,
        replica.name,
        replica.token,
        replica.message_end,
        replica.is_fit,
    )


def _check(request: Lead) -> None:
    """Refuse what cannot be written down.

    Raises:
        InvalidNameError: A name is none.
        InvalidRequestError: Another field makes no sense.
    """
    parse_group(request.name)
    parse_group(request.broker_group)
    for what, text in (("directory", request.directory), ("token", request.token)):
        if not 0 < len(text) <= _LONGEST or not text.isprintable() or " " in text:
            raise InvalidRequestError(
                f"{what} is {text[:40]!a}; 1 to {_LONGEST} printable characters without spaces "
                "are allowed"
            )
    if request.message_end > _LARGEST:
        raise InvalidRequestError(f"message_end {request.message_end} is over {_LARGEST}")
