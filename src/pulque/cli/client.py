"""``pulque client``: who is online now, since when, from where, and what it holds."""

from collections.abc import Mapping
from typing import Annotated, Any

import typer

from pulque.cli.common.admin_client import Admin, open_admin
from pulque.cli.common.options import OutputOption, Timeout, Url
from pulque.cli.common.output import Output, print_rows

__all__ = ["app"]

app = typer.Typer(
    help="The clients of a cluster.",
    no_args_is_help=True,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)


@app.callback()
def about() -> None:
    """The clients of a cluster."""


@app.command("list")
def list_clients(
    context: typer.Context,
    *,
    number: Annotated[int | None, typer.Option("-n", min=1, help="At most so many.")] = None,
    url: Url = None,
    admin: Admin = None,
    timeout: Timeout = 10.0,
    output: OutputOption = Output.TABLE,
) -> None:
    """List who is online: since when, from where, and what it holds.

    Exits with 4 if there are none.
    """
    rows = list(open_admin(context, url, admin, timeout).rows("/clients", number=number))
    columns = ("server", "client", "address", "since", "consumes", "holds", "last heard")
    print_rows(output, rows, columns, map(_line, rows), nothing="no clients are online")


def _line(row: Mapping[str, Any]) -> tuple[str, ...]:
    consumes = [f"{each['group']}:{each['subject']}" for each in row["consumers"]]
    return (
        row["server"],
        row["application"],
        row["address"],
        row["since"],
        " ".join(consumes) or "-",
        str(row["holds"]),
        f"{row['silent_seconds']:.1f} s ago",
    )
