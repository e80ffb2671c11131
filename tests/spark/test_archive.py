"""The archive on Spark: what Spark wrote is in the table once, for Spark and for everybody."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from datetime import UTC, date, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

import pulque
from pulque.errors import StorageError
from pulque.testing.broker import InProcessBroker

pytest.importorskip("pyspark")
from deltalake import DeltaTable
from pyspark import cloudpickle
from pyspark.sql import SparkSession

from pulque.cli.app import run as run_command
from pulque.cli.common.options import Tools
from pulque.pipeline.archive.message_archiver import Archived, Archiver, run_here, run_on_spark
from pulque.pipeline.archive.tasks import Report, RowsDone, Work, do_work
from pulque.pipeline.lake.maintenance import compact, expire, sweep
from pulque.pipeline.lake.table import view
from pulque.pipeline.query import Question, ask

SUBJECTS = ("orders", "orders.paid", "refunds")
Sent = dict[str, bytes]


def fill(broker: InProcessBroker, first: int, end: int) -> Sent:
    """Send numbers as bodies, and seal them; return them by id."""
    sent: Sent = {}
    with pulque.connect(broker.url) as client:
        with client.producer(max_batch=20) as producer:
            pending = [
                producer.send(
                    SUBJECTS[number % len(SUBJECTS)],
                    str(number).encode(),
                    key=f"key-{number}",
                    headers={"number": str(number)},
                )
                for number in range(first, end)
            ]
            for number, each in zip(range(first, end), pending, strict=True):
                sent[each.result(20).id] = str(number).encode()
        client.seal()
    return sent


@pytest.fixture
def broker(tmp_path: Path) -> Iterator[InProcessBroker]:
    with InProcessBroker(tmp_path / "data", storage={"segment_size": "64KiB"}) as found:
        yield found


def pipeline(*arguments: str) -> int:
    return run_command(["pipeline", *arguments], Tools(connect=pulque.connect))


def by_strangers(lake: Path) -> Sent:
    rows = DeltaTable(str(lake / "messages")).to_pyarrow_table().to_pylist()
    found = {row["message_id"]: row["body"] for row in rows}
    assert len(found) == len(rows)
    return found


def by_spark(spark: SparkSession, lake: Path) -> Sent:
    rows = view(spark, str(lake)).select("message_id", "body").collect()
    found = {row.message_id: bytes(row.body) for row in rows}
    assert len(found) == len(rows)
    return found


def test_all_readers_see_each_message_once(
    spark: SparkSession,
    broker: InProcessBroker,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    lake, data = tmp_path / "lake", str(tmp_path / "data")
    sent = fill(broker, 0, 2000)
    arguments = ("archive", "--lake", str(lake), "--data", data, "-o", "json")

    assert pipeline(*arguments) == 0
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert sum(line["messages"] for line in lines) == 2000
    assert by_strangers(lake) == sent
    assert by_spark(spark, lake) == sent
    sent |= fill(broker, 2000, 2100)
    assert pipeline(*arguments) == 0
    assert pipeline(*arguments) == 0
    assert by_strangers(lake) == sent
    assert by_spark(spark, lake) == sent
    (row,) = spark.sql("SELECT * FROM messages WHERE headers['number'] = '7'").collect()
    assert (row.key, row.subject, bytes(row.body)) == ("key-7", "orders.paid", b"7")
    assert row.day == datetime.fromtimestamp(broker.clock.now_ms() / 1000, UTC).date()

    raw = spark.read.format("pulque").options(
        path=str(next((lake / "raw").iterdir())), subscribePattern=".*"
    )
    assert {each.message_id: bytes(each.body) for each in raw.load().collect()} == sent


def test_a_damaged_segment_fails_the_command_and_no_other(
    spark: SparkSession,
    broker: InProcessBroker,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert spark
    lake, data = tmp_path / "lake", tmp_path / "data"
    sent = fill(broker, 0, 3000)
    damaged = min((data / "messages").glob("*.log"))
    content = bytearray(damaged.read_bytes())
    content[len(content) // 2] ^= 1
    damaged.write_bytes(content)
    arguments = ("archive", "--lake", str(lake), "--data", str(data))

    assert pipeline(*arguments) == 1
    assert not (lake / "messages" / "_delta_log").exists()
    assert pipeline(*arguments, "--keep-going") == 1
    printed = capsys.readouterr().out
    assert f"{damaged.name} at offset" in printed
    found = by_strangers(lake)
    assert 0 < len(found) < len(sent)
    assert found.items() <= sent.items()
    content[len(content) // 2] ^= 1
    damaged.write_bytes(content)
    assert pipeline(*arguments) == 0
    assert by_strangers(lake) == sent


def test_a_worker_that_dies_fails_the_run_and_loses_nothing(
    spark: SparkSession,
    broker: InProcessBroker,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    lake, data = tmp_path / "lake", str(tmp_path / "data")
    sent = fill(broker, 0, 2000)

    def die(work: Work) -> Report:
        """Do the work, and die before anybody hears of rows that were written."""
        report = do_work(work)
        if isinstance(report, RowsDone):
            os.kill(os.getpid(), signal.SIGKILL)
        return report  # of a copied file: had it died of that, there might be no rows yet

    here = sys.modules[__name__]
    cloudpickle.register_pickle_by_value(here)  # type: ignore[no-untyped-call]
    monkeypatch.setattr("pulque.pipeline.archive.message_archiver.do_work", die)
    with pytest.raises(StorageError, match="Spark could not do the work"):
        list(Archiver(str(lake), data, "tested", lambda: run_on_spark(spark)).run())
    monkeypatch.undo()
    cloudpickle.unregister_pickle_by_value(here)  # type: ignore[no-untyped-call]
    assert list(lake.rglob("*.parquet"))  # which nobody will see
    assert not (lake / "messages" / "_delta_log").exists()

    again = list(Archiver(str(lake), data, "tested", lambda: run_on_spark(spark)).run())
    assert all(isinstance(each, Archived) for each in again)
    assert by_strangers(lake) == sent == by_spark(spark, lake)


def test_compaction_changes_files_and_no_row(
    spark: SparkSession, broker: InProcessBroker, tmp_path: Path
) -> None:
    lake, data = tmp_path / "lake", str(tmp_path / "data")
    sent: Sent = {}
    for turn in range(3):
        sent |= fill(broker, turn * 100, turn * 100 + 100)
        list(Archiver(str(lake), data, "tested", lambda: run_on_spark(spark)).run())
    before = by_spark(spark, lake)

    done = compact(str(lake))
    assert done.files_after < done.files_before
    assert by_spark(spark, lake) == before == by_strangers(lake) == sent
    (found,) = ask(str(lake), Question(key="key-150"))
    assert found["body"] == b"150"
    # What was archived stays archived, and what comes is added to it.
    assert list(Archiver(str(lake), data, "tested", lambda: run_on_spark(spark)).run()) == []
    sent |= fill(broker, 300, 310)
    assert len(list(Archiver(str(lake), data, "tested", lambda: run_on_spark(spark)).run())) == 1
    assert by_spark(spark, lake) == sent
    assert sweep(str(lake), timedelta(0)) == done.files_before
    assert by_strangers(lake) == sent


def test_old_days_go_and_do_not_come_back(
    spark: SparkSession, broker: InProcessBroker, tmp_path: Path
) -> None:
    lake, data = tmp_path / "lake", str(tmp_path / "data")
    old = fill(broker, 0, 100)
    broker.advance_time(2 * 86_400)
    young = fill(broker, 100, 200)

    def archive() -> list[Any]:
        return list(Archiver(str(lake), data, "tested", lambda: run_on_spark(spark)).run())

    archive()
    day = datetime.fromtimestamp(broker.clock.now_ms() / 1000, UTC).date()
    gone = expire(str(lake), day - timedelta(days=1))
    assert (gone.rows, gone.segments) == (len(old), 1)
    assert by_strangers(lake) == young == by_spark(spark, lake)
    assert archive() == []
    assert expire(str(lake), date(2020, 1, 1)).rows == 0


def test_a_lake_may_have_a_space_and_an_umlaut_in_its_path(
    spark: SparkSession, broker: InProcessBroker, tmp_path: Path
) -> None:
    lake = tmp_path / "a läke"
    sent = fill(broker, 0, 10)
    list(Archiver(str(lake), str(tmp_path / "data"), "tested", lambda: run_here).run())

    assert by_spark(spark, lake) == sent


PHASES = ("writing", "verify", "publish", "commit", "done")
KILLED = """
import os, signal, sys, threading, time
from pathlib import Path
from pulque.pipeline.archive.message_archiver import Archiver, run_on_spark
from pulque.pipeline.session import spark_session

