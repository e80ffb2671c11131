"""Rows of a table to messages: which columns mean what, and what is refused."""

from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import pyarrow as pa

from pulque.client.sending.outgoing_message import Outgoing
from pulque.errors import UsageError
from pulque.model.names import parse_subject

__all__ = ["Row", "check_schema", "rows_of"]

_BODY = ("body", "value")
_TYPES = {
    "subject": "string",
    "key": "string",
    "order_key": "string",
    "tags": "array<string>",
    "headers": "map<string,string>",
    "priority": "int",
    "expires_at": "timestamp",
}
_ALLOWED = {"body": ("binary", "string"), "value": ("binary", "string")} | {
    name: (kind,) for name, kind in _TYPES.items()
}


class Row(NamedTuple):
    """One message, and where it goes."""

    subject: str
    message: Outgoing


def check_schema(fields: Iterable[tuple[str, str]], *, has_subject: bool) -> None:
    """Check the columns of what is to be written, by name and Spark's name of the type.

    Raises:
        UsageError: A column is unknown, of a wrong type, or missing; it is named.
    """
    given = list(fields)
    found = dict(given)
    if len(found) < len(given):
        names = [name for name, _ in given]
        double = next(name for name in names if names.count(name) > 1)
        raise UsageError(f"there are {names.count(double)} columns {double!r}; one is allowed")
    for name, kind in found.items():
        allowed = _ALLOWED.get(name)
        if allowed is None:
            raise UsageError(
                f"column {name!r} is not part of a message; there are {', '.join(_ALLOWED)}: "
                "drop it, or put it into the body or headers"
            )
        if kind not in allowed:
            raise UsageError(f"column {name!r} is {kind}; it must be {' or '.join(allowed)}")
    bodies = [name for name in _BODY if name in found]
    if len(bodies) != 1:
        raise UsageError(
            f"one column named body or value is needed; found {' and '.join(bodies) or 'neither'}"
        )
    if not has_subject and "subject" not in found:
        raise UsageError("there is neither an option nor a column named subject")


def rows_of(batch: pa.RecordBatch, subject: str | None) -> Iterator[Row]:
    """Yield the messages of some rows.

    Args:
        batch: Rows with columns that ``check_schema`` has seen.
        subject: Where all of them go, if they do not say so themselves.

    Raises:
        UsageError: A row has no body, or no subject, or one that is not allowed.
    """
    columns = {name: batch.column(name).to_pylist() for name in batch.schema.names}
    bodies = columns.pop("body", None) or columns.pop("value", [])
    columns.pop("value", None)
    subjects = columns.pop("subject", None)
    for at, body in enumerate(bodies):
        if body is None:
            raise UsageError(f"row {at} has no body: an empty one must be '' or X''")
        target = subject or (subjects or [None])[at if subjects else 0]
        if not target:
            raise UsageError(f"row {at} has no subject, and there is no option of that name")
        parts = {name: values[at] for name, values in columns.items() if values[at] is not None}
        data = body.encode() if isinstance(body, str) else bytes(body)
        yield Row(parse_subject(target), _message(data, parts))


def _message(body: bytes, parts: dict[str, Any]) -> Outgoing:
    if "headers" in parts:
        parts["headers"] = headers = dict(parts["headers"])
        empty = [name for name, value in headers.items() if value is None]
        if empty:
            raise UsageError(
                f"header {empty[0]!r} of a row is null; text is allowed: leave the header out, "
                "or make it ''"
            )
    if None in parts.get("tags", ()):
        raise UsageError("a tag of a row is null; text is allowed: leave the tag out")
    return Outgoing(body, **parts)
