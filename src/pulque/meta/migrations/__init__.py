"""How the database of the meta servers came to look as it does, one step per file."""

__all__ = ["NEWEST", "VERSION_TABLE"]

NEWEST = "0004"
"""The last step: where the database is there, nothing has to be done."""
VERSION_TABLE = "pulque_migrations"
"""Where the database says how far it is."""
