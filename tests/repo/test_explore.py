"""`make explore` tries new seeds, and keeps what fails."""

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tools import suite

GREEN = """
def test_that_draws(seed): assert seed >= 0

def test_that_is_not_random(): assert False, "this one must not run"
"""
RED = """
import hypothesis.strategies as st
from hypothesis import given

@given(st.integers())
def test_that_finds(number): assert number < 17
"""


def explore(tmp_path: Path, *sources: str) -> "subprocess.CompletedProcess[str]":
    for each in ("tools", "docs"):
        shutil.copytree(suite.ROOT / each, tmp_path / each)
    (tmp_path / "conftest.py").write_text('pytest_plugins = ["tests.conftest"]\n')
    markers = "".join(f"    {each}\n" for each in ("accepts", "long", "random", "server", "spark"))
    (tmp_path / "pytest.ini").write_text(
        f"[pytest]\npythonpath = {suite.ROOT}\nmarkers =\n{markers}"
    )
    for number, source in enumerate(sources):
        (tmp_path / f"test_sample_{number}.py").write_text(source)
    return subprocess.run(
        [sys.executable, "tools/explore.py", "--minutes", "0.01", "--workers", "1"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )


@pytest.mark.slow
def test_what_fails_is_kept_with_its_seed(tmp_path: Path) -> None:
    ended = explore(tmp_path, GREEN, RED)

    assert ended.returncode == 1, ended.stdout + ended.stderr
    assert "passed in" in ended.stdout
    seed = re.search(r"FAILED: PULQUE_TEST_SEED=(\d+) pytest test_sample_1.py", ended.stdout)
    assert seed, ended.stdout
    kept = tmp_path / ".reports" / "explore" / f"test_sample_1.py-{seed[1]}.txt"
    assert "assert 17 < 17" in kept.read_text()
    assert "@reproduce_failure" in kept.read_text()


@pytest.mark.slow
def test_it_succeeds_if_nothing_fails(tmp_path: Path) -> None:
    ended = explore(tmp_path, GREEN)

    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert not (tmp_path / ".reports").exists()
