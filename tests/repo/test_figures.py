"""Figures that the README shows come from a run that is kept."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.accepts("004-52")
def test_what_waiting_for_the_disk_costs_is_measured_and_said() -> None:
    newest = max((ROOT / "bench/results").glob("*.md")).read_text(encoding="utf-8")
    readme = (ROOT / "README.md").read_text(encoding="utf-8")

    rates = {
        acks: int(re.search(rf"acks={acks} \| ([\d,]+)", newest).group(1).replace(",", ""))  # type: ignore[union-attr]
        for acks in ("memory", "disk")
    }

    assert all(rates.values())
    for rate in rates.values():
        assert f"{round(rate, -3):,}" in readme
