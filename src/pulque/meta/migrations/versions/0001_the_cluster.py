"""The cluster, its servers, its subjects and their partitions, and what was commanded."""

import sqlalchemy as sa
from alembic import op

__all__ = ["down_revision", "revision", "upgrade"]

revision = "0001"
down_revision = None


def upgrade() -> None:
    """Make the tables."""
    op.create_table(
        "pulque_cluster",
        sa.Column("one", sa.Integer, primary_key=True, autoincrement=False),
        sa.Column("cluster_id", sa.String(64), nullable=False),
        sa.Column("revision", sa.BigInteger, nullable=False),
    )
    op.create_table(
        "pulque_servers",
        sa.Column("name", sa.String(255), primary_key=True),
        sa.Column("broker_group", sa.String(255), nullable=False),
        sa.Column("role", sa.Integer, nullable=False),
        sa.Column("host", sa.String(255), nullable=False),
        sa.Column("port", sa.Integer, nullable=False),
        sa.Column("directory", sa.String(255), nullable=False),
        sa.Column("incarnation", sa.BigInteger, nullable=False),
        sa.Column("state", sa.Integer, nullable=False),
        sa.Column("is_removed", sa.Boolean, nullable=False),
        sa.Column("beats", sa.BigInteger, nullable=False),
        sa.Column("revision", sa.BigInteger, nullable=False, index=True),
    )
    op.create_table(
        "pulque_broker_groups",
        sa.Column("name", sa.String(255), primary_key=True),
        sa.Column("is_read_only", sa.Boolean, nullable=False),
        sa.Column("is_draining", sa.Boolean, nullable=False),
        sa.Column("revision", sa.BigInteger, nullable=False, index=True),
    )
    op.create_table(
        "pulque_subjects",
        sa.Column("name", sa.String(255), primary_key=True),
        sa.Column("revision", sa.BigInteger, nullable=False, index=True),
    )
    op.create_table(
        "pulque_partitions",
        sa.Column("subject", sa.String(255), primary_key=True),
        sa.Column("place", sa.Integer, primary_key=True, autoincrement=False),
        sa.Column("name", sa.String(320), nullable=False),
        sa.Column("broker_group", sa.String(255), nullable=False),
        sa.Column("slot_start", sa.Integer, nullable=False),
        sa.Column("slot_end", sa.Integer, nullable=False),
    )
    op.create_table(
        "pulque_marks",
        sa.Column("pattern", sa.String(255), primary_key=True),
        sa.Column("is_read_only", sa.Boolean, nullable=False),
        sa.Column("revision", sa.BigInteger, nullable=False, index=True),
    )
