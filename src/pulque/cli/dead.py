"""``pulque dead``: what nobody could process, looked at, delivered again, or given up."""

import sys
from typing import TYPE_CHECKING, Annotated

import typer

from pulque.cli.common.admin_client import Admin, open_admin
from pulque.cli.common.exit_codes import ExitCode
from pulque.cli.common.message_output import (
    MessageOutput,
    message_fields,
    print_whole,
)
from pulque.cli.common.options import OutputOption, Timeout, Url, open_client, opened
from pulque.cli.common.output import (
    Output,
    instant,
    nothing_there,
    print_broker_table,
    print_json,
    print_line,
    print_result,
    print_rows,
    print_warning,
)
from pulque.cli.send import parse_headers
from pulque.client.inspecting.dead_letters import death_of
from pulque.errors import UsageError
from pulque.model.message import Message

if TYPE_CHECKING:
    from pulque.client.blocking.dead_letters import DeadLetters

__all__ = ["app"]

app = typer.Typer(help="Dead letters: messages that failed for good.", rich_markup_mode=None)

Subject = Annotated[
    str, typer.Argument(metavar="SUBJECT", help="Where they were sent to.", show_default=False)
]
Group = Annotated[
    str, typer.Option("--group", help="Which group could not process them.", show_default=False)
]
Broker = Annotated[
    str | None,
    typer.Option(
        "--broker", metavar="GROUP", help="Whose: the broker group, if several have letters."
    ),
]
_AT_ONCE = 1000


@app.command("list")
def list_letters(
    context: typer.Context,
    subject: Subject,
    *,
    group: Group,
    first: Annotated[int, typer.Option("--from", min=0, help="The first sequence.")] = 0,
    number: Annotated[int, typer.Option("-n", min=1, help="At most so many.")] = 100,
    broker: Broker = None,
    url: Url = None,
    timeout: Timeout = 10.0,
    output: OutputOption = Output.TABLE,
) -> None:
    """Print dead letters that nobody has dealt with, oldest first.

    Exits with 4 if there are none.
    """
    letters: list[Message] = []
    with open_client(context, url, timeout) as client:
        dead = client.dead(subject, group)
        brokers = dead.brokers() if broker is None else [broker]
        if first and len(brokers) > 1:
            raise UsageError(
                f"--from {first}: of which broker? each counts for itself; give --broker, one of "
                f"{', '.join(brokers)}"
            )
        for each in brokers:
            letters += _letters_of(dead, each, first, number)
        count = dead.count()
    letters = sorted(letters, key=lambda letter: letter.stored_at_ms)[:number]
    if output is Output.JSON:
        for letter in letters:
            print_json(message_fields(letter))
    else:
        if letters:
            columns = ("sequence", "id", "died", "attempts", "why", "last reason")
            print_broker_table(columns, [_row(letter) for letter in letters])
        print_warning(f"{len(letters)} of {count} dead letters of {subject} for {group}")
    if not letters:
        raise typer.Exit(ExitCode.NOTHING)


@app.command("count")
def count_letters(
    context: typer.Context,
    subject: Annotated[
        str | None,
        typer.Argument(metavar="[SUBJECT]", help="Only of this subject, or of order.* say."),
    ] = None,
    *,
    group: Annotated[str | None, typer.Option(help="Only of this group.")] = None,
    url: Url = None,
    admin: Admin = None,
    timeout: Timeout = 10.0,
    output: OutputOption = Output.TABLE,
) -> None:
    """Count the dead letters of a cluster, by subject and group.

    Exits with 4 if there are none.
    """
    query = {"subject": subject, "group": group}
    found = open_admin(context, url, admin, timeout).rows("/dead", query)
    rows = [row for row in found if row["count"]]
    columns = ("subject", "group", "count")
    lines = [[str(row[name]) for name in columns] for row in rows]
    nothing = f"there are no dead letters{_of(subject, group)}"
    print_rows(output, rows, columns, lines, nothing=nothing)


@app.command()
def show(
    context: typer.Context,
    subject: Subject,
    sequence: Annotated[
        int, typer.Argument(metavar="SEQUENCE", min=0, help="Which one.", show_default=False)
    ],
    *,
    group: Group,
    broker: Broker = None,
    url: Url = None,
    timeout: Timeout = 10.0,
    output: Annotated[
        MessageOutput,
        typer.Option("--output", "-o", help="For people, JSON, or the body as it is."),
    ] = MessageOutput.TABLE,
) -> None:
    """Print one dead letter, with the reason of each attempt.

    Exits with 4 if it is not there, or was dealt with.
    """
    with open_client(context, url, timeout) as client:
        letter = client.dead(subject, group).show(sequence, broker=broker)
    if letter is None:
        raise nothing_there(f"dead letter {sequence} of {subject} for {group} is not there")
    print_whole(letter, output)


