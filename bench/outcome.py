"""What a benchmark hands over: figures, each beside its aim, and tables for people."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

__all__ = ["Aim", "BenchFailedError", "Section", "Table", "as_table"]


class BenchFailedError(Exception):
    """What was measured is not what was to be measured; the text says why."""


@dataclass(frozen=True, slots=True)
class Aim:
    """One figure beside what it should be.

    Attributes:
        what: The work, in a few words; a line of the table in the README.
        measured: What came out, in ``unit``.
        limit: What is aimed at.
        is_least: Whether the figure should be at least, or at most, the limit.
        unit: Written after the figures.
        detail: The figures behind a ratio.
    """

    what: str
    measured: float
    limit: float
    is_least: bool
    unit: str
    detail: str = ""

    @property
    def is_reached(self) -> bool:
        """Whether the figure is as aimed at."""
        return self.measured >= self.limit if self.is_least else self.measured <= self.limit

    @property
    def verdict(self) -> str:
        """One word for the table."""
        return "PASS" if self.is_reached else "short"

    def cells(self) -> list[str]:
        """What was measured, what was aimed at, and the verdict, as text."""
        sign = "≥" if self.is_least else "≤"
        unit = self.unit if self.unit in {"×", ""} else f" {self.unit}"
        return [
            self.what,
            f"{_number(self.measured)}{unit}",
            f"{sign} {self.limit:g}{unit}",
            self.verdict,
            self.detail,
        ]

    def as_dict(self) -> dict[str, Any]:
        """For a result file."""
        return {**asdict(self), "verdict": self.verdict}


@dataclass(frozen=True, slots=True)
class Table:
    """Figures for people; the first column is text, the others are numbers."""

    title: str
    head: Sequence[str]
    rows: Sequence[Sequence[str]]


@dataclass(slots=True)
class Section:
    """What one benchmark found.

    Attributes:
        name: As given on the command line.
        title: What was measured, in a line.
        aims: The figures that have an aim.
        tables: The rest, for people.
        notes: How it was measured, and what a reader must know.
        figures: Everything, for programs.
        foreign_cores: The most CPU that others used during a run that counts.
        seconds: How long the benchmark took.
        failure: Why there are no figures, if there are none.
    """

    name: str
    title: str
    aims: list[Aim] = field(default_factory=list)
    tables: list[Table] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    figures: dict[str, Any] = field(default_factory=dict)
    foreign_cores: float = 0.0
    seconds: float = 0.0
    failure: str | None = None

    def saw(self, foreign_cores: float) -> None:
        """Take note of what others used during a run."""
        self.foreign_cores = max(self.foreign_cores, foreign_cores)

    def note(self, text: str) -> None:
        """Tell the reader how it was measured."""
        self.notes.append(text)

    def as_dict(self) -> dict[str, Any]:
        """For a result file."""
        return {
            "title": self.title,
            "aims": [aim.as_dict() for aim in self.aims],
            "notes": self.notes,
            "figures": self.figures,
            "foreign_cores": round(self.foreign_cores, 2),
            "seconds": round(self.seconds, 1),
            "failure": self.failure,
        }


def as_table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a Markdown table; all columns but the first are set to the right."""
    lines = [_line(head), "|---|" + "---:|" * (len(head) - 1)]
    return "\n".join([*lines, *map(_line, rows)])


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _number(value: float) -> str:
    if abs(value) >= 100:
        return f"{value:,.0f}"
    return f"{value:.1f}" if abs(value) >= 10 else f"{value:.2f}"
