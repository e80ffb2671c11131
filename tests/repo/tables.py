"""Tables of a page, by the heading that they stand under."""

import re
from dataclasses import dataclass

__all__ = ["Table", "bare", "tables"]

_CODE = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)
_HEADING = re.compile(r"#+ +(.+)")


@dataclass(frozen=True, slots=True)
class Table:
    """One table: its heading, its columns, and rows by column."""

    heading: str
    columns: tuple[str, ...]
    rows: tuple[dict[str, str], ...]


def tables(page: str) -> list[Table]:
    """Read all tables outside of code."""
    found: list[Table] = []
    heading = ""
    lines: list[str] = []
    for line in [
        *re.sub(r"^```.*?^```$", "", page, flags=re.MULTILINE | re.DOTALL).splitlines(),
        "",
    ]:
        if line.startswith("|"):
            lines.append(line)
            continue
        if lines:
            found.append(_table(heading, lines))
            lines = []
        if match := _HEADING.fullmatch(line):
            heading = bare(match[1])
    return found


def bare(cell: str) -> str:
    """Return a cell without the marks of code style."""
    return cell.replace("`", "").strip()


def _table(heading: str, lines: list[str]) -> Table:
    columns, _, *rows = [
        tuple(cell.strip() for cell in line.strip().strip("|").split("|")) for line in lines
    ]
    return Table(heading, columns, tuple(dict(zip(columns, row, strict=True)) for row in rows))
