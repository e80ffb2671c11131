"""The audit against what producers and consumers themselves know; then against a spoilt lake."""

import asyncio
import json
import os
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from datetime import UTC, date, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

import pulque
from pulque.errors import PulqueError
from pulque.model.pack import ProducedBy
from pulque.testing.broker import InProcessBroker
from pulque.testing.process import BrokerProcess
from pulque.testing.raw import RawConnection
from tests.malformed import send_batches, torn
from tests.robustness.brokers import flags, wait_until
from tests.robustness.handling import SUBJECT

pytest.importorskip("pyspark")
import pyarrow as pa
from deltalake import DeltaTable, write_deltalake
from pyspark.sql import SparkSession

from pulque.cli.app import run as run_command
from pulque.cli.common.options import Tools
from pulque.pipeline.archive.fact_archiver import FactsArchiver
from pulque.pipeline.archive.message_archiver import Archiver, run_here
from pulque.pipeline.audit.stored import Scope
from pulque.pipeline.audit.summary import Audit, audit
from pulque.pipeline.lake.maintenance import expire

pytestmark = pytest.mark.timeout(600)
TWICE = pulque.RetryPolicy(delays=[0.1], max_attempts=2)
Lines = list[dict[str, Any]]


def archive(data: Path, lake: Path) -> None:
    """Archive what is sealed, in this process: what Spark does is tested elsewhere."""
    messages = Archiver(str(lake), str(data), "tested", lambda: run_here)
    facts = FactsArchiver(str(lake), str(data), "tested", lambda: run_here)
    for each in (*messages.run(), *facts.run()):
        assert not hasattr(each, "reason"), each


def totals(found: Audit) -> dict[tuple[str, str | None], Counter[str]]:
    """Add the hours up."""
    by_group: dict[tuple[str, str | None], Counter[str]] = {}
    for line in found.lines:
        counts = by_group.setdefault((line.subject, line.group), Counter())
        counts.update({"stored": line.stored, "sent": line.sent or 0, **line.states})
    return by_group


