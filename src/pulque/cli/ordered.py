"""``pulque group ordered`` and ``pulque group skip``: groups that consume in order."""

from collections.abc import Mapping
from typing import Annotated, Any

import typer

from pulque.cli.common.admin_client import Admin, open_admin, path_of
from pulque.cli.common.options import OutputOption, Timeout, Url
from pulque.cli.common.output import Output, print_result, print_rows

__all__ = ["ordered", "skip"]

_COLUMNS = ("broker_group", "partition", "group", "holder", "settled", "end", "held")
Subject = Annotated[
    str, typer.Argument(metavar="SUBJECT", help="Of which subject.", show_default=False)
]


def ordered(
    context: typer.Context,
    subject: Subject,
    *,
    group: Annotated[str | None, typer.Option(help="Only this group.", show_default=False)] = None,
    url: Url = None,
    admin: Admin = None,
    timeout: Timeout = 10.0,
    output: OutputOption = Output.TABLE,
) -> None:
    """Show which consumer has which partition, and since when a group waits for a message.

    Exits with 4 if no group consumes the subject in order.
    """
    query = {} if group is None else {"group": group}
    path = path_of("subjects", subject, "ordered")
    rows = list(open_admin(context, url, admin, timeout).rows(path, query))
    who = "no group consumes" if group is None else f"group {group} does not consume"
    nothing = f"{who} {subject} in order"
    print_rows(output, rows, (*_COLUMNS, "stuck since"), map(_line, rows), nothing=nothing)


def skip(  # one for each option
    context: typer.Context,
    subject: Subject,
    *,
    group: Annotated[str, typer.Option(help="For which group.", show_default=False)],
    broker_group: Annotated[
        str, typer.Option(help="The broker group of the partition.", show_default=False)
    ],
    partition: Annotated[
        str | None,
        typer.Option(help="The partition; the one named like the subject, if left out."),
    ] = None,
    sequence: Annotated[
        int,
        typer.Option(
            min=0, help="What the group waits for, as `ordered` tells it.", show_default=False
        ),
    ],
    reason: Annotated[str, typer.Option(help="Why, for people.", show_default=False)] = "",
    url: Url = None,
    admin: Admin = None,
    timeout: Timeout = 10.0,
    output: OutputOption = Output.TABLE,
) -> None:
    """Make a dead letter of the message that an ordered group waits for.

    Whoever holds it loses the partition for a moment; what it had handled beyond that message and
    not settled comes again.
    """
    body = {
        "broker_group": broker_group,
        "partition": partition or subject,
        "sequence": sequence,
        "reason": reason,
    }
    path = path_of("subjects", subject, "ordered", group, "skip")
    found = open_admin(context, url, admin, timeout).ask("POST", path, body)
    print_result(output, found, f"{group} goes on with {found['next_sequence']}")


def _line(row: Mapping[str, Any]) -> tuple[str, ...]:
    cells = ("-" if row[each] is None else str(row[each]) for each in _COLUMNS)
    return (*cells, row["stuck_since"] or "-")
