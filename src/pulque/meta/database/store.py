"""What the meta servers keep: read by revision, written in short transactions.

A write first takes the next revision from the one row of ``pulque_cluster``. That row is locked
until the end, so writes come one after the other, whichever meta server they come from, and what
a write reads is what it changes.
"""

import secrets
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from sqlalchemy import Select, insert, select, update
from sqlalchemy.engine import Row
from sqlalchemy.ext.asyncio import AsyncConnection

from pulque.meta.database.allotment_store import (
    Allotment,
    AttendingConsumer,
    OrderKey,
    read_ordered,
)
from pulque.meta.database.connection import Database
from pulque.meta.database.leadership_store import read_leaderships
from pulque.meta.database.tables import (
    BROKER_GROUPS,
    CLUSTER,
    MARKS,
    PARTITIONS,
    POLICIES,
    REPLICAS,
    SERVERS,
    SUBJECTS,
    next_revision,
)
from pulque.model.cluster import GroupMarks, Placement, Server, ServerState
from pulque.model.leadership import Leadership
from pulque.model.names import PartitionName, Subject
from pulque.model.ordered import OrderStrategy
from pulque.model.routes import Role, Slots

__all__ = ["Changes", "ClusterStore"]

_ONE = 1
_ID_BYTES = 8
_FEW = 500
"""As many values as any database takes in one statement."""


@dataclass(slots=True)
class Changes:
    """What is different since a revision."""

    revision: int
    """Up to which everything is in here; some of it may be newer."""
    servers: list[Server] = field(default_factory=list)
    groups: dict[str, GroupMarks] = field(default_factory=dict)
    subjects: dict[Subject, tuple[Placement, ...]] = field(default_factory=dict)
    read_only: dict[str, bool] = field(default_factory=dict)
    """Whether subjects and patterns take no sends, by command."""
    policies: dict[str, str] = field(default_factory=dict)
    """What was changed for the whole cluster: JSON by key."""
    orders: dict[Subject, OrderStrategy] = field(default_factory=dict)
    """Of the subjects that are different."""
    attending: list[AttendingConsumer] = field(default_factory=list)
    """Consumers of ordered groups that came or went."""
    allotments: dict[OrderKey, Allotment] = field(default_factory=dict)
    leaderships: dict[str, Leadership] = field(default_factory=dict)
    """By broker group."""