class Story:
    """What happens to a broker, and what those who did it know."""

    def __init__(self, broker: InProcessBroker, client: pulque.Client) -> None:
        self.broker = broker
        self.client = client
        self.sent: list[str] = []
        self.expected: dict[tuple[str, str | None], Counter[str]] = {}

    def send(self, count: int, **how: Any) -> None:
        with self.client.producer() as producer:
            for number in range(count):
                tags = ("hot",) if number % 4 == 0 else ()
                pending = producer.send("orders", b"%d" % number, tags=tags, **how)
                self.sent.append(pending.result(20).id)

    def take(self, consumer: pulque.Consumer, count: int) -> list[pulque.ReceivedMessage]:
        """Pull so many, however they come."""
        found: list[pulque.ReceivedMessage] = []
        while len(found) < count:
            some = consumer.pull(count - len(found), timeout=5)
            assert some, f"{len(found)} of {count}"
            found += some
        return found

    def ack(self, group: str, count: int, **how: Any) -> None:
        """Handle so many, and leave."""
        with self.client.consumer("orders", group, consumer_id=f"{group}-1", **how) as consumer:
            consumer.ack_all(self.take(consumer, count))
            consumer.settle()

    def expect(self, group: str | None, **states: int) -> None:
        everything = {"stored": len(self.sent), "sent": len(self.sent), **states}
        self.expected["orders", group] = Counter(everything)

    # -- groups ------------------------------------------------------------------------------

    def fail_often(self) -> None:
        """Nack, retry, die, resend, purge; then go with some held."""
        with self.client.consumer(
            "orders", "kitchen", consumer_id="cook", retry=TWICE
        ) as consumer:
            first = self.take(consumer, 60)
            for at, message in enumerate(first):
                message.ack() if at % 10 else message.nack("burnt")
            consumer.settle()
            self.broker.advance_time(1)
            failed = {message.id for message in first[::10]}
            others = self.wait_for(consumer, failed, lambda message: message.nack("again"))
            letters = self.client.dead("orders", "kitchen")
            wait_until(lambda: letters.count() == len(failed), within=20, what="dead letters")
            (one, two, *_) = letters.list()
            letters.resend(one.sequence)
            others += self.wait_for(consumer, {one.id}, lambda message: message.ack())
            letters.purge(until=two.sequence)
            for message in self.take(consumer, 10):
                message.nack("later", delay=3600)
            consumer.settle()
            self.take(consumer, 5)
            self.broker.advance_time(1)
            self.client.seal()
            # Of the 6 that failed one was resent, one purged.
            states = {"settled": 54 + 1 + others, "dead": 4, "purged": 1, "retry": 10, "held": 5}
            self.expect("kitchen", **states, new=len(self.sent) - sum(states.values()))

    def wait_for(
        self,
        consumer: pulque.Consumer,
        ids: set[str],
        handle: Callable[[pulque.ReceivedMessage], None],
    ) -> int:
        """Handle these messages, and ack all that come in between; return how many those were."""
        others = 0
        left = set(ids)
        while left:
            (message,) = self.take(consumer, 1)
            if message.id in left:
                left.remove(message.id)
                handle(message)
            else:
                others += 1
                message.ack()
            consumer.settle()
        return others

    def filter_by_tag(self) -> None:
        hot = len(self.sent) // 4
        self.ack("hot", hot, tags=("hot",))
        with self.client.consumer("orders", "hot", consumer_id="hot-1", tags=("hot",)) as consumer:
            assert not consumer.pull(10, timeout=0.2)
        self.hot = hot

    def set_back(self) -> None:
        self.ack("again", 50)
        self.client.reset("orders", "again", "earliest")
        self.ack("again", 30)

    def skip(self) -> None:
        self.ack("hasty", 10)
        self.client.reset("orders", "hasty", "latest")

    def hand_over(self) -> None:
        """Consume in order: one leaves with some unsettled, one falls silent, one gives up."""
        for number in range(60):
            self.client.send("rows", b"%d" % number, order_key=f"{number}")
        how: dict[str, Any] = {"ordered": True, "retry": TWICE}
        with self.client.consumer("rows", "line", consumer_id="leaves", **how) as consumer:
            self._ack_some(consumer, handed=20, acked=10)
        silent = self.client.consumer("rows", "line", consumer_id="silent", **how)
        self._ack_some(silent, handed=20, acked=10)
        self.broker.advance_time(40, heartbeats=False)
        with self.client.consumer("rows", "line", consumer_id="heir", **how) as heir:
            self._ack_some(heir, handed=20, acked=20)
        silent.close()
        states = {"stored": 60, "sent": 60, "settled": 40, "new": 20}
        self.expected["rows", "line"] = Counter(states)

    def _ack_some(self, consumer: pulque.Consumer, *, handed: int, acked: int) -> None:
        messages = self.take(consumer, handed)
        assert int(messages[0].body) % 10 == 0
        for message in messages[:acked]:
            message.ack()
        consumer.settle()

    def lose(self) -> None:
        """A consumer goes silent with some messages; another one handles them."""
        lost = self.client.consumer("orders", "team", consumer_id="lost", retry=TWICE)
        lost.ack_all(self.take(lost, 10))
        lost.settle()
        self.take(lost, 7)
        self.broker.advance_time(40, heartbeats=False)
        with self.client.consumer("orders", "team", consumer_id="heir", retry=TWICE) as heir:
            self.broker.advance_time(2)
            got = self.take(heir, 20)
            heir.ack_all(got)
            heir.settle()


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Story]:
    """A lake of a broker that saw everything that can happen, and what is true of it."""
    place = tmp_path_factory.mktemp("story")
    settings = {"archive": True, "segment_size": "64KiB"}
    with InProcessBroker(place / "data", storage=settings) as broker:
        with pulque.connect(broker.url) as client:
            story = Story(broker, client)
            story.send(100)
            story.send(20, priority=7)
            for act in (story.filter_by_tag, story.set_back, story.skip, story.lose):
                act()
            story.ack("once", 30, mode="once")
            with client.consumer("orders", consumer_id="screen", broadcast=True) as screen:
                screen.ack_all(story.take(screen, 15))
                screen.settle()
            client.send("lonely", b"nobody comes")
            story.hand_over()
            with client.consumer("orders", "late", start="latest", consumer_id="late-1") as late:
                assert not late.pull(1, timeout=0.1)
                story.send(8)
                late.ack_all(story.take(late, 3))
                late.settle()
                time.sleep(0.2)
            story.fail_often()
            sent = len(story.sent)
        story.expect("again", settled=30, new=sent - 30)
        story.expect("once", settled=30, new=sent - 30)
        story.expect("#screen", settled=15, new=sent - 15)
        story.expect("late", settled=3, before=120, new=sent - 123)
        archive(place / "data", place / "lake")
    return place, story