@app.command()
def resend(  # one for each option
    context: typer.Context,
    subject: Subject,
    sequences: Annotated[
        list[int] | None,
        typer.Argument(metavar="SEQUENCE...", min=0, help="Which ones.", show_default=False),
    ] = None,
    *,
    group: Group,
    everything: Annotated[
        bool, typer.Option("--all", help="All that there are, instead of some.")
    ] = False,
    body: Annotated[
        str | None, typer.Option(help="A new body, for a single one.", show_default=False)
    ] = None,
    file: Annotated[
        str | None,
        typer.Option(metavar="FILE", help="Take the new body from a file; - is stdin."),
    ] = None,
    header: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME=VALUE", help="New headers, instead of its own. May be repeated."
        ),
    ] = None,
    broker: Broker = None,
    url: Url = None,
    timeout: Timeout = 10.0,
    output: OutputOption = Output.TABLE,
) -> None:
    """Deliver dead letters to their group again, as first attempts; edited, if you like.

    Exits with 1 if some of them could not be resent, and with 4 if --all finds none.
    """
    if bool(sequences) == everything:
        raise UsageError("which dead letters? give their sequences, or --all")
    edited = _edited_body(body, file)
    headers = parse_headers(header) if header else None
    if everything and (edited, headers, broker) != (None, None, None):
        raise UsageError(
            "--body, --file and --header go with a single dead letter, --broker with sequences"
        )
    with open_client(context, url, timeout) as client:
        dead = client.dead(subject, group)
        if everything:
            _print_count("resent", dead.resend_all(), subject, group, output)
            return
        found = dead.resend(*(sequences or ()), body=edited, headers=headers, broker=broker)
    if output is Output.JSON:
        print_json({name: list(value) for name, value in found._asdict().items()})
    else:
        print_line(f"resent {len(found.resent)}")
        for name, left in (("resent or purged before", found.done), ("not there", found.missing)):
            if left:
                print_warning(f"{name}: {', '.join(map(str, left))}")
    if found.done or found.missing:
        raise typer.Exit(ExitCode.FAILED)


@app.command()
def purge(
    context: typer.Context,
    subject: Subject,
    *,
    group: Group,
    until: Annotated[
        int | None,
        typer.Option(min=0, metavar="SEQUENCE", help="The last one to go.", show_default=False),
    ] = None,
    everything: Annotated[bool, typer.Option("--all", help="All that there are.")] = False,
    broker: Broker = None,
    url: Url = None,
    timeout: Timeout = 10.0,
    output: OutputOption = Output.TABLE,
) -> None:
    """Give up dead letters: they are not shown any more, and cannot be resent.

    Exits with 4 if there are none.
    """
    if everything == (until is not None):
        raise UsageError("which dead letters? give --until SEQUENCE, or --all")
    with open_client(context, url, timeout) as client:
        count = client.dead(subject, group).purge(until, broker=broker)
    _print_count("purged", count, subject, group, output)


def _letters_of(dead: "DeadLetters", broker: str, first: int, number: int) -> list[Message]:
    letters: list[Message] = []
    while len(letters) < number:
        some = dead.list(first, min(number - len(letters), _AT_ONCE), broker=broker)
        letters += some
        if not some:
            break
        first = some[-1].sequence + 1
    return letters


def _of(subject: str | None, group: str | None) -> str:
    """Return what dead letters were looked for, as text."""
    of = "" if subject is None else f" of {subject}"
    return of if group is None else f"{of} for {group}"


def _print_count(what: str, count: int, subject: str, group: str, output: Output) -> None:
    """Print how many dead letters were dealt with; none is nothing to end well with."""
    print_result(output, {what: count}, f"{what} {count}")
    if not count:
        raise nothing_there(f"there are no such dead letters{_of(subject, group)}")


def _row(letter: Message) -> tuple[str, ...]:
    at_ms, attempts, why, reason = death_of(letter)
    where = (letter.broker_group, str(letter.sequence), letter.id)
    return (*where, instant(at_ms), str(attempts), why, reason)


def _edited_body(body: str | None, file: str | None) -> bytes | None:
    if body is not None and file is not None:
        raise UsageError("--body and --file contradict each other")
    if body is not None:
        return body.encode()
    if file is None:
        return None
    if file == "-":
        return sys.stdin.buffer.read()
    with opened(file, "--file ") as source:
        return source.read()
