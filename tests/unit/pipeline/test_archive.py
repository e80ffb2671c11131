"""The archive without Spark: each message once, whatever happens on the way."""

import json
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

import pulque
from pulque.errors import UsageError
from pulque.testing.broker import InProcessBroker

pytest.importorskip("deltalake")
import pyarrow as pa
from deltalake import DeltaTable

from pulque.pipeline.archive.message_archiver import (
    Archived,
    Archiver,
    Outcome,
    SegmentFailure,
    broker_of,
    run_here,
)
from pulque.pipeline.archive.tasks import (
    CopyDone,
    CopyWork,
    NotDone,
    NotYet,
    Report,
    RowsDone,
    Work,
    do_work,
    report_from_json,
    report_to_json,
)
from pulque.pipeline.archive.totals import Tally
from pulque.pipeline.lake.file_writer import WritableTree
from pulque.pipeline.lake.maintenance import compact, sweep
from pulque.pipeline.lake.table import MESSAGES, Table, TableFile

SUBJECTS = ("orders", "orders.paid", "refunds", "orders.sent")
STEPS = ("write", "verify", "publish", "commit", "done")


def fill(broker: InProcessBroker, turns: int = 24) -> set[tuple[str, bytes]]:
    """Send to several subjects over two days; return ids and bodies."""
    sent: set[tuple[str, bytes]] = set()
    with pulque.connect(broker.url) as client:
        for turn in range(turns):
            subject = SUBJECTS[turn % len(SUBJECTS)]
            bodies = [f"{subject}-{turn}-{n}".encode() * 9 for n in range(40 + turn)]
            with client.producer(compression="zstd" if turn % 5 == 0 else None) as producer:
                pending = [
                    producer.send(
                        subject,
                        body,
                        key=f"k{number}",
                        headers={"turn": str(turn)} if number % 2 else None,
                    )
                    for number, body in enumerate(bodies)
                ]
                ids = [each.result(20).id for each in pending]
            sent |= set(zip(ids, bodies, strict=True))
            if turn == turns // 2:
                broker.advance_time(86_400)
        client.seal()
    return sent


@pytest.fixture
def data(tmp_path: Path) -> Path:
    return tmp_path / "data"


@pytest.fixture
def lake(tmp_path: Path) -> Path:
    return tmp_path / "lake"


@pytest.fixture(scope="module")
def filled(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, set[tuple[str, bytes]]]:
    """A stopped broker with several segments, all but the last of them sealed."""
    data = tmp_path_factory.mktemp("filled") / "data"
    with InProcessBroker(data, storage={"segment_size": "64KiB"}) as broker:
        found = fill(broker)
    assert len(segments(data)) >= 3
    return data, found


@pytest.fixture
def sent(filled: tuple[Path, set[tuple[str, bytes]]], data: Path) -> set[tuple[str, bytes]]:
    """What was sent to a broker whose directory this test has for itself."""
    shutil.copytree(filled[0], data)
    return filled[1]


def segments(data: Path) -> list[Path]:
    """All segments but the open one."""
    return sorted((data / "messages").glob("*.log"))[:-1]


def archiver(lake: Path, data: Path, **options: Any) -> Archiver:
    return Archiver(str(lake), str(data), "tested", lambda: run_here, **options)


def archive(lake: Path, data: Path, *, keep_going: bool = False) -> list[Outcome]:
    return list(archiver(lake, data).run(keep_going=keep_going))


def rows(lake: Path) -> list[dict[str, Any]]:
    """Read the table as a stranger would."""
    found: list[dict[str, Any]] = pa.table(
        DeltaTable(str(lake / "messages")).to_pyarrow_table()
    ).to_pylist()
    return found


def archived(lake: Path) -> list[tuple[str, bytes]]:
    return sorted((row["message_id"], row["body"]) for row in rows(lake))


def parquet_files(lake: Path) -> int:
    return len(list((lake / "messages").rglob("*.parquet")))


