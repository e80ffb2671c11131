"""``pulque pipeline replay``: send messages of a lake again."""

from typing import Annotated

import typer
from rich.console import Console
from rich.progress import MofNCompleteColumn, Progress, SpinnerColumn, TextColumn

from pulque.cli.common.exit_codes import ExitCode
from pulque.cli.common.options import OutputOption, Url, open_client
from pulque.cli.common.output import Output, print_json, print_line, print_table
from pulque.cli.pipeline.options import (
    BeginOption,
    EndOption,
    HeaderOption,
    IdOption,
    KeyOption,
    LakeOption,
    SubjectOption,
    parse_header,
    parse_instant,
    pipeline_extra,
)
from pulque.errors import UsageError

__all__ = ["replay"]

_TIMEOUT_S = 30.0


def replay(
    context: typer.Context,
    *,
    lake: LakeOption,
    target: Annotated[
        str | None,
        typer.Option(
            "--target", metavar="SUBJECT", help="Where to; else each to its own subject."
        ),
    ] = None,
    message_id: IdOption = None,
    key: KeyOption = None,
    subject: SubjectOption = None,
    begin: BeginOption = None,
    end: EndOption = None,
    header: HeaderOption = None,
    everything: Annotated[
        bool, typer.Option("--all", help="All messages of the archive, instead of some.")
    ] = False,
    rate: Annotated[
        float | None, typer.Option("--rate", metavar="N", help="At most so many per second.")
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Only say how many messages it would be.")
    ] = False,
    url: Url = None,
    output: OutputOption = Output.TABLE,
) -> None:
    """Send messages of an archive again that match all that is given.

    They are new messages; the header origin_id names the one they were made from. Retries and
    dead letters of groups are left out: their originals are there. Exits with 4 if there are none.
    """
    conditions = (message_id, key, subject, begin, end, *(header or ()))
    if everything == any(each is not None for each in conditions):
        raise UsageError(
            "which messages? give --id, --key, --subject, --from, --to or --header, or else --all"
        )
    with pipeline_extra():
        from pulque.pipeline.lake import replay as work
        from pulque.pipeline.query import Question

        work.check_rate(rate)
        question = Question(
            id=message_id,
            key=key,
            subject=subject,
            begin=parse_instant(begin, "--from"),
            end=parse_instant(end, "--to"),
            headers=dict(map(parse_header, header or [])),
        )
        found = work.count_messages(lake, question)
        if found.total and not dry_run:
            with open_client(context, url, _TIMEOUT_S) as client, _progress() as progress:
                task = progress.add_task("replay", total=found.total)
                found = work.replay(
                    lake,
                    question,
                    client,
                    target=target,
                    rate=rate,
                    on_sent=lambda count: progress.advance(task, count),
                )
    _tell(found.messages, found.body_bytes, output, dry_run=dry_run)
    if not found.total:
        raise typer.Exit(ExitCode.NOTHING)


def _progress() -> Progress:
    columns = (SpinnerColumn(), TextColumn("{task.description}"), MofNCompleteColumn())
    # On stderr: what is printed may be read by a program.
    return Progress(*columns, transient=True, console=Console(stderr=True))


def _tell(messages: dict[str, int], body_bytes: int, output: Output, *, dry_run: bool) -> None:
    if output is Output.JSON:
        print_json({"messages": messages, "body_bytes": body_bytes, "dry_run": dry_run})
        return
    if messages:
        print_table(("subject", "messages"), [[s, str(n)] for s, n in sorted(messages.items())])
    verb = "would be sent" if dry_run else "sent"
    print_line(f"{sum(messages.values())} messages, {body_bytes} bytes of bodies {verb}")
