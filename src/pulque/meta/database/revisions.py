"""The one number that orders all writes of a cluster."""

from sqlalchemy import update
from sqlalchemy.ext.asyncio import AsyncConnection

from pulque.meta.database.tables import CLUSTER

__all__ = ["next_revision"]


async def next_revision(connection: AsyncConnection) -> int:
    """Take the next revision, and with it the only right to write until the end."""
    bumped = update(CLUSTER).values(revision=CLUSTER.c.revision + 1).returning(CLUSTER.c.revision)
    return int((await connection.execute(bumped)).scalar_one())
