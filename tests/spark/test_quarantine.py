"""Batches that nobody can decode: reads name them or go on, and the audit still adds up."""

from collections import Counter
from pathlib import Path

import pytest

import pulque
from pulque.testing.broker import InProcessBroker
from tests.malformed import lying, odd, send_batches, torn, with_part
from tests.robustness.brokers import wait_until

pytest.importorskip("pyspark")
from pyspark.errors import PySparkException
from pyspark.sql import SparkSession

from pulque.pipeline.archive.fact_archiver import FactsArchiver
from pulque.pipeline.archive.message_archiver import Archiver, run_here
from pulque.pipeline.audit.summary import audit

BAD = (torn("orders"), lying("orders"), odd("orders"), with_part("orders", key=b"\xff"))


def fill(broker: InProcessBroker, client: pulque.Client) -> None:
    client.send_many("orders", [b"1", b"2"])
    assert send_batches(broker.url, "orders", *BAD) == ["NONE"] * len(BAD)
    client.send("orders", b"3")


def test_a_read_names_a_bad_batch_or_goes_on_without_it(
    spark: SparkSession, tmp_path: Path
) -> None:
    data = tmp_path / "data"
    with InProcessBroker(data) as broker, pulque.connect(broker.url) as client:
        fill(broker, client)
        client.seal()
    reader = spark.read.format("pulque").option("path", str(data)).option("subscribe", "orders")
    reader = reader.option("includeHeaders", "true").option("failOnDataLoss", "false")
    found = [bytes(row.body) for row in reader.load().select("body", "key", "headers").collect()]
    with pytest.raises(PySparkException, match=r"the batch at orders/[25] cannot be decoded"):
        reader.option("failOnDataLoss", "true").load().select("body", "key", "headers").collect()

    assert found == [b"1", b"2", b"3"]


def test_the_audit_adds_up_with_batches_that_nobody_can_decode(
    spark: SparkSession, tmp_path: Path
) -> None:
    data, lake = tmp_path / "data", str(tmp_path / "lake")
    storage = {"archive": True}
    with InProcessBroker(data, storage=storage) as broker, pulque.connect(broker.url) as client:
        fill(broker, client)
        with client.consumer("orders", group="kitchen") as consumer:
            done = 0
            while done < 5:  # three of ours, and two of the batch with odd headers
                for message in consumer.pull(timeout=10):
                    message.ack()
                    done += 1
            consumer.settle()
            letters = client.dead("orders", "kitchen")
            wait_until(lambda: letters.count() == 5, within=20, what="dead letters")
        client.seal()
    for archiver in (Archiver, FactsArchiver):
        for outcome in archiver(lake, str(data), "tested", lambda: run_here).run():
            assert not hasattr(outcome, "reason"), outcome

    found = audit(spark, lake)

    assert found.is_exact, found.found
    counts: Counter[str] = Counter()
    for line in found.lines:
        counts.update({"stored": line.stored, "sent": line.sent or 0, **line.states})
    assert counts == {"stored": 14, "sent": 14, "settled": 5, "dead": 9}
    assert any(
        note.startswith("11 messages of 4 batches cannot be decoded") for note in found.notes
    )


def test_the_audit_adds_up_where_a_partition_begins_with_a_bad_batch(
    spark: SparkSession, tmp_path: Path
) -> None:
    data, lake = tmp_path / "data", tmp_path / "lake"
    with InProcessBroker(data) as broker, pulque.connect(broker.url) as client:
        assert send_batches(broker.url, "orders", torn("orders")) == ["NONE"]
        assert send_batches(broker.url, "spoilt", torn("spoilt")) == ["NONE"]
        client.send_many("orders", [b"1", b"2"])
        client.seal()
    list(Archiver(str(lake), str(data), "tested", lambda: run_here).run())

    found = audit(spark, str(lake))
    assert found.is_exact, found.found
    assert [(line.subject, line.sent, line.stored) for line in found.lines] == [
        ("orders", 5, 5),
        ("spoilt", 3, 3),
    ]

    for copy in (lake / "raw" / "tested").iterdir():
        copy.unlink()
    found = audit(spark, str(lake))
    assert found.is_exact, found.found
