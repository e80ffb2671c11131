"""``pulque pipeline archive``: sealed segments into a lake."""

import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any

import typer

from pulque.cli.common.exit_codes import ExitCode
from pulque.cli.common.options import OutputOption, Url, open_client
from pulque.cli.common.output import Output, flush, print_json, print_line, print_warning
from pulque.cli.pipeline.options import (
    LakeOption,
    SparkOption,
    VerboseOption,
    pipeline_extra,
    start_spark,
)
from pulque.cli.servers.settings import DEFAULT_DIRECTORY
from pulque.errors import StorageError

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from pulque.pipeline.archive.fact_archiver import FactsArchiver
    from pulque.pipeline.archive.message_archiver import Archiver, Outcome, TaskRunner
from pulque.cli.common.durations import parse_seconds

__all__ = ["archive"]

_MIB = 1024 * 1024
_TIMEOUT_S = 30.0


def archive(
    context: typer.Context,
    *,
    lake: LakeOption,
    data: Annotated[
        str,
        typer.Option(
            "--data", metavar="DIR", help="The broker's data directory, or one of segments."
        ),
    ] = DEFAULT_DIRECTORY,
    broker: Annotated[
        str | None,
        typer.Option(
            "--broker",
            metavar="NAME",
            help="The broker's name in the lake; else the id of its data directory.",
        ),
    ] = None,
    seal: Annotated[
        bool,
        typer.Option("--seal", help="First let the broker seal what it writes to (see --url)."),
    ] = False,
    url: Url = None,
    keep_going: Annotated[
        bool,
        typer.Option("--keep-going", help="Go on behind a segment that cannot be archived."),
    ] = False,
    follow: Annotated[
        bool, typer.Option("--follow", help="Go on with what is sealed later, until stopped.")
    ] = False,
    interval: Annotated[
        float,
        typer.Option(
            "--interval", parser=parse_seconds, metavar="TIME", help="How often to look then."
        ),
    ] = 60.0,
    runs_on: SparkOption = "local[*]",
    verbose: VerboseOption = False,
    output: OutputOption = Output.TABLE,
) -> None:
    """Archive sealed segments: a copy of each, and its messages as rows of a Delta table.

    What consumers did, as far as the log of it is sealed, goes to a table of its own. Each message
    is in its table once, however often this is run, killed or run twice at a time. Exits with 1 if
    a segment could not be archived; it is named, and nothing of it is in the table.
    """
    if seal:
        with open_client(context, url, _TIMEOUT_S) as client:
            client.seal()
    with pipeline_extra(), _stopping(is_wanted=follow) as stop:
        from pulque.pipeline.archive.fact_archiver import FactsArchiver
        from pulque.pipeline.archive.message_archiver import Archiver, broker_of

        name = broker_of(data, broker)
        runner = _runner(partial(start_spark, runs_on, is_verbose=verbose))
        messages = Archiver(lake, data, name, runner, should_stop=stop.is_set)
        facts = FactsArchiver(lake, data, name, runner)
        has_failed = _run(data, messages, facts, output, keep_going=keep_going)
        while follow and not stop.wait(interval):
            try:
                is_worse = _run(data, messages, facts, output, keep_going=keep_going)
            except StorageError as error:
                # A segment that went meanwhile, a lake that was away: the next time may do.
                print_warning(f"warning: {error}")
                is_worse = True
            has_failed = has_failed or is_worse
    if has_failed:
        raise typer.Exit(ExitCode.FAILED)


def _runner(spark: Callable[[], "SparkSession"]) -> Any:
    def start() -> "TaskRunner":
        from pulque.pipeline.archive.message_archiver import run_on_spark

        return run_on_spark(spark())

    return start


def _run(
    data: str,
    messages: "Archiver",
    facts: "FactsArchiver",
    output: Output,
    *,
    keep_going: bool,
) -> bool:
    """Archive what waits, print it, and tell the broker; say whether anything failed."""
    from pulque.pipeline.archive.message_archiver import confirm

    has_failed = False
    with _progress(messages) as advance:
        for outcome in messages.run(keep_going=keep_going):
            advance()
            has_failed = _print(outcome, "messages", output) or has_failed
    for outcome in facts.run(keep_going=keep_going):
        has_failed = _print(outcome, "facts", output) or has_failed
    try:
        confirm(data, messages=messages.archived_up_to(), actions=facts.archived_up_to())
    except StorageError as error:
        print_warning(f"warning: the broker does not know what is archived: {error}")
    return has_failed


def _print(outcome: "Outcome", what: str, output: Output) -> bool:
    """Print what became of a segment; say whether it failed."""
    from pulque.pipeline.archive.message_archiver import SegmentFailure

    has_failed = isinstance(outcome, SegmentFailure)
    if output is Output.JSON:
        state = "failed" if has_failed else "archived"
        print_json({"state": state, "log": what, **asdict(outcome)})
    elif isinstance(outcome, SegmentFailure):
        kind = "damaged" if outcome.is_damage else "failed"
        print_line(f"segment {outcome.base}: {kind}: {outcome.reason}")
    else:
        note = ", by another run" if outcome.was_there else ""
        if outcome.quarantined:
            note += f"; {outcome.quarantined} more cannot be decoded: see table quarantine"
        print_line(
            f"segment {outcome.base}: {outcome.messages} {what}, {outcome.size / _MIB:.1f} MiB, "
            f"{outcome.files} files{note}"
        )
    flush()
    return has_failed


@contextmanager
def _progress(archiver: "Archiver") -> Iterator[Any]:
    """Show how far it is, if somebody is watching."""
    if not sys.stderr.isatty():
        yield lambda: None
        return
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeElapsedColumn,
    )

    columns = (TextColumn("archiving"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as shown:
        waiting, torn = archiver.waiting()
        task = shown.add_task("", total=len(waiting) + len(torn))
        yield lambda: shown.advance(task)


@contextmanager
def _stopping(*, is_wanted: bool) -> Iterator[threading.Event]:
    """Stop politely at SIGTERM and Ctrl-C, and ignore SIGHUP, if the command runs on and on."""
    stop = threading.Event()
    if not is_wanted:
        yield stop
        return

    def ask(*_: object) -> None:
        # In a thread: the one that is interrupted here may hold the lock of ``wait``.
        threading.Thread(target=stop.set).start()

    before = {each: signal.signal(each, ask) for each in (signal.SIGTERM, signal.SIGINT)}
    before[signal.SIGHUP] = signal.signal(signal.SIGHUP, lambda *_: None)
    try:
        yield stop
    finally:
        for each, handler in before.items():
            signal.signal(each, handler)
