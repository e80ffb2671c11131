"""What commands print: lines for people, JSON for machines, bytes as they are.

Results go to stdout, everything else to stderr. Text that came from outside is escaped, so that
no terminal acts upon it; JSON is valid whatever the locale.
"""

import json
import os
import sys
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from enum import StrEnum

import typer

from pulque.cli.common.exit_codes import ExitCode
from pulque.settings.foreign import escaped

__all__ = [
    "Output",
    "flush",
    "forget_stdout",
    "instant",
    "json_text",
    "nothing_there",
    "print_broker_table",
    "print_bytes",
    "print_json",
    "print_line",
    "print_ready",
    "print_result",
    "print_rows",
    "print_table",
    "print_warning",
    "rows_of",
]


class Output(StrEnum):
    """How a result is printed."""

    TABLE = "table"
    JSON = "json"


def print_line(text: str) -> None:
    """Print one line, escaped."""
    print(escaped(text))


def print_ready(url: str) -> None:
    """Say that a server serves now."""
    try:
        print(f"ready {url}")
        flush()
    except OSError:
        # Whoever started us does not listen; clients still may come.
        forget_stdout()


def print_json(value: object) -> None:
    """Print one JSON value in one line."""
    print(json_text(value, sys.stdout.encoding))


def print_bytes(data: bytes) -> None:
    """Print bytes as they are."""
    sys.stdout.flush()
    sys.stdout.buffer.write(data)


def print_table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    """Print rows below headings: folded to fit a terminal, one line each for everybody else."""
    cells = [[escaped(cell) for cell in row] for row in rows]
    if sys.stdout.isatty():
        _print_folded(columns, cells)
    else:
        _print_plain([list(columns), *cells])


def print_rows(
    output: Output,
    rows: Sequence[object],
    columns: Sequence[str],
    lines: Iterable[Sequence[str]],
    *,
    nothing: str,
) -> None:
    """Print a list: JSON values, or lines below headings.

    Raises:
        Exit: There is nothing, which is said on stderr.
    """
    if not rows:
        raise nothing_there(nothing)
    if output is Output.JSON:
        for row in rows:
            print_json(row)
    else:
        print_table(columns, lines)


def print_result(output: Output, found: object, text: str) -> None:
    """Print what came of a command: a JSON value, or a line."""
    if output is Output.JSON:
        print_json(found)
    else:
        print_line(text)


def print_broker_table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print rows that begin with their broker group; a lone broker's is left out."""
    if any(row[0] for row in rows):
        print_table(("broker group", *columns), rows)
    else:
        print_table(columns, [row[1:] for row in rows])


def _print_folded(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    # Slow to import, and most commands print no table.
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(box=SIMPLE_HEAD, pad_edge=False, show_edge=False)
    for column in columns:
        table.add_column(column, overflow="fold")
    for row in rows:
        table.add_row(*map(Text, row))
    Console(highlight=False).print(table)


def _print_plain(rows: Sequence[Sequence[str]]) -> None:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        padded = (cell.ljust(width) for cell, width in zip(row, widths, strict=True))
        print("  ".join(padded).rstrip())


def print_warning(text: str) -> None:
    """Tell something on stderr that is no error."""
    print(escaped(text), file=sys.stderr)


def nothing_there(text: str) -> typer.Exit:
    """Say on stderr that there is nothing, and return what ends the command with its code."""
    print_warning(text)
    return typer.Exit(ExitCode.NOTHING)


def flush() -> None:
    """Make sure that whoever reads stdout has it."""
    sys.stdout.flush()


def forget_stdout() -> None:
    """Take note that nobody reads stdout; what is left of it has nowhere to go."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, sys.stdout.fileno())
    os.close(nowhere)


def json_text(value: object, encoding: str | None) -> str:
    """Write a value as JSON in one line that any terminal can show and none acts upon."""
    text = json.dumps(value, ensure_ascii=False, separators=(", ", ": "))
    if text.isascii() and text.isprintable():
        return text
    return "".join(c if _is_safe(c, encoding) else json.dumps(c)[1:-1] for c in text)


def _is_safe(character: str, encoding: str | None) -> bool:
    if not character.isprintable():
        return False
    try:
        character.encode(encoding or "ascii")
    except UnicodeEncodeError:
        return False
    return True


def instant(at_ms: int) -> str:
    """Write an instant in ISO 8601, UTC, with milliseconds."""
    seconds, milliseconds = divmod(at_ms, 1000)
    try:
        date = datetime.fromtimestamp(seconds, UTC)
    except (OverflowError, ValueError, OSError):
        return f"{at_ms}ms"
    return f"{date:%Y-%m-%dT%H:%M:%S}.{milliseconds:03d}Z"


def rows_of(values: Mapping[str, object], prefix: str = "") -> Iterable[tuple[str, str]]:
    """Flatten nested values into rows of name and text."""
    for name, value in values.items():
        if isinstance(value, Mapping) and value:
            yield from rows_of(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", _cell(value)


def _cell(value: object) -> str:
    if isinstance(value, str):
        return value
    return json.dumps(value, ensure_ascii=False)
