"""Every promise of docs/guarantees.md stands beside tests that exist."""

import re
from pathlib import Path

import pytest


def has_tests(root: Path, shown: str) -> bool:
    """Return whether a folder, a file or the beginning of file names leads to tests."""
    found = [*root.glob(f"{shown.rstrip('/')}*"), *root.glob(f"{shown.rstrip('/')}/**/test_*.py")]
    return any(
        re.search(r"\bdef test_|TestCase\b", path.read_text(encoding="utf-8"))
        for path in found
        if path.is_file()
    )


@pytest.mark.accepts("003-62")
def test_every_promise_names_a_test_that_exists() -> None:
    root = Path(__file__).parents[2]
    page = (root / "docs/guarantees.md").read_text(encoding="utf-8")
    rows = [line for line in page.splitlines() if line[:3].strip("| ").isdigit()]
    shown = [span for row in rows for span in row.split("|")[4].split("`")[1::2]]

    assert len(rows) >= 10
    assert all(row.split("|")[4].count("`") >= 2 for row in rows)
    assert [path for path in shown if not has_tests(root, path)] == []
    assert (root / "docs/journey.md").exists()
