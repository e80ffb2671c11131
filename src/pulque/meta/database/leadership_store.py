"""Who leads which broker group, as the database has it.

A leadership is changed only by who names the epoch and the version that it saw: of two that change
it at the same time, one finds that it has changed. What a broker says when it asks is written down
before it is answered, so that every meta server can elect it, and none takes it for silent while
it goes on with the answer.
"""

from collections.abc import Collection, Iterable, Sequence
from typing import Any, NamedTuple

from sqlalchemy import Row, and_, delete, insert, select, update
from sqlalchemy.ext.asyncio import AsyncConnection

from pulque.meta.database.connection import Database
from pulque.meta.database.tables import LEADERSHIPS, REPLICAS, SERVERS, next_revision
from pulque.model.leadership import Leadership
from pulque.model.positions import Epoch

__all__ = ["LeadershipStore", "Replica", "read_leaderships"]


class Replica(NamedTuple):
    """A broker of a group, as it spoke of itself last."""

    directory: str
    """The id of its data directory."""
    broker_group: str
    name: str
    token: str
    """Of its process."""
    message_end: int
    """How far its logs are, or have to be, on disk: both ends together, as each only grows."""
    is_fit: bool

    def judged(self, known: "Replica") -> "Replica":
        """Return what to believe of a broker that is in sync, by what was known of it.

        A process may have its log cut by a leader, and says so itself. One that was started later
        has at least what was on disk.
        """
        is_later = self.token != known.token or not known.is_fit
        if is_later and self.message_end < known.message_end:
            return self._replace(message_end=known.message_end, is_fit=False)
        return self


class LeadershipStore:
    """Reads and writes who leads."""

    def __init__(self, database: Database) -> None:
        self._database = database

    async def hear(self, replicas: Iterable[Replica]) -> dict[str, Replica]:
        """Write down what brokers said, and count it as a heartbeat of each.

        A process that was started on a directory which is in sync, and has less on its disk than
        was written down of the process before, is not fit: the directory is an older copy, or
        lost something that may have been confirmed.

        Returns:
            By directory, what is written down.

        Raises:
            UnavailableError: The database is away.
        """
        # In one order everywhere: so no two meta servers wait for each other.
        latest = sorted({each.directory: each for each in replicas}.values())
        async with self._database.writing() as connection:
            in_sync = await _all_in_sync(connection)
            judged = {}
            for said in latest:
                query = select(REPLICAS).where(REPLICAS.c.directory == said.directory)
                known = (await connection.execute(query)).first()
                each = said
                if known is not None and said.directory in in_sync:
                    each = said.judged(_replica_of(known))
                judged[each.directory] = each
                values = each._asdict()
                done = await connection.execute(
                    update(REPLICAS).where(REPLICAS.c.directory == each.directory).values(values)
                )
                if not done.rowcount:
                    await _forget_others(connection, in_sync | judged.keys())
                    await connection.execute(insert(REPLICAS).values(values))
            for name in sorted({each.name for each in latest}):
                counted = update(SERVERS).where(SERVERS.c.name == name)
                await connection.execute(counted.values(beats=SERVERS.c.beats + 1))
        return judged

    async def replicas(self) -> Sequence[Replica]:
        """Return what all brokers said last.

        Raises:
            UnavailableError: The database is away.
        """
        async with self._database.reading() as connection:
            rows = await connection.execute(select(REPLICAS).order_by(REPLICAS.c.directory))
            return [_replica_of(row) for row in rows]

    async def create(self, first: Leadership) -> bool:
        """Write down the first leadership of a broker group, unless it has one.

        Returns:
            Whether it was done.

        Raises:
            UnavailableError: The database is away.
        """
        async with self._database.writing() as connection:
            revision = await next_revision(connection)
            there = select(LEADERSHIPS).where(LEADERSHIPS.c.broker_group == first.broker_group)
            if (await connection.execute(there)).first() is not None:
                await connection.rollback()
                return False
            await connection.execute(insert(LEADERSHIPS).values(_values(first, revision)))
        return True

    async def change(
        self, seen: Leadership, wanted: Leadership, beats: tuple[str, int] | None = None
    ) -> bool:
        """Write down another leadership, unless it is not what the caller saw.

        Args:
            seen: As the caller knows it.
            wanted: As it is to be.
            beats: A server that must not have been counted since, and how often it had been: a
                leader that is heard of at the last moment stays.

        Returns:
            Whether it was done.

        Raises:
            UnavailableError: The database is away. It may have been done or not.
        """
        is_seen = and_(
            LEADERSHIPS.c.broker_group == seen.broker_group,
            LEADERSHIPS.c.epoch == seen.epoch,
            LEADERSHIPS.c.version == seen.version,
        )
        async with self._database.writing() as connection:
            revision = await next_revision(connection)
            if beats is None or await _counted(connection, beats[0]) == beats[1]:
                values = _values(wanted, revision)
                done = await connection.execute(update(LEADERSHIPS).where(is_seen).values(values))
                if done.rowcount:
                    return True
            await connection.rollback()
        return False


async def read_leaderships(connection: AsyncConnection, since: int) -> dict[str, Leadership]:
    """Return the leaderships that were changed after a revision, by broker group."""
    rows = await connection.execute(select(LEADERSHIPS).where(LEADERSHIPS.c.revision > since))
    return {
        row.broker_group: Leadership(
            row.broker_group,
            Epoch(row.epoch),
            row.version,
            row.leader,
            row.token,
            tuple(row.in_sync.split()),
            row.min_in_sync,
        )
        for row in rows
    }


async def _all_in_sync(connection: AsyncConnection) -> set[str]:
    """Return the data directories that are in sync, of all broker groups."""
    rows = await connection.execute(select(LEADERSHIPS.c.in_sync))
    return {directory for row in rows for directory in row.in_sync.split()}


async def _forget_others(connection: AsyncConnection, kept: Collection[str]) -> None:
    """Remove what was said of directories that no server has, but for those to be kept.

    So there are no more of them than servers, and directories in sync.
    """
    of_servers = select(SERVERS.c.directory)
    gone = REPLICAS.c.directory.not_in(of_servers) & REPLICAS.c.directory.not_in(kept)
    await connection.execute(delete(REPLICAS).where(gone))


def _replica_of(row: Row[Any]) -> Replica:
    return Replica(
        row.directory, row.broker_group, row.name, row.token, row.message_end, row.is_fit
    )


async def _counted(connection: AsyncConnection, name: str) -> int:
    """Return how often a server was heard of, and have nobody count until the end."""
    query = select(SERVERS.c.beats).where(SERVERS.c.name == name).with_for_update()
    return int(await connection.scalar(query) or 0)


def _values(row: Leadership, revision: int) -> dict[str, object]:
    return row._asdict() | {"in_sync": " ".join(row.in_sync), "revision": revision}
