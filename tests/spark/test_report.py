"""The report against figures counted one message at a time, in plain Python."""

import json
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

import pytest

import pulque
from pulque.testing.broker import InProcessBroker

pytest.importorskip("pyspark")
from deltalake import DeltaTable
from pyspark.sql import SparkSession

from pulque.cli.app import run as run_command
from pulque.cli.common.options import Tools
from tests.spark.test_audit import archive

pytestmark = pytest.mark.timeout(600)
TWICE = pulque.RetryPolicy(delays=[0.1], max_attempts=2)
Rows = list[dict[str, Any]]


def take(consumer: pulque.Consumer, count: int) -> list[pulque.ReceivedMessage]:
    found: list[pulque.ReceivedMessage] = []
    while len(found) < count:
        some = consumer.pull(count - len(found), timeout=5)
        assert some, f"{len(found)} of {count}"
        found += some
    return found


def cook_some(broker: InProcessBroker, client: pulque.Client) -> None:
    with client.consumer("orders", "kitchen", consumer_id="cook", retry=TWICE) as cook:
        first = take(cook, 25)
        broker.advance_time(2)
        second = take(cook, 25)
        broker.advance_time(0.7)
        cook.ack_all(first[:10])
        cook.settle()
        broker.advance_time(5)
        for at, message in enumerate((*first[10:], *second[:15])):
            message.ack() if at % 9 else message.nack("burnt" if at % 2 else "<raw>")
        cook.settle()
        broker.advance_time(1)
        for message in take(cook, 4):
            message.ack()
        cook.settle()
        client.seal()


def tell_a_story(broker: InProcessBroker, client: pulque.Client) -> None:
    """Settle in other ranges than was pulled, late; nack, set back, hold some."""
    with client.producer() as producer:
        for number in range(90):
            pending = producer.send("orders", b"x" * number, key=f"k{number % 7 % 4}")
            pending.result(20)
    client.send("lonely", b"nobody comes")
    cook_some(broker, client)
    with client.consumer("orders", "again", consumer_id="a") as again:
        again.ack_all(take(again, 30))
        again.settle()
    client.reset("orders", "again", "earliest")
    with client.consumer("orders", "again", consumer_id="a") as again:
        found = take(again, 12)
        broker.advance_time(3)
        again.ack_all(found)
        again.settle()
    with client.consumer("orders", consumer_id="screen", broadcast=True) as screen:
        screen.ack_all(take(screen, 15))
        screen.settle()
    # Its deliveries have the numbers of messages: they come a second time.
    client.reset("orders", "#screen", "earliest")
    with client.consumer("orders", consumer_id="screen", broadcast=True) as screen:
        found = take(screen, 11)
        broker.advance_time(4)
        screen.ack_all(found)
        screen.settle()
    client.seal()


