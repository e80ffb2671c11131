"""``pulque delay``: messages that are due later, and what is done with them."""

import time
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Annotated

import typer

from pulque.cli.common.durations import ahead_of_now, before_now, parse_span
from pulque.cli.common.exit_codes import ExitCode
from pulque.cli.common.message_output import (
    MessageOutput,
    message_fields,
    message_line,
    print_message,
)
from pulque.cli.common.options import OutputOption, Timeout, Url, open_client
from pulque.cli.common.output import (
    Output,
    instant,
    nothing_there,
    print_json,
    print_line,
    print_result,
    print_rows,
)
from pulque.client.inspecting.delayed_messages import outcome_of
from pulque.errors import UsageError
from pulque.settings.foreign import quoted

if TYPE_CHECKING:
    from pulque import DelayedMessage, Fate

__all__ = [
    "AtOption",
    "DelayOption",
    "LevelOption",
    "app",
    "parse_delay",
    "parse_instant",
]

app = typer.Typer(
    help="Run a delay server, or look at messages that are due later.", rich_markup_mode=None
)
DelayOption = Annotated[
    str | None,
    typer.Option(
        "--delay", metavar="TIME", help="How long from now, such as 90 or 90s, 10m, 1h30m or 2d."
    ),
]
AtOption = Annotated[
    str | None,
    typer.Option("--at", metavar="INSTANT", help="When, such as 2027-01-31T09:30:00+01:00."),
]
LevelOption = Annotated[
    int | None,
    typer.Option(
        "--level", metavar="N", help="A usual delay: 1 is a second, 5 a minute, 18 two hours."
    ),
]
MaybeSubject = Annotated[
    str | None,
    typer.Argument(metavar="[SUBJECT]", help="Only of this subject.", show_default=False),
]
Start = Annotated[
    str | None, typer.Option("--from", metavar="INSTANT", help="Due then, or later.")
]
End = Annotated[str | None, typer.Option("--until", metavar="INSTANT", help="Due before that.")]
MessageId = Annotated[
    str, typer.Argument(metavar="ID", help="Its id, as its receipt says.", show_default=False)
]
_COLUMNS = ("due", "id", "subject", "group", "bytes", "delay server")
_WORDS = {
    "CANCELLED": "cancelled",
    "ALREADY_CANCELLED": "was cancelled before",
    "TOO_LATE": "too late: it is delivered, or about to be",
    "UNKNOWN": "no delay server has it",
    "MOVED": "moved",
}


@app.command("list")
def list_messages(
    context: typer.Context,
    subject: MaybeSubject = None,
    *,
    number: Annotated[int, typer.Option("-n", min=1, help="At most so many.")] = 100,
    start: Start = None,
    end: End = None,
    url: Url = None,
    timeout: Timeout = 10.0,
    output: OutputOption = Output.TABLE,
) -> None:
    """Print the messages that are due next.

    Exits with 4 if there are none.
    """
    with open_client(context, url, timeout) as client:
        found = client.delayed(subject).next(
            number, start=parse_instant(start, "--from"), end=parse_instant(end, "--until")
        )
    rows = list(map(_fields, found))
    nothing = f"no messages{_of(subject)} wait"
    print_rows(output, rows, _COLUMNS, map(_row, found), nothing=nothing)


@app.command()
def counts(
    context: typer.Context,
    subject: MaybeSubject = None,
    *,
    start: Start = None,
    end: End = None,
    url: Url = None,
    timeout: Timeout = 10.0,
    output: OutputOption = Output.TABLE,
) -> None:
    """Count the messages that are due later, by hour and subject.

    Exits with 4 if there are none.
    """
    with open_client(context, url, timeout) as client:
        found = client.delayed(subject).counts(
            parse_instant(start, "--from"), parse_instant(end, "--until")
        )
    rows = [each._asdict() | {"hour": each.hour.isoformat()} for each in found]
    lines = [
        [each.hour.strftime("%Y-%m-%d %H:%MZ"), each.subject, str(each.messages)] for each in found
    ]
    nothing = f"no messages{_of(subject)} wait"
    print_rows(output, rows, ("hour", "subject", "messages"), lines, nothing=nothing)


@app.command()
def stuck(
    context: typer.Context,
    subject: MaybeSubject = None,
    *,
    number: Annotated[int, typer.Option("-n", min=1, help="At most so many.")] = 100,
    url: Url = None,
    timeout: Timeout = 10.0,
    output: OutputOption = Output.TABLE,
) -> None:
    """Print the messages that are overdue, as brokers refuse them, and why.

    They are tried again every ten minutes, and can be cancelled or moved. Exits with 4 if there
    are none.
    """
    with open_client(context, url, timeout) as client:
        found = client.delayed(subject).stuck(number)
    rows = [_fields(each) | {"reason": each.reason} for each in found]
    lines = [[*_row(each), each.reason] for each in found]
    nothing = f"no messages{_of(subject)} are overdue"
    print_rows(output, rows, (*_COLUMNS, "reason"), lines, nothing=nothing)


