"""Administration as people do it: commands in a shell, against real meta servers and brokers."""

import json
import os
import select
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import pulque
from pulque.cli.common.admin_client import AdminClient

pytestmark = pytest.mark.server

PULQUE = [sys.executable, "-m", "pulque"]
LIMIT = 60.0
BEAT = "300ms"


class Cluster:
    """A meta server and brokers, each a process."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        data = str(folder / "meta")
        beat = f"cluster.heartbeat={BEAT}"
        self.url = self._start("meta", "meta", "--data", data, "--port", "0", "--set", beat)
        with pulque.connect(self.url) as client:
            self.admin = str(client.status()["admin"])
        self.api = AdminClient(self.admin, LIMIT)

    def add_broker(self, name: str) -> str:
        """Start a broker and wait until the cluster knows it; return where it listens."""
        settings = self._folder / f"{name}.toml"
        address = self.url.removeprefix("pulque://")
        settings.write_text(
            f'name = "{name}"\n[storage]\ndirectory = "{self._folder / name}"\nreserve = "1MiB"\n'
            f'[cluster]\nmeta = ["{address}"]\n'
        )
        url = self._start(name, "broker", "--config", str(settings), "--port", "0")
        self.until(name, "ready")
        return url

    def kill(self, name: str) -> None:
        self._processes[name].kill()
        self._processes[name].wait(LIMIT)

    def run(self, *arguments: str, given: bytes = b"") -> subprocess.CompletedProcess[bytes]:
        environ = {
            **os.environ,
            "PULQUE_URL": self.url,
            "PULQUE_ADMIN": self.admin,
            "PULQUE_STATE_DIR": str(self._folder / "state"),
        }
        return subprocess.run(
            [*PULQUE, *arguments], input=given, capture_output=True, timeout=LIMIT,
            env=environ, check=False,
        )  # fmt: skip

    def rows(self, *arguments: str) -> list[dict[str, Any]]:
        return objects(self.run(*arguments, "-o", "json"))

    def states(self) -> dict[str, str]:
        return {row["name"]: row["state"] for row in self.api.rows("/brokers")}

    def until(self, name: str, state: str) -> None:
        """Wait until a broker is seen as it should be."""
        deadline = time.monotonic() + LIMIT
        while self.states().get(name) != state:
            assert time.monotonic() < deadline, self.states()
            time.sleep(0.05)

    def close(self) -> None:
        for process in reversed(self._processes.values()):
            process.terminate()
        for process in self._processes.values():
            try:
                process.wait(LIMIT)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            assert process.stdout is not None
            process.stdout.close()

    def _start(self, name: str, *arguments: str) -> str:
        with (self._folder / f"{name}.stderr").open("ab") as log:
            process = subprocess.Popen(
                [*PULQUE, *arguments], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=log
            )
        self._processes[name] = process
        assert process.stdout is not None
        assert select.select([process.stdout], [], [], LIMIT)[0], f"{name} is not ready"
        line = process.stdout.readline().decode()
        log_text = (self._folder / f"{name}.stderr").read_text()
        assert line.startswith("ready "), log_text[-4000:]
        return line.split()[1]


def objects(ended: subprocess.CompletedProcess[bytes]) -> list[dict[str, Any]]:
    assert ended.returncode == 0, ended.stderr.decode()
    return [json.loads(line) for line in ended.stdout.splitlines()]


def refused(send: Callable[[], object]) -> pulque.PulqueError:
    """Send until a broker heard, with its next heartbeat, that it takes nothing."""
    deadline = time.monotonic() + LIMIT
    while time.monotonic() < deadline:
        try:
            send()
        except pulque.PulqueError as error:
            return error
        time.sleep(0.1)
    raise AssertionError("everything is taken")


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    found = Cluster(tmp_path)
    try:
        yield found
    finally:
        found.close()


WALK = """
set -eu
pulque() { "$PYTHON" -m pulque "$@"; }

pulque cluster show | grep -q '^brokers.ready *2$'
pulque subject create order.book
pulque subject extend order.book --partitions 4
pulque subject show order.book
pulque config set spread=1 > config.txt
seq 1 20 | pulque send order.book --file - --lines
for url in $BROKERS; do
  code=0
  pulque pull order.book --group billing --url "$url" -n 100 --timeout 5 >> pulled.txt || code=$?
  test "$code" -eq 0 -o "$code" -eq 4
