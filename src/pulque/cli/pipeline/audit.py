"""``pulque pipeline audit``: sent = stored = settled + dead + waiting, or what breaks it."""

from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer

from pulque.cli.common.exit_codes import ExitCode
from pulque.cli.common.options import OutputOption
from pulque.cli.common.output import Output, instant, print_json, print_line, print_table
from pulque.cli.pipeline.options import (
    LakeOption,
    SinceOption,
    SparkOption,
    SubjectOption,
    UntilOption,
    VerboseOption,
    parse_instant,
    pipeline_extra,
    start_spark,
)

if TYPE_CHECKING:
    from pulque.pipeline.audit.summary import Audit, AuditFinding, Line

__all__ = ["audit"]

_COLUMNS = (
    *("subject", "group", "hour", "sent", "stored", "settled", "dead", "waiting"),
    *("not wanted", "unknown", ""),
)
_BREAKS = ("what", "where", "group", "message", "meaning")


def audit(
    *,
    lake: LakeOption,
    subject: SubjectOption = None,
    group: Annotated[
        str | None, typer.Option("--group", metavar="G", help="Of this group only.")
    ] = None,
    since: SinceOption = None,
    until: UntilOption = None,
    receipts: Annotated[
        str | None,
        typer.Option(
            "--receipts",
            metavar="FILE",
            help="What senders were confirmed, as pulque send -o json prints it: must be stored.",
        ),
    ] = None,
    runs_on: SparkOption = "local[*]",
    verbose: VerboseOption = False,
    output: OutputOption = Output.TABLE,
) -> None:
    """Prove from an archive that nothing was lost: sent = stored = settled + dead + waiting.

    For each subject, group and hour in which messages were stored, as of what is archived. Exits
    with 1 if anything does not add up, and names the messages.
    """
    begin, end = parse_instant(since, "--since"), parse_instant(until, "--until")
    with pipeline_extra():
        from pulque.pipeline.audit.stored import Scope
        from pulque.pipeline.audit.summary import audit as compare
        from pulque.pipeline.lake.table import MESSAGES, Table

        Table(lake, MESSAGES).open()  # before Spark is started for nothing
        spark = start_spark(runs_on, is_verbose=verbose)
        scope = Scope(subject, group)
        result = compare(spark, lake, scope, since=begin, until=end, receipts=receipts)
    if output is Output.JSON:
        _print_json(result)
    else:
        _print_tables(result)
    if not result.is_exact:
        raise typer.Exit(ExitCode.FAILED)


def _print_json(result: "Audit") -> None:
    for line in result.lines:
        print_json({"kind": "line", **_line_fields(line)})
    for each in result.found:
        values = {name: value for name, value in asdict(each).items() if value is not None}
        print_json({"kind": "break", **values})
    exact = {"is_exact": result.is_exact, "breaks": result.wrong, "notes": result.notes}
    print_json({"kind": "result", **exact})


def _line_fields(line: "Line") -> dict[str, Any]:
    return {
        "subject": line.subject,
        "group": line.group,
        "hour": instant(round(line.hour.timestamp() * 1000)),
        "sent": line.sent,
        "stored": line.stored,
        "settled": line.settled,
        "dead": line.dead,
        "waiting": line.waiting,
        "states": dict(line.states),
        "is_even": line.is_even,
    }


def _print_tables(result: "Audit") -> None:
    print_table(_COLUMNS, [_line_cells(line) for line in result.lines])
    for note in result.notes:
        print_line(f"note: {note}")
    if result.is_exact:
        print_line("exact: sent = stored = settled + dead + waiting + not wanted, for each group")
        return
    print_line("")
    print_table(_BREAKS, [_found_cells(each) for each in result.found])
    left = result.wrong - len(result.found)
    print_line(f"{result.wrong} breaks{f', {left} of them not shown' if left > 0 else ''}")


def _line_cells(line: "Line") -> list[str]:
    head = [line.subject, line.group or "–", f"{line.hour:%Y-%m-%d %H}h"]
    stored = ["–" if line.sent is None else str(line.sent), str(line.stored)]
    if line.group is None:
        return [*head, *stored, "–", "–", "–", "–", "–", "" if line.is_even else "≠"]
    counts = (line.settled, line.dead, line.waiting, line.unwanted, line.unknown)
    return [*head, *stored, *map(str, counts), "" if line.is_even else "≠"]


def _found_cells(found: "AuditFinding") -> list[str]:
    from pulque.pipeline.audit.summary import FLAWS

    where = found.partition or found.broker
    if found.first is not None:
        last = found.first + found.count - 1
        numbers = str(found.first) if found.count <= 1 else f"{found.first}..{last}"
        where = f"{where}/{numbers}" if not found.consumer else (
            f"{where}, deliveries {numbers} of {found.consumer}"
        )  # fmt: skip
    meaning = FLAWS.get(found.flaw, "")
    if found.note:
        meaning = f"{meaning}: {found.note}"
    return [found.flaw, where, found.group or "", found.message_id or "", meaning]
