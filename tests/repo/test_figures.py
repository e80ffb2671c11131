"""Figures that the README shows come from a run that is kept."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_what_waiting_for_the_disk_costs_is_measured_and_said() -> None:
    newest = max((ROOT / "bench/results").glob("*.md")).read_text(encoding="utf-8")
    readme = (ROOT / "README.md").read_text(encoding="utf-8")

    rows = {
        acks: re.search(rf"Pulque, acks={acks} ((?:\| [\d,]+ ){{3}})\| (\d+) /", newest)
        for acks in ("memory", "disk")
    }
    waits = {acks: int(row.group(2)) for acks, row in rows.items() if row is not None}

    # Many at once share a sync; one at a time waits for its own.
    assert waits["memory"] < waits["disk"]
    for acks, row in rows.items():
        assert row is not None
        rate = int(row.group(1).split("|")[1].replace(",", ""))
        assert f"{round(rate, -3):,}" in readme
        assert f"{waits[acks]}" in readme
