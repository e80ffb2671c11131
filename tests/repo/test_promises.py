"""Every promise of docs/guarantees.md stands beside tests that exist."""

from pathlib import Path

import pytest


@pytest.mark.accepts("003-62")
def test_every_promise_names_a_test_that_exists() -> None:
    root = Path(__file__).parents[2]
    page = (root / "docs/guarantees.md").read_text(encoding="utf-8")
    rows = [line for line in page.splitlines() if line[:3].strip("| ").isdigit()]
    shown = [span for row in rows for span in row.split("|")[4].split("`")[1::2]]

    assert len(rows) >= 10
    assert all(row.split("|")[4].count("`") >= 2 for row in rows)
    assert [path for path in shown if not list(root.glob(f"{path.rstrip('/')}*"))] == []
    assert (root / "docs/journey.md").exists()
