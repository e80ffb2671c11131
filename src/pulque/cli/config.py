"""``pulque config``: what settings are in force, and where each came from."""

import os
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from pulque.cli.cluster_settings import print_settings
from pulque.cli.common.admin_client import Admin, open_admin
from pulque.cli.common.interrupts import importing
from pulque.cli.common.options import (
    ConfigFile,
    DataDirectory,
    OutputOption,
    Port,
    SetOption,
    Timeout,
    Url,
)
from pulque.cli.common.output import Output, print_json, print_line, print_table
from pulque.errors import ConfigError

if TYPE_CHECKING:
    from pulque.broker.config import BrokerSettings
    from pulque.delay.config import DelaySettings
    from pulque.meta.config import MetaSettings
    from pulque.settings.sources import Given, LoadedSettings

__all__ = [
    "DEFAULT_DELAY_DIRECTORY",
    "DEFAULT_DIRECTORY",
    "DEFAULT_META_DIRECTORY",
    "app",
    "flags_of",
    "load_delay",
    "load_for_command",
    "load_meta",
]

DEFAULT_DIRECTORY = "pulque-data"
"""Where ``pulque up`` keeps messages if it is told nothing."""

DEFAULT_META_DIRECTORY = "pulque-meta"
_META_DATABASE = "PULQUE_META__DATABASE__URL"
"""Where ``pulque meta`` keeps the cluster if it is told nothing."""

DEFAULT_DELAY_DIRECTORY = "pulque-delay"
"""Where ``pulque delay`` keeps messages if it is told nothing."""


class _Server(StrEnum):
    BROKER = "broker"
    META = "meta"
    DELAY = "delay"


class _Shown(StrEnum):
    BROKER = "broker"
    META = "meta"
    DELAY = "delay"
    CLUSTER = "cluster"


_ShownOption = Annotated[
    _Shown,
    typer.Option(
        "--server",
        help="Whose settings: those of a broker, of `meta`, of `delay`, or of a running cluster "
        "(--url).",
    ),
]
_ServerOption = Annotated[
    _Server,
    typer.Option("--server", help="Whose settings: those of a broker, of `meta` or of `delay`."),
]

app = typer.Typer(help="Show and check settings.", rich_markup_mode=None)


@app.command()
def show(
    context: typer.Context,
    *,
    server: _ShownOption = _Shown.BROKER,
    config: ConfigFile = None,
    data: DataDirectory = None,
    port: Port = None,
    set_values: SetOption = None,
    url: Url = None,
    admin: Admin = None,
    timeout: Timeout = 10.0,
    output: OutputOption = Output.TABLE,
) -> None:
    """Print every setting that would be in force, and where it came from.

    Without --config these are the settings of `pulque up`, with it those of `pulque broker`; with
    --server meta or delay those of these commands; with --server cluster those that `pulque
    config set` can change while a cluster runs.
    """
    if server is _Shown.CLUSTER:
        print_settings(open_admin(context, url, admin, timeout).get("/config")["items"], output)
        return
    from pulque.settings.schema import show_value, values_of

    loaded = _load(_Server(server), config, flags_of(data, port, set_values))
    values = {key: show_value(value) for key, value in values_of(loaded.settings).items()}
    if output is Output.JSON:
        print_json(
            {
                key: {"value": value or None, "origin": loaded.origins[key]}
                for key, value in values.items()
            }
        )
        return
    rows = [(key, value or "-", loaded.origins[key]) for key, value in values.items()]
    print_table(("setting", "value", "origin"), rows)


@app.command()
def check(
    *,
    server: _ServerOption = _Server.BROKER,
    config: ConfigFile = None,
    data: DataDirectory = None,
    port: Port = None,
    set_values: SetOption = None,
    output: OutputOption = Output.TABLE,
) -> None:
    """Say whether the settings are allowed; every problem is told, with its place.

    Exits with 2 if there are any.
    """
    loaded = _load(server, config, flags_of(data, port, set_values))
    given = sum(origin != "default" for origin in loaded.origins.values())
    if output is Output.JSON:
        print_json({"valid": True, "given": given})
    else:
        print_line(f"the settings are valid; {given} of {len(loaded.origins)} are not defaults")


def _load(
    server: _Server, config: Path | None, flags: dict[str, "Given"]
) -> "LoadedSettings[Any]":
    if server is _Server.META:
        return load_meta(config, flags)
    if server is _Server.DELAY:
        return load_delay(config, flags)
    return load_for_command(config, flags)


def load_delay(config: Path | None, flags: dict[str, "Given"]) -> "LoadedSettings[DelaySettings]":
    """Load the settings of ``pulque delay``."""
    with importing():
        from pulque.delay.config import DelaySettings
        from pulque.settings.sources import load_settings

    fallbacks = {} if config else {"storage.directory": DEFAULT_DELAY_DIRECTORY}
    return load_settings(
        DelaySettings, file=config, environ=os.environ, flags=flags, fallbacks=fallbacks
    )


def load_meta(config: Path | None, flags: dict[str, "Given"]) -> "LoadedSettings[MetaSettings]":
    """Load the settings of ``pulque meta``."""
    with importing():
        from pulque.meta.config import MetaSettings
        from pulque.settings.sources import load_settings

    has_place = config or "database.url" in flags or _META_DATABASE in os.environ
    fallbacks = {} if has_place else {"storage.directory": DEFAULT_META_DIRECTORY}
    return load_settings(
        MetaSettings, file=config, environ=os.environ, flags=flags, fallbacks=fallbacks
    )


def load_for_command(
    config: Path | None, flags: dict[str, "Given"], *, needs_file: bool = False
) -> "LoadedSettings[BrokerSettings]":
    """Load the settings of ``pulque up``, or those of ``pulque broker`` if there is a file."""
    with importing():
        from pulque.broker.config import BrokerSettings
        from pulque.settings.sources import load_settings

    fallbacks = {} if config or needs_file else {"storage.directory": DEFAULT_DIRECTORY}
    return load_settings(
        BrokerSettings, file=config, environ=os.environ, flags=flags, fallbacks=fallbacks
    )


def flags_of(
    data: str | None, port: int | None, set_values: list[str] | None
) -> dict[str, "Given"]:
    """Return what the options say, by key.

    Raises:
        ConfigError: A ``--set`` is not KEY=VALUE.
    """
    from pulque.settings.sources import Given

    flags: dict[str, Given] = {}
    for text in set_values or ():
        key, equals, value = text.partition("=")
        if not equals or not key.strip():
            raise ConfigError(f"--set {text!r}: it must look like storage.retention=7d")
        flags[key.strip()] = Given(value.strip(), "--set")
    if data is not None:
        flags["storage.directory"] = Given(data, "--data")
    if port is not None:
        flags["listen.port"] = Given(port, "--port")
    return flags
