"""``spark.read`` and ``spark.readStream`` give what was sent: all of it, once, and no more."""

import json
from datetime import UTC, datetime
from pathlib import Path

import pytest

import pulque
from pulque.testing.broker import InProcessBroker

pytest.importorskip("pyspark")
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, SparkSession


def send(broker: InProcessBroker, subject: str, first: int, end: int) -> None:
    with pulque.connect(broker.url) as client, client.producer(max_batch=7) as producer:
        for number in range(first, end):
            tags = ["even"] if number % 2 == 0 else []
            producer.send(
                subject,
                str(number).encode(),
                key=f"key-{number}",
                tags=tags,
                headers={"number": str(number)} if number % 3 == 0 else None,
            )


def read(spark: SparkSession, broker: InProcessBroker, **options: str) -> DataFrame:
    return spark.read.format("pulque").options(url=broker.url, **options).load()


def bodies(frame: DataFrame) -> list[int]:
    return sorted(int(row.body) for row in frame.select("body").collect())


def test_a_batch_read_gives_all_that_was_sent(
    spark: SparkSession, broker: InProcessBroker
) -> None:
    send(broker, "orders", 0, 100)
    rows = read(spark, broker, subscribe="orders", includeHeaders="true").collect()

    assert [row.sequence for row in rows] == list(range(100))
    for number, row in enumerate(rows):
        assert (row.body, row.key) == (str(number).encode(), f"key-{number}")
        assert row.tags == (["even"] if number % 2 == 0 else None)
        assert row.headers == ({"number": str(number)} if number % 3 == 0 else None)
        assert (row.subject, row.partition, row.attempt, row.priority) == (
            "orders",
            "orders",
            1,
            4,
        )


def test_many_tasks_give_what_one_gives(spark: SparkSession, broker: InProcessBroker) -> None:
    send(broker, "orders", 0, 200)
    frame = read(spark, broker, subscribe="orders", minPartitions="7")

    assert frame.rdd.getNumPartitions() >= 7
    assert bodies(frame) == list(range(200))


def test_patterns_cover_subjects_by_prefix_and_by_expression(
    spark: SparkSession, broker: InProcessBroker
) -> None:
    for at, subject in enumerate(("order.paid", "order.sent", "refund")):
        send(broker, subject, 10 * at, 10 * at + 10)

    assert bodies(read(spark, broker, subscribe="order.*")) == list(range(20))
    assert bodies(read(spark, broker, subscribe="order.paid, refund")) == [
        *range(10),
        *range(20, 30),
    ]
    assert bodies(read(spark, broker, subscribePattern="order.(sent|lost)")) == list(range(10, 20))


def test_offsets_and_times_cut_on_both_sides(spark: SparkSession, broker: InProcessBroker) -> None:
    send(broker, "orders", 0, 50)
    broker.advance_time(60)
    middle_ms = broker.clock.now_ms()
    send(broker, "orders", 50, 100)

    offsets = {"startingOffsets": json.dumps({"orders": 10})}
    ending = {"endingOffsets": json.dumps({"orders": 20})}
    assert bodies(read(spark, broker, subscribe="orders", **offsets, **ending)) == list(
        range(10, 20)
    )
    at = str(middle_ms)
    assert bodies(read(spark, broker, subscribe="orders", startingTimestamp=at)) == list(
        range(50, 100)
    )
    assert bodies(read(spark, broker, subscribe="orders", endingTimestamp=at)) == list(range(50))


def test_nothing_stored_is_an_empty_table(spark: SparkSession, broker: InProcessBroker) -> None:
    assert read(spark, broker, subscribe="nothing", failOnDataLoss="false").count() == 0
    assert read(spark, broker, subscribe="no.such.*").count() == 0
    send(broker, "orders", 0, 5)
    assert read(spark, broker, subscribe="orders", startingOffsets="latest").count() == 0


def test_columns_can_be_chosen(spark: SparkSession, broker: InProcessBroker) -> None:
    send(broker, "orders", 0, 10)

    assert read(spark, broker, subscribe="orders", columns="sequence,key").columns == [
        "sequence",
        "key",
    ]
    declared = spark.read.format("pulque").schema("body binary, stored_at timestamp")
    rows = declared.options(url=broker.url, subscribe="orders").load().collect()
    assert [row.body for row in rows] == [str(number).encode() for number in range(10)]
    assert all(row.stored_at.year >= 2026 for row in rows)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({}, "exactly one of subscribe"),
        ({"subscribe": "a", "assign": "a"}, "found subscribe and assign"),
        ({"subscribe": "../x"}, "is not allowed"),
        ({"subscribePattern": "("}, "not a regular expression"),
        ({"subscribe": "a", "startingOffsets": "yesterday"}, "'earliest', 'latest', or JSON"),
        ({"subscribe": "a", "startingTimestamp": "-5"}, "at least 0"),
        ({"subscribe": "a", "minPartitions": "zero"}, "at least 1"),
        ({"subscribe": "a", "columns": "body,bodies"}, "no column 'bodies'"),
        ({"subscribe": "a", "subscrib": "b"}, "no option 'subscrib'"),
        ({"subscribe": "a", "failOnDataLoss": "maybe"}, "'true' and 'false'"),
    ],
)
def test_what_cannot_be_is_refused_in_words(
    spark: SparkSession, broker: InProcessBroker, options: dict[str, str], words: str
) -> None:
    with pytest.raises(PySparkException, match=words.replace("(", r"\(")):
        read(spark, broker, **options).count()


def test_offsets_that_are_gone_fail_or_are_passed_over(
    spark: SparkSession, broker: InProcessBroker
) -> None:
    send(broker, "orders", 0, 10)
    beyond = {"endingOffsets": json.dumps({"orders": 99})}

    with pytest.raises(PySparkException, match="failOnDataLoss=false"):
        read(spark, broker, subscribe="orders", **beyond).count()
    frame = read(spark, broker, subscribe="orders", failOnDataLoss="false", **beyond)
    assert bodies(frame) == list(range(10))


