"""``pulque config``: the settings in force, and those that may change while a cluster runs."""

from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from pulque.cli.common.admin_client import Admin, open_admin
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
from pulque.cli.servers.settings import flags_of, load_delay, load_for_command, load_meta
from pulque.errors import UsageError

if TYPE_CHECKING:
    from pulque.settings.sources import Given, LoadedSettings

__all__ = ["app"]


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
        _print_settings(open_admin(context, url, admin, timeout).get("/config")["items"], output)
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


@app.command("set")
def set_values(
    context: typer.Context,
    values: Annotated[
        list[str] | None,
        typer.Argument(metavar="[KEY=VALUE]...", help="What to change.", show_default=False),
    ] = None,
    *,
    url: Url = None,
    admin: Admin = None,
    timeout: Timeout = 10.0,
    output: OutputOption = Output.TABLE,
) -> None:
    """Change settings of a running cluster, such as spread=3; without any, print them.

    A list is written with commas: allowed=order.*,stock. Only the settings that this prints can be
    changed; all others are read once, when a server starts.
    """
    client = open_admin(context, url, admin, timeout)
    change = dict(map(_parsed, values or ()))
    found = client.ask("PATCH", "/config", change) if change else client.get("/config")
    _print_settings(found["items"], output)


def _load(
    server: _Server, config: Path | None, flags: dict[str, "Given"]
) -> "LoadedSettings[Any]":
    if server is _Server.META:
        return load_meta(config, flags)
    if server is _Server.DELAY:
        return load_delay(config, flags)
    return load_for_command(config, flags)


def _print_settings(rows: list[dict[str, Any]], output: Output) -> None:
    """Print settings that may change, with what is allowed."""
    if output is Output.JSON:
        print_json({row["key"]: row["value"] for row in rows})
        return
    print_table(
        ("setting", "value", "allowed", "what it does"),
        [(row["key"], _shown(row["value"]), row["allowed"], row["description"]) for row in rows],
    )


def _parsed(text: str) -> tuple[str, str | int | list[str]]:
    key, equals, value = text.partition("=")
    if not equals or not key.strip():
        raise UsageError(f"{text!r}: it must look like spread=3")
    key, value = key.strip(), value.strip()
    if key == "allowed":
        return key, [each.strip() for each in value.split(",") if each.strip()]
    return key, int(value) if value.isascii() and value.isdigit() else value


def _shown(value: object) -> str:
    return ",".join(map(str, value)) or "-" if isinstance(value, list) else str(value)
