"""Marks that tie tests to docs/acceptance.md, and a report of how those tests ended.

    @pytest.mark.accepts("000-33", "000-35")
    def test_nacks_survive_the_loss_of_every_broker(): ...

An id that the list does not have makes its module or class fail to collect. With
``--acceptance-report=FILE`` the end of the run writes ``{item id: {test: outcome}}``. Under xdist
the marks travel as user properties of the reports, so that the controller, which sees every
report, is the only one that writes.
"""

import json
from collections.abc import Generator
from pathlib import Path

import pytest

from tools.acceptance import LIST, read_items

__all__ = ["Outcomes"]

_PROPERTY = "accepts"
_WORST_LAST = ("passed", "skipped", "failed")


class Outcomes:
    """Gathers reports: up to three for a test (set-up, call, tear-down); the worst counts."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._outcomes: dict[str, dict[str, str]] = {}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        for name, id in report.user_properties:
            if name == _PROPERTY:
                self.record(str(id), report.nodeid, report.outcome)

    def record(self, id: str, test: str, outcome: str) -> None:
        tests = self._outcomes.setdefault(id, {})
        tests[test] = max(tests.get(test, outcome), outcome, key=_WORST_LAST.index)

    def pytest_sessionfinish(self) -> None:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._path.write_text(
            json.dumps(self._outcomes, indent=1, sort_keys=True), encoding="utf-8"
        )


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--acceptance-report",
        metavar="FILE",
        type=Path,
        help="write which acceptance items were proved by which test",
    )


def pytest_configure(config: pytest.Config) -> None:
    path: Path | None = config.getoption("--acceptance-report")
    is_worker = hasattr(config, "workerinput")
    if path is not None and not is_worker:
        report = config.invocation_params.dir / path
        config.pluginmanager.register(Outcomes(report))


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(
    collector: pytest.Collector,
) -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    """Refuse unknown ids where they stand; note the known ones on their tests."""
    report = yield
    items = [item for item in report.result or () if isinstance(item, pytest.Item)]
    marks = [(item, _accepted(item)) for item in items]
    if unknown := sorted({id for _, ids in marks for id in ids} - _known_ids(collector.config)):
        report.outcome = "failed"
        report.result = []
        report.longrepr = (
            f"{collector.nodeid} accepts what is not in {LIST.name}: {', '.join(unknown)}"
        )
        return report
    for item, ids in marks:
        item.user_properties.extend((_PROPERTY, id) for id in ids)
    return report


def _accepted(item: pytest.Item) -> list[str]:
    return [id for mark in item.iter_markers("accepts") for id in mark.args]


_IDS = pytest.StashKey[frozenset[str]]()


def _known_ids(config: pytest.Config) -> frozenset[str]:
    if _IDS not in config.stash:
        config.stash[_IDS] = frozenset(
            item.id for item in read_items(LIST.read_text(encoding="utf-8"))
        )
    return config.stash[_IDS]