@pytest.mark.accepts("000-51")
def test_segments_are_copied_whole(sent: set[tuple[str, bytes]], lake: Path, data: Path) -> None:
    assert sent
    archive(lake, data)

    for each in segments(data):
        index = each.with_suffix(".index")
        for path in (each, index) if index.exists() else (each,):
            assert (lake / "raw" / "tested" / path.name).read_bytes() == path.read_bytes()
    assert not [path for path in (lake / "raw" / "tested").iterdir() if path.name[0] == "."]


def test_every_message_is_in_the_table_once(
    sent: set[tuple[str, bytes]], lake: Path, data: Path
) -> None:
    outcomes = archive(lake, data)

    assert all(isinstance(each, Archived) for each in outcomes)
    assert archived(lake) == sorted(sent)
    assert sum(each.messages for each in outcomes if isinstance(each, Archived)) == len(sent)
    found = rows(lake)
    assert len({row["day"] for row in found}) == 2
    assert all(row["stored_at"].date() == row["day"] for row in found)
    assert {row["segment"] for row in found} == {int(each.stem) for each in segments(data)}
    headers = [dict(row["headers"])["turn"] for row in found if row["headers"] is not None]
    assert len(headers) == sum(1 for row in found if int(row["key"][1:]) % 2)


def test_a_second_run_has_nothing_to_do(
    sent: set[tuple[str, bytes]], lake: Path, data: Path
) -> None:
    archive(lake, data)

    def never() -> Any:
        pytest.fail("nothing has to be started for nothing")

    assert list(Archiver(str(lake), str(data), "tested", never).run()) == []
    assert archived(lake) == sorted(sent)


def test_what_is_sealed_later_is_added(lake: Path, data: Path) -> None:
    with InProcessBroker(data, storage={"segment_size": "64KiB"}) as broker:
        sent = fill(broker, 4)
        archive(lake, data)
        assert archived(lake) == sorted(sent)
        sent |= fill(broker, 8)
        archive(lake, data)
        assert archived(lake) == sorted(sent)


def test_what_is_being_written_is_left_out(lake: Path, data: Path) -> None:
    with InProcessBroker(data) as broker, pulque.connect(broker.url) as client:
        client.send("orders", b"not sealed")
        assert archive(lake, data) == []
        client.seal()
        archive(lake, data)
        assert len(archived(lake)) == 1
        client.send("orders", b"not sealed either")
        broker.kill()
    archive(lake, data)
    assert len(archived(lake)) == 1


class Crash(BaseException):
    """As good as kill -9: nothing of ours runs after it."""


@pytest.mark.parametrize("turn", [0, 1])
@pytest.mark.parametrize("step", STEPS)
def test_a_crash_at_any_step_neither_loses_nor_doubles(
    sent: set[tuple[str, bytes]], lake: Path, data: Path, step: str, turn: int
) -> None:
    left = [turn]

    def crash(name: str) -> None:
        if name == step:
            if not left[0]:
                raise Crash
            left[0] -= 1

    runs = archiver(lake, data, step=crash)
    try:
        list(runs.run())
    except Crash:
        pass
    else:
        assert step == "write"  # all segments are written at once
    if (lake / "messages" / "_delta_log").exists():
        found = archived(lake)
        assert len(set(found)) == len(found)
        assert set(found) <= sent
    archive(lake, data)
    assert archived(lake) == sorted(sent)


def test_two_runs_at_once_add_each_segment_once(
    sent: set[tuple[str, bytes]], lake: Path, data: Path
) -> None:
    meet = threading.Barrier(2, timeout=60)

    def step(name: str) -> None:
        if name == "commit":
            meet.wait()

    outcomes: list[list[Outcome]] = [[], []]

    def run(at: int) -> None:
        outcomes[at] += archiver(lake, data, step=step).run()

    threads = [threading.Thread(target=run, args=(at,)) for at in range(2)]
    for each in threads:
        each.start()
    for each in threads:
        each.join(120)

    assert archived(lake) == sorted(sent)
    both = list(zip(*outcomes, strict=True))
    assert len(both) == len(segments(data))
    for one, other in both:
        assert isinstance(one, Archived)
        assert isinstance(other, Archived)
        assert one.was_there != other.was_there
    assert parquet_files(lake) == len(DeltaTable(str(lake / "messages")).file_uris())


