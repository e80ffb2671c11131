"""Measure speed and size beside other queues and the machine's limits.

Everything runs on loopback and in .bench; servers are started and stopped by the bench. Results go
to bench/results, those of a quick or partial run to .bench/results.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import time
import traceback
from collections.abc import Sequence
from pathlib import Path

from bench import limits
from bench.machine import describe, touch_memory
from bench.options import Options, tell
from bench.outcome import Section
from bench.peers import work_directory
from bench.report import Report
from bench.system import BENCHMARKS

__all__ = ["main"]

_ROOT = Path(__file__).parents[1]
_LIMIT_S = 35 * 60.0


def main() -> int:
    """Measure what the command line asks for; 1 if something could not be measured."""
    names, options = _parse()
    # Whoever ends the bench ends its servers with it.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    machine = describe(_ROOT)
    tell(f"{machine}\nmemory")
    began_s = time.monotonic()
    tell(f"  touched in {touch_memory(2048 if options.is_quick else 6144):.1f} s")
    tell("what the machine can do")
    with work_directory() as directory:
        found = limits.measure(directory, quick=options.is_quick)
    sections = []
    for name in names:
        tell(name)
        sections.append(_measure(name, options, time.monotonic() - began_s))
    report = Report(machine, found, sections, time.monotonic() - began_s)
    for path in report.write(options):
        tell(f"written: {os.path.relpath(path)}")
    print(report.aims())
    return 1 if any(section.failure is not None for section in sections) else 0


def _parse() -> tuple[Sequence[str], Options]:
    parser = argparse.ArgumentParser(prog="python -m bench", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="short runs: shows that it works")
    parser.add_argument(
        "--only", nargs="+", choices=BENCHMARKS, metavar="NAME", help=f"of {', '.join(BENCHMARKS)}"
    )
    parser.add_argument("--results", type=Path, metavar="DIR", help="where to write the results")
    given = parser.parse_args()
    is_partial = given.quick or given.only is not None
    usual = _ROOT / ".bench" / "results" if is_partial else _ROOT / "bench" / "results"
    date = describe(_ROOT).date
    results = given.results or usual
    return given.only or list(BENCHMARKS), Options(given.quick, results, date)


def _measure(name: str, options: Options, passed_s: float) -> Section:
    """Run one benchmark; what goes wrong is in its section, and the others go on."""
    began_s = time.monotonic()
    if passed_s > _LIMIT_S:
        return Section(name, name, failure=f"the bench had taken {passed_s / 60:.0f} minutes")
    try:
        section = BENCHMARKS[name](options)
    except Exception as failure:  # noqa: BLE001 - whatever it is, the reader must hear of it
        traceback.print_exc()
        last_line = (str(failure).strip().splitlines() or [""])[-1]
        section = Section(name, name, failure=f"{type(failure).__name__}: {last_line}")
    section.seconds = time.monotonic() - began_s
    return section


if __name__ == "__main__":
    sys.exit(main())