class ClusterStore:
    """The database of the cluster."""

    def __init__(self, database: Database) -> None:
        self._database = database

    async def open(self) -> str:
        """Make the tables if they are not there; return the id of the cluster.

        Raises:
            UnavailableError: The database is away.
            ConfigError: Its tables are of a newer version.
        """
        await self._database.migrate()
        async with self._database.reading() as connection:
            found = await connection.scalar(select(CLUSTER.c.cluster_id))
        return found or await self._found_cluster()

    async def close(self) -> None:
        """Close the connections."""
        await self._database.close()

    async def changes(self, since: int) -> Changes | None:
        """Return what came after a revision; None if nothing did.

        Raises:
            UnavailableError: The database is away.
        """
        async with self._database.reading() as connection:
            # The number first: whatever is read after it is as new, or newer.
            revision = int(await connection.scalar(select(CLUSTER.c.revision)) or 0)
            if revision == since:
                return None
            found = Changes(revision)
            found.servers = await self._servers(
                connection, select(SERVERS).where(SERVERS.c.revision > since)
            )
            await _read_marks(connection, since, found)
            await _read_subjects(connection, since, found)
            found.attending, found.allotments = await read_ordered(connection, since)
            found.leaderships = await read_leaderships(connection, since)
        return found

    async def register(self, server: Server, seen: Server | None) -> Server | None:
        """Write down a server, unless it is not what the caller saw.

        Args:
            server: As it registers now.
            seen: As the caller knows it; None if not at all.

        Returns:
            What stands there instead, if something else does; then nothing was written.

        Raises:
            UnavailableError: The database is away.
        """
        async with self._database.writing() as connection:
            revision = await next_revision(connection)
            query = select(SERVERS).where(SERVERS.c.name == server.name)
            stored = await self._servers(connection, query)
            if stored and stored[0] != seen:
                await connection.rollback()
                return stored[0]
            values = server._asdict() | {"revision": revision}
            if stored:
                changed = update(SERVERS).where(SERVERS.c.name == server.name)
                await connection.execute(changed.values(values))
            else:
                await connection.execute(insert(SERVERS).values(values | {"beats": 0}))
            if not stored or stored[0].incarnation != server.incarnation:
                # What was said of its logs is of another start: it is elected once it asks.
                said = REPLICAS.c.directory == server.directory
                await connection.execute(update(REPLICAS).where(said).values(token=""))
        return None

    async def beat(self, names: Sequence[str]) -> dict[str, int]:
        """Count a heartbeat of each of these servers; return the counts of all servers.

        Other meta servers see by the counts who lives, even if they cannot hear it themselves.

        Raises:
            UnavailableError: The database is away.
        """
        async with self._database.writing() as connection:
            for some in _slices(names):
                which = SERVERS.c.name.in_(some)
                # In one order everywhere: so no two meta servers wait for each other.
                locked = select(SERVERS.c.name).where(which).order_by(SERVERS.c.name)
                await connection.execute(locked.with_for_update())
                await connection.execute(
                    update(SERVERS).where(which).values(beats=SERVERS.c.beats + 1)
                )
            rows = await connection.execute(select(SERVERS.c.name, SERVERS.c.beats))
            return {row.name: row.beats for row in rows}

    async def create_subjects(self, placed: Mapping[Subject, Sequence[Placement]]) -> None:
        """Write down new subjects; those that are there stay as they are.

        Raises:
            UnavailableError: The database is away.
        """
        async with self._database.writing() as connection:
            revision = await next_revision(connection)
            there = await _existing(connection, placed)
            new = {name: each for name, each in placed.items() if name not in there}
            if not new:
                await connection.rollback()
                return
            await connection.execute(
                insert(SUBJECTS), [{"name": name, "revision": revision} for name in new]
            )
            await connection.execute(insert(PARTITIONS), _rows_of(new))

    async def replace_partitions(
        self, subject: Subject, seen: Sequence[Placement], placed: Sequence[Placement]
    ) -> bool:
        """Give a subject other partitions, unless they are not those that the caller saw.

        Returns:
            Whether it was done.

        Raises:
            UnavailableError: The database is away.
        """
        async with self._database.writing() as connection:
            revision = await next_revision(connection)
            found = Changes(revision)
            await _read_subjects(connection, -1, found, only=subject)
            if found.subjects.get(subject) != tuple(seen):
                await connection.rollback()
                return False
            await connection.execute(PARTITIONS.delete().where(PARTITIONS.c.subject == subject))
            await connection.execute(insert(PARTITIONS), _rows_of({subject: placed}))
            await connection.execute(
                update(SUBJECTS).where(SUBJECTS.c.name == subject).values(revision=revision)
            )
        return True

    async def set_order(self, subject: Subject, order: OrderStrategy) -> bool:
        """Write down what a failure may do to the order of a subject's messages.

        Returns:
            Whether there is such a subject.

        Raises:
            UnavailableError: The database is away.
        """
        async with self._database.writing() as connection:
            values = {"order_strategy": int(order), "revision": await next_revision(connection)}
            done = await connection.execute(
                update(SUBJECTS).where(SUBJECTS.c.name == subject).values(values)
            )
        return bool(done.rowcount)

    async def mark_group(self, broker_group: str, marks: GroupMarks) -> None:
        """Write down what was commanded about a broker group.

        Raises:
            UnavailableError: The database is away.
        """
        async with self._database.writing() as connection:
            values = marks._asdict() | {"revision": await next_revision(connection)}
            done = await connection.execute(
                update(BROKER_GROUPS).where(BROKER_GROUPS.c.name == broker_group).values(values)
            )
            if not done.rowcount:
                values |= {"name": broker_group}
                await connection.execute(insert(BROKER_GROUPS).values(values))

    async def mark_subject(self, pattern: str, *, is_read_only: bool) -> None:
        """Write down whether a subject, or a pattern, takes no sends.

        Raises:
            UnavailableError: The database is away.
        """
        async with self._database.writing() as connection:
            revision = await next_revision(connection)
            values = {"is_read_only": is_read_only, "revision": revision}
            done = await connection.execute(
                update(MARKS).where(MARKS.c.pattern == pattern).values(values)
            )
            if not done.rowcount:
                await connection.execute(insert(MARKS).values({"pattern": pattern} | values))

    async def set_policies(self, values: Mapping[str, str]) -> None:
        """Write down what holds for the whole cluster.

        Raises:
            UnavailableError: The database is away.
        """
        async with self._database.writing() as connection:
            revision = await next_revision(connection)
            for key, value in values.items():
                row = {"value": value, "revision": revision}
                done = await connection.execute(
                    update(POLICIES).where(POLICIES.c.key == key).values(row)
                )
                if not done.rowcount:
                    await connection.execute(insert(POLICIES).values({"key": key} | row))

    async def _found_cluster(self) -> str:
        """Give the cluster its id, unless another meta server does at this moment."""
        async with self._database.writing() as connection:
            await self._database.lock(connection)
            found = await connection.scalar(select(CLUSTER.c.cluster_id))
            if found is None:
                found = secrets.token_hex(_ID_BYTES)
                await connection.execute(
                    insert(CLUSTER).values(one=_ONE, cluster_id=found, revision=0)
                )
        return str(found)

    @staticmethod
    async def _servers(
        connection: AsyncConnection, query: Select[tuple[object, ...]]
    ) -> list[Server]:
        return [_server(row) for row in await connection.execute(query)]


