"""``pulque config set``: settings that may change while a cluster runs."""

from typing import Annotated, Any

import typer

from pulque.cli.common.admin_client import Admin, open_admin
from pulque.cli.common.options import OutputOption, Timeout, Url
from pulque.cli.common.output import Output, print_json, print_table
from pulque.errors import UsageError

__all__ = ["print_settings", "set_values"]


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
    print_settings(found["items"], output)


def print_settings(rows: list[dict[str, Any]], output: Output) -> None:
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