def test_a_table_whose_metadata_changes_meanwhile_is_archived_to(
    sent: set[tuple[str, bytes]], lake: Path, data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As it does when two runs make the table at the same moment."""
    commit = DeltaTable.create_write_transaction
    changes = [{"pulque.tried": "2"}, {"pulque.tried": "1"}]

    def late(table: DeltaTable, *arguments: Any, **options: Any) -> None:
        if changes:
            other = DeltaTable(str(lake / "messages"))
            other.alter.set_table_properties(changes.pop(), raise_if_not_exists=False)
        commit(table, *arguments, **options)

    monkeypatch.setattr(DeltaTable, "create_write_transaction", late)
    outcomes = archive(lake, data)

    assert all(isinstance(each, Archived) for each in outcomes)
    assert archived(lake) == sorted(sent)


def test_compaction_and_archive_at_once_disturb_neither(
    sent: set[tuple[str, bytes]], lake: Path, data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    commit = DeltaTable.create_write_transaction
    compacted = []

    def late(table: DeltaTable, *arguments: Any, **options: Any) -> None:
        """Commit to a table that was compacted since it was opened."""
        if DeltaTable(str(lake / "messages")).file_uris():
            compacted.append(compact(str(lake)))
        commit(table, *arguments, **options)

    monkeypatch.setattr(DeltaTable, "create_write_transaction", late)
    assert all(isinstance(each, Archived) for each in archive(lake, data))
    assert any(each.files_after < each.files_before for each in compacted)
    assert archived(lake) == sorted(sent)
    assert archive(lake, data) == []


def test_instants_of_any_year_are_written_as_others_read_them() -> None:
    early, late = datetime(1, 1, 1, tzinfo=UTC), datetime(9999, 12, 31, 23, 59, 59, tzinfo=UTC)
    file = TableFile("a.parquet", 1, 1, (), {"created_at": early}, {"created_at": late})

    written = json.loads(file.statistics())
    assert written["minValues"] == {"created_at": "0001-01-01T00:00:00.000Z"}
    assert written["maxValues"] == {"created_at": "9999-12-31T23:59:59.000Z"}


def test_reports_of_tasks_reach_the_driver_as_they_were_made(
    sent: set[tuple[str, bytes]], lake: Path, data: Path
) -> None:
    made: list[Report] = [
        NotDone(7, 'segment "7": broken', is_damage=True),
        NotYet(8),
        RowsDone(9, (), Tally(), Tally(1, 2, 3, 4), (TableFile("q", 1, 2, (), {}, {}),)),
    ]

    def run(works: Sequence[Work]) -> list[Report]:
        reports = [do_work(work) for work in works]
        made.extend(reports)
        return [report_from_json(report_to_json(report)) for report in reports]

    assert all(
        isinstance(e, Archived) for e in Archiver(str(lake), str(data), "a", lambda: run).run()
    )
    assert archived(lake) == sorted(sent)
    assert {type(report) for report in made} >= {CopyDone, RowsDone, NotDone, NotYet}
    for report in made:
        received = report_from_json(report_to_json(report))
        assert _without_files(received) == _without_files(report)
        assert _statistics(received) == _statistics(report)


def _without_files(report: Report) -> Report:
    return replace(report, files=()) if isinstance(report, RowsDone) else report


def _statistics(report: Report) -> list[str]:
    return [f.statistics() for f in report.files] if isinstance(report, RowsDone) else []


def flip(path: Path, at: int) -> None:
    content = bytearray(path.read_bytes())
    content[at] ^= 1
    path.write_bytes(content)


def flip_body(path: Path) -> None:
    flip(path, path.stat().st_size // 2)


def flip_table(path: Path) -> None:
    flip(path, 60)


def cut(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 100)


def make_newer(path: Path) -> None:
    """Say of every batch that it is of a version nobody knows yet."""
    path.write_bytes(b"PLQ9" + path.read_bytes()[4:])


@pytest.mark.parametrize("harm", [flip_body, flip_table, cut, make_newer])
@pytest.mark.parametrize("has_index", [True, False])
def test_a_damaged_segment_is_named_and_nothing_of_it_is_published(
    sent: set[tuple[str, bytes]],
    lake: Path,
    data: Path,
    harm: Callable[[Path], None],
    has_index: bool,  # noqa: FBT001
) -> None:
    damaged = segments(data)[1]
    whole = damaged.read_bytes()
    if not has_index:
        damaged.with_suffix(".index").unlink(missing_ok=True)
    harm(damaged)

    first = archive(lake, data)
    assert isinstance(first[0], Archived)
    assert isinstance(first[-1], SegmentFailure)
    assert len(first) == 2
    outcomes = archive(lake, data, keep_going=True)
    (failed,) = (each for each in outcomes if isinstance(each, SegmentFailure))
    assert failed.base == int(damaged.stem)
    assert failed.is_damage
    assert damaged.name in failed.reason
    assert "at offset" in failed.reason
    found = rows(lake)
    assert {row["segment"] for row in found} == {
        int(each.stem) for each in segments(data) if each != damaged
    }
    assert parquet_files(lake) == len(DeltaTable(str(lake / "messages")).file_uris())
    assert not (lake / "raw" / "tested" / damaged.name).exists()

    damaged.write_bytes(whole)
    assert len(archive(lake, data)) == 1
    assert archived(lake) == sorted(sent)


def test_what_an_index_counts_must_be_there(
    sent: set[tuple[str, bytes]], lake: Path, data: Path
) -> None:
    assert sent

    def forgetful(works: Sequence[Work]) -> Iterator[Report]:
        return run_here([work for work in works if isinstance(work, CopyWork)])

    (failed,) = Archiver(str(lake), str(data), "tested", lambda: forgetful).run()
    assert isinstance(failed, SegmentFailure)
    assert "its index has" in failed.reason
    assert segments(data)[0].name in failed.reason
    assert not list(lake.rglob("*.log"))
    assert not Table(str(lake)).exists()


def test_an_empty_segment_is_archived_too(lake: Path, data: Path) -> None:
    with InProcessBroker(data) as broker, pulque.connect(broker.url) as client:
        client.send("orders", b"one")
        client.seal()
    # Nothing but the table of partitions, and that is empty.
    first = segments(data)[0]
    alone = data.parent / "alone"
    alone.mkdir()
    size = int.from_bytes(first.read_bytes()[4:8], "little")
    (alone / first.name).write_bytes(first.read_bytes()[:size])
    (alone / f"{size:020d}.log").write_bytes(b"")

    assert archive(lake, alone) == [Archived(0, 0, 0, size)]
    assert archive(lake, alone) == []
    assert archived(lake) == []


AS_NOBODY = """
import os, sys
from pulque.pipeline.archive.message_archiver import Archiver, run_here

def outcomes(lake):
    return list(Archiver(lake, sys.argv[2], "tested", lambda: run_here).run())

outcomes(sys.argv[1] + ".other")  # imports what is needed, which nobody may not read
if os.geteuid() == 0:
    os.setgid(65534)
    os.setuid(65534)
for each in outcomes(sys.argv[1]):
    print(type(each).__name__, each.is_damage, each.reason)
"""


@pytest.fixture
def open_place() -> Iterator[Path]:
    """A directory that others may look into; those of pytest are for their owner alone."""
    with tempfile.TemporaryDirectory() as place:
        Path(place).chmod(0o755)
        yield Path(place)


def test_a_lake_that_must_not_be_written_to_is_named(
    sent: set[tuple[str, bytes]], open_place: Path, data: Path
) -> None:
    lake, seen = open_place / "lake", open_place / "data"
    shutil.copytree(data, seen)
    lake.mkdir(mode=0o555)
    for each in [seen, *seen.rglob("*")]:
        each.chmod(0o755)
    # Root may write anywhere, so a process that is nobody tries.
    tried = subprocess.run(
        [sys.executable, "-c", AS_NOBODY, str(lake), str(seen)],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert tried.stdout.startswith("SegmentFailure False "), tried.stderr
    assert "ermission" in tried.stdout
    assert str(lake) in tried.stdout
    assert not list(lake.iterdir())
    lake.chmod(0o755)
    assert all(isinstance(each, Archived) for each in archive(lake, seen))
    assert archived(lake) == sorted(sent)


def test_clocks_that_are_wrong_change_nothing_but_the_instants_shown(
    lake: Path, tmp_path: Path
) -> None:
    bodies = {b"early", b"now", b"late", b"back"}
    with InProcessBroker(tmp_path / "skewed") as broker, pulque.connect(broker.url) as client:
        clock = broker.clock
        for body, step_s in ((b"early", 0), (b"now", 3600), (b"late", 20 * 3600)):
            broker.advance_time(step_s)
            client.send("orders", body)
        before_ms = clock.now_ms()
        clock.set_now_ms(before_ms - 30 * 3_600_000)
        client.send("orders", b"back")
        client.seal()
    assert all(isinstance(each, Archived) for each in archive(lake, tmp_path / "skewed"))
    rows = DeltaTable(str(lake / "messages")).to_pyarrow_table().to_pylist()

    assert {row["body"] for row in rows} == bodies
    in_order = sorted(rows, key=lambda row: row["sequence"])
    # A broker's own time never goes back, so a range of time is a range of sequences.
    assert [row["stored_at"] for row in in_order] == sorted(row["stored_at"] for row in rows)
    assert {str(row["day"]) for row in rows} == {f"{row['stored_at']:%Y-%m-%d}" for row in rows}


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system with room for less than the archive needs."""
    place = tmp_path / "disk"
    place.mkdir()
    made = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=200k", "tmpfs", str(place)],
        check=False,
        capture_output=True,
        text=True,
    )
    if made.returncode:
        pytest.skip(f"a small disk cannot be mounted here: {made.stderr.strip()}")
    yield place
    subprocess.run(["umount", str(place)], check=True)


