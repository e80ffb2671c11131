"""The guide for Spark can be followed: its Python runs from top to bottom, as it stands there."""

import re
from pathlib import Path
from typing import Any

import pytest

import pulque
from pulque.testing.broker import InProcessBroker

pytest.importorskip("pyspark")
from pyspark.sql import SparkSession

GUIDE = Path(__file__).resolve().parents[2] / "docs" / "guide" / "spark.md"
ADDRESS = "pulque://127.0.0.1:7450"


def blocks(broker: InProcessBroker) -> list[str]:
    found = re.findall(r"```python\n(.*?)```", GUIDE.read_text(), re.DOTALL)
    return [each.replace(ADDRESS, broker.url) for each in found]


def finish(query: Any) -> None:
    query.processAllAvailable()
    query.stop()


def test_the_guide_runs_from_top_to_bottom(
    spark: SparkSession,
    broker: InProcessBroker,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    with pulque.connect(broker.url) as client:
        client.send("order.paid", b'{"order": 1, "cents": 350}', key="1")
        client.send("order.sent", b'{"order": 1}', key="1")
    names: dict[str, Any] = {}
    for block in blocks(broker):
        # Paths in it are below the directory that one is in; Spark has its own since it started.
        text = re.sub(r'"(paid|enriched)(\.\w+)?"', rf'"{tmp_path}/\1\2"', block)
        exec(text, names)  # noqa: S102
        if "query" in names:
            finish(names.pop("query"))

    assert names["spark"] is spark
    assert names["orders"].count() == 2
    assert names["paid"].count() == 1
    assert spark.read.parquet(str(tmp_path / "paid")).count() == 1
    with pulque.connect(broker.url) as client:
        counted = client.read("order.counted", max_messages=10)
        enriched = client.read("order.enriched", max_messages=10)
    assert {each.key for each in counted} == {"order.paid", "order.sent"}
    assert [each.body for each in enriched] == [b'paid: {"order": 1, "cents": 350}']
