"""``pulque message``: stored messages, found by key or time, and shown by id or position."""

import re
from typing import Annotated

import typer

from pulque.cli.common.exit_codes import ExitCode
from pulque.cli.common.message_output import (
    MessageOutput,
    print_message,
    print_whole,
)
from pulque.cli.common.options import Timeout, Url, open_client
from pulque.cli.common.output import (
    instant,
    nothing_there,
    print_broker_table,
    print_warning,
)
from pulque.cli.delay import parse_instant
from pulque.errors import UnknownMessageError, UsageError
from pulque.model.message import Message
from pulque.model.positions import ConsumeSequence, Position
from pulque.settings.foreign import quoted

__all__ = ["app"]

app = typer.Typer(help="Stored messages: find and show them.", rich_markup_mode=None)

Copies = Annotated[
    bool, typer.Option("--copies", help="Retries and dead letters of groups count, too.")
]
Broker = Annotated[
    str | None, typer.Option("--broker", metavar="GROUP", help="Only this broker group's.")
]
OutputOption = Annotated[
    MessageOutput,
    typer.Option("--output", "-o", help="For people, JSON, or the bodies as they are."),
]
_POSITION = re.compile(r"(?P<partition>.+)/(?P<sequence>[0-9]{1,18})", re.ASCII)
_MOST_BODY = 60


@app.command()
def find(  # one for each option
    context: typer.Context,
    subject: Annotated[
        str, typer.Argument(metavar="SUBJECT", help="Where they were sent to.", show_default=False)
    ],
    *,
    key: Annotated[
        str | None, typer.Option(help="Only those with this key.", show_default=False)
    ] = None,
    since: Annotated[
        str | None,
        typer.Option(
            metavar="TIME", help="Stored then, or later: an instant, or 2h for 2 hours ago."
        ),
    ] = None,
    until: Annotated[
        str | None, typer.Option(metavar="TIME", help="Stored before that; written alike.")
    ] = None,
    number: Annotated[int, typer.Option("-n", min=1, max=1000, help="At most so many.")] = 32,
    copies: Copies = False,
    broker: Broker = None,
    url: Url = None,
    timeout: Timeout = 10.0,
    output: OutputOption = MessageOutput.TABLE,
) -> None:
    """Print stored messages, the newest first.

    Exits with 4 if there are none, and with 3 if a broker did not answer, so that some may be
    missing.
    """
    first = parse_instant(since, "--since", is_past=True)
    last = parse_instant(until, "--until", is_past=True)
    with open_client(context, url, timeout) as client:
        found = client.messages.find(
            subject,
            key=key,
            since=first,
            until=last,
            limit=number,
            copies=copies,
            broker=broker,
        )
    if output is not MessageOutput.TABLE:
        for message in found:
            print_message(message, output)
    elif found:
        columns = ("message", "id", "stored", "key", "attempt", "body")
        print_broker_table(columns, [_row(message) for message in found])
    for name, reason in found.missing.items():
        print_warning(f"messages of {name} may be missing: {reason}")
    if found.missing:
        raise typer.Exit(ExitCode.UNREACHABLE)
    if not found:
        raise nothing_there(f"no such messages of {subject} are stored")


@app.command()
def show(
    context: typer.Context,
    which: Annotated[
        str,
        typer.Argument(
            metavar="MESSAGE",
            help="Its id, or where it is: PARTITION/SEQUENCE.",
            show_default=False,
        ),
    ],
    *,
    copies: Copies = False,
    broker: Annotated[
        str | None,
        typer.Option("--broker", metavar="GROUP", help="Whose PARTITION/SEQUENCE, in a cluster."),
    ] = None,
    url: Url = None,
    timeout: Timeout = 10.0,
    output: OutputOption = MessageOutput.TABLE,
) -> None:
    """Print one stored message.

    Exits with 4 if it is not there.
    """
    what = _place(which, broker)
    try:
        with open_client(context, url, timeout) as client:
            message = client.messages.get(what, copies=copies)
    except UnknownMessageError as error:
        raise nothing_there(str(error)) from None
    print_whole(message, output)


def _place(which: str, broker: str | None) -> str | Position:
    found = _POSITION.fullmatch(which)
    if found is not None:
        return Position(broker or "", found["partition"], ConsumeSequence(int(found["sequence"])))
    if broker is not None:
        raise UsageError(f"--broker goes with PARTITION/SEQUENCE, and not with {quoted(which)}")
    return which


def _row(message: Message) -> tuple[str, ...]:
    body = message.body
    shown = body[:_MOST_BODY].decode(errors="backslashreplace")
    return (
        message.broker_group,
        f"{message.partition}/{message.sequence}",
        message.id,
        instant(message.stored_at_ms),
        message.key or "",
        str(message.attempt),
        f"{shown} … ({len(body)} bytes)" if len(body) > _MOST_BODY else shown,
    )
