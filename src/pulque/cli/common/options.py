"""Options that many commands have, and what commands are given to work with."""

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, BinaryIO

import typer

from pulque.cli.common.durations import parse_seconds
from pulque.cli.common.output import Output
from pulque.errors import UsageError

if TYPE_CHECKING:
    from pulque import Client

__all__ = [
    "AcksChoice",
    "AcksOption",
    "ConfigFile",
    "DataDirectory",
    "OutputOption",
    "Port",
    "SetOption",
    "Timeout",
    "Tools",
    "Url",
    "open_client",
    "opened",
]


@dataclass(frozen=True, slots=True)
class Tools:
    """What commands need from outside, so that a test can give them something else."""

    connect: Callable[..., Any]
    """As ``pulque.connect``."""


Url = Annotated[
    str | None,
    typer.Option(
        "--url",
        envvar="PULQUE_URL",
        show_default="pulque://127.0.0.1:7450",
        metavar="URL",
        help="Where a broker or a meta server listens.",
    ),
]
Timeout = Annotated[
    float,
    typer.Option(
        "--timeout",
        parser=parse_seconds,
        metavar="TIME",
        help="How long to wait for the broker: 10 or 10s, 2m.",
    ),
]
OutputOption = Annotated[
    Output,
    typer.Option("--output", "-o", help="For people, or one JSON value per line."),
]
ConfigFile = Annotated[
    Path | None,
    typer.Option("--config", metavar="FILE", help="Read settings from this TOML file."),
]
SetOption = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="KEY=VALUE",
        help="Set any setting, e.g. storage.retention=7d. May be repeated.",
    ),
]
DataDirectory = Annotated[
    str | None,
    typer.Option("--data", metavar="DIR", help="The data directory (storage.directory)."),
]
Port = Annotated[
    int | None,
    typer.Option("--port", metavar="N", help="The TCP port; 0 takes any free one (listen.port)."),
]


class AcksChoice(StrEnum):
    """How durable a message must be before it counts as sent."""

    MEMORY = "memory"
    DISK = "disk"
    REPLICA = "replica"


AcksOption = Annotated[
    AcksChoice,
    typer.Option("--acks", help="How durable a message must be before it counts as sent."),
]


def opened(file: str, option: str = "") -> BinaryIO:
    """Open a file that a command is to read.

    Raises:
        UsageError: It cannot be opened.
    """
    try:
        return Path(file).open("rb")
    except OSError as error:
        raise UsageError(f"{option}{file}: {error.strerror}") from None


def open_client(context: typer.Context, url: str | None, timeout: float) -> "Client":
    """Connect as the options say; the caller closes.

    Raises:
        UsageError: The time is no time.
    """
    if timeout <= 0:
        raise UsageError("--timeout must be above 0")
    tools: Tools = context.obj
    client: Client = tools.connect(url, timeout=timeout)
    return client
