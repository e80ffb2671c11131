"""Run by alembic: takes the steps over the connection of ``database/connection.py``."""

from alembic import context

from pulque.meta.database.tables import TABLES
from pulque.meta.migrations import VERSION_TABLE

__all__: list[str] = []

context.configure(
    connection=context.config.attributes["connection"],
    target_metadata=TABLES,
    version_table=VERSION_TABLE,
)
context.run_migrations()
