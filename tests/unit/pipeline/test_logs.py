"""A log read over the network and out of its files gives the same messages, and all of them."""

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import pulque
from pulque.errors import (
    CorruptionError,
    DataDirectoryError,
    UnavailableError,
    UnknownSubjectError,
)
from pulque.model.names import parse_partition
from pulque.model.record import MAGIC
from pulque.testing.broker import InProcessBroker

pytest.importorskip("pyarrow")
pytest.importorskip("pyspark")
from pulque.pipeline.columns import ALL_COLUMNS
from pulque.pipeline.data_source.source import PulqueDataSource
from pulque.pipeline.options import At, Place, Selection
from pulque.pipeline.reading.batch_decoder import decode
from pulque.pipeline.reading.broker_log import LiveLog
from pulque.pipeline.reading.ranges import Bounds, DataLossError, Range, whole_range
from pulque.pipeline.reading.stored_log import StoredLog, read_stretch

SUBJECTS = ("orders", "orders.paid", "refunds")
EVERYTHING = Selection(subjects=("*",))
ORDERS = Selection(subjects=("orders",))
Row = dict[str, Any]


@pytest.fixture
def broker(tmp_path: Path) -> Iterator[InProcessBroker]:
    with InProcessBroker(tmp_path, storage={"segment_size": "64KiB"}) as found:
        yield found


def fill(broker: InProcessBroker) -> dict[str, list[bytes]]:
    """Send batches of all sizes, some of them compressed, to several subjects."""
    sent: dict[str, list[bytes]] = {subject: [] for subject in SUBJECTS}
    with pulque.connect(broker.url) as client:
        for turn in range(30):
            subject = SUBJECTS[turn % len(SUBJECTS)]
            with client.producer(compression="zstd" if turn % 5 == 0 else None) as producer:
                for number in range(1 + turn * 37 % 200):
                    body = f"{subject}-{turn}-{number}".encode() * 5
                    producer.send(subject, body, key=f"k{number}", tags=["a"] * (number % 2))
                    sent[subject].append(body)
    return sent


def rows_of_files(log: StoredLog, ranges: list[Range], **options: Any) -> list[Row]:
    rows: list[Row] = []
    for stretch in log.plan(
        ranges, least=3, most_rows=100, must_be_whole=options.get("must_be_whole", True)
    ):
        for placed in read_stretch(stretch, **{"must_be_whole": True, **options}):
            rows += decode(placed, ALL_COLUMNS).to_pylist()
    return sorted(rows, key=lambda row: (row["partition"], row["sequence"]))


def rows_of_broker(log: LiveLog, ranges: list[Range]) -> list[Row]:
    rows: list[Row] = []
    for placed in log.read(ranges, must_be_whole=True):
        rows += decode(placed, ALL_COLUMNS).to_pylist()
    return sorted(rows, key=lambda row: (row["partition"], row["sequence"]))


def whole(log: StoredLog | LiveLog) -> list[Range]:
    return [Range(name, *log.bounds(name)) for name in log.partitions(EVERYTHING)]


def test_both_ways_give_all_messages(broker: InProcessBroker, tmp_path: Path) -> None:
    sent = fill(broker)
    with LiveLog(broker.url) as live:
        served = rows_of_broker(live, whole(live))
    broker.stop()
    stored = StoredLog(str(tmp_path))

    assert rows_of_files(stored, whole(stored)) == served
    for subject, bodies in sent.items():
        assert [row["body"] for row in served if row["subject"] == subject] == bodies


def test_part_of_a_range_is_that_part(broker: InProcessBroker, tmp_path: Path) -> None:
    bodies = fill(broker)["orders"]
    part = [Range(parse_partition("orders"), 3, 77)]
    with LiveLog(broker.url) as live:
        served = rows_of_broker(live, part)
    broker.stop()

    assert [row["body"] for row in served] == bodies[3:77]
    assert rows_of_files(StoredLog(str(tmp_path)), part) == served


def test_a_time_is_the_same_place_both_ways(broker: InProcessBroker, tmp_path: Path) -> None:
    fill(broker)
    name = parse_partition("refunds")
    with LiveLog(broker.url) as live:
        times = {row["stored_at"] for row in rows_of_broker(live, whole(live))}
        places = [
            At(Place.TIME, at_ms=int(each.timestamp() * 1000) + more)
            for each in times
            for more in (-1, 0, 1)
        ]
        served = [live.at_time(name, place) for place in places]
    broker.stop()
    stored = StoredLog(str(tmp_path))

    assert [stored.at_time(name, place) for place in places] == served


def test_a_running_brokers_open_segment_is_not_read(
    broker: InProcessBroker, tmp_path: Path
) -> None:
    fill(broker)
    stored = StoredLog(str(tmp_path))
    with LiveLog(broker.url) as live:
        assert sum(each.length for each in whole(stored)) < sum(e.length for e in whole(live))


def test_without_their_indexes_segments_are_walked(
    broker: InProcessBroker, tmp_path: Path
) -> None:
    fill(broker)
    broker.stop()
    before = rows_of_files(log := StoredLog(str(tmp_path)), whole(log))
    for path in (tmp_path / "messages").glob("*.index"):
        path.unlink()
    log = StoredLog(str(tmp_path))

    assert rows_of_files(log, whole(log)) == before


