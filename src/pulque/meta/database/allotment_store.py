"""Who consumes in order, and what is allotted to whom, as the database has it.

That a consumer is online is in the database, as every meta server has to know when it is not any
more. Heartbeats only count up; whoever sees a count stand still for too long says that the
consumer is offline, unless it was counted meanwhile. What is allotted has a version: of two meta
servers that allot at the same time, one finds that it has changed.
"""

import json
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from sqlalchemy import and_, insert, select, update
from sqlalchemy.ext.asyncio import AsyncConnection
from sqlalchemy.sql import ColumnElement

from pulque.meta.database.connection import Database
from pulque.meta.database.tables import ALLOTMENTS, ATTENDING, next_revision
from pulque.model.names import ConsumerId, Group, Subject

__all__ = [
    "NOTHING_ALLOTTED",
    "Allotment",
    "AttendingConsumer",
    "AttendingStore",
    "OrderKey",
    "Word",
    "read_ordered",
]

OrderKey = tuple[Subject, Group]
"""One ordered group of one subject."""


class AttendingConsumer(NamedTuple):
    """A consumer of an ordered group."""

    subject: Subject
    group: Group
    consumer: ConsumerId
    incarnation: int
    is_online: bool

    @property
    def key(self) -> OrderKey:
        """Its subject and group."""
        return self.subject, self.group


class Allotment(NamedTuple):
    """What belongs to whom, of one subject for one group."""

    version: int
    allotted: Mapping[int, ConsumerId]
    """By the partition's place among those of the subject."""
    drained: frozenset[int]
    """The places of partitions that are closed, and empty for the group."""


NOTHING_ALLOTTED = Allotment(0, {}, frozenset())


class Word(NamedTuple):
    """What became of a consumer's word that it is there, or goes."""

    is_new: bool = False
    """It came or went by that."""
    newer: int | None = None
    """The incarnation that fences it, if there is one."""


class AttendingStore:
    """Reads and writes who attends."""

    def __init__(self, database: Database) -> None:
        self._database = database

    async def attend(self, consumers: Sequence[AttendingConsumer]) -> list[Word]:
        """Write down that consumers are there, or go; return what became of each word.

        Raises:
            UnavailableError: The database is away.
        """
        words: dict[AttendingConsumer, Word] = {}
        async with self._database.writing() as connection:
            # In one order everywhere: so no two meta servers wait for each other.
            for each in sorted(set(consumers)):
                if each.is_online and await _count(connection, each):
                    words[each] = Word()
        rest = [each for each in dict.fromkeys(consumers) if each not in words]
        if rest:
            async with self._database.writing() as connection:
                revision = await next_revision(connection)
                for each in rest:
                    words[each] = await _come_or_go(connection, each, revision)
                if not any(words[each].is_new for each in rest):
                    await connection.rollback()
        return [words[each] for each in consumers]

    async def beats(self) -> dict[AttendingConsumer, int]:
        """Return how often each consumer that is online was counted.

        Raises:
            UnavailableError: The database is away.
        """
        async with self._database.reading() as connection:
            rows = await connection.execute(select(ATTENDING).where(ATTENDING.c.is_online))
            return {_attending(row): row.beats for row in rows}

    async def lose(self, silent: Mapping[AttendingConsumer, int]) -> bool:
        """Say that consumers are offline, unless they were counted meanwhile.

        Args:
            silent: Who they are, and how often each had been counted.

        Returns:
            Whether any of them is offline by that.

        Raises:
            UnavailableError: The database is away.
        """
        lost = 0
        async with self._database.writing() as connection:
            revision = await next_revision(connection)
            for each, beats in sorted(silent.items()):
                done = await connection.execute(
                    update(ATTENDING)
                    .where(_is(each), ATTENDING.c.is_online, ATTENDING.c.beats == beats)
                    .values(is_online=False, revision=revision)
                )
                lost += done.rowcount
            if not lost:
                await connection.rollback()
        return bool(lost)

    async def allot(self, key: OrderKey, seen: int, wanted: Allotment) -> bool:
        """Write down what belongs to whom, unless that is not what the caller saw.

        Args:
            key: Of which subject and group.
            seen: The version that the caller knows; 0 if there is none.
            wanted: What it is to be; its version does not matter.

        Returns:
            Whether it was done.

        Raises:
            UnavailableError: The database is away.
        """
        where = and_(ALLOTMENTS.c.subject == key[0], ALLOTMENTS.c.group_name == key[1])
        async with self._database.writing() as connection:
            revision = await next_revision(connection)
            stored = await connection.scalar(select(ALLOTMENTS.c.version).where(where))
            if (stored or 0) != seen:
                await connection.rollback()
                return False
            values = {
                "version": seen + 1,
                "allotted": json.dumps(sorted(wanted.allotted.items())),
                "drained": json.dumps(sorted(wanted.drained)),
                "revision": revision,
            }
            if stored is None:
                values |= {"subject": key[0], "group_name": key[1]}
                await connection.execute(insert(ALLOTMENTS).values(values))
            else:
                await connection.execute(update(ALLOTMENTS).where(where).values(values))
        return True


