"""Decode bodies into the types that handlers annotate.

``bytes`` and ``str`` are the body itself; ``dict``, ``list`` and ``Any`` are its JSON. Types with
fields are validated: pydantic's by pydantic, all others (dataclasses, ``msgspec.Struct``,
``TypedDict``, ``list[Order]`` …) by msgspec, strictly: ``"1"`` is not a number. Both packages are
imported only if a type needs them.
"""

from collections.abc import Callable, Iterator
from typing import Any, cast, get_args, get_origin

from pulque.errors import UsageError
from pulque.model.message import PayloadError, parse_json

__all__ = ["PayloadError", "decoder_of"]

Decoder = Callable[[bytes], object]

_PLAIN = (dict, dict[str, Any], dict[str, object], list, list[Any], list[object])
"""Types that need no package."""


def decoder_of(wanted: Any) -> Decoder:
    """Return a function that decodes a body into this type.

    It raises ``PayloadError`` for a body that does not fit the type.

    Raises:
        UsageError: The type is not supported, or its package is missing.
    """
    if wanted is bytes:
        return bytes
    if wanted is str:
        return _named(wanted, bytes.decode)
    if wanted is Any or wanted is object:
        return _named(wanted, parse_json)
    if wanted in _PLAIN:
        return _named(wanted, _plain(get_origin(wanted) or wanted))
    if any(_is_of_pydantic(part) for part in _parts(wanted)):
        return _named(wanted, _by_pydantic(wanted))
    return _named(wanted, _by_msgspec(wanted))


# ── by hand ────────────────────────────────────────────────────────────────────────────────────


def _plain(kind: type) -> Decoder:
    def decode(body: bytes) -> object:
        value = parse_json(body)
        if not isinstance(value, kind):
            raise TypeError(f"a JSON {kind.__name__} is wanted, it is a {type(value).__name__}")
        return value

    return decode


# ── by packages ────────────────────────────────────────────────────────────────────────────────


def _parts(wanted: Any) -> Iterator[Any]:
    """Yield a type and its type arguments, recursively: ``list[Order | None]`` has four."""
    yield wanted
    for each in get_args(wanted):
        yield from _parts(each)


def _is_of_pydantic(kind: Any) -> bool:
    return isinstance(kind, type) and (
        hasattr(kind, "__pydantic_validator__") or hasattr(kind, "__pydantic_core_schema__")
    )


def _by_pydantic(wanted: Any) -> Decoder:
    from pydantic import TypeAdapter

    adapter: Any = TypeAdapter(wanted)
    return cast("Decoder", adapter.validate_json)


def _by_msgspec(wanted: Any) -> Decoder:
    try:
        import msgspec
    except ImportError:
        raise UsageError(
            f"to decode a body into {_name_of(wanted)}: pip install 'pulque[typed]'; "
            "bytes, str, dict and list need nothing"
        ) from None
    try:
        info = msgspec.inspect.type_info(wanted)
        decoder: Any = msgspec.json.Decoder(wanted)
    except (TypeError, NameError) as problem:
        raise UsageError(f"no body can be decoded into {_name_of(wanted)}: {problem}") from problem
    if isinstance(info, msgspec.inspect.CustomType):
        raise UsageError(f"no body can be decoded into {_name_of(wanted)}; use decode=")
    return cast("Decoder", decoder.decode)


def _named(wanted: Any, decode: Decoder) -> Decoder:
    """Return a decoder that raises every failure as ``PayloadError`` with the expected type."""
    name = _name_of(wanted)

    def decode_or_say(body: bytes) -> object:
        try:
            return decode(body)
        except Exception as problem:
            text = " ".join(str(problem).split())
            raise PayloadError(f"the body is no {name}: {text}") from problem

    return decode_or_say


def _name_of(wanted: Any) -> str:
    return wanted.__name__ if isinstance(wanted, type) else str(wanted)