def write_receipts(path: Path, *receipts: dict[str, Any]) -> str:
    path.write_text("\n".join(json.dumps(each) for each in receipts))
    return str(path)


def test_the_audit_knows_what_everybody_knows(
    spark: SparkSession, told: tuple[Path, Story], tmp_path: Path
) -> None:
    place, story = told
    later = {"id": "f" * 32, "partition": "orders", "sequence": 10**6}
    known = [{"id": each} for each in story.sent]
    receipts = write_receipts(tmp_path / "receipts", *known, later)
    found = audit(spark, str(place / "lake"), receipts=receipts)
    for each in found.found:
        print(each)
    assert found.is_exact
    assert all(line.is_even for line in found.lines)
    by_group = totals(found)
    for key, expected in story.expected.items():
        assert by_group[key] == expected, key
    assert by_group["lonely", None] == {"stored": 1, "sent": 1}
    # What was passed over on the way to the tags is told apart where a whole pull was.
    hot = by_group["orders", "hot"]
    assert hot["settled"] + hot["filtered"] == 120
    hasty = by_group["orders", "hasty"]
    assert (hasty["settled"], hasty["skipped"], hasty["new"]) == (10, 110, 8)
    team = by_group["orders", "team"]
    assert team["settled"] + team["new"] == len(story.sent)
    assert team["settled"] == 30


def spoil(place: Path, name: str) -> Path:
    """Return a copy of the lake that may be spoilt."""
    copy = place / name
    subprocess.run(["cp", "-r", str(place / "lake"), str(copy)], check=True)
    return copy


def rows_of(lake: Path, table: str, condition: str) -> pa.Table:
    import duckdb

    everything = DeltaTable(str(lake / table)).to_pyarrow_table()
    with duckdb.connect() as connection:
        connection.register("everything", everything)
        found = connection.table("everything").filter(condition).to_arrow_table()
    return found.cast(everything.schema)


def remove(lake: Path, table: str, condition: str) -> None:
    DeltaTable(str(lake / table)).delete(condition)


def spoil_messages(lake: Path) -> dict[int, str]:
    """Take two messages away, double one; return the ids of all."""
    rows = rows_of(lake, "messages", "partition = 'orders'").to_pylist()
    ids = {row["sequence"]: row["message_id"] for row in rows}
    remove(lake, "messages", f"partition = 'orders' AND sequence IN (17, {max(ids)})")
    double = rows_of(lake, "messages", "partition = 'orders' AND sequence = 33")
    write_deltalake(str(lake / "messages"), double, mode="append")
    return ids


def spoil_facts(lake: Path) -> None:
    """Take a settle and a nack away, and make a settle up."""
    of = "kind = 'settled' AND \"group\" ="
    cooked = rows_of(lake, "consumption", f"{of} 'kitchen' AND partition = 'orders'").to_pylist()
    *_, settle, _ = sorted(cooked, key=lambda row: row["offset"])
    assert settle["count"] == 1
    remove(lake, "consumption", f"offset = {settle['offset']} AND kind = 'settled'")
    burnt = "kind = 'nacked' AND reason = 'burnt' AND first_pull = 10 AND partition = 'orders'"
    assert rows_of(lake, "consumption", burnt).num_rows == 1
    remove(lake, "consumption", burnt)
    made_up = rows_of(lake, "consumption", f"{of} 'late'").slice(0, 1)
    (row,) = made_up.to_pylist()
    row |= {"first_pull": row["first_pull"] + row["count"], "count": 2, "offset": 10**9}
    spoilt = pa.Table.from_pylist([row], made_up.schema)
    write_deltalake(str(lake / "consumption"), spoilt, mode="append")


