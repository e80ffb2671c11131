"""One page of a longer list: where it begins is an opaque text that the page before gave."""

import base64
import json
from bisect import bisect_right
from collections.abc import Callable, Sequence
from typing import Annotated, Generic, TypeVar

from fastapi import Query
from pydantic import BaseModel, ConfigDict, Field

from pulque.errors import InvalidRequestError

__all__ = ["Cursor", "Key", "Limit", "Page", "Unreachable", "cut", "read_cursor", "write_cursor"]

T = TypeVar("T")
Key = tuple[str | int, ...]
"""What a list is sorted by; no two rows have the same."""

MOST_ROWS = 1000
_LONGEST = 4000

Cursor = Annotated[
    str | None,
    Query(max_length=_LONGEST, description="`next` of the page before; without it, the first."),
]
Limit = Annotated[int, Query(ge=1, le=MOST_ROWS, description="At most so many rows.")]


class Unreachable(BaseModel):
    """A broker that did not answer, so that its part is missing."""

    model_config = ConfigDict(frozen=True)

    broker: str
    message: str


class Page(BaseModel, Generic[T]):
    """Some rows of a list."""

    items: list[T]
    next: str | None = Field(
        default=None, description="Give it as `cursor` to get the next page; null at the end."
    )
    unreachable: list[Unreachable] = Field(
        default=[], description="Brokers whose part of the list is missing."
    )


def write_cursor(key: Key) -> str:
    """Return a cursor that stands behind the row with this key."""
    text = json.dumps(list(key), separators=(",", ":"))
    return base64.urlsafe_b64encode(text.encode()).decode().rstrip("=")


def read_cursor(cursor: str | None, shape: Sequence[type]) -> Key | None:
    """Return the key that a cursor stands behind.

    Raises:
        InvalidRequestError: It was not made by a page of this list.
    """
    if cursor is None:
        return None
    try:
        padded = cursor.encode("ascii") + b"=" * (-len(cursor) % 4)
        found = json.loads(base64.b64decode(padded, altchars=b"-_", validate=True))
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, list) or [type(part) for part in found] != list(shape):
        raise InvalidRequestError("the cursor is none of this list; take `next` of a page of it")
    return tuple(found)


def cut(
    rows: list[T], key: Callable[[T], Key], after: Key | None, limit: int
) -> tuple[list[T], str | None]:
    """Sort rows, and return those behind a key and the cursor of what follows them."""
    rows.sort(key=key)
    first = 0 if after is None else bisect_right(rows, after, key=key)
    some = rows[first : first + limit]
    has_more = first + limit < len(rows)
    return some, write_cursor(key(some[-1])) if has_more else None