async def read_ordered(
    connection: AsyncConnection, since: int
) -> tuple[list[AttendingConsumer], dict[OrderKey, Allotment]]:
    """Return who came or went, and what was allotted, after a revision."""
    attending = select(ATTENDING).where(ATTENDING.c.revision > since)
    consumers = [_attending(row) for row in await connection.execute(attending)]
    allotments = {}
    for row in await connection.execute(select(ALLOTMENTS).where(ALLOTMENTS.c.revision > since)):
        allotted = {place: ConsumerId(consumer) for place, consumer in json.loads(row.allotted)}
        drained = frozenset(json.loads(row.drained))
        key = (Subject(row.subject), Group(row.group_name))
        allotments[key] = Allotment(row.version, allotted, drained)
    return consumers, allotments


async def _count(connection: AsyncConnection, each: AttendingConsumer) -> bool:
    """Count a heartbeat of a consumer that is known to be online; say whether it is."""
    done = await connection.execute(
        update(ATTENDING)
        .where(_is(each), ATTENDING.c.is_online, ATTENDING.c.incarnation == str(each.incarnation))
        .values(beats=ATTENDING.c.beats + 1)
    )
    return bool(done.rowcount)


async def _come_or_go(connection: AsyncConnection, each: AttendingConsumer, revision: int) -> Word:
    row = (await connection.execute(select(ATTENDING).where(_is(each)))).first()
    if row is not None and int(row.incarnation) > each.incarnation:
        return Word(newer=int(row.incarnation))
    values = {
        "incarnation": str(each.incarnation),
        "is_online": each.is_online,
        "revision": revision,
    }
    if row is not None:
        is_new = row.is_online != each.is_online or int(row.incarnation) != each.incarnation
        values["beats"] = row.beats + 1
        await connection.execute(update(ATTENDING).where(_is(each)).values(values))
        return Word(is_new=is_new)
    if each.is_online:
        values |= {"subject": each.subject, "group_name": each.group, "consumer": each.consumer}
        await connection.execute(insert(ATTENDING).values({**values, "beats": 0}))
    return Word(is_new=each.is_online)


def _is(each: AttendingConsumer) -> ColumnElement[bool]:
    return and_(
        ATTENDING.c.subject == each.subject,
        ATTENDING.c.group_name == each.group,
        ATTENDING.c.consumer == each.consumer,
    )


def _attending(row: object) -> AttendingConsumer:
    found = row._mapping  # type: ignore[attr-defined]  # noqa: SLF001  # SQLAlchemy's own name
    return AttendingConsumer(
        Subject(found["subject"]),
        Group(found["group_name"]),
        ConsumerId(found["consumer"]),
        int(found["incarnation"]),
        bool(found["is_online"]),
    )