lake, data, phase = sys.argv[1:]

def kill():
    os.kill(os.getpid(), signal.SIGKILL)

def when_writing():
    for _ in range(60_000):
        if any(Path(lake).rglob("*.parquet")):
            kill()
        time.sleep(0.001)

def step(name):
    if name == phase:
        kill()
    if name == "write" and phase == "writing":
        threading.Thread(target=when_writing, daemon=True).start()

def runner():
    settings = {"spark.driver.memory": "512m"}
    return run_on_spark(spark_session("local[1]", settings=settings))

for outcome in Archiver(lake, data, "tested", runner, step=step).run():
    print(outcome)
"""


@pytest.mark.long
@pytest.mark.timeout(1200)
def test_kill_9_in_each_phase_neither_loses_nor_doubles(
    spark: SparkSession, broker: InProcessBroker, tmp_path: Path
) -> None:
    data = tmp_path / "data"
    sent = fill(broker, 0, 4000)
    for phase in PHASES:
        lake = tmp_path / f"lake-{phase}"
        arguments = [sys.executable, "-c", KILLED, str(lake), str(data), phase]
        killed = subprocess.run(arguments, check=False, timeout=120, env=os.environ)
        assert killed.returncode == -signal.SIGKILL
        if (lake / "messages" / "_delta_log").exists():
            assert by_strangers(lake).items() <= sent.items()
        again = Archiver(str(lake), str(data), "tested", lambda: run_on_spark(spark))
        assert all(isinstance(each, Archived) for each in again.run())
        assert by_strangers(lake) == sent == by_spark(spark, lake)


@pytest.mark.parametrize("is_verbose", [False, True], ids=["quiet", "verbose"])
def test_a_command_shows_spark_s_own_log_only_if_asked(
    broker: InProcessBroker, tmp_path: Path, *, is_verbose: bool
) -> None:
    fill(broker, 0, 30)
    arguments = ["--lake", str(tmp_path / "lake"), "--data", str(tmp_path / "data")]
    options = ["--master", "local[1]", *(["--verbose"] if is_verbose else [])]
    done = subprocess.run(
        [sys.executable, "-m", "pulque", "pipeline", "archive", *arguments, *options],
        check=False,
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("segment 0: 30 messages")
    assert ("WARN" in done.stderr) is is_verbose
    assert is_verbose or not done.stderr
