"""``/dead``: what nobody could process, over all brokers."""

from collections.abc import Callable
from typing import Annotated

from fastapi import APIRouter, Path

from pulque.admin.cluster import KnownServer
from pulque.admin.context import Context, instant
from pulque.admin.group_requests import ask_those_concerned, find_positions
from pulque.admin.models.dead import (
    DeadPage,
    DeadSource,
    DeadSourcePage,
    Letter,
    LetterName,
    Purge,
    Purged,
    Resend,
    ResendDone,
)
from pulque.admin.models.names import (
    GroupInQuery,
    PatternInQuery,
    PlainGroupInPath,
    ServerInPath,
    SubjectInPath,
)
from pulque.admin.models.pagination import (
    Cursor,
    Limit,
    Unreachable,
    cut,
    read_cursor,
    write_cursor,
)
from pulque.client.inspecting.dead_letters import DeadLetterTalks, Talk, death_of
from pulque.client.inspecting.stored_messages import text_or_base64
from pulque.errors import InvalidRequestError, UnknownSubjectError
from pulque.model.message import Message
from pulque.model.names import is_broadcast, subject_of

__all__ = ["DeadApi"]

SequenceInPath = Annotated[int, Path(ge=0, le=2**63 - 1, description="Its sequence there.")]


class DeadApi:
    """Answers for dead letters."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self.router = router = APIRouter(prefix="/dead", tags=["dead letters"])
        one = "/{subject}/{group}"
        router.get("", summary="Count dead letters")(self.sources)
        router.get(one, summary="List dead letters")(self.page)
        router.post(f"{one}/resend", summary="Deliver dead letters again")(self.resend)
        router.post(f"{one}/purge", summary="Give up dead letters")(self.purge)
        router.get(f"{one}/{{broker_group}}/{{sequence}}", summary="Show a dead letter")(self.show)

    async def sources(
        self,
        subject: PatternInQuery = None,
        group: GroupInQuery = None,
        cursor: Cursor = None,
        limit: Limit = 100,
    ) -> DeadSourcePage:
        """Return how many dead letters each group has of each subject that it consumed."""
        after = read_cursor(cursor, (str, str))
        places, silent = await find_positions(self._context, subject, group)
        pairs = {
            (str(subject_of(found.partition)), str(found.group))
            for _, found in places
            if not is_broadcast(found.group)
        }
        some, following = cut(list(pairs), lambda pair: pair, after, limit)
        servers = list(dict.fromkeys(server for server, _ in places))
        rows = [
            DeadSource(subject=name, group=owner, count=await self._count(servers, name, owner))
            for name, owner in some
        ]
        return DeadSourcePage(items=rows, next=following, unreachable=silent)

    async def page(
        self,
        subject: SubjectInPath,
        group: PlainGroupInPath,
        cursor: Cursor = None,
        limit: Limit = 100,
    ) -> DeadPage:
        """Return dead letters that nobody has dealt with, by broker group, oldest first."""
        broker_group, sequence = read_cursor(cursor, (str, int)) or ("", -1)
        letters = DeadLetterTalks(subject, group)
        rows: list[Letter] = []
        silent: list[Unreachable] = []
        for server in sorted(await self._context.serving(), key=lambda each: each.broker_group):
            if server.broker_group < str(broker_group):
                continue
            first = int(sequence) + 1 if server.broker_group == broker_group else 0
            if first < 0 or first > 2**63 - 1:
                raise InvalidRequestError("the cursor is none of this list")
            left = limit - len(rows)
            if not left:
                return DeadPage(
                    items=rows,
                    next=write_cursor((server.broker_group, first - 1)),
                    unreachable=silent,
                )
            found, unheard = await self._some(server, letters, first, left)
            silent += unheard
            rows += (_letter(server, each, is_whole=False) for each in found)
            if len(found) == left:
                last = write_cursor((server.broker_group, found[-1].sequence))
                return DeadPage(items=rows, next=last, unreachable=silent)
        return DeadPage(items=rows, unreachable=silent)

    async def show(
        self,
        subject: SubjectInPath,
        group: PlainGroupInPath,
        broker_group: ServerInPath,
        sequence: SequenceInPath,
    ) -> Letter:
        """Return one dead letter with its body."""
        (server, *_) = await self._context.serving(broker_group)
        letter = await self._context.brokers.talk(
            server, DeadLetterTalks(subject, group).one(sequence)
        )
        if letter is None:
            raise UnknownSubjectError(
                f"dead letter {sequence} of {subject} for {group} is not on {broker_group}"
            )
        return _letter(server, letter, is_whole=True)

    async def resend(
        self, subject: SubjectInPath, group: PlainGroupInPath, resend: Resend
    ) -> ResendDone:
        """Deliver dead letters to their group again, as first attempts."""
        letters = DeadLetterTalks(subject, group)
        if resend.all:
            return ResendDone(resent=await self._change_all(letters, letters.resend_all))
        wanted: dict[str, list[int]] = {}
        for each in resend.letters:
            wanted.setdefault(each.broker_group, []).append(each.sequence)
        servers = {name: (await self._context.serving(name))[0] for name in wanted}
        done = ResendDone(resent=0)
        for name, sequences in wanted.items():
            unique = list(dict.fromkeys(sequences))
            found = await self._context.brokers.talk(
                servers[name], letters.resend(unique, None, None)
            )
            done = ResendDone(
                resent=done.resent + len(found.resent),
                done=[*done.done, *_names(name, found.done)],
                missing=[*done.missing, *_names(name, found.missing)],
            )
        return done

    async def purge(self, subject: SubjectInPath, group: PlainGroupInPath, purge: Purge) -> Purged:
        """Give up dead letters: they are not shown any more, and cannot be resent."""
        letters = DeadLetterTalks(subject, group)
        if purge.until is not None:
            (server, *_) = await self._context.serving(purge.until.broker_group)
            return Purged(
                purged=await self._context.brokers.talk(
                    server, letters.purge(purge.until.sequence)
                )
            )
        return Purged(purged=await self._change_all(letters, lambda: letters.purge(None)))

    async def _change_all(self, letters: DeadLetterTalks, talk: Callable[[], Talk[int]]) -> int:
        """Have all brokers change letters; none does if one of them does not answer."""
        brokers = self._context.brokers
        known = await ask_those_concerned(
            brokers,
            await self._context.serving(),
            lambda server: brokers.talk(server, letters.count()),
        )
        counts = await ask_those_concerned(
            brokers,
            [server for server, _ in known],
            lambda server: brokers.talk(server, talk()),
            is_change=True,
        )
        return sum(count for _, count in counts)

    async def _count(self, servers: "list[KnownServer]", subject: str, group: str) -> int:
        letters = DeadLetterTalks(subject, group)
        counts, _ = await self._context.brokers.ask_all(
            servers, lambda server: self._context.brokers.talk(server, letters.count())
        )
        return sum(count for _, count in counts)

    async def _some(
        self, server: KnownServer, letters: DeadLetterTalks, first: int, limit: int
    ) -> "tuple[list[Message], list[Unreachable]]":
        answers, silent = await self._context.brokers.ask_all(
            [server], lambda each: self._context.brokers.talk(each, letters.some(first, limit))
        )
        return [message for _, found in answers for message in found], silent


def _names(broker_group: str, sequences: tuple[int, ...]) -> list[LetterName]:
    return [LetterName(broker_group=broker_group, sequence=each) for each in sequences]


def _letter(server: KnownServer, message: Message, *, is_whole: bool) -> Letter:
    death = death_of(message)
    text, encoded = text_or_base64(message.body) if is_whole else (None, None)
    return Letter(
        broker_group=server.broker_group,
        sequence=message.sequence,
        id=message.id,
        died_at=instant(death.at_ms),
        attempts=death.attempts,
        why=death.why,
        reason=death.reason,
        key=message.key,
        tags=list(message.tags),
        headers=dict(message.headers),
        size=len(message.body),
        body=text,
        body_base64=encoded,
    )
