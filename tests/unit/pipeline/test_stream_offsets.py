"""Where a stream goes on, asked as Spark asks; without Spark."""

from pathlib import Path
from typing import Any

import pytest

import pulque
from pulque.testing.broker import InProcessBroker

pytest.importorskip("pyspark")
pytest.importorskip("pyarrow")
from pyspark.sql.streaming.datasource import ReadAllAvailable

from pulque.pipeline.ranges import DataLossError
from pulque.pipeline.source import PulqueDataSource


def stream_of(broker: InProcessBroker, **options: str) -> Any:
    source = PulqueDataSource({"url": broker.url, "subscribe": "orders", **options})
    return source.streamReader(source.schema())


def send(broker: InProcessBroker, *bodies: bytes) -> None:
    with pulque.connect(broker.url) as client:
        client.send_many("orders", list(bodies))


def bodies_between(stream: Any, start: dict[str, int], end: dict[str, int]) -> list[bytes]:
    return [
        row["body"]
        for partition in stream.partitions(start, end)
        for batch in stream.read(partition)
        for row in batch.to_pylist()
    ]


@pytest.fixture
def before(tmp_path: Path) -> dict[str, int]:
    """What a stream has read of a broker that is gone."""
    with InProcessBroker(tmp_path / "before") as broker:
        send(broker, *[b"%d" % number for number in range(10)])
        stream = stream_of(broker, startingOffsets="earliest")
        start = stream.initialOffset()
        end: dict[str, int] = stream.latestOffset(start, ReadAllAvailable())
        assert len(bodies_between(stream, start, end)) == 10
        stream.stop()
    return end


@pytest.mark.parametrize("stored", [(), (b"a", b"b")])
def test_a_subject_that_vanished_is_named(
    before: dict[str, int], tmp_path: Path, stored: tuple[bytes, ...]
) -> None:
    with InProcessBroker(tmp_path / "after") as broker:
        if stored:
            send(broker, *stored)
        stream = stream_of(broker)
        with pytest.raises(DataLossError, match=r"orders.* read up to 10 and ends at \d now"):
            stream.latestOffset(before, ReadAllAvailable())
        stream.stop()


def test_if_wanted_the_read_begins_anew_with_what_there_is(
    before: dict[str, int], tmp_path: Path
) -> None:
    with InProcessBroker(tmp_path / "after") as broker:
        send(broker, b"a", b"b")
        stream = stream_of(broker, failOnDataLoss="false")
        end = stream.latestOffset(before, ReadAllAvailable())
        assert bodies_between(stream, before, end) == [b"a", b"b"]
        send(broker, b"c")
        assert bodies_between(stream, end, stream.latestOffset(end, ReadAllAvailable())) == [b"c"]
        stream.stop()
