"""Run by alembic: takes the steps over the connection that ``database.py`` hands over."""

from alembic import context

from pulque.meta.migrations import VERSION_TABLE
from pulque.meta.tables import TABLES

__all__: list[str] = []

context.configure(
    connection=context.config.attributes["connection"],
    target_metadata=TABLES,
    version_table=VERSION_TABLE,
)
context.run_migrations()
