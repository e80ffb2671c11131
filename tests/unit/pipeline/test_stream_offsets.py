"""Where a stream goes on, asked as Spark asks; without Spark."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

import pulque
from pulque.errors import UnknownSubjectError, UsageError
from pulque.testing.broker import InProcessBroker

pytest.importorskip("pyspark")
pytest.importorskip("pyarrow")
from pyspark.sql.streaming.datasource import ReadAllAvailable
from pyspark.sql.types import BinaryType, StringType, StructType

from pulque.pipeline.data_source.source import PulqueDataSource
from pulque.pipeline.options import ReadOptions
from pulque.pipeline.reading.ranges import DataLossError


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


@pytest.mark.parametrize(
    ("selected", "named"),
    [
        ({"subscribe": "orders"}, "refunds"),
        ({"subscribe": "orders, order.*"}, "orders.paid"),
        ({"subscribe": "orders"}, "broker-1/refunds"),
        ({"subscribe": "orders"}, "%dead%orders%billing"),
        ({"subscribePattern": "order.*"}, "refunds"),
        ({"assign": "orders"}, "orders#p7"),
        ({"assign": "broker-1/orders"}, "broker-2/orders"),
    ],
)
@pytest.mark.parametrize("option", ["startingOffsets", "endingOffsets"])
def test_a_place_in_a_partition_that_is_not_read_is_refused(
    selected: dict[str, str], named: str, option: str
) -> None:
    ((way, value),) = selected.items()
    words = f"{option} names '{named}', which is not read: {way} is '{value}'"
    with pytest.raises(UsageError, match=re.escape(words)):
        ReadOptions.parse({**selected, option: json.dumps({named: 3})})


@pytest.mark.parametrize(
    ("selected", "named"),
    [
        ({"subscribe": "orders"}, "orders"),
        ({"subscribe": "orders"}, "orders#p7"),
        ({"subscribe": "order.*"}, "broker-1/order.paid"),
        ({"subscribePattern": "order.*"}, "orders"),
        ({"assign": "orders"}, "broker-1/orders"),
        ({"assign": "broker-1/orders"}, "orders"),
        ({"assign": "%dead%orders%billing"}, "%dead%orders%billing"),
    ],
)
def test_a_place_in_a_partition_that_is_read_is_taken(
    selected: dict[str, str], named: str
) -> None:
    options = ReadOptions.parse({**selected, "startingOffsets": json.dumps({named: 3})})
    assert options.starting.sequences == {named: 3}


@pytest.mark.parametrize("selected", [{"subscribe": "ordrs"}, {"assign": "ordrs"}])
def test_a_read_of_a_subject_that_does_not_exist_fails_by_name(
    pulque_broker: InProcessBroker, selected: dict[str, str]
) -> None:
    send(pulque_broker, b"a")
    source = PulqueDataSource({"url": pulque_broker.url, **selected})
    with pytest.raises(UnknownSubjectError, match="there is no subject ordrs"):
        source.reader(source.schema()).partitions()
    stream: Any = source.streamReader(source.schema())
    with pytest.raises(UnknownSubjectError, match="there is no subject ordrs"):
        stream.prepareForTriggerAvailableNow()
    stream.stop()


def test_files_that_have_nothing_of_an_assigned_subject_fail_by_name(tmp_path: Path) -> None:
    with InProcessBroker(tmp_path / "data") as broker:
        send(broker, b"a")
    source = PulqueDataSource({"path": str(tmp_path / "data"), "assign": "ordrs"})
    with pytest.raises(UnknownSubjectError, match="there is no subject ordrs"):
        source.reader(source.schema()).partitions()


@pytest.mark.parametrize(
    ("schema", "words"),
    [
        ("body binary, color string", "no column 'color'; there are message_id, subject"),
        ("body string", "column 'body' of the schema is string; it must be binary"),
    ],
)
def test_a_schema_that_messages_do_not_have_is_refused(schema: str, words: str) -> None:
    kinds = {"string": StringType(), "binary": BinaryType()}
    given = StructType()
    for column in schema.split(", "):
        name, kind = column.split()
        given.add(name, kinds[kind])
    source = PulqueDataSource({"subscribe": "orders"})
    for open_with in (source.reader, source.streamReader):
        with pytest.raises(UsageError, match=words):
            open_with(given)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"subscribe": " , "}, "subscribe is ' , '; at least one name is needed"),
        ({"assign": ","}, "assign is ','; at least one name is needed"),
        ({"subscribe": "a", "columns": ","}, "columns is ','; at least one name is needed"),
        ({"subscribe": "a", "startingTimestamp": str(2**63)}, "a whole number of at least 0"),
        ({"subscribe": "a", "rowsPerPartition": str(2**64)}, "a whole number of at least 1"),
        ({"subscribe": "a", "startingOffsets": f'{{"a": {2**63}}}'}, "startingOffsets is"),
        ({"subscribe": "a", "endingOffsets": '{"a": -2}'}, "-2, the earliest, for 'a'"),
    ],
)
def test_options_that_read_nothing_or_cannot_travel_are_refused(
    options: dict[str, str], words: str
) -> None:
    with pytest.raises(UsageError, match=re.escape(words)):
        ReadOptions.parse(options)
