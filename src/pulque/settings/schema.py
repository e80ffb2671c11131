"""The list of all settings, derived from the models: keys, kinds, limits, defaults, descriptions.

The loader's error texts, ``pulque config show`` and the reference page use it, so none of them
can miss a setting.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta
from functools import lru_cache
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel, ByteSize, SecretStr
from pydantic.fields import FieldInfo

from pulque.settings.sections import ServerSettings
from pulque.settings.units import show_duration, show_size

__all__ = [
    "Setting",
    "Value",
    "environment_name",
    "environment_prefix",
    "settings_of",
    "show_value",
    "values_of",
]

Value = str | int | float | Path | timedelta | tuple[str, ...] | SecretStr | None

_KINDS: dict[Any, str] = {
    ByteSize: "size",
    Path: "path",
    SecretStr: "text",
    bool: "yes or no",
    float: "number",
    int: "whole number",
    str: "text",
    timedelta: "duration",
    tuple[str, ...]: "list",
}


@dataclass(frozen=True, slots=True)
class Setting:
    """The description of one setting."""

    key: str
    """With dots: ``storage.retention``."""
    kind: str
    """The type of a value, in words."""
    allowed: str
    """The limits, in words; empty if there are none."""
    default: Value
    is_required: bool
    description: str

    @property
    def section(self) -> str:
        """The part of the key before the dot; empty at the top."""
        return self.key.rpartition(".")[0]


@lru_cache(maxsize=8)
def settings_of(model: type[ServerSettings]) -> dict[str, Setting]:
    """Return every setting of a server by its key, in the order of the models."""
    return {setting.key: setting for setting in _walk(model, "")}


def environment_prefix(model: type[ServerSettings]) -> str:
    """Return the prefix of a server's environment variables."""
    return f"PULQUE_{model.server.upper()}__"


def environment_name(model: type[ServerSettings], key: str) -> str:
    """Return the environment variable that sets a key."""
    return environment_prefix(model) + key.replace(".", "__").upper()


def values_of(settings: ServerSettings) -> dict[str, Value]:
    """Return the value of every setting by its key."""
    values: dict[str, Value] = {}
    for key in settings_of(type(settings)):
        value: Any = settings
        for part in key.split("."):
            value = getattr(value, part)
        values[key] = value
    return values


def show_value(value: object) -> str:
    """Format a value as in a settings file, without quotes."""
    match value:
        case None:
            return ""
        case timedelta():
            return show_duration(value)
        case ByteSize():
            return show_size(value)
        case tuple():
            return ", ".join(value)
        case _:
            return str(value)


def _walk(model: type[BaseModel], prefix: str) -> Iterator[Setting]:
    for name, field in model.model_fields.items():
        kind = field.annotation
        if isinstance(kind, type) and issubclass(kind, BaseModel):
            yield from _walk(kind, f"{prefix}{name}.")
        else:
            yield _setting(f"{prefix}{name}", field)


def _setting(key: str, field: FieldInfo) -> Setting:
    kind, metadata = _unwrapped(field.annotation)
    limits = [*field.metadata, *metadata]
    return Setting(
        key=key,
        kind="one of" if get_origin(kind) is Literal else _KINDS[kind],
        allowed=_allowed(kind, limits),
        default=None if field.is_required() else field.default,
        is_required=field.is_required(),
        description=field.description or "",
    )


def _unwrapped(kind: Any) -> tuple[Any, list[object]]:
    """Return the inner type of ``… | None`` and ``Annotated``."""
    metadata: list[object] = []
    if get_origin(kind) in (Union, UnionType):
        kind = next(each for each in get_args(kind) if each is not type(None))
    if get_origin(kind) is Annotated:
        kind, *metadata = get_args(kind)
    for each in list(metadata):
        if isinstance(each, FieldInfo):
            metadata += each.metadata
    return kind, metadata


def _allowed(kind: object, metadata: list[object]) -> str:
    if get_origin(kind) is Literal:
        return ", ".join(get_args(kind))
    shown = [_show_limit(_limit(metadata, name), kind) for name in ("ge", "le")]
    match shown:
        case [str(low), str(high)]:
            return f"{low} to {high}"
        case [str(low), None]:
            return f"{low} or more"
        case [None, str(high)]:
            return f"up to {high}"
        case _:
            return ""


def _limit(metadata: list[object], name: str) -> object:
    return next((getattr(each, name) for each in metadata if hasattr(each, name)), None)


def _show_limit(limit: object, kind: object) -> str | None:
    if limit is None:
        return None
    return show_size(int(str(limit))) if kind is ByteSize else show_value(limit)
