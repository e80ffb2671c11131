"""Source and sink over all brokers of a cluster, by way of a meta server or of any broker."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import pulque
from pulque.errors import UnavailableError, UnknownSubjectError
from pulque.model.names import parse_partition
from pulque.testing.cluster import ClusterProcesses

pytest.importorskip("pyspark")
from pyspark.sql import SparkSession

from pulque.pipeline.data_source.source import PulqueDataSource
from pulque.pipeline.options import Selection
from pulque.pipeline.reading.broker_log import LiveLog
from pulque.pipeline.reading.ranges import DataLossError

pytestmark = pytest.mark.server

MISSED = parse_partition("missed")
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
    with (
        LiveLog(cluster.url, timeout_s=1) as log,
        pytest.raises(DataLossError, match="broker-2 has messages of missed and is away"),
    ):
        log.check_whole(Selection(subjects=("missed",)))
    # It may go after that was checked, and before partitions are listed.
    for selection in (Selection(subjects=("missed",)), Selection(partitions=(MISSED,))):
        with (
            LiveLog(cluster.url, timeout_s=1) as log,
            pytest.raises(UnavailableError, match="broker-2"),
        ):
            list(map(log.bounds, log.partitions(selection, must_be_whole=True)))
    cluster["broker-2"].restart()
    with LiveLog(cluster.url, timeout_s=30) as log:
        log.check_whole(Selection(subjects=("missed",)))


class Impatient(LiveLog):
    """Waits a second for brokers that are away."""

    def __init__(self, url: str | None) -> None:
        super().__init__(url, timeout_s=1)


def planned(**options: str) -> int:
    """Return how many messages a batch read would read, without a session of Spark."""
    source = PulqueDataSource(options)
    tasks = source.reader(source.schema()).partitions()
    return sum(each.length for task in tasks for each in task.value.ranges)


@pytest.mark.parametrize(
    "selected",
    [
        {"subscribe": "lone.a"},
        {"subscribe": "lone.*"},
        {"subscribePattern": "lone[.]a"},
        {"assign": "lone.a"},
    ],
    ids=["subject", "pattern", "expression", "partition"],
)
def test_a_read_fails_by_name_while_all_brokers_of_a_subject_are_away(
    cluster: ClusterProcesses,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    selected: dict[str, str],
) -> None:
    monkeypatch.setattr("pulque.pipeline.data_source.source.LiveLog", Impatient)
    send(cluster, "lone.a", 40)
    options = {"url": cluster.url, **selected}
    assert planned(**options) >= 40

    for name in cluster.brokers:
        cluster[name].stop()

    with pytest.raises(DataLossError, match=r"broker-1, broker-2 has messages of .* and is away"):
        planned(**options)
    assert planned(**options, failOnDataLoss="false") == 0
    assert re.search(r"broker-2 has messages of .* and is away; the read goes on", caplog.text)
    source = PulqueDataSource(options)
    stream: Any = source.streamReader(source.schema())
    for begin in (stream.initialOffset, stream.prepareForTriggerAvailableNow):
        with pytest.raises(DataLossError, match=r"has messages of .* and is away"):
            begin()
    stream.stop()


def test_a_read_of_a_subject_that_does_not_exist_fails_by_name(
    cluster: ClusterProcesses, caplog: pytest.LogCaptureFixture
) -> None:
    options = {"url": cluster.url, "subscribe": "no.such"}

    with pytest.raises(UnknownSubjectError, match=r"there is no subject no\.such"):
        planned(**options)
    assert planned(**options, failOnDataLoss="false") == 0
    assert "there is no subject no.such; the read goes on without it" in caplog.text
    assert planned(url=cluster.url, subscribe="no.such.*") == 0


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