async def _read_marks(connection: AsyncConnection, since: int, into: Changes) -> None:
    groups = select(BROKER_GROUPS).where(BROKER_GROUPS.c.revision > since)
    for row in await connection.execute(groups):
        into.groups[row.name] = GroupMarks(row.is_read_only, row.is_draining)
    for row in await connection.execute(select(MARKS).where(MARKS.c.revision > since)):
        into.read_only[row.pattern] = row.is_read_only
    for row in await connection.execute(select(POLICIES).where(POLICIES.c.revision > since)):
        into.policies[row.key] = row.value


async def _read_subjects(
    connection: AsyncConnection, since: int, into: Changes, only: Subject | None = None
) -> None:
    query = (
        select(PARTITIONS, SUBJECTS.c.order_strategy)
        .join(SUBJECTS, SUBJECTS.c.name == PARTITIONS.c.subject)
        .where(SUBJECTS.c.revision > since)
        .order_by(PARTITIONS.c.subject, PARTITIONS.c.place)
    )
    if only is not None:
        query = query.where(SUBJECTS.c.name == only)
    found: dict[Subject, list[Placement]] = {}
    for row in await connection.execute(query):
        found.setdefault(Subject(row.subject), []).append(_placement(row))
        into.orders[Subject(row.subject)] = OrderStrategy(row.order_strategy)
    into.subjects = {name: tuple(placed) for name, placed in found.items()}


async def _existing(connection: AsyncConnection, names: Iterable[Subject]) -> set[str]:
    found: set[str] = set()
    for some in _slices(list(names)):
        rows = await connection.execute(select(SUBJECTS.c.name).where(SUBJECTS.c.name.in_(some)))
        found.update(row.name for row in rows)
    return found


def _slices(names: Sequence[str]) -> Iterable[Sequence[str]]:
    return (names[at : at + _FEW] for at in range(0, len(names), _FEW))


def _server(row: Row[tuple[object, ...]]) -> Server:
    return Server(
        row.name,
        row.broker_group,
        Role(row.role),
        row.host,
        row.port,
        row.directory,
        row.incarnation,
        ServerState(row.state),
        row.is_removed,
    )


def _placement(row: Row[tuple[object, ...]]) -> Placement:
    # There are many thousands of them, and few different groups: one text serves all.
    name, subject = str(row.name), str(row.subject)
    slots = Slots(row.slot_start, row.slot_end)
    return Placement(
        PartitionName(subject if name == subject else name),
        sys.intern(row.broker_group),
        slots,
        row.is_closed,
        tuple(map(int, row.parents.split())),
    )


def _rows_of(placed: Mapping[Subject, Sequence[Placement]]) -> list[dict[str, object]]:
    return [
        {
            "subject": subject,
            "place": place,
            "name": each.partition,
            "broker_group": each.broker_group,
            "slot_start": each.slots.start,
            "slot_end": each.slots.end,
            "is_closed": each.is_closed,
            "parents": " ".join(map(str, each.parents)),
        }
        for subject, placements in placed.items()
        for place, each in enumerate(placements)
    ]