def test_files_give_what_the_broker_gave(spark: SparkSession, tmp_path: Path) -> None:
    with InProcessBroker(tmp_path, storage={"segment_size": "64KiB"}) as broker:
        send(broker, "orders", 0, 3000)
        served = read(spark, broker, subscribe="orders").collect()
    stored = spark.read.format("pulque").options(path=str(tmp_path), subscribe="orders").load()

    assert sorted(stored.collect(), key=lambda row: row.sequence) == served
    assert len(served) == 3000


def stream(
    spark: SparkSession, broker: InProcessBroker, place: Path, **options: str
) -> list[tuple[int, int]]:
    """Run a query over what there is now; return its batches as (id, rows)."""
    source = spark.readStream.format("pulque").options(
        url=broker.url, startingOffsets="earliest", **options
    )
    query = (
        source.load()
        .selectExpr("cast(body as string) body", "sequence", "partition")
        .writeStream.format("parquet")
        .option("path", str(place / "out"))
        .option("checkpointLocation", str(place / "checkpoint"))
        .trigger(availableNow=True)
        .start()
    )
    assert query.awaitTermination(120)
    return [(each["batchId"], each["numInputRows"]) for each in query.recentProgress]


def streamed(spark: SparkSession, place: Path) -> list[int]:
    return sorted(int(row.body) for row in spark.read.parquet(str(place / "out")).collect())


def test_a_stream_goes_on_where_it_stopped_and_keeps_its_limit(
    spark: SparkSession, broker: InProcessBroker, tmp_path: Path
) -> None:
    send(broker, "order.paid", 0, 100)
    limit = {"subscribe": "order.*", "maxOffsetsPerTrigger": "40"}
    first = stream(spark, broker, tmp_path, **limit)

    assert [rows for _, rows in first] == [40, 40, 20]
    send(broker, "order.paid", 100, 120)
    send(broker, "order.later", 120, 130)  # a subject that came later, from its beginning
    stream(spark, broker, tmp_path, **limit)
    assert streamed(spark, tmp_path) == list(range(130))
    nothing_new = stream(spark, broker, tmp_path, **limit)
    assert sum(rows for _, rows in nothing_new) == 0
    assert streamed(spark, tmp_path) == list(range(130))


def test_a_stream_survives_a_restart_of_the_broker(
    spark: SparkSession, broker: InProcessBroker, tmp_path: Path
) -> None:
    send(broker, "orders", 0, 30)
    stream(spark, broker, tmp_path, subscribe="orders")
    broker.kill()
    broker.restart()
    send(broker, "orders", 30, 60)
    stream(spark, broker, tmp_path, subscribe="orders")

    assert streamed(spark, tmp_path) == list(range(60))


def test_instants_are_the_brokers_own(spark: SparkSession, broker: InProcessBroker) -> None:
    send(broker, "orders", 0, 1)
    (row,) = read(spark, broker, subscribe="orders").collect()
    stored_at_ms = broker.clock.now_ms()

    # Spark's rows hold naive instants in the zone of this machine's Python.
    assert row.stored_at.astimezone(UTC) == datetime.fromtimestamp(stored_at_ms / 1000, UTC)


def test_one_table_serves_queries_with_different_filters(
    spark: SparkSession, broker: InProcessBroker
) -> None:
    for at, subject in enumerate(("order.paid", "order.sent", "refund")):
        send(broker, subject, 100 * at, 100 * at + 10)
    table = read(spark, broker, subscribePattern=".*")
    paid, refunds = table.where("subject = 'order.paid'"), table.where("subject = 'refund'")

    # A source that takes filters over from Spark gets this wrong; see the decision about it.
    assert bodies(paid) == list(range(10))
    assert len(bodies(table)) == 30
    assert bodies(paid.union(refunds)) == [*range(10), *range(200, 210)]


@pytest.mark.parametrize("where", ["live", "files"])
def test_options_leave_out_what_a_filter_would_and_read_less(
    spark: SparkSession, tmp_path: Path, where: str
) -> None:
    with InProcessBroker(tmp_path, storage={"segment_size": "64KiB"}) as broker:
        for at, subject in enumerate(("order.paid", "order.sent", "refund")):
            send(broker, subject, 1000 * at, 1000 * at + 500)
        broker.advance_time(60)
        middle_ms = broker.clock.now_ms()
        for at, subject in enumerate(("order.paid", "order.sent", "refund")):
            send(broker, subject, 1000 * at + 500, 1000 * at + 600)
        with pulque.connect(broker.url) as client:
            client.seal()
        place = {"url": broker.url} if where == "live" else {"path": str(tmp_path)}

        def load(**options: str) -> DataFrame:
            return (
                spark.read.format("pulque").options(rowsPerPartition="300", **place, **options)
            ).load()

        whole = load(subscribePattern=".*")
        tasks = whole.rdd.getNumPartitions()
        asked = {
            "subject = 'order.paid'": {"subscribe": "order.paid"},
            "subject like 'order.%'": {"subscribe": "order.*"},
            f"stored_at >= timestamp_millis({middle_ms})": {
                "subscribePattern": ".*",
                "startingTimestamp": str(middle_ms),
            },
            f"subject = 'refund' and stored_at < timestamp_millis({middle_ms})": {
                "subscribe": "refund",
                "endingTimestamp": str(middle_ms),
            },
        }
        for text, options in asked.items():
            narrow = load(**options)
            assert bodies(narrow) == bodies(whole.where(text)), text
            assert narrow.rdd.getNumPartitions() < tasks, text