def test_what_is_missing_doubled_or_made_up_is_named(
    spark: SparkSession,
    told: tuple[Path, Story],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert spark
    place, story = told
    lake = spoil(place, "spoilt")
    ids = spoil_messages(lake)
    spoil_facts(lake)
    never = {"id": "0" * 32, "partition": "orders", "sequence": 5}
    receipts = write_receipts(tmp_path / "receipts", {"id": ids[1]}, never)

    arguments = ["pipeline", "audit", "--lake", str(lake), "-o", "json", "--receipts", receipts]
    assert run_command(arguments, Tools(connect=pulque.connect)) == 1
    printed = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    breaks = [line for line in printed if line["kind"] == "break"]
    for each in breaks:
        print(each)
    of_messages = {
        (each["flaw"], each.get("first"), each.get("message_id"))
        for each in breaks
        if "group" not in each and "note" not in each
    }
    assert of_messages == {
        ("not_stored", 17, ids[17]),
        ("not_stored", max(ids), ids[max(ids)]),
        ("stored_twice", 33, ids[33]),
        ("receipt_unstored", 5, "0" * 32),
    }
    by_flaw = {each["flaw"]: each for each in breaks if "group" in each}
    assert by_flaw.keys() == {"settled_unpulled", "retried_unfailed", "settle_missing"}
    unpulled = by_flaw["settled_unpulled"]
    assert (unpulled["group"], unpulled["consumer"], unpulled["count"]) == ("late", "late-1", 2)
    assert by_flaw["retried_unfailed"]["group"] == "kitchen"
    assert by_flaw["retried_unfailed"]["message_id"] in story.sent
    assert by_flaw["settle_missing"]["group"] == "kitchen"
    assert by_flaw["settle_missing"]["message_id"] in story.sent
    assert any("rows of" in each.get("note", "") for each in breaks)
    assert printed[-1]["is_exact"] is False
    assert printed[-1]["breaks"] == len(breaks)


CRASHES = {
    "consumption.lease": "1500ms",
    "consumption.lease_check": "200ms",
    "retry.delays": "100ms 300ms",
    "retry.attempts": 3,
    "storage.checkpoint_interval": "1s",
    "storage.segment_size": "256KiB",
    "storage.archive": "true",
}


def start_consumer(url: str, folder: Path, name: str) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "tests.robustness.handling", url, "crew", name]
    return subprocess.Popen(
        [*command, str(folder / f"{name}.handled")],
        stdout=subprocess.DEVNULL,
        env={**os.environ, "PULQUE_STATE_DIR": str(folder / "state")},
    )


def keep_sending(url: str, stop: threading.Event, confirmed: list[str]) -> None:
    with pulque.connect(url, timeout=60) as client:
        number = 0
        while not stop.wait(0.02):
            bodies = [b"%d" % (number + each) for each in range(50)]
            number += 50
            try:
                confirmed += [receipt.id for receipt in client.send_many(SUBJECT, bodies)]
            except PulqueError as error:
                print("not confirmed:", error)


def crash_under_load(broker: BrokerProcess, folder: Path) -> list[str]:
    """Kill consumers and the broker while messages flow; return the ids that were confirmed."""
    confirmed: list[str] = []
    stop = threading.Event()
    sender = threading.Thread(target=keep_sending, args=(broker.url, stop, confirmed))
    consumers = {name: start_consumer(broker.url, folder, name) for name in ("ana", "ben")}
    sender.start()
    try:
        for victim in ("ana", "ben"):
            wait_until((folder / "ben.handled").exists, within=30, what="work")
            time.sleep(0.7)
            consumers[victim].kill()
            consumers[victim].wait()
            broker.kill()
            broker.restart()
            consumers[victim] = start_consumer(broker.url, folder, victim)
        time.sleep(0.5)
        stop.set()
        sender.join(60)
        with pulque.connect(broker.url, timeout=30) as client:
            wait_until(lambda: is_drained(client), within=60, what="the group has drained")
            client.seal()
    finally:
        stop.set()
        sender.join(60)
        for consumer in consumers.values():
            consumer.kill()
            consumer.wait()
    return confirmed


