"""Count the items of docs/acceptance.md that a passing test proves.

    python -m tools.acceptance                     run every test, then count
    python -m tools.acceptance --report FILE       count from an earlier run
    python -m tools.acceptance --strict 000-04..000-06 003-01
                                                   fail unless these are proved (none named: all)

A test names what it proves with ``@pytest.mark.accepts("000-33")``. At the end of a run
``tests/acceptance_plugin.py`` writes a report, which is read here:
``{item id: {test: "passed" | "failed" | "skipped"}}``. An item is proved when at least one of its
tests passed and none failed.
"""

import argparse
import json
import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

from tools.suite import REPORT, ROOT, run_suite

__all__ = [
    "Item",
    "Report",
    "Standing",
    "UnknownItemError",
    "expand",
    "main",
    "read_items",
    "standing",
    "summary",
]

LIST = ROOT / "docs" / "acceptance.md"

Report = Mapping[str, Mapping[str, str]]
"""For each item id, its tests and how each ended."""

_ITEM = re.compile(r"^- (?P<id>\d{3}-X?\d+) \[(?P<kind>[^\]]+)\] (?P<text>.+)$", re.MULTILINE)
_DOCUMENT = re.compile(r"^## (?P<id>\d{3}): (?P<title>.+)$", re.MULTILINE)


class UnknownItemError(Exception):
    """An id that the list does not have."""

    def __init__(self, id: str) -> None:
        super().__init__(f"{id} is not an item of {LIST.relative_to(ROOT)}")


class Standing(Enum):
    """How far an item is proved."""

    PROVED = "proved"
    FAILING = "failing"
    OPEN = "open"


@dataclass(frozen=True, slots=True)
class Item:
    """One line of the list."""

    id: str
    kind: str
    text: str

    @property
    def document(self) -> str:
        return self.id.partition("-")[0]

    @property
    def is_optional(self) -> bool:
        return "X" in self.id


def read_items(text: str) -> list[Item]:
    """Read the items from the list, in order; an id that stands twice is an error."""
    items = [Item(found["id"], found["kind"], found["text"]) for found in _ITEM.finditer(text)]
    ids = [item.id for item in items]
    if twice := sorted({id for id in ids if ids.count(id) > 1}):
        raise ValueError(f"items that stand twice: {', '.join(twice)}")
    return items


def read_documents(text: str) -> dict[str, str]:
    return {found["id"]: found["title"] for found in _DOCUMENT.finditer(text)}


def expand(ids: Iterable[str], known: Sequence[str]) -> list[str]:
    """Turn ``000-04..000-06`` into the ids from one to the other, both included."""
    expanded: list[str] = []
    for id in ids:
        first, _, last = id.partition("..")
        for end in (first, last or first):
            if end not in known:
                raise UnknownItemError(end)
        expanded += known[known.index(first) : known.index(last or first) + 1]
    return expanded


def standing(id: str, report: Report) -> Standing:
    outcomes = set(report.get(id, {}).values())
    if "failed" in outcomes:
        return Standing.FAILING
    return Standing.PROVED if "passed" in outcomes else Standing.OPEN


def summary(items: Sequence[Item], titles: Mapping[str, str], report: Report) -> str:
    """Say what is proved, what fails and what is open."""
    lines: list[str] = []
    for document, title in titles.items():
        own = [item for item in items if item.document == document]
        proved = [item for item in own if standing(item.id, report) is Standing.PROVED]
        lines.append(f"{document}  {len(proved):3} of {len(own):3}  {title}")
    proved = [item for item in items if standing(item.id, report) is Standing.PROVED]
    lines.append(f"all  {len(proved):3} of {len(items):3}")
    lines += _failing(items, report)
    lines += _open(items, titles, report)
    return "\n".join(lines)


def _failing(items: Sequence[Item], report: Report) -> list[str]:
    failing = [item for item in items if standing(item.id, report) is Standing.FAILING]
    lines = ["", "With a failing test:"] if failing else []
    for item in failing:
        lines.append(f"  {item.id}  {item.text}")
        failed = [test for test, outcome in report[item.id].items() if outcome == "failed"]
        lines += [f"    {test}" for test in failed]
    return lines


def _open(items: Sequence[Item], titles: Mapping[str, str], report: Report) -> list[str]:
    lines: list[str] = []
    for document in titles:
        own = [item for item in items if item.document == document]
        open_items = [item for item in own if standing(item.id, report) is Standing.OPEN]
        if open_items:
            lines += ["", f"Without a passing test in {document}:"]
        lines += [f"  {item.id} [{item.kind}] {item.text}" for item in open_items]
    return lines


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m tools.acceptance",
        description="Count the acceptance items that tests prove.",
    )
    parser.add_argument("--report", type=Path, help="count from this file, run no test")
    parser.add_argument(
        "--strict",
        nargs="*",
        metavar="ID",
        help="fail unless these are proved; FIRST..LAST is a range",
    )
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the count; return 0 if nothing failed and everything under ``--strict`` is proved."""
    options = _parse(arguments)
    text = LIST.read_text(encoding="utf-8")
    items = read_items(text)
    required = (
        [item.id for item in items if not item.is_optional]
        if options.strict == []
        else options.strict
    )
    try:
        wanted = expand(required or (), [item.id for item in items])
    except UnknownItemError as error:
        print(error, file=sys.stderr)
        return 2

    exit_code = 0 if options.report else run_suite()
    path = options.report or REPORT
    if not path.exists():
        print(f"there is no report at {path}: `make test` writes one", file=sys.stderr)
        return exit_code or 2
    report: Report = json.loads(path.read_text(encoding="utf-8"))
    print(summary(items, read_documents(text), report))

    missing = [id for id in wanted if standing(id, report) is not Standing.PROVED]
    if missing:
        print(f"\nRequired and not proved: {', '.join(missing)}")
    failing = any(standing(item.id, report) is Standing.FAILING for item in items)
    return 1 if missing or failing else exit_code


if __name__ == "__main__":
    sys.exit(main())
