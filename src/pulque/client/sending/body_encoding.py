"""What is sent as a body: bytes and text as they are, all other values as JSON."""

import dataclasses
import json

from pulque.errors import UsageError

__all__ = ["JSON_TYPE", "TYPE_HEADER", "encode_payload"]

TYPE_HEADER = "content-type"
JSON_TYPE = "application/json"
"""What ``TYPE_HEADER`` is for a value that was written as JSON."""


def encode_payload(value: object) -> bytes:
    """Return a value as a body: bytes and text as they are, all else as JSON.

    Raises:
        UsageError: It cannot be written as JSON.
    """
    match value:
        case bytes():
            return value
        case bytearray() | memoryview():
            return bytes(value)
        case str():
            return _encode(value)
        case _ if hasattr(type(value), "__struct_fields__"):
            return _dump_by_msgspec(value)
        case _ if hasattr(type(value), "__pydantic_serializer__"):
            return _dump_by_pydantic(value)
        case _:
            return _dump(value)


def _encode(text: str) -> bytes:
    try:
        return text.encode()
    except UnicodeEncodeError as problem:
        raise UsageError(f"a body cannot be written as UTF-8: {problem}") from None


def _dump(value: object) -> bytes:
    try:
        text = json.dumps(value, default=_as_json, allow_nan=False, ensure_ascii=False)
        return text.encode()
    except (TypeError, ValueError, RecursionError) as problem:
        raise UsageError(f"a {type(value).__name__} cannot be sent: {problem}") from problem


def _as_json(value: object) -> object:
    if hasattr(type(value), "__pydantic_serializer__"):
        return json.loads(_dump_by_pydantic(value))
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {each.name: getattr(value, each.name) for each in dataclasses.fields(value)}
    raise TypeError(f"a {type(value).__name__} is no JSON")


def _dump_by_pydantic(value: object) -> bytes:
    # Its classes bring what writes them: the client need not import the package.
    found: bytes = type(value).__pydantic_serializer__.to_json(value)  # type: ignore[attr-defined]
    return found


def _dump_by_msgspec(value: object) -> bytes:
    import msgspec

    return msgspec.json.encode(value)
