"""Order: its strategy, partitions that were split or merged, and who consumes what in order."""

import sqlalchemy as sa
from alembic import op

__all__ = ["down_revision", "revision", "upgrade"]

revision = "0003"
down_revision = "0002"


def upgrade() -> None:
    """Add columns and tables."""
    op.add_column(
        "pulque_subjects",
        sa.Column("order_strategy", sa.Integer, nullable=False, server_default="0"),
    )
    op.add_column(
        "pulque_partitions",
        sa.Column("is_closed", sa.Boolean, nullable=False, server_default=sa.false()),
    )
    op.add_column(
        "pulque_partitions", sa.Column("parents", sa.Text, nullable=False, server_default="")
    )
    op.create_table(
        "pulque_attending",
        sa.Column("subject", sa.String(255), primary_key=True),
        sa.Column("group_name", sa.String(255), primary_key=True),
        sa.Column("consumer", sa.String(255), primary_key=True),
        sa.Column("incarnation", sa.String(20), nullable=False),
        sa.Column("is_online", sa.Boolean, nullable=False),
        sa.Column("beats", sa.BigInteger, nullable=False),
        sa.Column("revision", sa.BigInteger, nullable=False, index=True),
    )
    op.create_table(
        "pulque_allotments",
        sa.Column("subject", sa.String(255), primary_key=True),
        sa.Column("group_name", sa.String(255), primary_key=True),
        sa.Column("version", sa.BigInteger, nullable=False),
        sa.Column("allotted", sa.Text, nullable=False),
        sa.Column("drained", sa.Text, nullable=False),
        sa.Column("revision", sa.BigInteger, nullable=False, index=True),
    )
