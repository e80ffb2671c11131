"""The columns of a message as Spark and Arrow see them."""

from collections.abc import Iterable

import pyarrow as pa

from pulque.errors import UsageError

__all__ = ["ALL_COLUMNS", "INSTANT", "SCHEMA", "schema_of"]

INSTANT = pa.timestamp("us", tz="UTC")

SCHEMA = pa.schema(
    [
        ("message_id", pa.string()),
        ("subject", pa.string()),
        ("partition", pa.string()),
        ("sequence", pa.int64()),
        ("key", pa.string()),
        ("order_key", pa.string()),
        ("tags", pa.list_(pa.string())),
        ("headers", pa.map_(pa.string(), pa.string())),
        ("body", pa.binary()),
        ("created_at", INSTANT),
        ("stored_at", INSTANT),
        ("expires_at", INSTANT),
        ("attempt", pa.int32()),
        ("priority", pa.int32()),
    ]
)
"""All columns, in order. What a message does not have is null."""

ALL_COLUMNS: tuple[str, ...] = tuple(SCHEMA.names)


def schema_of(columns: Iterable[str]) -> pa.Schema:
    """Return the schema of some columns.

    Raises:
        UsageError: One of them does not exist.
    """
    wanted = tuple(columns)
    unknown = [name for name in wanted if name not in ALL_COLUMNS]
    if unknown:
        raise UsageError(f"no column {unknown[0]!r}; there are {', '.join(ALL_COLUMNS)}")
    return pa.schema([SCHEMA.field(name) for name in wanted])
