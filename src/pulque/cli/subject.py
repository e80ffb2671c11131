"""``pulque subject``: what subjects a cluster has, where they lie, and what they may take."""

from collections.abc import Mapping
from enum import StrEnum
from typing import Annotated, Any

import typer

from pulque.cli.common.admin_client import Admin, open_admin, path_of
from pulque.cli.common.options import OutputOption, Timeout, Url
from pulque.cli.common.output import (
    Output,
    print_json,
    print_line,
    print_result,
    print_rows,
    print_table,
)
from pulque.model.names import parse_subject

__all__ = ["app"]

app = typer.Typer(
    help="The subjects of a cluster: where they lie, and what they may take.",
    no_args_is_help=True,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)
Subject = Annotated[str, typer.Argument(metavar="SUBJECT", help="Which one.", show_default=False)]
Number = Annotated[int | None, typer.Option("-n", min=1, help="At most so many.")]


class OrderChoice(StrEnum):
    """What a failure may do to the order of messages."""

    STRICT = "strict"
    BEST_EFFORT = "best-effort"


@app.command("list")
def list_subjects(
    context: typer.Context,
    *,
    number: Number = None,
    url: Url = None,
    admin: Admin = None,
    timeout: Timeout = 10.0,
    output: OutputOption = Output.TABLE,
) -> None:
    """List subjects with the broker groups that hold them.

    Exits with 4 if there are none.
    """
    rows = list(open_admin(context, url, admin, timeout).rows("/subjects", number=number))
    columns = ("subject", "partitions", "broker groups", "sends")
    print_rows(output, rows, columns, map(_line, rows), nothing="there are no subjects")


@app.command()
def show(
    context: typer.Context,
    subject: Subject,
    *,
    url: Url = None,
    admin: Admin = None,
    timeout: Timeout = 10.0,
    output: OutputOption = Output.TABLE,
) -> None:
    """Show where each partition of a subject lies, and what its broker has of it."""
    client = open_admin(context, url, admin, timeout)
    found = client.get(path_of("subjects", subject))
    stored = list(client.rows(path_of("subjects", subject, "partitions")))
    if output is Output.JSON:
        print_json({**found, "stored": stored})
        return
    _print_subject(found)
    if stored:
        print_line("")
        print_line("stored:")
        columns = ("broker_group", "partition", "start", "end")
        print_table(columns, [[str(row[name]) for name in columns] for row in stored])


@app.command()
def create(
    context: typer.Context,
    subjects: Annotated[
        list[str], typer.Argument(metavar="SUBJECT...", help="Which ones.", show_default=False)
    ],
    *,
    on: Annotated[
        list[str] | None,
        typer.Option(
            metavar="BROKER-GROUP",
            help="Where a partition of it goes. May be repeated.",
            show_default=False,
        ),
    ] = None,
    partitions: Annotated[
        int | None, typer.Option(min=1, help="At least so many partitions.", show_default=False)
    ] = None,
    url: Url = None,
    admin: Admin = None,
    timeout: Timeout = 10.0,
    output: OutputOption = Output.TABLE,
) -> None:
    """Create subjects ahead of their first send; those that exist stay as they are."""
    client = open_admin(context, url, admin, timeout)
    for subject in subjects:
        parse_subject(subject)  # before any of them is created
    for subject in subjects:
        found = client.ask("POST", "/subjects", {"subject": subject, "broker_groups": on or []})
        if partitions is not None and found["taking"] < partitions:
            body = {"partitions": partitions}
            found = client.ask("POST", path_of("subjects", subject, "extend"), body)
        _print_changed(found, output)


@app.command()
def extend(
    context: typer.Context,
    subject: Subject,
    *,
    partitions: Annotated[
        int, typer.Option(min=1, help="How many are to take messages.", show_default=False)
    ],
    on: Annotated[
        list[str] | None,
        typer.Option(
            metavar="BROKER-GROUP",
            help="Where an added partition goes; else they stay where the subject is. "
            "May be repeated.",
            show_default=False,
        ),
    ] = None,
    url: Url = None,
    admin: Admin = None,
    timeout: Timeout = 10.0,
    output: OutputOption = Output.TABLE,
) -> None:
    """Split partitions of a subject, so that more take messages.

    Those that are split take no more messages. Consumers in order get what follows them only
    after they have settled all that is in them.
    """
    client = open_admin(context, url, admin, timeout)
    body = {"partitions": partitions, "broker_groups": on or []}
    _print_changed(client.ask("POST", path_of("subjects", subject, "extend"), body), output)


@app.command()
def merge(
    context: typer.Context,
    subject: Subject,
    *,
    partitions: Annotated[
        int, typer.Option(min=1, help="How many are to take messages.", show_default=False)
    ],
    url: Url = None,
    admin: Admin = None,
    timeout: Timeout = 10.0,
    output: OutputOption = Output.TABLE,
) -> None:
    """Merge partitions of a subject, so that fewer take messages; order holds as with extend."""
    client = open_admin(context, url, admin, timeout)
    body = {"partitions": partitions}
    _print_changed(client.ask("POST", path_of("subjects", subject, "merge"), body), output)


@app.command()
def order(
    context: typer.Context,
    subject: Subject,
    strategy: Annotated[
        OrderChoice,
        typer.Argument(help="What a failure may do to the order.", show_default=False),
    ],
    *,
    url: Url = None,
    admin: Admin = None,
    timeout: Timeout = 10.0,
    output: OutputOption = Output.TABLE,
) -> None:
    """Say what a failure may do to the order of a subject's messages.

    strict: what fails is tried again where it is, and what follows with its key waits.
    best-effort: it may go another way, and be overtaken.
    """
    client = open_admin(context, url, admin, timeout)
    body = {"order": strategy.value}
    found = client.ask("PUT", path_of("subjects", subject, "order"), body)
    print_result(output, found, f"{found['subject']} keeps order: {found['order']}")


@app.command("read-only")
def read_only(
    context: typer.Context,
    subject: Annotated[
        str, typer.Argument(metavar="SUBJECT", help="Which one, or order.*", show_default=False)
    ],
    *,
    off: Annotated[bool, typer.Option("--off", help="Take sends again.")] = False,
    url: Url = None,
    admin: Admin = None,
    timeout: Timeout = 10.0,
    output: OutputOption = Output.TABLE,
) -> None:
    """Have a subject, or all of a pattern, take no sends; consumption goes on."""
    client = open_admin(context, url, admin, timeout)
    path = path_of("subjects", subject, "read-only")
    found = client.ask("PUT", path, {"read_only": not off})
    sends = "takes sends again" if off else "takes no sends"
    print_result(output, found, f"{subject} {sends}")


def _print_changed(found: Mapping[str, Any], output: Output) -> None:
    print_result(output, found, f"{found['subject']} has {found['taking']} partitions")


def _print_subject(found: Mapping[str, Any]) -> None:
    sends = "takes no sends" if found["read_only"] else "takes sends"
    print_line(f"{found['subject']} {sends}, order: {found['order']}")
    print_table(
        ("partition", "broker group", "slots", "sends"),
        [
            (
                each["partition"],
                each["broker_group"],
                "{}–{}".format(*each["slots"]),
                "closed" if each["closed"] else "taken",
            )
            for each in found["partitions"]
        ],
    )


def _line(row: Mapping[str, Any]) -> tuple[str, ...]:
    groups = dict.fromkeys(each["broker_group"] for each in row["partitions"])
    return (
        row["subject"],
        str(row["taking"]),
        " ".join(groups),
        "refused" if row["read_only"] else "taken",
    )
