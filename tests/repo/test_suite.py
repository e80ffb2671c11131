"""`make test` gives what failed a second try, and no more than that."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tools import suite

ONCE = """
import pytest
from pathlib import Path

@pytest.mark.xdist_group("a_group")
@pytest.mark.accepts("000-01")
def test_that_fails_once():
    seen = Path("seen")
    is_first = not seen.exists()
    seen.touch()
    assert not is_first

@pytest.mark.accepts("000-01")
def test_that_passes():
    with Path("passes").open("a") as file:
        file.write("!")
"""
ALWAYS = """
def test_that_fails(): assert False
"""


@pytest.mark.slow
@pytest.mark.parametrize(("source", "expected"), [(ONCE, 0), (ONCE + ALWAYS, 1)])
def test_a_failure_counts_if_it_comes_twice(tmp_path: Path, source: str, expected: int) -> None:
    for each in ("tools", "docs"):
        shutil.copytree(suite.ROOT / each, tmp_path / each)
    (tmp_path / "conftest.py").write_text('pytest_plugins = ["tests.conftest"]\n')
    (tmp_path / "pytest.ini").write_text(
        f"[pytest]\npythonpath = {suite.ROOT}\nmarkers =\n    accepts\n    long\n"
    )
    (tmp_path / "test_sample.py").write_text(source)

    ended = subprocess.run(
        [sys.executable, "tools/suite.py"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )

    assert ended.returncode == expected, ended.stdout
    assert ("These needed their second try" in ended.stdout) is (expected == 0)
    assert (tmp_path / "passes").read_text() == "!", "it was not run again"
    assert json.loads((tmp_path / ".acceptance.json").read_text()) == {
        "000-01": {
            "test_sample.py::test_that_fails_once": "passed",
            "test_sample.py::test_that_passes": "passed",
        }
    }