def is_drained(client: pulque.Client) -> bool:
    time.sleep(0.2)
    return bool(client.status()["messages_left"] == 0)


@pytest.mark.server
@pytest.mark.slow
def test_the_audit_of_a_crash_is_exact(
    spark: SparkSession, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert spark
    lake = tmp_path / "lake"
    with BrokerProcess.start(tmp_path / "data", arguments=flags(CRASHES)) as broker:
        confirmed = crash_under_load(broker, tmp_path)
        with pulque.connect(broker.url) as client:
            dead = client.dead(SUBJECT, "crew").count()
        archive(broker.data, lake)
    receipts = write_receipts(tmp_path / "receipts", *({"id": each} for each in confirmed))
    arguments = ["pipeline", "audit", "--lake", str(lake), "--subject", SUBJECT, "-o", "json"]
    code = run_command([*arguments, "--receipts", receipts], Tools(connect=pulque.connect))
    printed = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    for each in printed:
        print(each)
    assert code == 0
    lines = [each for each in printed if each["kind"] == "line"]
    assert {line["group"] for line in lines} == {"crew"}
    stored = sum(line["stored"] for line in lines)
    assert stored >= len(confirmed) > 0
    assert sum(line["dead"] for line in lines) == dead > 0
    assert sum(line["settled"] for line in lines) == stored - dead
    handled = {
        line for path in tmp_path.glob("*.handled") for line in path.read_text().splitlines()
    }
    assert len(handled) == stored - dead


REWRITTEN: dict[int, dict[str, Any]] = {
    3: {"body": b"forged"},
    5: {"key": "another"},
    8: {"key": None, "order_key": "key-8"},
    13: {"headers": [("n", "forged")]},
    21: {"tags": ["cold"]},
    34: {"created_at": datetime(2020, 1, 1, tzinfo=UTC)},
    55: {"message_id": "0" * 32},
    89: {"priority": 9, "segment": 4096},
}
"""What is written over the rows of some sequences."""


@pytest.fixture(scope="module")
def plain_lake(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[int, str]]:
    """A lake of 200 messages with all parts; and the id of each sequence."""
    place = tmp_path_factory.mktemp("plain")
    with InProcessBroker(place / "data", storage={"archive": True}) as broker:
        with pulque.connect(broker.url) as client, client.producer() as producer:
            sent = [
                producer.send(
                    "orders",
                    b"body %d" % number,
                    key=f"key-{number}",
                    tags=("hot",),
                    headers={"n": str(number)},
                )
                for number in range(200)
            ]
            producer.flush()
            ids = {int(each.result().sequence): each.result().id for each in sent}
            client.send("others", b"left alone")
            client.seal()
        archive(place / "data", place / "lake")
    return place, ids


def test_batches_that_a_producer_numbered_and_that_are_not_stored_are_counted(
    spark: SparkSession, tmp_path: Path
) -> None:
    async def send(url: str) -> None:
        raw = await RawConnection.open(url)
        # One was refused; behind the second start of a delay server the numbers go on far off.
        for number in (0, 1, 3, 1 << 32, (1 << 32) + 1):
            await raw.send("orders", [b"x"], produced_by=ProducedBy(7, 0, number))
        raw.close()

    with InProcessBroker(tmp_path / "data", storage={"archive": True}) as broker:
        asyncio.run(send(broker.url))
        with pulque.connect(broker.url) as client:
            client.seal()
        archive(tmp_path / "data", tmp_path / "lake")

    found = audit(spark, str(tmp_path / "lake"))

    assert found.is_exact
    assert [note for note in found.notes if note.startswith("1 batches of 1 producers")]


def rewrite(lake: Path, sequence: int, values: dict[str, Any]) -> None:
    """Put another row in the place of one of the table's."""
    condition = f"partition = 'orders' AND sequence = {sequence}"
    row = rows_of(lake, "messages", condition)
    for name, value in values.items():
        at = row.schema.get_field_index(name)
        row = row.set_column(at, row.field(name), pa.array([value], row.field(name).type))
    remove(lake, "messages", condition)
    write_deltalake(str(lake / "messages"), row, mode="append")


def damage_copy(lake: Path, body: bytes) -> None:
    """Turn a body round in the copy of the segment that holds it."""
    (copy,) = (lake / "raw" / "tested").glob("*.log")
    data = copy.read_bytes()
    assert data.count(body) == 1
    copy.write_bytes(data.replace(body, body[::-1]))


def test_rows_and_copies_that_were_rewritten_are_named(
    spark: SparkSession, plain_lake: tuple[Path, dict[int, str]]
) -> None:
    place, ids = plain_lake
    assert audit(spark, str(place / "lake")).is_exact

    lake = spoil(place, "rewritten")
    for sequence, values in REWRITTEN.items():
        rewrite(lake, sequence, values)
    damage_copy(lake, b"left alone")
    found = audit(spark, str(lake))

    assert not found.is_exact
    assert found.wrong == len(REWRITTEN) + 1
    named = {(each.flaw, each.partition, each.first): each for each in found.found}
    assert named.pop(("copy_damaged", "others", 0))
    assert named.keys() == {("rewritten", "orders", each) for each in REWRITTEN}
    for sequence, values in REWRITTEN.items():
        each = named["rewritten", "orders", sequence]
        assert each.note == ", ".join(values)
        assert each.message_id == ids[sequence]


def test_a_copy_that_cannot_be_read_is_named_and_the_rest_is_compared(
    spark: SparkSession, tmp_path: Path
) -> None:
    data, lake = tmp_path / "data", tmp_path / "lake"
    with InProcessBroker(data) as broker, pulque.connect(broker.url) as client:
        for bodies in ([b"1", b"2"], [b"3"], [b"4"]):
            client.send_many("orders", bodies)
            client.seal()
    archive(data, lake)
    first, second, _ = sorted((lake / "raw" / "tested").glob("*.log"))
    for copy in (first, second):
        spoilt = bytearray(copy.read_bytes())
        spoilt[70] ^= 0xFF  # in the table that names its partitions
        copy.write_bytes(spoilt)

    found = audit(spark, str(lake))
    assert [(each.flaw, each.partition) for each in found.found] == [("copy_damaged", None)] * 2
    for copy, each in zip((first, second), found.found, strict=True):
        assert copy.name in str(each.note)
    assert any(note.startswith("3 rows are of segments without a copy") for note in found.notes)

    assert rows_of(lake, "messages", "sequence = 3").num_rows == 1
    remove(lake, "messages", "sequence = 3")
    found = audit(spark, str(lake))
    assert [each.flaw for each in found.found] == ["copy_damaged", "copy_damaged", "not_stored"]


def test_what_expired_is_not_missed(spark: SparkSession, tmp_path: Path) -> None:
    data, lake = tmp_path / "data", tmp_path / "lake"
    with InProcessBroker(data) as broker, pulque.connect(broker.url) as client:
        client.send("quiet", b"1")
        client.send("orders", b"1")
        client.seal()
        broker.advance_time(86_400)
        assert send_batches(broker.url, "orders", torn("orders")) == ["NONE"]
        client.seal()
        broker.advance_time(86_400)
        client.send("orders", b"5")
        client.seal()
        day = datetime.fromtimestamp(broker.clock.now_ms() / 1000, UTC).date()
    archive(data, lake)

    for before, left in ((day - timedelta(days=1), 4), (day, 1), (day + timedelta(days=1), 0)):
        expire(str(lake), before)
        for scope in (Scope(), Scope(subject="quiet")):
            found = audit(spark, str(lake), scope)
            assert found.is_exact, (before, scope, found.found)
            stored = sum(line.stored for line in found.lines)
            assert stored == (0 if scope.subject else left)
    assert audit(spark, str(lake)).lines == []


def test_the_copy_of_a_segment_is_kept_as_long_as_its_bad_batches(tmp_path: Path) -> None:
    data, lake = tmp_path / "data", tmp_path / "lake"
    with InProcessBroker(data) as broker, pulque.connect(broker.url) as client:
        assert send_batches(broker.url, "orders", torn("orders")) == ["NONE"]
        client.seal()
        client.send("orders", b"3")
        client.seal()
    archive(data, lake)

    assert expire(str(lake), date(2020, 1, 1)).segments == 0
    assert len(list((lake / "raw" / "tested").glob("*.log"))) == 2
