"""Run by alembic: takes the steps over the connection that ``database.py`` hands over."""

from alembic import context

from pulque.meta.tables import TABLES

__all__: list[str] = []

context.configure(
    connection=context.config.attributes["connection"],
    target_metadata=TABLES,
    version_table="pulque_migrations",
)
context.run_migrations()
