"""`make test` runs each test once: a red test is red."""

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
"""
GREEN = """
import pytest

@pytest.mark.accepts("000-01")
def test_that_passes(): pass
"""


@pytest.mark.slow
@pytest.mark.parametrize(("source", "expected"), [(ONCE, "failed"), (GREEN, "passed")])
def test_a_failure_counts_even_if_it_comes_once(
    tmp_path: Path, source: str, expected: str
) -> None:
    for each in ("tools", "docs"):
        shutil.copytree(suite.ROOT / each, tmp_path / each)
    (tmp_path / "conftest.py").write_text('pytest_plugins = ["tests.conftest"]\n')
    (tmp_path / "pytest.ini").write_text(
        f"[pytest]\npythonpath = {suite.ROOT}\nmarkers =\n    accepts\n    long\n    random\n"
    )
    (tmp_path / "test_sample.py").write_text(source)

    ended = subprocess.run(
        [sys.executable, "tools/suite.py"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )

    assert ended.returncode == (expected == "failed"), ended.stdout
    report = json.loads((tmp_path / ".acceptance.json").read_text())
    assert set(report["000-01"].values()) == {expected}
