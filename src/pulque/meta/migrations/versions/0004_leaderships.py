"""Leaderships: who leads each broker group that has followers, and what its brokers have."""

import sqlalchemy as sa
from alembic import op

__all__ = ["down_revision", "revision", "upgrade"]

revision = "0004"
down_revision = "0003"


def upgrade() -> None:
    """Make the tables."""
    op.create_table(
        "pulque_leaderships",
        sa.Column("broker_group", sa.String(255), primary_key=True),
        sa.Column("epoch", sa.BigInteger, nullable=False),
        sa.Column("version", sa.BigInteger, nullable=False),
        sa.Column("leader", sa.String(255), nullable=False),
        sa.Column("token", sa.String(255), nullable=False),
        sa.Column("in_sync", sa.Text, nullable=False),
        sa.Column("min_in_sync", sa.Integer, nullable=False),
        sa.Column("revision", sa.BigInteger, nullable=False, index=True),
    )
    op.create_table(
        "pulque_replicas",
        sa.Column("directory", sa.String(255), primary_key=True),
        sa.Column("broker_group", sa.String(255), nullable=False),
        sa.Column("name", sa.String(255), nullable=False),
        sa.Column("token", sa.String(255), nullable=False),
        sa.Column("message_end", sa.BigInteger, nullable=False),
        sa.Column("is_fit", sa.Boolean, nullable=False),
    )