done
test "$(wc -l < pulled.txt)" -eq 20
pulque group lag billing
pulque cluster export definitions.json
pulque subject read-only 'order.*'
if pulque send order.book no --timeout 3; then exit 9; fi
pulque subject read-only 'order.*' --off
pulque cluster import definitions.json --dry-run
code=0; pulque subject show nothing || code=$?
test "$code" -eq 1
code=0; pulque broker remove b1 || code=$?
test "$code" -eq 1
code=0; pulque dead count || code=$?
test "$code" -eq 4
code=0; pulque cluster show --admin http://127.0.0.1:1 || code=$?
test "$code" -eq 3
"""


def test_a_walk_through_the_commands_in_a_shell(cluster: Cluster, tmp_path: Path) -> None:
    urls = [cluster.add_broker(name) for name in ("b1", "b2")]
    environ = {
        **os.environ,
        "PYTHON": sys.executable,
        "PULQUE_URL": cluster.url,
        "PULQUE_ADMIN": cluster.admin,
        "BROKERS": " ".join(urls),
        "PULQUE_STATE_DIR": str(tmp_path / "state"),
    }

    ended = subprocess.run(
        ["bash", "-c", WALK], cwd=tmp_path, env=environ, capture_output=True, timeout=240,
        check=False, text=True,
    )  # fmt: skip

    assert ended.returncode == 0, (ended.stdout, ended.stderr)
    assert "order.book has 4 partitions" in ended.stdout
    exported = json.loads((tmp_path / "definitions.json").read_text())
    assert exported["policies"]["spread"] == 1
    book = {"subject": "order.book", "partitions": 4, "order": "best-effort"}
    assert exported["subjects"] == [book]
    assert [(each["group"], each["subject"]) for each in exported["groups"]] == [
        ("billing", "order.book")
    ]
    lags = cluster.rows("group", "lag", "billing")
    assert lags
    assert sum(row["lag"] for row in lags) == 0


def test_a_new_cluster_learns_what_groups_want_from_another_ones_file(cluster: Cluster) -> None:
    for name in ("b1", "b2"):
        cluster.add_broker(name)
    billing = {
        "group": "billing",
        "subject": "orders",
        "mode": "shared",
        "filter": {"any_of": ["paid", "refunded"], "all_of": []},
        "retry": {"delays_seconds": [0.1], "jitter": 0.0, "max_attempts": 2},
    }
    plain = {"group": "audit", "subject": "orders", "mode": "shared"}
    definitions = {
        "subjects": [{"subject": "orders", "partitions": 2}],
        "groups": [billing, plain],
    }
    given = json.dumps(definitions).encode()

    assert cluster.run("cluster", "import", "-", "--yes", given=given).returncode == 0

    exported = json.loads(cluster.run("cluster", "export").stdout)
    assert [each for each in exported["groups"] if each["group"] == "billing"] == [billing]
    assert {each["group"] for each in exported["groups"]} == {"audit", "billing"}
    with pulque.connect(cluster.url) as client:
        for tag in ("new", "new", "paid"):
            client.send("orders", tag.encode(), tags=[tag])
        with client.consumer("orders", "billing", tags=["paid", "refunded"]) as consumer:
            tried = [nacked(consumer) for _ in range(2)]
        assert tried == [(b"paid", 1), (b"paid", 2)]
        deadline = time.monotonic() + LIMIT
        while not (dead := cluster.rows("dead", "count", "--admin", cluster.admin)):
            assert time.monotonic() < deadline
            time.sleep(0.1)
        assert sum(row["count"] for row in dead) == 1


def nacked(consumer: pulque.Consumer) -> tuple[bytes, int]:
    """Pull one message, and say that it was not handled."""
    (message,) = consumer.pull(1, timeout=LIMIT)
    message.nack()
    return message.body, message.attempt


def test_who_is_online_and_what_it_holds(cluster: Cluster) -> None:
    url = cluster.add_broker("b1")
    cluster.api.ask("POST", "/subjects", {"subject": "orders"})
    with pulque.connect(url, name="shop") as client:
        client.send_many("orders", [b"1", b"2", b"3"])
        with client.consumer("orders", "billing", consumer_id="till-1") as consumer:
            messages = consumer.pull(timeout=LIMIT)
            assert len(messages) == 3

            rows = cluster.rows("client", "list")

            held = [
                (each["consumer"], each["group"], each["subject"], each["held"])
                for row in rows
                if row["application"] == "shop"
                for each in row["consumers"]
            ]
            assert held == [("till-1", "billing", "orders", 3)]
            shop = next(row for row in rows if row["application"] == "shop" and row["consumers"])
            assert shop["server"] == "b1"
            assert shop["address"].startswith("127.0.0.1:")
            assert shop["holds"] == 3
            for message in messages:
                message.ack()


def test_a_read_only_broker_refuses_sends_and_is_still_consumed(cluster: Cluster) -> None:
    url = cluster.add_broker("b1")
    with pulque.connect(url) as client:
        client.send("orders", b"before")

        assert cluster.run("broker", "read-only", "b1").returncode == 0

        refusal = refused(lambda: client.send("orders", b"still taken", timeout=1.0))
        assert isinstance(refusal, pulque.ReadOnlyError | pulque.UnavailableError)
        with client.consumer("orders", "billing") as consumer:
            (first, *rest) = consumer.pull(timeout=LIMIT)
            assert first.body == b"before"
            for message in (first, *rest):
                message.ack()

        assert cluster.run("broker", "read-only", "b1", "--off").returncode == 0
        client.send("orders", b"after", timeout=LIMIT)


def test_a_broker_that_died_is_silent_its_part_is_missing_and_it_can_be_removed(
    cluster: Cluster,
) -> None:
    for name in ("b1", "b2"):
        cluster.add_broker(name)
    cluster.api.ask("POST", "/subjects", {"subject": "orders"})

    cluster.kill("b2")

    cluster.until("b2", "silent")
    shown = cluster.run("subject", "show", "orders")
    assert shown.returncode == 0
    assert b"b2 is missing" in shown.stderr
    assert cluster.run("cluster", "export").returncode == 3
    assert cluster.run("broker", "remove", "b1").returncode == 1
    assert cluster.run("broker", "remove", "b2").stdout == b"b2 is removed\n"
    assert cluster.states() == {"b1": "ready"}


def test_the_lag_that_was_seen_twice_tells_how_fast_it_goes(cluster: Cluster) -> None:
    url = cluster.add_broker("b1")
    with pulque.connect(url) as client:
        client.send_many("orders", [b"x"] * 100)
        with client.consumer("orders", "billing", max_messages=10) as consumer:
            consumer.pull(timeout=LIMIT)
            list(cluster.api.rows("/groups/billing/lag"))
            time.sleep(1.1)
            for message in consumer.pull(timeout=LIMIT):
                message.ack()
            consumer.settle()

            (row,) = cluster.rows("group", "lag", "billing")

    assert row["oldest_age_seconds"] > 0
    assert row["settled_per_second"] is not None
    assert row["sent_per_second"] == 0


def reject_all(cluster: Cluster, count: int) -> None:
    """Send messages to two brokers, and have a group reject them."""
    for name in ("b1", "b2"):
        cluster.add_broker(name)
    with pulque.connect(cluster.url, timeout=LIMIT) as client:
        for number in range(count):
            client.send("orders", b"%d" % number)
        with client.consumer("orders", "billing", consumer_id="c") as consumer:
            seen = 0
            while seen < count:
                for message in consumer.pull(count, timeout=LIMIT):
                    message.reject("never")
                    seen += 1
            consumer.settle(timeout=LIMIT)


OF = ("orders", "--group", "billing")


def test_commands_for_groups_cover_all_brokers(cluster: Cluster) -> None:
    reject_all(cluster, 8)

    (status,) = cluster.rows("status")
    assert {row["broker_group"] for row in status["brokers"]} == {"b1", "b2"}
    assert sum(row["messages_sent"] for row in status["brokers"]) == 8
    assert {row["broker_group"] for row in cluster.rows("broker", "seal")} == {"b1", "b2"}
    shown = cluster.rows("group", "show", "billing")
    assert {row["broker_group"] for row in shown} == {"b1", "b2"}

    unsaid = cluster.run("group", "reset", *OF, "--to", "0")
    assert unsaid.returncode == 2
    assert b"which broker?" in unsaid.stderr
    plain = ("--partition", "orders")
    (first,) = cluster.rows("group", "reset", *OF, *plain, "--to", "0", "--broker", "b1", "--yes")
    assert first["broker_group"] == "b1"
    rows = cluster.rows("group", "reset", *OF, *plain, "--to", "earliest", "--yes")
    assert first["reread"] + sum(row["reread"] for row in rows) == 8


def test_commands_for_dead_letters_cover_all_brokers(cluster: Cluster) -> None:
    reject_all(cluster, 8)

    deadline = time.monotonic() + LIMIT
    while len(letters := cluster.rows("dead", "list", *OF)) < 8:
        assert time.monotonic() < deadline, letters
    assert sorted(int(each["body"]) for each in letters) == list(range(8))
    one = letters[0]
    which = ("orders", str(one["sequence"]), *OF[1:])
    unsaid = cluster.run("dead", "show", *which)
    assert unsaid.returncode == 2
    assert b"which broker?" in unsaid.stderr
    named = ("--broker", one["broker_group"])
    (same,) = cluster.rows("dead", "show", *which, *named)
    assert same["id"] == one["id"]
    mine = cluster.rows("dead", "list", *OF, *named)
    assert {each["broker_group"] for each in mine} == {one["broker_group"]}
    assert cluster.rows("dead", "resend", *which, *named)[0]["resent"] == [one["sequence"]]
    assert cluster.rows("dead", "purge", *OF, "--all")[0]["purged"] == 7
