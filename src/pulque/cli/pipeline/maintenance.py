"""``pulque pipeline compact`` and ``expire``: keep a lake in shape."""

from dataclasses import asdict
from datetime import UTC, datetime, timedelta
from typing import Annotated

import typer

from pulque.cli.common.durations import parse_span_with_unit
from pulque.cli.common.options import OutputOption
from pulque.cli.common.output import Output, print_json, print_line
from pulque.cli.pipeline.options import LakeOption, pipeline_extra
from pulque.errors import UsageError

__all__ = ["compact", "expire"]

_MIB = 1024 * 1024

UnusedOption = Annotated[
    timedelta,
    typer.Option(
        "--unused-for",
        parser=parse_span_with_unit,
        metavar="TIME",
        show_default="7d",
        help="Remove files that the table does not name for so long; whoever reads an older "
        "state of the table, or archives, needs them.",
    ),
]


def compact(
    *,
    lake: LakeOption,
    file_size: Annotated[
        int, typer.Option("--file-size", min=1, metavar="MIB", help="How large files become.")
    ] = 256,
    unused_for: UnusedOption = timedelta(days=7),
    output: OutputOption = Output.TABLE,
) -> None:
    """Put small files together, and remove those that nobody needs any more."""
    with pipeline_extra():
        from pulque.pipeline.lake import maintenance as upkeep

        done = upkeep.compact(lake, file_bytes=file_size * _MIB)
        removed = upkeep.sweep(lake, unused_for)
    if output is Output.JSON:
        print_json({**asdict(done), "removed": removed})
    else:
        print_line(
            f"{done.files_before} files became {done.files_after}, with {done.rows} rows; "
            f"{removed} unused ones were removed"
        )


def expire(
    *,
    lake: LakeOption,
    older_than: Annotated[
        timedelta,
        typer.Option(
            "--older-than",
            parser=parse_span_with_unit,
            metavar="TIME",
            help="What was stored before then, such as 365d.",
        ),
    ],
    unused_for: UnusedOption = timedelta(days=7),
    output: OutputOption = Output.TABLE,
) -> None:
    """Let go of old messages, by whole days, and of the copies of segments that held them."""
    if older_than < timedelta(days=1):
        raise UsageError("--older-than must be a day or more, as days go whole")
    with pipeline_extra():
        from pulque.pipeline.lake import maintenance as upkeep

        before = (datetime.now(UTC) - older_than).date()
        done = upkeep.expire(lake, before)
        removed = upkeep.sweep(lake, unused_for)
    if output is Output.JSON:
        print_json({**asdict(done), "removed": removed})
    else:
        print_line(
            f"{done.rows} rows in {done.files} files and {done.segments} segments from before "
            f"{before} went; {removed} unused files were removed"
        )
