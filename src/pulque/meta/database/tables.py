"""The tables of the meta servers' database.

Every row that says something about the cluster carries the *revision* at which it changed last:
the number that each writing transaction takes from the one row of ``cluster``, and which orders
them all. So whoever knows a revision has to read only what came after it. Nothing is deleted.
"""

from sqlalchemy import (
    BigInteger,
    Boolean,
    Column,
    Integer,
    MetaData,
    String,
    Table,
    Text,
    false,
    update,
)
from sqlalchemy.ext.asyncio import AsyncConnection

__all__ = [
    "ALLOTMENTS",
    "ATTENDING",
    "BROKER_GROUPS",
    "CLUSTER",
    "LEADERSHIPS",
    "MARKS",
    "PARTITIONS",
    "POLICIES",
    "REPLICAS",
    "SERVERS",
    "SUBJECTS",
    "TABLES",
    "next_revision",
]

_NAME = 255

TABLES = MetaData()
CLUSTER = Table(
    "pulque_cluster",
    TABLES,
    Column("one", Integer, primary_key=True, autoincrement=False),
    Column("cluster_id", String(64), nullable=False),
    Column("revision", BigInteger, nullable=False),
)
SERVERS = Table(
    "pulque_servers",
    TABLES,
    Column("name", String(_NAME), primary_key=True),
    Column("broker_group", String(_NAME), nullable=False),
    Column("role", Integer, nullable=False),
    Column("host", String(_NAME), nullable=False),
    Column("port", Integer, nullable=False),
    Column("directory", String(_NAME), nullable=False),
    Column("incarnation", BigInteger, nullable=False),
    Column("state", Integer, nullable=False),
    Column("is_removed", Boolean, nullable=False),
    Column("beats", BigInteger, nullable=False),
    Column("revision", BigInteger, nullable=False, index=True),
)
BROKER_GROUPS = Table(
    "pulque_broker_groups",
    TABLES,
    Column("name", String(_NAME), primary_key=True),
    Column("is_read_only", Boolean, nullable=False),
    Column("is_draining", Boolean, nullable=False),
    Column("revision", BigInteger, nullable=False, index=True),
)
SUBJECTS = Table(
    "pulque_subjects",
    TABLES,
    Column("name", String(_NAME), primary_key=True),
    Column("revision", BigInteger, nullable=False, index=True),
    Column("order_strategy", Integer, nullable=False, server_default="0"),
)
PARTITIONS = Table(
    "pulque_partitions",
    TABLES,
    Column("subject", String(_NAME), primary_key=True),
    Column("place", Integer, primary_key=True, autoincrement=False),
    Column("name", String(_NAME + 65), nullable=False),
    Column("broker_group", String(_NAME), nullable=False),
    Column("slot_start", Integer, nullable=False),
    Column("slot_end", Integer, nullable=False),
    Column("is_closed", Boolean, nullable=False, server_default=false()),
    Column("parents", Text, nullable=False, server_default=""),
)
MARKS = Table(
    "pulque_marks",
    TABLES,
    Column("pattern", String(_NAME), primary_key=True),
    Column("is_read_only", Boolean, nullable=False),
    Column("revision", BigInteger, nullable=False, index=True),
)
POLICIES = Table(
    "pulque_policies",
    TABLES,
    Column("key", String(_NAME), primary_key=True),
    Column("value", Text, nullable=False),
    Column("revision", BigInteger, nullable=False, index=True),
)
ATTENDING = Table(
    "pulque_attending",
    TABLES,
    Column("subject", String(_NAME), primary_key=True),
    Column("group_name", String(_NAME), primary_key=True),
    Column("consumer", String(_NAME), primary_key=True),
    Column("incarnation", String(20), nullable=False),
    Column("is_online", Boolean, nullable=False),
    Column("beats", BigInteger, nullable=False),
    Column("revision", BigInteger, nullable=False, index=True),
)
ALLOTMENTS = Table(
    "pulque_allotments",
    TABLES,
    Column("subject", String(_NAME), primary_key=True),
    Column("group_name", String(_NAME), primary_key=True),
    Column("version", BigInteger, nullable=False),
    Column("allotted", Text, nullable=False),
    Column("drained", Text, nullable=False),
    Column("revision", BigInteger, nullable=False, index=True),
)
LEADERSHIPS = Table(
    "pulque_leaderships",
    TABLES,
    Column("broker_group", String(_NAME), primary_key=True),
    Column("epoch", BigInteger, nullable=False),
    Column("version", BigInteger, nullable=False),
    Column("leader", String(_NAME), nullable=False),
    Column("token", String(_NAME), nullable=False),
    Column("in_sync", Text, nullable=False),
    Column("min_in_sync", Integer, nullable=False),
    Column("revision", BigInteger, nullable=False, index=True),
)
# What brokers said last when they asked who leads: read in elections only, so without a revision.
REPLICAS = Table(
    "pulque_replicas",
    TABLES,
    Column("directory", String(_NAME), primary_key=True),
    Column("broker_group", String(_NAME), nullable=False),
    Column("name", String(_NAME), nullable=False),
    Column("token", String(_NAME), nullable=False),
    Column("message_end", BigInteger, nullable=False),
    Column("is_fit", Boolean, nullable=False),
)


async def next_revision(connection: AsyncConnection) -> int:
    """Take the next revision, and with it the only right to write until the end."""
    bumped = update(CLUSTER).values(revision=CLUSTER.c.revision + 1).returning(CLUSTER.c.revision)
    return int((await connection.execute(bumped)).scalar_one())
