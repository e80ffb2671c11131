"""The acceptance list is whole, marks are checked, and the count tells the truth."""

import json
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.acceptance_plugin import Outcomes
from tests.repo.tree import ROOT
from tools.acceptance import (
    LIST,
    Item,
    Report,
    Standing,
    UnknownItemError,
    expand,
    main,
    read_items,
    standing,
    summary,
)

ITEMS = [Item("000-01", "T", "one"), Item("000-02", "T", "two"), Item("001-01", "D", "three")]
TITLES = {"000": "the rebuild", "001": "the storage"}
REPORT: Report = {
    "000-01": {"test_a": "passed", "test_b": "skipped"},
    "000-02": {"test_a": "passed", "test_c": "failed"},
}


def test_the_list_has_every_item_once_in_order() -> None:
    items = read_items(LIST.read_text(encoding="utf-8"))
    counts = {
        document: sum(item.document == document for item in items)
        for document in ["000", "001", "002", "003", "004"]
    }

    assert counts == {"000": 58, "001": 47, "002": 57, "003": 62, "004": 108}
    assert [item.id for item in items if item.is_optional] == ["004-X1"]


def test_no_line_that_looks_like_an_item_is_missed() -> None:
    text = LIST.read_text(encoding="utf-8")

    assert len(re.findall(r"^- ", text, re.MULTILINE)) == len(read_items(text))


def test_an_item_that_stands_twice_is_an_error() -> None:
    with pytest.raises(ValueError, match="000-01"):
        read_items("- 000-01 [T] one\n- 000-01 [T] again\n")


@pytest.mark.parametrize(
    ("outcomes", "expected"),
    [
        ({}, Standing.OPEN),
        ({"a": "skipped"}, Standing.OPEN),
        ({"a": "passed", "b": "skipped"}, Standing.PROVED),
        ({"a": "passed", "b": "failed"}, Standing.FAILING),
    ],
)
def test_an_item_is_proved_by_a_pass_and_no_failure(
    outcomes: dict[str, str], expected: Standing
) -> None:
    assert standing("000-01", {"000-01": outcomes}) is expected


def test_summary_counts_proved_and_lists_failing_and_open_items() -> None:
    assert summary(ITEMS, TITLES, REPORT).splitlines() == [
        "000    1 of   2  the rebuild",
        "001    0 of   1  the storage",
        "all    1 of   3",
        "",
        "With a failing test:",
        "  000-02  two",
        "    test_c",
        "",
        "Without a passing test in 001:",
        "  001-01 [D] three",
    ]


def test_ranges_include_both_ends() -> None:
    known = ["000-01", "000-02", "000-03"]

    assert expand(["000-01..000-02", "000-03"], known) == known


def test_an_unknown_end_of_a_range_is_refused() -> None:
    with pytest.raises(UnknownItemError, match="000-09"):
        expand(["000-01..000-09"], ["000-01"])


def test_strict_fails_for_what_is_not_proved(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    report = tmp_path / "report.json"
    report.write_text(json.dumps({"000-01": {"test_a": "passed"}}))

    assert main(["--report", str(report)]) == 0
    assert main(["--report", str(report), "--strict", "000-01"]) == 0
    assert main(["--report", str(report), "--strict", "000-01..000-02"]) == 1
    assert main(["--report", str(report), "--strict"]) == 1
    assert main(["--report", str(report), "--strict", "999-01"]) == 2
    assert main(["--report", str(tmp_path / "none.json")]) == 2
    assert "Required and not proved: 000-02" in capsys.readouterr().out


def test_a_failing_test_fails_the_count(tmp_path: Path) -> None:
    report = tmp_path / "report.json"
    report.write_text(json.dumps(REPORT))

    assert main(["--report", str(report)]) == 1


def test_the_worst_phase_of_a_test_counts(tmp_path: Path) -> None:
    outcomes = Outcomes(tmp_path / "report.json")
    for outcome in ("passed", "failed", "passed"):
        outcomes.record("000-01", "test_a", outcome)
    outcomes.pytest_sessionfinish()

    assert json.loads((tmp_path / "report.json").read_text()) == {"000-01": {"test_a": "failed"}}


SAMPLE = """
import pytest

pytestmark = pytest.mark.accepts("000-01")

@pytest.mark.accepts("000-02", "000-03")
def test_that_passes(): pass

class TestOfAClass:
    @pytest.mark.accepts("000-04")
    def test_that_fails(self): assert False

@pytest.mark.accepts("000-05")
def test_that_is_skipped(): pytest.skip("no")

@pytest.fixture
def broken():
    yield
    raise OSError

@pytest.mark.accepts("000-06")
def test_whose_end_fails(broken): pass
"""


@dataclass(frozen=True, slots=True)
class Run:
    """What one run of pytest left behind."""

    exit_code: int
    output: str
    report: dict[str, dict[str, str]]


def run_pytest(folder: Path, source: str, *options: str) -> Run:
    """Run a module under the plugin in a process of its own."""
    (folder / "conftest.py").write_text('pytest_plugins = ["tests.acceptance_plugin"]\n')
    (folder / "pytest.ini").write_text(f"[pytest]\npythonpath = {ROOT}\nmarkers = accepts\n")
    (folder / "test_sample.py").write_text(source)
    command = [sys.executable, "-m", "pytest", "--acceptance-report=report.json", *options]
    result = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    report = json.loads((folder / "report.json").read_text())
    return Run(result.returncode, result.stdout + result.stderr, report)


@pytest.mark.parametrize("options", [(), ("-n", "2")], ids=["alone", "xdist"])
def test_a_run_reports_every_marked_test(tmp_path: Path, options: tuple[str, ...]) -> None:
    run = run_pytest(tmp_path, SAMPLE, *options)

    assert {id: set(tests.values()) for id, tests in run.report.items()} == {
        "000-01": {"passed", "failed", "skipped"},
        "000-02": {"passed"},
        "000-03": {"passed"},
        "000-04": {"failed"},
        "000-05": {"skipped"},
        "000-06": {"failed"},
    }, run.output
    assert run.report["000-02"] == {"test_sample.py::test_that_passes": "passed"}


@pytest.mark.parametrize("options", [(), ("-n", "2")], ids=["alone", "xdist"])
def test_an_unknown_id_fails_the_run(tmp_path: Path, options: tuple[str, ...]) -> None:
    source = '@__import__("pytest").mark.accepts("000-01", "000-999")\ndef test_a(): pass\n'
    run = run_pytest(tmp_path, source, *options)

    assert "accepts what is not in acceptance.md: 000-999" in run.output
    assert run.exit_code != 0
    assert run.report == {}
