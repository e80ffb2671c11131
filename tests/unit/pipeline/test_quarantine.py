"""A batch that nobody can decode does not stop the archive: its bytes are a row of their own."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import pulque
from pulque.model.batch import Codec
from pulque.testing.broker import InProcessBroker
from tests.malformed import lying, odd, send_batches, torn, with_part

pytest.importorskip("deltalake")
import pyarrow as pa
from deltalake import DeltaTable

from pulque.pipeline.archive.message_archiver import Archived, Archiver, SegmentFailure, run_here
from pulque.pipeline.lake.maintenance import compact
from pulque.pipeline.options import Selection
from pulque.pipeline.query import Question, ask, quarantined
from pulque.pipeline.reading.batch_decoder import decode_readable
from pulque.pipeline.reading.broker_log import LiveLog
from pulque.pipeline.reading.ranges import Range

BAD = (torn("orders"), torn("orders", Codec.LZ4), lying("orders"), odd("orders"))
LOST = 3 + 3 + 3 + 4
"""Messages; a batch is archived as a whole, or not at all."""


def fill(broker: InProcessBroker) -> None:
    """Send good messages before, among and behind bad batches, and seal the segment."""
    with pulque.connect(broker.url) as client:
        for number, batch in enumerate(BAD):
            client.send_many("orders", [b"good %d" % number, b"fine"])
            client.send("refunds", b"another")
            assert send_batches(broker.url, "orders", batch) == ["NONE"]
        client.send("orders", b"last")
        client.seal()


@pytest.fixture(scope="module")
def filled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    data = tmp_path_factory.mktemp("filled") / "data"
    with InProcessBroker(data) as broker:
        fill(broker)
    return data


@pytest.fixture
def data(filled: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(filled, tmp_path / "data"))


def archiver(lake: Path, data: Path, **options: Any) -> Archiver:
    return Archiver(str(lake), str(data), "tested", lambda: run_here, **options)


def rows(lake: Path, table: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = pa.table(
        DeltaTable(str(lake / table)).to_pyarrow_table()
    ).to_pylist()
    return found


def check(lake: Path) -> None:
    """Check that all good messages are rows, and all bad batches quarantined, each once."""
    bodies = sorted(row["body"] for row in rows(lake, "messages"))
    good = [b"good 0", b"good 1", b"good 2", b"good 3", *[b"fine"] * 4, *[b"another"] * 4, b"last"]
    assert bodies == sorted(good)
    found = sorted(rows(lake, "quarantine"), key=lambda row: row["first_sequence"])
    assert [row["raw"] for row in found] == list(BAD)
    places = [(row["partition"], row["first_sequence"], row["count"]) for row in found]
    assert places == [("orders", 2, 3), ("orders", 7, 3), ("orders", 12, 3), ("orders", 17, 4)]
    assert {(row["subject"], row["broker"], row["segment"]) for row in found} == {
        ("orders", "tested", 0)
    }
    assert all(row["reason"] and row["stored_at"] for row in found)


def test_a_segment_with_bad_batches_is_archived_and_they_are_quarantined(
    data: Path, tmp_path: Path
) -> None:
    lake = tmp_path / "lake"

    (outcome,) = archiver(lake, data).run()

    assert isinstance(outcome, Archived)
    assert (outcome.messages, outcome.quarantined) == (13, LOST)
    check(lake)
    assert archiver(lake, data).waiting() == ([], [])
    compact(str(lake))
    check(lake)


@pytest.mark.parametrize("at", ["verify", "publish", "quarantine", "commit", "done"])
def test_a_run_that_died_is_finished_by_the_next(data: Path, tmp_path: Path, at: str) -> None:
    lake = tmp_path / "lake"

    def die(step: str) -> None:
        if step == at:
            raise RuntimeError(at)

    with pytest.raises(RuntimeError, match=at):
        list(archiver(lake, data, step=die).run())
    assert not [each for each in archiver(lake, data).run() if isinstance(each, SegmentFailure)]

    check(lake)


def test_of_two_runs_at_once_one_counts(data: Path, tmp_path: Path) -> None:
    lake = tmp_path / "lake"

    def run_another(at: str) -> Callable[[str], None]:
        def step(name: str) -> None:
            if name == at:
                list(archiver(lake, data).run())

        return step

    (outcome,) = archiver(lake, data, step=run_another("quarantine")).run()

    assert isinstance(outcome, Archived)
    assert outcome.was_there
    check(lake)


def test_a_query_says_how_many_messages_it_cannot_show(data: Path, tmp_path: Path) -> None:
    lake = str(tmp_path / "lake")
    list(archiver(tmp_path / "lake", data).run())

    assert quarantined(lake, Question(subject="orders")) == LOST
    assert quarantined(lake, Question(subject="ord*", key="k", headers={"a": "b"})) == LOST
    assert quarantined(lake, Question(subject="refunds")) == 0
    assert len(ask(lake, Question(subject="orders"))) == 9


def test_a_live_read_names_bad_batches_and_has_the_rest(pulque_broker: InProcessBroker) -> None:
    fill(pulque_broker)
    columns = ("body", "headers")
    with LiveLog(pulque_broker.url) as log:
        (name,) = log.partitions(Selection(subjects=("orders",)))
        bounds = log.bounds(name)
        placed = list(log.read([Range(name, bounds.start, bounds.end)], must_be_whole=True))

    found = [decode_readable(each, columns) for each in placed]
    bodies = [body.as_py() for some, _ in found for rows in some for body in rows.column("body")]
    bad = [each for _, some in found for each in some]
    assert bodies == [
        b"good 0",
        b"fine",
        b"good 1",
        b"fine",
        b"good 2",
        b"fine",
        b"good 3",
        b"fine",
        b"last",
    ]
    assert sorted(each.first_sequence for each in bad) == [2, 7, 12, 17]
    assert all(each.reason for each in bad)


@pytest.mark.parametrize(
    ("part", "encoded", "is_rejected"),
    [
        ("key", b"\xff", True),
        ("order_key", b"\xff", True),
        ("tags", b"red\0\xff", True),
        ("headers", b"name\0\xff", True),
        ("headers", b"no value", True),
        ("headers", b"\0no name", True),
        ("key", b"a\0b", False),
        ("tags", b"\0red", False),
        ("headers", b"name\0", False),
    ],
)
def test_what_a_consumer_rejects_is_quarantined_and_the_rest_is_rows(
    tmp_path: Path, part: str, encoded: bytes, *, is_rejected: bool
) -> None:
    """No row holds a text that was altered so that it can be shown."""
    data, lake = tmp_path / "data", tmp_path / "lake"
    batch = with_part("orders", **{part: encoded})
    with InProcessBroker(data) as broker, pulque.connect(broker.url) as client:
        assert send_batches(broker.url, "orders", batch) == ["NONE"]
        client.send("orders", b"last")
        with client.consumer("orders", group="kitchen") as consumer:
            handed_out: list[bytes] = []
            while b"last" not in handed_out:
                for message in consumer.pull(timeout=10):
                    handed_out.append(message.body)
                    message.ack()
        client.seal()
    list(archiver(lake, data).run())

    assert handed_out == ([b"last"] if is_rejected else [b"odd", b"last"])
    bodies = [row["body"] for row in rows(lake, "messages") if row["partition"] == "orders"]
    assert bodies == handed_out
    kept = [row["raw"] for row in rows(lake, "quarantine")] if is_rejected else []
    assert kept == ([batch] if is_rejected else [])
