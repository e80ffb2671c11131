"""Logging of servers: one event per line, on stderr.

Text (``key=value``) on a terminal, JSON everywhere else. Libraries that use ``logging`` have
their lines formatted the same way. Untrusted values are escaped, and fields that may hold a
secret are never written.
"""

import logging
import sys
from collections.abc import Mapping, MutableMapping
from datetime import UTC, datetime
from typing import IO, Any

import structlog

from pulque.settings.foreign import escaped
from pulque.settings.sections import LogSection

__all__ = ["configure_logging"]

_SECRETS = frozenset(
    {"authorization", "credentials", "password", "private_key", "proof", "secret", "token"}
)
_HIDDEN = "***"
_FIRST_KEYS = ("at", "level", "event", "component")

_Fields = MutableMapping[str, Any]


def configure_logging(section: LogSection, stream: IO[str] | None = None) -> None:
    """Send all log lines of this process to ``stream``, by default stderr."""
    target = sys.stderr if stream is None else stream
    level = logging.getLevelNamesMapping()[section.level.upper()]
    last = _last_processors(section, target)
    shared: list[structlog.typing.Processor] = [
        structlog.contextvars.merge_contextvars,
        structlog.processors.add_log_level,
        _add_instant,
        _hide_secrets,
        structlog.processors.format_exc_info,
    ]
    structlog.configure(
        processors=[*shared, *last],
        wrapper_class=structlog.make_filtering_bound_logger(level),
        logger_factory=lambda *_: _LineLogger(target),
        cache_logger_on_first_use=False,
    )
    formatter = structlog.stdlib.ProcessorFormatter(
        foreign_pre_chain=[*shared, _add_component],
        processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, *last],
    )
    handler = _QuietHandler(target)
    handler.setFormatter(formatter)
    root = logging.getLogger()
    root.handlers[:] = [handler]
    # Libraries tell much at lower levels that only their authors can use.
    root.setLevel(max(level, logging.WARNING))


class _LineLogger:
    """Writes lines, and ignores write errors: a closed stderr must not stop a server."""

    def __init__(self, stream: IO[str]) -> None:
        self._stream = stream

    def msg(self, line: str) -> None:
        try:
            self._stream.write(f"{line}\n")
            self._stream.flush()
        except (OSError, ValueError):
            return

    debug = info = warning = error = critical = exception = msg


class _QuietHandler(logging.StreamHandler[IO[str]]):
    """A handler that ignores write errors."""

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802  # its base has it so
        """Drop the line."""


def _last_processors(section: LogSection, stream: IO[str]) -> list[structlog.typing.Processor]:
    if section.format == "text" or (section.format == "auto" and stream.isatty()):
        return [_in_order, _escape, structlog.processors.LogfmtRenderer(bool_as_flag=False)]
    # It writes nothing but ASCII, so there is nothing left to escape.
    return [_in_order, structlog.processors.JSONRenderer()]


def _add_instant(_logger: object, _method: str, fields: _Fields) -> _Fields:
    now = datetime.now(UTC).isoformat(timespec="milliseconds")
    fields["at"] = now.replace("+00:00", "Z")
    return fields


def _in_order(_logger: object, _method: str, fields: _Fields) -> _Fields:
    first = {key: fields.pop(key) for key in _FIRST_KEYS if key in fields}
    return {**first, **fields}


def _add_component(_logger: object, _method: str, fields: _Fields) -> _Fields:
    record = fields.get("_record")
    if isinstance(record, logging.LogRecord):
        fields["component"] = record.name
    return fields


def _hide_secrets(_logger: object, _method: str, fields: _Fields) -> _Fields:
    return {key: _without_secret(key, value) for key, value in fields.items()}


def _without_secret(key: str, value: object) -> object:
    if key.lower() in _SECRETS:
        return _HIDDEN
    if isinstance(value, Mapping):
        return {k: _without_secret(str(k), v) for k, v in value.items()}
    return value


def _escape(_logger: object, _method: str, fields: _Fields) -> _Fields:
    return {
        key: escaped(value) if isinstance(value, str) else value for key, value in fields.items()
    }