def test_a_segment_without_a_batch_is_no_trouble(broker: InProcessBroker, tmp_path: Path) -> None:
    sent = fill(broker)
    with pulque.connect(broker.url) as client:
        client.seal()
    broker.stop()
    log = StoredLog(str(tmp_path))

    assert len(rows_of_files(log, whole(log))) == sum(map(len, sent.values()))


def test_a_damaged_batch_is_named_or_passed_over(broker: InProcessBroker, tmp_path: Path) -> None:
    fill(broker)
    broker.stop()
    rows = rows_of_files(log := StoredLog(str(tmp_path)), whole(log))
    path = min((tmp_path / "messages").glob("*.log"))
    data = path.read_bytes()
    at = data.index(b"orders-3-0")
    path.write_bytes(data[:at] + b"X" + data[at + 1 :])
    log = StoredLog(str(tmp_path))

    with pytest.raises(CorruptionError, match=r"00000\.log.*not what was stored"):
        rows_of_files(log, whole(log))
    left = rows_of_files(log, whole(log), must_be_whole=False)
    assert 0 < len(left) < len(rows)
    assert all(row in rows for row in left)


def damage_all_of(path: Path) -> int:
    """Spoil all batches of a segment without an index; return the offset of the first one."""
    path.with_suffix(".index").unlink(missing_ok=True)
    content = bytearray(path.read_bytes())
    magic = MAGIC.to_bytes(2, "little")
    first = at = content.index(magic, content.index(magic) + 2)  # behind the partition table
    while at >= 0:
        content[at] ^= 0xFF
        at = content.find(magic, at)
    path.write_bytes(content)
    return int(path.stem) + first


def test_a_gap_is_told_where_nothing_of_a_damaged_segment_can_be_read(
    broker: InProcessBroker, tmp_path: Path
) -> None:
    with pulque.connect(broker.url) as client:
        for number in range(3):
            client.send("orders", b"%d" % number)
            client.seal()
    broker.stop()
    _, second, *_ = sorted((tmp_path / "messages").glob("*.log"))
    offset = damage_all_of(second)
    log = StoredLog(str(tmp_path))

    told = f"or lie in what is damaged: .*{second.name} at offset {offset}"
    with pytest.raises(DataLossError, match=told):
        rows_of_files(log, whole(log))
    left = rows_of_files(log, whole(log), must_be_whole=False)
    assert [row["body"] for row in left] == [b"0", b"2"]


def test_damage_of_one_subject_does_not_hide_a_missing_segment_of_another(
    broker: InProcessBroker, tmp_path: Path
) -> None:
    with pulque.connect(broker.url) as client:
        for number in range(3):
            client.send("orders", b"%d" % number)
            client.seal()
        client.send("refunds", b"damaged")
        client.seal()
    broker.stop()
    _, second, _, fourth, *_ = sorted((tmp_path / "messages").glob("*.log"))
    second.unlink()
    damage_all_of(fourth)
    log = StoredLog(str(tmp_path))
    orders = [Range(name, *log.bounds(name)) for name in log.partitions(ORDERS)]

    with pytest.raises(DataLossError, match=r"2 of these 3 are in the segments"):
        rows_of_files(log, orders)


def test_a_subject_that_does_not_exist_is_told(broker: InProcessBroker, tmp_path: Path) -> None:
    fill(broker)
    sources = ({"url": broker.url}, {"path": str(tmp_path)})
    for where in sources:
        source = PulqueDataSource({**where, "subscribe": "order.*, no.such"})
        with pytest.raises(UnknownSubjectError, match=r"there is no subject no\.such"):
            source.reader(source.schema()).partitions()


@pytest.mark.parametrize("name", ["orders#p7", "broker-1/orders"])
def test_a_partition_that_no_segment_has_is_told(
    broker: InProcessBroker, tmp_path: Path, name: str
) -> None:
    fill(broker)
    broker.stop()
    source = PulqueDataSource({"path": str(tmp_path), "assign": name})
    with pytest.raises(UnknownSubjectError, match=f"nothing of partition {name}; check its name"):
        source.reader(source.schema()).partitions()


def test_messages_that_are_not_there_are_told(broker: InProcessBroker) -> None:
    fill(broker)
    name = parse_partition("orders")
    with LiveLog(broker.url) as live:
        end = live.bounds(name).end
        with pytest.raises(DataLossError, match="not stored any more"):
            rows_of_broker(live, [Range(name, end - 1, end + 5)])


@pytest.mark.parametrize("which", [0, 1])
def test_a_segment_that_is_missing_is_told_or_passed_over(
    broker: InProcessBroker, tmp_path: Path, which: int, caplog: pytest.LogCaptureFixture
) -> None:
    fill(broker)
    broker.stop()
    log = StoredLog(str(tmp_path))
    ranges, rows = whole(log), rows_of_files(log, whole(log))
    gone = sorted((tmp_path / "messages").glob("*.log"))[which]
    gone.unlink()
    log.refresh()

    with pytest.raises(DataLossError, match=r"some were removed; with failOnDataLoss=false"):
        rows_of_files(log, ranges)
    with caplog.at_level(logging.WARNING, "pulque.pipeline"):
        left = rows_of_files(log, ranges, must_be_whole=False)
    assert 0 < len(left) < len(rows)
    assert all(row in rows for row in left)
    assert "some were removed; the read goes on with what there is" in caplog.text


