"""``pulque broker``: the brokers of a cluster, and what is done to them."""

from collections.abc import Mapping
from typing import Annotated, Any

import typer

from pulque.cli.common.admin_client import Admin, open_admin, path_of
from pulque.cli.common.options import OutputOption, Timeout, Url, open_client
from pulque.cli.common.output import (
    Output,
    print_json,
    print_line,
    print_result,
    print_rows,
    print_table,
    rows_of,
)

__all__ = ["app"]

app = typer.Typer(
    help="Run a broker as its settings say, or tell a running one.", rich_markup_mode=None
)

Name = Annotated[str, typer.Argument(metavar="NAME", help="Which one.", show_default=False)]
Off = Annotated[bool, typer.Option("--off", help="Take sends again.")]


@app.command()
def seal(
    context: typer.Context,
    *,
    url: Url = None,
    timeout: Timeout = 10.0,
    output: OutputOption = Output.TABLE,
) -> None:
    """Close the open segment of each running broker's message log, so that it can be archived."""
    with open_client(context, url, timeout) as client:
        ends = client.seal()
    for broker, end in ends.items():
        whose = f" of {broker}" if broker else ""
        text = f"sealed; the next segment{whose} begins at offset {end}"
        print_result(output, {"broker_group": broker, "end": end}, text)


@app.command("list")
def list_brokers(
    context: typer.Context,
    *,
    url: Url = None,
    admin: Admin = None,
    timeout: Timeout = 10.0,
    output: OutputOption = Output.TABLE,
) -> None:
    """List the brokers and delay servers of a cluster.

    Exits with 4 if there are none.
    """
    rows = list(open_admin(context, url, admin, timeout).rows("/brokers"))
    columns = (
        *("name", "broker group", "role", "standing", "epoch"),
        *("in sync", "address", "state", "sends", "partitions"),
    )
    print_rows(output, rows, columns, map(_line, rows), nothing="no brokers are registered")


@app.command()
def show(
    context: typer.Context,
    name: Name,
    *,
    url: Url = None,
    admin: Admin = None,
    timeout: Timeout = 10.0,
    output: OutputOption = Output.TABLE,
) -> None:
    """Show a broker, and what it says of itself."""
    found = open_admin(context, url, admin, timeout).get(path_of("brokers", name))
    if output is Output.JSON:
        print_json(found)
    else:
        print_table(("what", "value"), list(rows_of(found)))


@app.command("read-only")
def read_only(
    context: typer.Context,
    name: Name,
    *,
    off: Off = False,
    url: Url = None,
    admin: Admin = None,
    timeout: Timeout = 10.0,
    output: OutputOption = Output.TABLE,
) -> None:
    """Have a broker take no sends; consumption goes on."""
    client = open_admin(context, url, admin, timeout)
    found = client.ask("PUT", path_of("brokers", name, "read-only"), {"read_only": not off})
    _print_changed(found, output)


@app.command()
def drain(
    context: typer.Context,
    name: Name,
    *,
    off: Off = False,
    url: Url = None,
    admin: Admin = None,
    timeout: Timeout = 10.0,
    output: OutputOption = Output.TABLE,
) -> None:
    """Have a broker take no sends until everything is consumed, so that it can be removed.

    Of a broker group with followers the leader stands for the whole group. A follower has nothing
    to be drained of: stop it, and remove it.
    """
    client = open_admin(context, url, admin, timeout)
    found = client.ask("PUT", path_of("brokers", name, "drain"), {"draining": not off})
    if output is Output.TABLE and not off:
        left = client.get(path_of("brokers", name))["lag"]
        shown = "an unknown number of" if left is None else f"{left:,}"
        print_line(f"{name} takes no sends; {shown} messages are left to consume")
        return
    _print_changed(found, output)


@app.command()
def lead(
    context: typer.Context,
    name: Name,
    *,
    url: Url = None,
    admin: Admin = None,
    timeout: Timeout = 10.0,
    output: OutputOption = Output.TABLE,
) -> None:
    """Have the leader of a broker's group hand over to it.

    The broker has to be in sync. Sends and pulls of the group wait until it leads. A leader that
    is away is replaced without a command.
    """
    found = open_admin(context, url, admin, timeout).ask(
        "POST", path_of("brokers", name, "lead"), {}
    )
    epoch = found["epoch"]
    print_result(output, found, f"{name} leads {found['broker_group']} in epoch {epoch}")


@app.command()
def remove(
    context: typer.Context,
    name: Name,
    *,
    url: Url = None,
    admin: Admin = None,
    timeout: Timeout = 10.0,
) -> None:
    """Forget a broker that is stopped for good."""
    open_admin(context, url, admin, timeout).ask("DELETE", path_of("brokers", name))
    print_line(f"{name} is removed")


def _print_changed(found: Mapping[str, Any], output: Output) -> None:
    print_result(output, found, f"{found['name']} {_sends(found)}")


def _line(row: Mapping[str, Any]) -> tuple[str, ...]:
    first = (row[name] for name in ("name", "broker_group", "role", "standing"))
    copies = {True: "yes", False: "no", None: "-"}[row["in_sync"]]
    sends = "draining" if row["draining"] else "refused" if row["read_only"] else "taken"
    last = (row["address"], row["state"], sends, str(row["partitions"]))
    return (*first, str(row["epoch"] or "-"), copies, *last)


def _sends(row: Mapping[str, Any]) -> str:
    if row["draining"]:
        return "takes no sends, and is being emptied"
    return "takes no sends" if row["read_only"] else "takes sends"