def test_a_full_disk_is_named_and_nothing_of_the_segment_is_left(
    sent: set[tuple[str, bytes]], small_disk: Path, data: Path
) -> None:
    lake = small_disk / "lake"
    outcomes = archive(lake, data)

    assert isinstance(outcomes[-1], SegmentFailure)
    assert not outcomes[-1].is_damage
    assert "No space left" in outcomes[-1].reason
    assert not list(lake.rglob(".*.log.*"))
    subprocess.run(["mount", "-o", "remount,size=50m", str(small_disk)], check=True)
    assert all(isinstance(each, Archived) for each in archive(lake, data))
    assert archived(lake) == sorted(sent)
    assert parquet_files(lake) == len(DeltaTable(str(lake / "messages")).file_uris())


def test_a_lake_that_is_a_file_is_named(
    sent: set[tuple[str, bytes]], lake: Path, data: Path
) -> None:
    assert sent
    lake.write_text("not a directory")
    (failed,) = archive(lake, data)
    assert isinstance(failed, SegmentFailure)
    assert str(lake) in failed.reason


def test_two_brokers_of_one_name_are_told_apart(lake: Path, tmp_path: Path) -> None:
    for at in range(2):
        data = tmp_path / f"data-{at}"
        with InProcessBroker(data) as broker, pulque.connect(broker.url) as client:
            client.send("orders", f"from {at}".encode())
            client.seal()
            assert broker_of(str(data), None) != "tested"
            archive(lake, data)
    outcomes = [archive(lake, tmp_path / f"data-{at}") for at in range(2)]
    assert outcomes[0] == []
    (failed,) = outcomes[1]
    assert isinstance(failed, SegmentFailure)
    assert "another broker of the same name" in failed.reason


