"""Write what was measured: a file for programs, a page for people, a table for the README."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import pulque
from bench.limits import Limits
from bench.machine import Machine
from bench.options import Options
from bench.outcome import Section, as_table

__all__ = ["Report"]

_PACKAGES = ("google-crc32c", "numpy", "uvloop")
_AIM_HEAD = ("work", "measured", "aim", "", "figures")


@dataclass(frozen=True, slots=True)
class Report:
    """Everything that one run found."""

    machine: Machine
    limits: Limits
    sections: Sequence[Section]
    seconds: float

    def write(self, options: Options) -> list[Path]:
        """Write both files; return their paths."""
        options.results.mkdir(parents=True, exist_ok=True)
        data = options.results / f"{options.date}.json"
        data.write_text(json.dumps(self._as_dict(options), indent=2, ensure_ascii=False) + "\n")
        page = options.results / f"{options.date}.md"
        page.write_text(self._as_page(options))
        return [data, page]

    def aims(self) -> str:
        """The table that goes into the README."""
        rows = []
        for section in self.sections:
            if section.failure is not None:
                rows.append([section.title, "–", "–", "not measured", section.failure])
            rows += [aim.cells() for aim in section.aims]
        return as_table(_AIM_HEAD, rows)

    def _as_dict(self, options: Options) -> dict[str, Any]:
        return {
            "machine": self.machine.as_dict(),
            "versions": _versions(),
            "is_quick": options.is_quick,
            "seconds": round(self.seconds),
            "limits": self.limits.as_dict(),
            "sections": {section.name: section.as_dict() for section in self.sections},
        }

    def _as_page(self, options: Options) -> str:
        kind = "A quick run, to see that it works. " if options.is_quick else ""
        versions = ", ".join(f"{name} {number}" for name, number in _versions().items())
        made = f"{kind}Made by `make bench` in {self.seconds / 60:.0f} minutes."
        trust = (
            "Ratios hold within one run. *Other load* is CPU that neither servers nor clients of "
            "the bench used while a run was measured, in cores: how far to trust it."
        )
        parts = [
            f"# Speed and size, {options.date}",
            f"{made} {self.machine}. {versions}.",
            trust,
            "## All aims",
            self.aims(),
            "## What the machine can do",
            _limits_table(self.limits),
        ]
        for section in self.sections:
            parts += _section(section)
        return "\n\n".join(parts) + "\n"


def _versions() -> dict[str, str]:
    found = {"pulque": pulque.__version__}
    for package in _PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = "none"
    return found


def _limits_table(limits: Limits) -> str:
    return as_table(
        ("", ""),
        [
            ["loopback TCP, 1 MiB at a time", f"{limits.loopback_bytes_per_s / 1e9:.2f} GB/s"],
            ["there and back over loopback, p50", f"{limits.ping_pong_p50_us:.0f} µs"],
            ["copying memory", f"{limits.memcpy_bytes_per_s / 1e9:.1f} GB/s"],
            [
                "append 4 KiB and fdatasync, p50 / p99",
                f"{limits.fdatasync_p50_us:,.0f} / {limits.fdatasync_p99_us:,.0f} µs",
            ],
            [
                "append 100 B and fdatasync, one after the other",
                f"{limits.one_sync_per_message_per_s:,.0f} /s",
            ],
        ],
    )


def _section(section: Section) -> Iterable[str]:
    yield f"## {section.name}: {section.title}"
    if section.failure is not None:
        yield f"Not measured: {section.failure}"
        return
    for table in section.tables:
        if table.title:
            yield f"{table.title}:"
        yield as_table(table.head, table.rows)
    yield from section.notes
    yield f"Other load: {section.foreign_cores:.1f} cores. Took {section.seconds:.0f} s."