@app.command()
def show(
    context: typer.Context,
    message_id: MessageId,
    *,
    url: Url = None,
    timeout: Timeout = 10.0,
    output: Annotated[
        MessageOutput,
        typer.Option("--output", "-o", help="For people, JSON, or the body as it is."),
    ] = MessageOutput.TABLE,
) -> None:
    """Print one message that is due later.

    Exits with 4 if it is not, or no longer, there.
    """
    with open_client(context, url, timeout) as client:
        found = client.delayed().show(message_id)
    if found is None or found.message is None:
        raise nothing_there(f"no delay server has {message_id}")
    match output:
        case MessageOutput.JSON:
            content = message_fields(found.message)
            # Where it is stored, and since when, it has yet to be.
            for name in ("sequence", "stored_at"):
                del content[name]
            print_json(content | _fields(found))
        case MessageOutput.RAW:
            print_message(found.message, output)
        case MessageOutput.TABLE:
            line = message_line(found.message).split(" ", 2)[2]
            print_line(f"due {instant(found.due_at_ms)} {found.partition} {line}")


@app.command()
def cancel(
    context: typer.Context,
    ids: Annotated[
        list[str], typer.Argument(metavar="ID...", help="Their ids.", show_default=False)
    ],
    *,
    url: Url = None,
    timeout: Timeout = 10.0,
    output: OutputOption = Output.TABLE,
) -> None:
    """Have messages never delivered.

    Exits with 1 if it was too late for one of them, and with 4 if one is not there.
    """
    with open_client(context, url, timeout) as client:
        fates = client.cancel_many(ids)
    for each, fate in zip(ids, fates, strict=True):
        result = {"id": each, "outcome": outcome_of(fate)}
        print_result(output, result, f"{each} {_WORDS[fate.name]}")
    _exit_by(fates)


@app.command()
def reschedule(
    context: typer.Context,
    message_id: MessageId,
    *,
    delay: DelayOption = None,
    at: AtOption = None,
    level: LevelOption = None,
    url: Url = None,
    timeout: Timeout = 10.0,
    output: OutputOption = Output.TABLE,
) -> None:
    """Have a message delivered at another time.

    Exits with 1 if it was too late, or cancelled before, and with 4 if it is not there.
    """
    with open_client(context, url, timeout) as client:
        moved = client.reschedule(
            message_id,
            delay=parse_delay(delay),
            at=parse_instant(at, "--at"),
            level=level,
        )
    fate, due_at = moved.fate, instant(moved.due_at_ms)
    result = {"id": message_id, "outcome": outcome_of(fate), "due_at": due_at}
    to = f" to {due_at}" if fate.name == "MOVED" else ""
    print_result(output, result, f"{message_id} {_WORDS[fate.name]}{to}")
    _exit_by([fate], is_move=True)


def parse_delay(text: str | None) -> timedelta | None:
    """Return a delay as it was written.

    Raises:
        UsageError: It is none.
    """
    if text is None:
        return None
    try:
        return parse_span(text)
    except ValueError as error:
        raise UsageError(f"--delay {quoted(text)}: {error}") from None


def parse_instant(text: str | None, option: str, *, is_past: bool = False) -> datetime | None:
    """Return an instant: as it was written, or a duration from now, ``2h``.

    Args:
        text: What was written.
        option: Where, for the error.
        is_past: Whether a duration counts backwards.

    Raises:
        UsageError: It is neither, or has no time zone.
    """
    if text is None:
        return None
    if (counted := before_now(text) if is_past else ahead_of_now(text)) is not None:
        return counted
    try:
        found = datetime.fromisoformat(text)
    except ValueError:
        found = None
    if found is None or found.utcoffset() is None:
        example = datetime.fromtimestamp(time.time() // 60 * 60, UTC).isoformat()
        raise UsageError(
            f"{option} {quoted(text)}: an instant with its time zone is allowed, such as "
            f"{example}, or a duration {'before' if is_past else 'from'} now, such as 2h"
        )
    return found


def _of(subject: str | None) -> str:
    return "" if subject is None else f" of {subject}"


def _exit_by(fates: "Sequence[Fate]", *, is_move: bool = False) -> None:
    names = {fate.name for fate in fates}
    if "TOO_LATE" in names or (is_move and "ALREADY_CANCELLED" in names):
        raise typer.Exit(ExitCode.FAILED)
    if "UNKNOWN" in names:
        raise typer.Exit(ExitCode.NOTHING)


def _fields(each: "DelayedMessage") -> dict[str, object]:
    return {
        "id": each.id,
        "due_at": instant(each.due_at_ms),
        "subject": each.subject,
        "partition": each.partition,
        "group": each.group,
        "size": each.size,
        "delay_server": each.delay_server,
    }


def _row(each: "DelayedMessage") -> list[str]:
    return [
        instant(each.due_at_ms),
        each.id,
        each.subject,
        each.group or "",
        str(each.size),
        each.delay_server,
    ]