def test_a_brokers_name_is_its_directorys_id(data: Path, tmp_path: Path) -> None:
    with InProcessBroker(data):
        pass
    assert len(broker_of(str(data), None)) == 16
    assert broker_of(str(data), "west-1") == "west-1"
    with pytest.raises(UsageError, match="not allowed"):
        broker_of(str(data), "../west")
    (tmp_path / "plain").mkdir()
    with pytest.raises(UsageError, match="--broker"):
        broker_of(str(tmp_path / "plain"), None)


def test_a_newer_schema_is_refused(lake: Path, data: Path, sent: set[tuple[str, bytes]]) -> None:
    assert sent
    DeltaTable.create(
        str(lake / "messages"),
        MESSAGES.schema,
        partition_by=["day", "bucket"],
        configuration={"pulque.schema": "2"},
        raise_if_key_not_exists=False,
    )
    with pytest.raises(UsageError, match="version 2 of its schema, and this Pulque knows 1"):
        archive(lake, data)


def test_a_table_of_somebody_else_is_refused(lake: Path) -> None:
    DeltaTable.create(str(lake / "messages"), pa.schema([("a", pa.int64())]))
    with pytest.raises(UsageError, match="not one that Pulque made"):
        Table(str(lake)).open()


@pytest.mark.parametrize("left", ["00000000000000000000.json#1", "_commit_4711.json.tmp"])
def test_a_run_that_died_while_it_made_the_table_is_finished_by_the_next(
    sent: set[tuple[str, bytes]], lake: Path, data: Path, left: str
) -> None:
    log = lake / "messages" / "_delta_log"
    log.mkdir(parents=True)
    (log / left).write_text("{")

    assert all(isinstance(each, Archived) for each in archive(lake, data))
    assert archived(lake) == sorted(sent)


