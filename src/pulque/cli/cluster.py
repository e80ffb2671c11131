"""``pulque cluster``: the whole of it at a glance, and its definitions as one file."""

import json
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from pulque.cli.common.admin_client import Admin, open_admin
from pulque.cli.common.options import OutputOption, Timeout, Url, opened
from pulque.cli.common.output import (
    Output,
    print_json,
    print_line,
    print_table,
    print_warning,
    rows_of,
)
from pulque.errors import UsageError

__all__ = ["app"]

app = typer.Typer(
    help="A whole cluster, and its definitions as one file.",
    no_args_is_help=True,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)
_MAX_FILE = 1024 * 1024


@app.command()
def show(
    context: typer.Context,
    *,
    url: Url = None,
    admin: Admin = None,
    timeout: Timeout = 10.0,
    output: OutputOption = Output.TABLE,
) -> None:
    """Show the cluster at a glance."""
    found = open_admin(context, url, admin, timeout).get("/cluster")
    if output is Output.JSON:
        print_json(found)
    else:
        print_table(("what", "value"), list(rows_of(found)))


@app.command("export")
def export_definitions(
    context: typer.Context,
    file: Annotated[
        str, typer.Argument(metavar="[FILE]", help="Where to; - is stdout.", show_default=False)
    ] = "-",
    *,
    url: Url = None,
    admin: Admin = None,
    timeout: Timeout = 60.0,
) -> None:
    """Write the definitions of subjects, groups and policies to a file, as JSON."""
    found = open_admin(context, url, admin, timeout).get("/definitions")
    text = json.dumps(found, indent=2)
    if file == "-":
        print(text)
        return
    Path(file).write_text(f"{text}\n", encoding="utf-8")
    print_warning(f"{len(found['subjects'])} subjects, {len(found['groups'])} groups")


@app.command("import")
def import_definitions(
    context: typer.Context,
    file: Annotated[
        str, typer.Argument(metavar="FILE", help="Where from; - is stdin.", show_default=False)
    ],
    *,
    dry_run: Annotated[
        bool, typer.Option("--dry-run/--yes", help="Only say what would happen, or do it.")
    ] = True,
    url: Url = None,
    admin: Admin = None,
    timeout: Timeout = 60.0,
    output: OutputOption = Output.TABLE,
) -> None:
    """Make what is defined in a file and not there; nothing is removed.

    Without --yes, only say what would happen.
    """
    wanted = _read(file)
    query = {"dry_run": "true" if dry_run else "false"}
    found = open_admin(context, url, admin, timeout).ask("PUT", "/definitions", wanted, query)
    if output is Output.JSON:
        print_json(found)
        return
    for what in ("created", "extended", "ordered", "marked"):
        for name in found[what]:
            print_line(f"{'would be ' if dry_run else ''}{what}: {name}")
    print_line(f"{'would tell' if dry_run else 'told'} {found['groups']} groups")
    if dry_run:
        print_warning("nothing was changed; --yes does it")


def _read(file: str) -> Any:
    if file == "-":
        data = sys.stdin.buffer.read(_MAX_FILE + 1)
    else:
        with opened(file) as source:
            data = source.read(_MAX_FILE + 1)
    if len(data) > _MAX_FILE:
        raise UsageError(f"{file} is over {_MAX_FILE} bytes; split its lists into several files")
    try:
        return json.loads(data)
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{file} is not JSON: {error}") from None
