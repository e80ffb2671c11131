"""``pulque pipeline report``: how much, how fast, what failed; as tables, and as a page."""

from dataclasses import asdict
from datetime import UTC, date, datetime
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from pulque.cli.common.exit_codes import ExitCode
from pulque.cli.common.options import OutputOption
from pulque.cli.common.output import (
    Output,
    instant,
    print_json,
    print_line,
    print_table,
    print_warning,
)
from pulque.cli.pipeline.options import (
    LakeOption,
    SparkOption,
    SubjectOption,
    VerboseOption,
    parse_instant,
    pipeline_extra,
    start_spark,
)
from pulque.errors import StorageError

if TYPE_CHECKING:
    from pulque.pipeline.report.figures import Report

__all__ = ["report"]

_LAST_ROWS = 24
"""So many hours and days are shown on a terminal."""
_LISTS = {
    "subjects": "subject",
    "hours": "hour",
    "days": "day",
    "end_to_end": "end_to_end",
    "handling": "handling",
    "redeliveries": "redeliveries",
    "failures": "failures",
    "consumers": "consumer",
    "keys": "key",
}


def report(
    *,
    lake: LakeOption,
    subject: SubjectOption = None,
    group: Annotated[
        str | None, typer.Option("--group", metavar="G", help="Of this group only.")
    ] = None,
    since: Annotated[
        str | None,
        typer.Option("--since", metavar="T", help="Stored or settled at this instant or later."),
    ] = None,
    until: Annotated[
        str | None,
        typer.Option("--until", metavar="T", help="Stored or settled before this instant."),
    ] = None,
    page: Annotated[
        Path | None,
        typer.Option("--html", metavar="FILE", help="Write a page with plots there, too."),
    ] = None,
    runs_on: SparkOption = "local[*]",
    verbose: VerboseOption = False,
    output: OutputOption = Output.TABLE,
) -> None:
    """Tell from an archive how much was sent, how fast it was handled, and what failed.

    Rates, latencies, retries and their reasons, slow consumers, hot keys and growth. Exits with 4
    if there was nothing to tell of.
    """
    begin, end = parse_instant(since, "--since"), parse_instant(until, "--until")
    with pipeline_extra():
        from pulque.pipeline.audit.stored import Scope
        from pulque.pipeline.lake.table import MESSAGES, Table
        from pulque.pipeline.report.queries import report as compute

        # Before Spark is started for nothing: are matplotlib, Jinja and the archive there?
        if page is not None:
            import_module("pulque.pipeline.report.html_page")
        Table(lake, MESSAGES).open()
        spark = start_spark(runs_on, is_verbose=verbose)
        found = compute(spark, lake, Scope(subject, group), since=begin, until=end)
        if page is not None:
            _write_page(found, page)
    if output is Output.JSON:
        _print_json(found)
    else:
        _print_tables(found)
    if found.is_empty:
        raise typer.Exit(ExitCode.NOTHING)


def _write_page(found: "Report", path: Path) -> None:
    from pulque.pipeline.report.html_page import page

    try:
        path.write_text(page(found, datetime.now(UTC)), encoding="utf-8")
    except OSError as error:
        raise StorageError(f"{path}: {error.strerror or error}") from error


def _print_json(found: "Report") -> None:
    for name, kind in _LISTS.items():
        for each in getattr(found, name):
            values = {key: _plain(value) for key, value in asdict(each).items()}
            print_json({"kind": kind, **values})
    sums = {"messages": found.messages, "size": found.size, "settled": found.settled}
    print_json({"kind": "result", **sums, "about": found.about, "notes": list(found.notes)})


def _plain(value: Any) -> Any:
    if isinstance(value, datetime):
        return instant(round(value.timestamp() * 1000))
    return value.isoformat() if isinstance(value, date) else value


def _print_tables(found: "Report") -> None:
    from pulque.pipeline.report.tables import tables

    if found.is_empty:
        print_line(f"nothing was stored and nothing settled: {found.about}")
    for table in tables(found):
        if not table.rows:
            continue
        rows = table.rows[-_LAST_ROWS:]
        more = (
            f" (the last {len(rows)} of {len(table.rows)})" if len(rows) < len(table.rows) else ""
        )
        print_line(f"{table.title}{more}")
        print_table(table.columns, rows)
        print_line("")
    for note in found.notes:
        print_warning(f"note: {note}")