def test_a_range_that_retention_shortened_is_named_where_the_read_goes_on(
    caplog: pytest.LogCaptureFixture,
) -> None:
    wanted, bounds = Range(parse_partition("orders"), 3, 20), Bounds(7, 15)
    with pytest.raises(DataLossError, match="messages 3 to 20 of orders were to be read"):
        whole_range(wanted, bounds, must_be_whole=True)

    with caplog.at_level(logging.WARNING, "pulque.pipeline"):
        assert whole_range(wanted, bounds, must_be_whole=False) == Range(wanted.partition, 7, 15)
    assert "messages 3 to 20 of orders were to be read, and 7 to 15 are stored" in caplog.text
    caplog.clear()
    within = Range(wanted.partition, 7, 15)
    assert whole_range(within, bounds, must_be_whole=False) == within
    assert not caplog.text


@pytest.mark.parametrize("victims", [(b"body-050",), (b"body-000",), (b"body-000", b"body-099")])
def test_a_read_of_a_broker_names_what_is_damaged_there(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, victims: tuple[bytes, ...]
) -> None:
    with InProcessBroker(tmp_path) as broker, pulque.connect(broker.url) as client:
        for number in range(100):
            client.send("orders", b"body-%03d" % number)
    (path,) = (tmp_path / "messages").glob("*.log")
    content = path.read_bytes()
    for victim in victims:
        content = content.replace(victim, victim.upper())
    path.write_bytes(content)

    with InProcessBroker(tmp_path) as broker, LiveLog(broker.url) as log:
        ranges = whole(log)
        with pytest.raises(DataLossError, match=r"damaged.*with failOnDataLoss=false"):
            rows_of_broker(log, ranges)
        with caplog.at_level(logging.WARNING, "pulque.pipeline"):
            left = list(log.read(ranges, must_be_whole=False))
        rows = [row for placed in left for row in decode(placed, ALL_COLUMNS).to_pylist()]
    assert len(rows) == 100 - len(victims)
    assert "damaged" in caplog.text


def test_a_broker_that_dies_in_the_middle_of_a_read_fails_it(broker: InProcessBroker) -> None:
    with pulque.connect(broker.url) as client:
        for _ in range(18):
            client.send_many("orders", [bytes(9_000)] * 150)  # more than one answer holds
    name = parse_partition("orders")
    with LiveLog(broker.url, timeout_s=1) as live:
        reading = live.read([Range(name, *live.bounds(name))], must_be_whole=True)
        first = decode(next(reading), ["sequence"])
        broker.kill()
        with pytest.raises(UnavailableError):
            list(reading)
        broker.restart()
        # A task that Spark runs again reads all of it.
        again = list(live.read([Range(name, *live.bounds(name))], must_be_whole=True))
    assert 0 < first.num_rows < 2700
    assert sum(decode(each, ["sequence"]).num_rows for each in again) == 2700


def test_a_broker_that_comes_back_in_the_middle_of_a_read_goes_on(
    broker: InProcessBroker,
) -> None:
    with pulque.connect(broker.url) as client:
        for _ in range(18):
            client.send_many("orders", [bytes(9_000)] * 150)
    name = parse_partition("orders")
    with LiveLog(broker.url) as live:
        reading = live.read([Range(name, *live.bounds(name))], must_be_whole=True)
        found = [decode(next(reading), ["sequence"])]
        broker.kill()
        broker.restart()
        found += [decode(each, ["sequence"]) for each in reading]
    assert [each for batch in found for each in batch["sequence"].to_pylist()] == [*range(2700)]


def test_a_directory_of_something_else_is_refused(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("hello")

    with pytest.raises(DataDirectoryError, match="neither a data directory"):
        StoredLog(str(tmp_path))


def test_what_decompresses_to_much_is_handed_out_in_parts(
    broker: InProcessBroker, tmp_path: Path
) -> None:
    """A few kilobytes of a log may be gigabytes, which no task has the memory for."""
    bodies = [b"%d" % number + bytes(900_000) for number in range(30)]
    with pulque.connect(broker.url) as client, client.producer(compression="zstd") as producer:
        for body in bodies:
            producer.send("orders", body).result(20)
    with LiveLog(broker.url) as live:
        served = list(live.read(whole(live), must_be_whole=True))
    broker.stop()
    log = StoredLog(str(tmp_path))
    stretches = log.plan(whole(log), least=1, most_rows=10**6, must_be_whole=True)
    stored = [placed for each in stretches for placed in read_stretch(each, must_be_whole=True)]

    for found in (served, stored):
        assert max(len(placed.data) for placed in found) < 6_000_000
        rows = [decode(placed, ("body",)).to_pylist() for placed in found]
        assert [row["body"] for some in rows for row in some] == bodies