def test_the_whole_log_of_a_new_table_is_synced(
    sent: set[tuple[str, bytes]], lake: Path, data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without its first version no later one can be read."""
    assert sent
    synced: set[str] = set()
    monkeypatch.setattr(WritableTree, "sync", lambda _, path: synced.add(path))
    archive(lake, data)

    log = sorted((lake / "messages" / "_delta_log").glob("*.json"))
    assert len(log) >= 3
    assert {f"messages/_delta_log/{each.name}" for each in log} <= synced


def test_files_are_not_swept_before_their_time(
    sent: set[tuple[str, bytes]], lake: Path, data: Path
) -> None:
    """A run of the archive that goes on for half an hour still needs what it wrote."""
    assert sent
    archive(lake, data)
    (file, *_) = (lake / "messages").rglob("*.parquet")
    written = Path(shutil.copy(file, file.with_name("tested-of-another-run.parquet")))
    before = time.time() - 40 * 60
    os.utime(written, (before, before))

    assert sweep(str(lake), timedelta(minutes=59)) == 0
    assert written.exists()
    assert sweep(str(lake), timedelta(minutes=0)) == 1


@pytest.mark.parametrize("name", ["a lake", "läke", "100% (1)", "a#b", "a?b"])
def test_a_lake_may_have_almost_any_name(
    sent: set[tuple[str, bytes]], tmp_path: Path, data: Path, name: str
) -> None:
    lake = tmp_path / name
    assert all(isinstance(each, Archived) for each in archive(lake, data))
    assert archived(lake) == sorted(sent)


@pytest.mark.parametrize("name", ["a%20lake", "a\\lake"])
def test_a_lake_that_delta_tables_take_for_another_is_refused(
    sent: set[tuple[str, bytes]], tmp_path: Path, data: Path, name: str
) -> None:
    assert sent
    with pytest.raises(UsageError, match=r"neither a percent sign before two .* is allowed"):
        archive(tmp_path / name, data)
    assert not (tmp_path / name).exists()
