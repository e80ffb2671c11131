"""What consumers did is in its table once, under the names of those who did it."""

from pathlib import Path
from typing import Any

import pytest

import pulque
from pulque.storage.directory.archive_progress import read_archived
from pulque.storage.files import OsFileSystem
from pulque.testing.broker import InProcessBroker

pytest.importorskip("deltalake")
from deltalake import DeltaTable

from pulque.pipeline.archive.fact_archiver import FactsArchiver
from pulque.pipeline.archive.message_archiver import (
    Archived,
    Archiver,
    SegmentFailure,
    confirm,
    run_here,
)

SMALL = {"action_segment_size": "64KiB", "archive": True}
Row = dict[str, Any]


def archiver(place: Path) -> FactsArchiver:
    return FactsArchiver(str(place / "lake"), str(place / "data"), "tested", lambda: run_here)


def rows(place: Path) -> list[Row]:
    found: list[Row] = (
        DeltaTable(str(place / "lake" / "consumption")).to_pyarrow_table().to_pylist()
    )
    return sorted(found, key=lambda row: row["offset"])


def consume(broker: InProcessBroker, turns: int) -> int:
    """Pull and settle until the action log has sealed a segment; return how many were nacked."""
    nacked = 0
    with (
        pulque.connect(broker.url) as client,
        client.consumer("orders", group="kitchen", consumer_id="cook") as consumer,
    ):
        for turn in range(turns):
            client.send_many("orders", [b"x"] * 4)
            messages = consumer.pull(4, timeout=5)
            for message in messages[1:]:
                message.ack()
            for message in messages[:1]:
                if turn % 2:
                    message.ack()
                else:
                    message.nack("burnt " * 150)
                    nacked += 1
            consumer.settle()
        client.seal()
    return nacked


@pytest.fixture
def nacked(tmp_path: Path) -> int:
    with InProcessBroker(tmp_path / "data", storage=SMALL) as broker:
        total = 0
        for _ in range(4):
            total += consume(broker, 40)
            broker.advance_time(120)  # time for checkpoints and for a new segment
    assert len(list((tmp_path / "data" / "actions").glob("*.log"))) >= 2
    return total


def test_facts_are_rows_with_names(nacked: int, tmp_path: Path) -> None:
    outcomes = list(archiver(tmp_path).run())
    assert all(isinstance(each, Archived) for each in outcomes)
    found = rows(tmp_path)

    assert sum(each.messages for each in outcomes if isinstance(each, Archived)) == len(found)
    for sealed in (row for row in found if row["kind"] == "sealed"):
        same = [row for row in found if row["segment"] == sealed["segment"]]
        assert sealed["count"] == len(same) - 1
        assert sealed["offset"] > max(row["offset"] for row in same if row is not sealed)
    found = [row for row in found if row["kind"] != "sealed"]
    assert {row["group"] for row in found} == {"kitchen"}
    assert {row["consumer"] for row in found if row["kind"] != "opened"} == {"cook"}
    assert {row["subject"] for row in found} == {"orders"}
    assert {"opened", "pulled", "settled", "nacked"} == {row["kind"] for row in found}
    burnt = [row for row in found if row["kind"] == "nacked"]
    assert 0 < len(burnt) <= nacked
    assert {row["reason"] for row in burnt} == {"burnt " * 150}
    pulled = [row for row in found if row["kind"] == "pulled" and row["partition"] == "orders"]
    ends = [row["first_sequence"] + row["count"] for row in pulled]
    assert [row["first_sequence"] for row in pulled] == [0, *ends[:-1]]
    before = rows(tmp_path)
    assert list(archiver(tmp_path).run()) == []
    assert rows(tmp_path) == before


def test_facts_are_sealed_with_messages(tmp_path: Path) -> None:
    with InProcessBroker(tmp_path / "data", storage={"archive": True}) as broker:
        assert consume(broker, 3) == 2
        (first,) = archiver(tmp_path).run()
        assert isinstance(first, Archived)
        with pulque.connect(broker.url) as client:
            client.seal()  # there is nothing new
            consume(broker, 1)
        (second,) = archiver(tmp_path).run()
        assert isinstance(second, Archived)
        assert second.base == first.base + first.size


def test_a_damaged_segment_is_named_and_left_out(nacked: int, tmp_path: Path) -> None:
    assert nacked
    path = min((tmp_path / "data" / "actions").glob("*.log"))
    whole = path.read_bytes()
    harmed = bytearray(whole)
    harmed[len(harmed) // 2] ^= 1
    path.write_bytes(harmed)
    (failed, *_) = archiver(tmp_path).run()
    assert isinstance(failed, SegmentFailure)
    assert failed.is_damage
    assert f"{path.name} at offset" in failed.reason
    assert not list((tmp_path / "lake").rglob("*.parquet"))
    path.write_bytes(whole)
    assert all(isinstance(each, Archived) for each in archiver(tmp_path).run())


def test_the_broker_keeps_what_is_not_archived(nacked: int, tmp_path: Path) -> None:
    assert nacked
    data = tmp_path / "data"
    facts = archiver(tmp_path)
    messages = Archiver(str(tmp_path / "lake"), str(data), "tested", lambda: run_here)
    assert (messages.archived_up_to(), facts.archived_up_to()) == (0, 0)
    before = len(list((data / "actions").glob("*.log")))
    list(messages.run())
    list(facts.run())
    confirm(str(data), messages=messages.archived_up_to(), actions=facts.archived_up_to())
    last = max(int(path.stem) for path in (data / "messages").glob("*.log"))
    bases = sorted(int(path.stem) for path in (data / "actions").glob("*.log"))
    assert read_archived(OsFileSystem(str(data))) == (last, bases[-1])

    with InProcessBroker(data, storage=SMALL) as broker:
        for _ in range(3):
            consume(broker, 1)
            broker.advance_time(120)
    after = len(list((data / "actions").glob("*.log")))
    assert after < before
