"""Source and sink over all brokers of a cluster, by way of a meta server or of any broker."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

import pulque
from pulque.testing.cluster import ClusterProcesses

pytest.importorskip("pyspark")
from pyspark.sql import SparkSession

from pulque.pipeline.live import LiveLog
from pulque.pipeline.options import Selection
from pulque.pipeline.ranges import DataLossError

pytestmark = pytest.mark.server

META = {"cluster": {"heartbeat": "300ms"}}


@pytest.fixture(scope="module")
def started(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ClusterProcesses]:
    folder = tmp_path_factory.mktemp("cluster")
    with ClusterProcesses.start(folder, brokers=2, meta_settings=META) as made:
        yield made


@pytest.fixture
def cluster(started: ClusterProcesses) -> ClusterProcesses:
    for name in started.brokers:
        if not started[name].is_running:
            started[name].restart()
    started.wait_until_known()
    return started


def send(cluster: ClusterProcesses, subject: str, count: int) -> None:
    with pulque.connect(cluster.url, timeout=30) as client:
        for number in range(count):
            client.send(subject, b"%d" % number)


def ends(cluster: ClusterProcesses, subject: str) -> dict[str, int]:
    """Return how many messages of a subject each broker has."""
    with pulque.connect(cluster.url, timeout=30) as client:
        found: dict[str, int] = {}
        for each in client.positions(subject):
            found[each.broker_group] = found.get(each.broker_group, 0) + each.end
    return found


def test_a_read_gives_what_all_brokers_have_whoever_is_asked(
    spark: SparkSession, cluster: ClusterProcesses
) -> None:
    send(cluster, "read.a", 60)
    send(cluster, "read.b", 10)
    assert all(ends(cluster, "read.a").values())

    for url in (cluster.url, cluster["broker-1"].url, cluster["broker-2"].url):
        frame = (
            spark.read.format("pulque")
            .options(url=url, subscribe="read.*", minPartitions="3")
            .load()
        )
        found = [(row.subject, int(row.body)) for row in frame.collect()]
        wanted = [("read.a", n) for n in range(60)] + [("read.b", n) for n in range(10)]
        assert sorted(found) == wanted


def test_each_broker_counts_for_itself_and_can_be_named(
    spark: SparkSession, cluster: ClusterProcesses
) -> None:
    send(cluster, "named", 40)
    sizes = ends(cluster, "named")

    def count(**options: str) -> int:
        return spark.read.format("pulque").options(url=cluster.url, **options).load().count()

    for broker, size in sizes.items():
        assert count(assign=f"{broker}/named") == size
    assert count(assign="named") == 40
    assert count(subscribe="named", startingOffsets=json.dumps({"broker-1/named": 3})) == 40 - 3
    assert count(subscribe="named", startingOffsets=json.dumps({"named": -1})) == 0


def test_a_broker_that_is_away_is_missed(spark: SparkSession, cluster: ClusterProcesses) -> None:
    send(cluster, "missed", 40)
    left = ends(cluster, "missed")["broker-1"]
    cluster["broker-2"].stop()
    options = {"url": cluster.url, "subscribe": "missed", "failOnDataLoss": "false"}

    assert spark.read.format("pulque").options(**options).load().count() == left
    with LiveLog(cluster.url, timeout_s=1) as log:
        found = log.partitions(Selection(subjects=("missed",)))
        with pytest.raises(DataLossError, match="a broker that has messages of missed is away"):
            log.check_whole(found)
    cluster["broker-2"].restart()
    with LiveLog(cluster.url, timeout_s=30) as log:
        log.check_whole(found)


def copy(spark: SparkSession, cluster: ClusterProcesses, place: Path) -> None:
    query = (
        spark.readStream.format("pulque")
        .options(url=cluster.url, subscribe="source", startingOffsets="earliest")
        .option("maxOffsetsPerTrigger", "50")
        .load()
        .select("body", "key")
        .writeStream.format("pulque")
        .options(url=cluster.url, subject="target", staging=str(place / "staging"), maxBatch="5")
        .option("checkpointLocation", str(place / "checkpoint"))
        .trigger(availableNow=True)
        .start()
    )
    assert query.awaitTermination(180)


@pytest.mark.timeout(400)
def test_a_stream_copies_a_subject_exactly_once_from_all_brokers_to_all(
    spark: SparkSession, cluster: ClusterProcesses, tmp_path: Path
) -> None:
    send(cluster, "source", 100)
    copy(spark, cluster, tmp_path)
    # As after a crash between the sink's commit and Spark's own: the last one is done again.
    commits = sorted((tmp_path / "checkpoint" / "commits").glob("[0-9]*"))
    for path in (commits[-1], commits[-1].with_name(f".{commits[-1].name}.crc")):
        path.unlink(missing_ok=True)
    send(cluster, "source", 100)
    copy(spark, cluster, tmp_path)

    with pulque.connect(cluster.broker_url, timeout=30) as client:
        found = sorted(int(message.body) for message in client.read("target"))
    assert found == sorted(2 * list(range(100)))
    assert all(size > 0 for size in ends(cluster, "target").values())
    assert len(ends(cluster, "target")) == 2


def test_a_batch_write_is_spread_over_all_brokers(
    spark: SparkSession, cluster: ClusterProcesses
) -> None:
    frame = spark.range(200).selectExpr("cast(id as string) body")
    frame.write.format("pulque").options(url=cluster.url, subject="written", maxBatch="10").mode(
        "append"
    ).save()

    sizes = ends(cluster, "written")
    assert sum(sizes.values()) == 200
    assert len(sizes) == 2
    assert all(sizes.values())