@pytest.fixture(scope="module")
def lake(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("report")
    settings = {"archive": True, "segment_size": "64KiB"}
    with InProcessBroker(place / "data", storage=settings) as broker:
        with pulque.connect(broker.url) as client:
            tell_a_story(broker, client)
        archive(place / "data", place / "lake")
    return place / "lake"


# ── one message at a time ──────────────────────────────────────────────────────────────────


def rows_of(lake: Path, table: str) -> Rows:
    rows: Rows = DeltaTable(str(lake / table)).to_pyarrow_table().to_pylist()
    return rows


class Oracle:
    """What the tables say, delivery by delivery."""

    def __init__(self, lake: Path) -> None:
        self.messages = rows_of(lake, "messages")
        created = {(row["partition"], row["sequence"]): row for row in self.messages}
        self.handling: dict[tuple[str, str], list[float]] = defaultdict(list)
        self.by_consumer: dict[tuple[str, str], list[float]] = defaultdict(list)
        self.ends: dict[tuple[str, str], list[float]] = defaultdict(list)
        held: dict[tuple[Any, ...], tuple[int, Any]] = {}
        nacked: set[tuple[Any, ...]] = set()
        order = {"nacked": 0, "settled": 1}
        facts = rows_of(lake, "consumption")
        for fact in sorted(facts, key=lambda row: (row["offset"], order.get(row["kind"], 2))):
            key = (fact["partition"], fact["group"], fact["consumer"])
            pulls = range(
                fact["first_pull"] or 0, (fact["first_pull"] or 0) + (fact["count"] or 0)
            )
            for at, pull in enumerate(pulls):
                if fact["kind"] == "pulled":
                    held[*key, pull] = (fact["first_sequence"] + at, fact["at"])
                elif fact["kind"] == "nacked":
                    nacked.add((*key, pull))
                elif fact["kind"] == "settled":
                    sequence, handed_at = held.pop((*key, pull))
                    took = (fact["at"] - handed_at).total_seconds() * 1000
                    self.handling[fact["subject"], fact["group"]].append(took)
                    self.by_consumer[fact["group"], fact["consumer"]].append(took)
                    if (*key, pull) not in nacked:
                        since = created[fact["partition"], sequence]["created_at"]
                        whole = (fact["at"] - since).total_seconds() * 1000
                        self.ends[fact["subject"], fact["group"]].append(max(whole, 0))
                    nacked.discard((*key, pull))
        self.facts = facts
        self.unsettled = Counter(key[1:3] for key in held)
        self.sent = [row for row in self.messages if not row["partition"].startswith("%")]
        self.reasons = Counter(row["reason"] for row in facts if row["kind"] == "nacked")


def percentile(values: list[float], share: float) -> float:
    ordered = sorted(values)
    place = share * (len(ordered) - 1)
    low = int(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


def run(capsys: pytest.CaptureFixture[str], lake: Path, *more: str) -> tuple[int, Rows]:
    arguments = ["pipeline", "report", "--lake", str(lake), "-o", "json", *more]
    code = run_command(arguments, Tools(connect=pulque.connect))
    return code, [json.loads(line) for line in capsys.readouterr().out.splitlines()]


def check_latency(printed: Rows, kind: str, expected: dict[tuple[str, str], list[float]]) -> None:
    found = {(row["subject"], row["group"]): row for row in printed if row["kind"] == kind}
    assert found.keys() == expected.keys()
    for key, values in expected.items():
        row = found[key]
        assert row["messages"] == len(values), key
        for name, share in (("p50", 0.5), ("p90", 0.9), ("p99", 0.99), ("longest", 1)):
            assert row[name] == pytest.approx(percentile(values, share), rel=0.01, abs=1), key


def test_the_report_is_what_one_counts_by_hand(
    spark: SparkSession, lake: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert spark
    path = tmp_path / "report.html"
    code, printed = run(capsys, lake, "--html", str(path))
    for each in printed:
        print(each)
    assert code == 0
    oracle = Oracle(lake)
    assert len(oracle.handling["orders", "again"]) == 42
    assert len(oracle.handling["orders", "kitchen"]) == 44
    assert len(oracle.handling["orders", "#screen"]) == 26
    check_latency(printed, "handling", oracle.handling)
    check_latency(printed, "end_to_end", oracle.ends)
    for row in (row for row in printed if row["kind"] == "consumer"):
        key = (row["group"], row["consumer"])
        assert row["settled"] == len(oracle.by_consumer[key])
        assert row["unsettled"] == oracle.unsettled[key]
    hours = Counter[str]()
    sizes = Counter[str]()
    for row in (row for row in printed if row["kind"] == "hour"):
        hours[row["subject"]] += row["messages"]
        sizes[row["subject"]] += row["size"]
    assert hours == Counter(row["subject"] for row in oracle.sent) == {"orders": 90, "lonely": 1}
    assert sizes["orders"] == sum(range(90))
    keys = {row["key"]: row["messages"] for row in printed if row["kind"] == "key"}
    assert keys == Counter(row["key"] for row in oracle.sent if row["key"])
    reasons = Counter(
        {row["reason"]: row["times"] for row in printed if row["kind"] == "failures"}
    )
    assert reasons == oracle.reasons
    retries = sum(row["redelivered"] for row in printed if row["kind"] == "redeliveries")
    assert retries == sum(row["partition"].startswith("%retry%") for row in oracle.messages) > 0
    assert printed[-1]["settled"] == sum(map(len, oracle.handling.values()))
    text = path.read_text(encoding="utf-8")
    assert "kitchen" in text
    assert "&lt;raw&gt;" in text


def test_a_report_of_nothing_says_so(
    spark: SparkSession, lake: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert spark
    code, printed = run(capsys, lake, "--subject", "order'; --", "--until", "2026-01-01")
    assert (code, [row["kind"] for row in printed]) == (4, ["result"])
    assert run(capsys, tmp_path / "none")[0] == 2
    code, printed = run(capsys, lake, "--subject", "lonely")
    assert (code, printed[-1]["messages"], printed[-1]["settled"]) == (0, 1, 0)
    assert "nothing was settled yet" in printed[-1]["notes"][0]


def test_a_part_is_that_group_and_that_time(
    spark: SparkSession, lake: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert spark
    settles = [
        row for row in Oracle(lake).facts if row["kind"] == "settled" and row["group"] == "kitchen"
    ]
    since = sorted(row["at"] for row in settles)[1]
    code, printed = run(capsys, lake, "--group", "kitchen", "--since", since.isoformat())
    assert code == 0
    later = sum(row["count"] for row in settles if row["at"] >= since)
    assert printed[-1]["settled"] == later < sum(row["count"] for row in settles)
    groups = {row["group"] for row in printed if "group" in row}
    assert groups == {"kitchen"}
