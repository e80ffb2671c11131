"""A skipped test fails, unless the machine cannot run it and the reason is listed here.

A run that skips what it should prove is green and says nothing. What tests need is installed by
``make test`` (``requirements/dev.txt``, ``tools/programs.py``); what is left are rights that root
of a container may lack. Allowed skips are named at the end of the run.
"""

import re
from collections import Counter
from collections.abc import Generator

import pytest

__all__ = ["ALLOWED"]

ALLOWED = {
    r"only root |network namespaces need root": "only root has these rights",
    r"(?:network namespaces|strace) do(?:es)? not work here: ": "a container may forbid them",
    r"a small disk cannot be mounted here: ": "a container may forbid mounts",
    r"::1 cannot be bound here": "a machine may have no IPv6",
}
"""Patterns of the reasons that a test may give, and why each is allowed."""


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_makereport() -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Fail a test that was skipped, where it ran: with xdist, in the worker."""
    report = yield
    _refuse(report)
    return report


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_make_collect_report() -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    """Fail a module that skipped itself."""
    report = yield
    _refuse(report)
    return report


def _refuse(report: pytest.TestReport | pytest.CollectReport) -> None:
    if not report.skipped or hasattr(report, "wasxfail"):
        return
    reason = _reason(report)
    if not any(re.match(pattern, reason) for pattern in ALLOWED):
        report.outcome = "failed"
        report.longrepr = (
            f"{report.nodeid} was skipped: {reason}. Only the reasons in tests/skips.py are "
            "allowed: install what is missing, or add the reason there."
        )


def _reason(report: pytest.TestReport | pytest.CollectReport) -> str:
    """Return why a test was skipped, from the place and text that pytest keeps of it."""
    *_, text = report.longrepr if isinstance(report.longrepr, tuple) else (str(report.longrepr),)
    return text.removeprefix("Skipped: ")


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Name what was skipped."""
    found = Counter(_reason(each) for each in terminalreporter.getreports("skipped"))
    for reason, count in sorted(found.items()):
        terminalreporter.write_line(f"{count} skipped, as tests/skips.py allows: {reason}")
