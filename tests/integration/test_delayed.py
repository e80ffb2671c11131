"""Delayed messages with real delay servers: never early, to the right group, cancelled, moved."""

import asyncio
import json
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Self

import pytest

import pulque
from pulque import Fate, Outgoing, aio
from pulque.testing.cluster import ClusterProcesses
from pulque.testing.process import BrokerProcess

pytestmark = pytest.mark.server

LIMIT = 40.0
DAY = timedelta(days=1)


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ClusterProcesses]:
    """Two brokers and two delay servers; tests use subjects of their own."""
    folder = tmp_path_factory.mktemp("delayed")
    with ClusterProcesses.start(folder, brokers=2) as cluster:
        for name in ("delay-1", "delay-2"):
            cluster.add_delay(name)
        yield cluster


@pytest.fixture
def client(cluster: ClusterProcesses, tmp_path: Path) -> Iterator[pulque.Client]:
    with pulque.connect(cluster.url, state_dir=tmp_path, timeout=LIMIT) as client:
        yield client


def take(consumer: pulque.Consumer, count: int) -> list[tuple[pulque.ReceivedMessage, int]]:
    """Return so many messages, and when each of them came."""
    found: list[tuple[pulque.ReceivedMessage, int]] = []
    deadline = time.monotonic() + LIMIT
    while len(found) < count:
        assert time.monotonic() < deadline, f"{len(found)} of {count} came"
        for message in consumer.pull(timeout=1.0):
            found.append((message, time.time_ns() // 1_000_000))
            message.ack()
    return found


def wait_until(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + LIMIT
    while not condition():
        assert time.monotonic() < deadline, "it did not come true in time"
        time.sleep(0.05)


@pytest.mark.accepts("001-10", "001-11", "001-15", "001-16", "001-32", "004-69", "004-72")
def test_messages_come_when_they_are_due_and_not_before(client: pulque.Client) -> None:
    sent: dict[str, pulque.Receipt] = {}
    for n in range(30):
        at = datetime.now(UTC) + timedelta(milliseconds=200 * n + 2000)
        receipt = client.send("due", b"%d" % n, at=at, key=f"k{n}", tags=["t"], headers={"a": "b"})
        sent[receipt.id] = receipt
    assert {each.broker_group for each in sent.values()} == {"delay-1", "delay-2"}
    seen, now_ms = client.read("due"), time.time_ns() // 1_000_000
    assert all(sent[each.id].due_at_ms <= now_ms for each in seen), "until then nobody sees them"
    with client.consumer("due", "kitchen", tags=["t"]) as consumer:
        came = take(consumer, 30)
        assert consumer.pull(timeout=1.0) == []
    assert {message.id for message, _ in came} == set(sent)
    for message, at_ms in came:
        receipt = sent[message.id]
        assert at_ms >= receipt.due_at_ms, "never early"
        assert message.stored_at_ms >= receipt.due_at_ms
        assert (message.subject, message.partition) == ("due", "due")
        assert message.key == f"k{message.body.decode()}"
        assert (message.headers["a"], message.tags, message.attempt) == ("b", ("t",), 1)


@pytest.mark.accepts("004-67")
def test_a_level_is_a_delay(client: pulque.Client) -> None:
    before = time.time_ns() // 1_000_000
    receipt = client.send("levels", b"x", level=2)
    assert 5000 <= receipt.due_at_ms - before <= 5000 + 1000 * LIMIT
    with client.consumer("levels", "kitchen") as consumer:
        ((message, at_ms),) = take(consumer, 1)
    assert message.id == receipt.id
    assert at_ms >= receipt.due_at_ms


@pytest.mark.accepts("001-31")
def test_two_years_ahead_are_kept_and_more_is_refused(client: pulque.Client) -> None:
    far = client.send("far", b"x", delay=2 * 366 * DAY - timedelta(hours=1))
    wait_until(lambda: client.delayed("far").next())
    (found,) = client.delayed("far").next()
    assert (found.id, found.due_at_ms) == (far.id, far.due_at_ms)
    with pytest.raises(pulque.UsageError, match=r"at most 732.0 days"):
        client.send("far", b"x", delay=733 * DAY)
    with client.producer() as producer:
        fine = producer.send("far", b"fine", delay=DAY)
        with pytest.raises(pulque.UsageError, match=r"at most 732.0 days"):
            producer.send("far", b"x", delay=733 * DAY)
        assert fine.result(LIMIT).due_at_ms
    with pytest.raises(pulque.InvalidRequestError, match=r"ahead|at most|allowed"):
        client.reschedule(far, delay=733 * DAY)
    assert client.cancel(far) is Fate.CANCELLED


def test_priorities_order_keys_and_patterns_are_kept(client: pulque.Client) -> None:
    receipts = client.send_many(
        "kept.parts",
        [
            Outgoing(b"%d" % n, order_key=f"o{n % 3}", priority=9 if n % 2 else 4, delay=1.0)
            for n in range(20)
        ],
    )
    with client.consumer("kept.*", "kitchen") as consumer:
        came = [message for message, _ in take(consumer, 20)]
    assert {each.id for each in came} == {each.id for each in receipts}
    assert {(m.order_key, m.priority) for m in came if m.body == b"7"} == {("o1", 9)}
    assert Counter(m.priority for m in came) == {4: 10, 9: 10}


def test_every_producer_and_both_twins(cluster: ClusterProcesses, client: pulque.Client) -> None:
    with client.producer() as producer:
        pending = producer.send_many(
            "twins", [Outgoing(b"p%d" % n, delay=1.5) for n in range(500)] + [b"now"]
        )
        receipts = pending.result(LIMIT)
    assert [bool(each.due_at_ms) for each in receipts] == [True] * 500 + [False]

    async def send() -> None:
        async with aio.connect(cluster.url) as other:
            await other.send("twins", b"a", delay=1.0)
            async with other.producer() as producer:
                await (await producer.send("twins", b"b", level=1))

    asyncio.run(send())
    with client.consumer("twins", "kitchen") as consumer:
        bodies = Counter(message.body for message, _ in take(consumer, 503))
    assert bodies == Counter([*(b"p%d" % n for n in range(500)), b"now", b"a", b"b"])


def test_what_is_cancelled_never_comes(client: pulque.Client) -> None:
    receipts = [client.send("cancelled", b"%d" % n, delay=3.0) for n in range(20)]
    assert client.cancel(receipts[0]) is Fate.CANCELLED
    assert client.cancel(receipts[0]) is Fate.ALREADY_CANCELLED
    assert client.cancel(receipts[1].id) is Fate.CANCELLED
    assert client.cancel_many(receipts[2:10]) == [Fate.CANCELLED] * 8
    assert client.cancel("00" * 16) is Fate.UNKNOWN
    with client.consumer("cancelled", "kitchen") as consumer:
        came = [message for message, _ in take(consumer, 10)]
        assert consumer.pull(timeout=1.0) == []
    assert {each.id for each in came} == {each.id for each in receipts[10:]}
    assert client.cancel(receipts[15]) is Fate.TOO_LATE
    assert client.delayed("cancelled").next() == []


def test_what_is_moved_comes_once_at_its_new_time(client: pulque.Client) -> None:
    receipts = [client.send("moved", b"%d" % n, delay=DAY) for n in range(4)]
    moves = [client.reschedule(each, delay=1.0 + n) for n, each in enumerate(receipts[:3])]
    assert {each.fate for each in moves} == {Fate.MOVED}
    assert client.reschedule(receipts[0], at=moves[0].due_at).fate in {Fate.MOVED, Fate.TOO_LATE}
    with client.consumer("moved", "kitchen") as consumer:
        came = {message.id: at_ms for message, at_ms in take(consumer, 3)}
        assert consumer.pull(timeout=1.0) == []
    assert set(came) == {each.id for each in receipts[:3]}
    for receipt, move in zip(receipts, moves, strict=False):
        assert came[receipt.id] >= move.due_at_ms
    (left,) = client.delayed("moved").next()
    assert left.id == receipts[3].id
    assert client.cancel(receipts[3]) is Fate.CANCELLED
    assert client.reschedule(receipts[3], delay=1).fate is Fate.ALREADY_CANCELLED


def test_what_waits_is_counted_listed_and_shown(client: pulque.Client) -> None:
    start = (datetime.now(UTC) + 30 * DAY).replace(minute=0, second=0, microsecond=0)
    hour = timedelta(hours=1)
    sent = [
        client.send("listed", b"body %d" % n, at=start + (n % 4) * hour + n * timedelta(seconds=1))
        for n in range(12)
    ]
    wait_until(lambda: len(client.delayed("listed").next()) == 12)
    counts = client.delayed("listed").counts()
    assert [(each.hour, each.messages) for each in counts] == [
        (start + n * hour, 3) for n in range(4)
    ]
    some = client.delayed("listed").counts(start + hour, start + 2 * hour)
    assert [each.messages for each in some] == [3]
    listed = client.delayed("listed").next(5)
    expected = sorted(sent, key=lambda each: each.due_at_ms)[:5]
    assert [each.id for each in listed] == [each.id for each in expected]
    for wanted in (sent[3], sent[3].id):
        shown = client.delayed().show(wanted)
        assert shown is not None
        assert shown.message is not None
        assert (shown.message.body, shown.message.id) == (b"body 3", sent[3].id)
        assert shown.delay_server == sent[3].broker_group
    assert client.cancel_many(sent) == [Fate.CANCELLED] * 12
    assert client.delayed("listed").counts() == []


class Shop:
    """An application that is closed when the first attempt comes."""

    def __init__(self, url: str, state_dir: Path, opens: datetime) -> None:
        self.app = pulque.App(url, name="shop", state_dir=state_dir)
        self.came: list[tuple[pulque.ReceivedMessage, int]] = []
        self._opens = opens
        self._thread = threading.Thread(target=asyncio.run, args=[self.app.serve()])
        self.app.subscribe("closed.shop", group="shop")(self.handle)

    def handle(self, message: pulque.ReceivedMessage) -> None:
        self.came.append((message, time.time_ns() // 1_000_000))
        if message.attempt == 1:
            raise pulque.RetryAt(self._opens, "closed until then")

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.app.stop()
        self._thread.join(LIMIT)


@pytest.mark.accepts("000-58")
def test_a_handler_says_when_it_wants_a_message_again(
    cluster: ClusterProcesses, client: pulque.Client, tmp_path: Path
) -> None:
    opens = datetime.now(UTC) + timedelta(seconds=5)
    receipt = client.send("closed.shop", b"a whole body", headers={"a": "b"}, key="k")
    with (
        client.consumer("closed.shop", "other") as other,
        Shop(cluster.url, tmp_path / "app", opens) as shop,
    ):
        wait_until(lambda: client.delayed("closed.shop").next())
        (waiting,) = client.delayed("closed.shop").next()
        assert (waiting.id, waiting.group) == (receipt.id, "shop")
        shown = client.delayed().show(waiting.id)
        assert shown is not None
        assert shown.message is not None
        assert shown.message.body == b"a whole body", "not just an id"
        wait_until(lambda: len(shop.came) == 2)
        message, at_ms = shop.came[1]
        assert (message.id, message.attempt, message.key) == (receipt.id, 2, "k")
        assert (message.body, message.headers["a"]) == (b"a whole body", "b")
        assert message.headers["pulque.reason"] == "closed until then"
        assert at_ms >= opens.timestamp() * 1000, "never early"
        take(other, 1)
        assert other.pull(timeout=1.0) == [], "it came back to that group only"
    assert client.dead("closed.shop", "shop").count() == 0


def test_long_nacks_wait_at_a_delay_server(client: pulque.Client) -> None:
    client.send("slow", b"x")
    with client.consumer("slow", "kitchen") as consumer:
        (message,) = consumer.pull(timeout=LIMIT)
        message.nack("in a hundred days", delay=100 * DAY)
        wait_until(lambda: client.delayed("slow").next())
        consumer.settle(timeout=LIMIT)
    (waiting,) = client.delayed("slow").next()
    assert (waiting.id, waiting.group) == (message.id, "kitchen")
    assert {each.lag for each in client.groups("slow", group="kitchen")} == {0}
    moved = client.reschedule(waiting.id, delay=1.0)
    assert moved.fate is Fate.MOVED
    with client.consumer("slow", "kitchen") as consumer:
        ((again, at_ms),) = take(consumer, 1)
    assert (again.id, again.attempt) == (message.id, 2)
    assert at_ms >= moved.due_at_ms


def test_the_command_line_does_all_of_it(cluster: ClusterProcesses) -> None:
    def command(*arguments: str) -> tuple[int, str]:
        done = subprocess.run(
            [sys.executable, "-m", "pulque", *arguments, "--url", cluster.url],
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        return done.returncode, done.stdout

    code, out = command("send", "shell", "tea", "--delay", "1d", "-o", "json")
    assert code == 0
    message_id = json.loads(out)["id"]
    assert message_id in command("delay", "list", "shell")[1]
    assert command("delay", "show", message_id, "-o", "raw") == (0, "tea\n")
    assert command("delay", "counts", "shell")[0] == 0
    code, out = command("delay", "reschedule", message_id, "--delay", "2d")
    assert (code, out.split()[1]) == (0, "moved")
    assert command("delay", "cancel", message_id) == (0, f"{message_id} cancelled\n")
    assert command("delay", "list", "shell")[0] == 4


def test_delay_servers_that_are_away_are_gone_round_and_keep_what_they_have(
    tmp_path: Path,
) -> None:
    with ClusterProcesses.start(tmp_path, brokers=1) as cluster:
        for name in ("delay-1", "delay-2"):
            cluster.add_delay(name)
        with pulque.connect(cluster.url, state_dir=tmp_path / "state", timeout=LIMIT) as client:
            before = [client.send("away", b"before %d" % n, delay=4.0) for n in range(4)]
            cluster["delay-1"].kill()
            after = [client.send("away", b"after %d" % n, delay=1.0) for n in range(4)]
            assert {each.broker_group for each in after} == {"delay-2"}
            cluster["delay-1"].restart()
            with client.consumer("away", "kitchen") as consumer:
                came = [message.id for message, _ in take(consumer, 8)]
                assert consumer.pull(timeout=1.0) == []
            assert Counter(came) == Counter(each.id for each in (*before, *after))


def test_a_lone_broker_says_how_to_get_a_delay_server(broker_process: BrokerProcess) -> None:
    with pulque.connect(broker_process.url) as client:
        with pytest.raises(pulque.NoDelayServerError, match=r"pulque up.*pulque delay"):
            client.send("orders", b"x", delay=5)
        with pytest.raises(pulque.NoDelayServerError):
            client.delayed().counts()
