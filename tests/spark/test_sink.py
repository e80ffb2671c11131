"""``df.write`` and ``df.writeStream`` send every row; a stream sends it once."""

from pathlib import Path

import pytest

import pulque
from pulque.testing.broker import InProcessBroker

pytest.importorskip("pyspark")
from pyspark.errors import PySparkException
from pyspark.sql import SparkSession
from pyspark.sql import functions as f


def messages_of(broker: InProcessBroker, subject: str) -> list[pulque.Message]:
    with pulque.connect(broker.url) as client:
        return client.read(subject, max_messages=100_000)


def test_rows_become_messages_with_all_their_parts(
    spark: SparkSession, broker: InProcessBroker
) -> None:
    frame = spark.range(50).select(
        f.concat(f.lit("body-"), "id").cast("binary").alias("body"),
        f.concat(f.lit("key-"), "id").alias("key"),
        f.array(f.lit("red"), f.concat(f.lit("t"), "id")).alias("tags"),
        f.create_map(f.lit("id"), f.col("id").cast("string")).alias("headers"),
        f.when(f.col("id") % 2 == 0, "even").otherwise("odd").alias("subject"),
    )
    frame.write.format("pulque").option("url", broker.url).mode("append").save()
    found = messages_of(broker, "even") + messages_of(broker, "odd")

    assert len(found) == 50
    for message in found:
        number = message.body.decode().removeprefix("body-")
        assert message.key == f"key-{number}"
        assert message.tags == ("red", f"t{number}")
        assert message.headers == {"id": number}
        assert message.subject == ("even" if int(number) % 2 == 0 else "odd")


def test_priorities_go_to_their_partitions(spark: SparkSession, broker: InProcessBroker) -> None:
    frame = spark.range(4).selectExpr("cast(id as string) value", "cast(id + 3 as int) priority")
    frame.write.format("pulque").options(url=broker.url, subject="x").mode("append").save()
    back = spark.read.format("pulque").options(url=broker.url, subscribe="x").load()

    rows = {(row.body, row.priority, row.partition) for row in back.collect()}
    assert rows == {(b"0", 3, "x#p3"), (b"1", 4, "x"), (b"2", 5, "x#p5"), (b"3", 6, "x#p6")}


@pytest.mark.parametrize(
    ("columns", "words"),
    [
        (["id"], "column 'id' is not part of a message"),
        (["cast(id as int) body"], "column 'body' is int; it must be binary or string"),
        (["'x' key"], "one column named body or value"),
        (["'x' body", "'x' value"], "found body and value"),
        (["'x' body"], "neither an option nor a column named subject"),
        (["'x' body", "'../x' subject"], "is not allowed"),
        (["cast(null as string) body", "'s' subject"], "row 0 has no body"),
    ],
)
def test_what_is_no_message_is_refused_by_name(
    spark: SparkSession, broker: InProcessBroker, columns: list[str], words: str
) -> None:
    frame = spark.range(1).selectExpr(*columns)

    with pytest.raises(PySparkException, match=words):
        frame.write.format("pulque").option("url", broker.url).mode("append").save()


def test_messages_cannot_be_overwritten(spark: SparkSession, broker: InProcessBroker) -> None:
    frame = spark.range(1).selectExpr("'x' body")

    with pytest.raises(PySparkException, match="cannot be overwritten"):
        frame.write.format("pulque").options(url=broker.url, subject="x").mode("overwrite").save()


def run_stream(spark: SparkSession, broker: InProcessBroker, place: Path) -> None:
    query = (
        spark.readStream.format("pulque")
        .options(url=broker.url, subscribe="source", startingOffsets="earliest")
        .option("maxOffsetsPerTrigger", "30")
        .load()
        .select("body", "key")
        .writeStream.format("pulque")
        .options(url=broker.url, subject="target", staging=str(place / "staging"))
        .option("checkpointLocation", str(place / "checkpoint"))
        .trigger(availableNow=True)
        .start()
    )
    assert query.awaitTermination(120)


def test_a_stream_copies_a_subject_exactly_once(
    spark: SparkSession, broker: InProcessBroker, tmp_path: Path
) -> None:
    with pulque.connect(broker.url) as client:
        client.send_many("source", [str(number).encode() for number in range(100)])
    run_stream(spark, broker, tmp_path)
    # As after a crash between the sink's commit and Spark's own: the last one is done again.
    commits = sorted((tmp_path / "checkpoint" / "commits").glob("[0-9]*"))
    for path in (commits[-1], commits[-1].with_name(f".{commits[-1].name}.crc")):
        path.unlink(missing_ok=True)
    run_stream(spark, broker, tmp_path)

    found = sorted(int(message.body) for message in messages_of(broker, "target"))
    assert found == list(range(100))


def test_a_stream_without_a_staging_directory_is_refused(
    spark: SparkSession, broker: InProcessBroker, tmp_path: Path
) -> None:
    source = spark.readStream.format("rate").load().selectExpr("cast(value as string) value")
    query = (
        source.writeStream.format("pulque")
        .options(url=broker.url, subject="x")
        .option("checkpointLocation", str(tmp_path))
    )
    with pytest.raises(PySparkException, match="needs the option staging"):
        query.start().awaitTermination(60)
