"""The commands on top of the API: tables for people, JSON for scripts, exit codes."""

import contextlib
import json
import os
import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import pulque
from pulque.admin.cluster import WatchingClient
from pulque.cli.app import run
from pulque.cli.common.admin_client import AdminClient
from pulque.cli.common.options import Tools
from pulque.errors import UnavailableError
from pulque.testing.broker import InProcessBroker
from tests.unit.admin.conftest import serving
from tests.unit.admin.fakes import FakeCluster, FakeLeader, led_group, server

Command = Callable[..., tuple[int, str, str]]


@pytest.fixture
def cluster(running: dict[str, InProcessBroker]) -> FakeCluster:
    return FakeCluster({name: server(name, each.url) for name, each in running.items()})


@pytest.fixture
def command(
    cluster: FakeCluster, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> Iterator[Command]:
    """Runs a command against the API; returns its code, stdout and stderr."""
    with serving(cluster) as url:
        monkeypatch.setenv("PULQUE_ADMIN", url)

        def call(*arguments: str) -> tuple[int, str, str]:
            code = run(arguments, Tools(connect=pulque.connect))
            out, err = capsys.readouterr()
            return code, out, err

        yield call


def rows(answer: tuple[int, str, str]) -> list[Any]:
    code, out, _ = answer
    assert code == 0
    return [json.loads(line) for line in out.splitlines()]


def test_subjects(command: Command) -> None:
    assert command("subject", "list")[0] == 4
    assert command("subject", "create", "b", "a")[1].splitlines() == [
        "b has 2 partitions",
        "a has 2 partitions",
    ]
    assert command("subject", "create", "c", "--partitions", "4")[1] == "c has 4 partitions\n"
    code, out, _ = command("subject", "list")
    assert (code, out.splitlines()) == (
        0,
        [
            "subject  partitions  broker groups  sends",
            "a        2           b1 b2          taken",
            "b        2           b1 b2          taken",
            "c        4           b1 b2          taken",
        ],
    )
    assert [
        row["subject"] for row in rows(command("subject", "list", "-o", "json", "-n", "2"))
    ] == [
        "a",
        "b",
    ]
    assert command("subject", "extend", "a", "--partitions", "3")[1] == "a has 3 partitions\n"
    assert command("subject", "extend", "a", "--partitions", "4", "--on", "b2")[0] == 0
    (shown,) = rows(command("subject", "show", "a", "-o", "json"))
    assert {each["broker_group"] for each in shown["partitions"]} == {"b2"}
    assert command("subject", "read-only", "a")[1] == "a takes no sends\n"
    assert "takes no sends" in command("subject", "show", "a")[1]
    assert command("subject", "read-only", "a", "--off", "-o", "json")[1] == '{"read_only": []}\n'


def test_what_the_server_refuses_is_the_commands_error(command: Command) -> None:
    code, out, err = command("subject", "show", "nothing")
    assert (code, out) == (1, "")
    assert err.startswith("error: UnknownSubjectError: there is no subject nothing")
    code, _, err = command("subject", "create", "a\x1b[31m\nb")
    assert code == 2
    assert "\x1b" not in err
    assert len(err.splitlines()) == 1
    assert command("broker", "remove", "b1")[0] == 1
    assert command("subject", "extend", "a")[0] == 2


@pytest.mark.parametrize(
    "arguments",
    [
        ["subject", "read-only", ""],
        ["subject", "create", "good", "bad name"],
        ["subject", "create", ""],
        ["subject", "show", "bad name"],
        ["subject", "extend", "bad name", "--partitions", "2"],
        ["group", "lag", ""],
        ["group", "lag", "bad name"],
        ["group", "ordered", "bad name"],
        ["dead", "count", "bad name"],
        ["broker", "drain", "bad name"],
        ["subject", "show", "\udcff"],
        ["broker", "remove", "\udcff"],
        ["group", "lag", "g", "--subject", "\udcff"],
        ["dead", "count", "\udcff"],
    ],
    ids=ascii,
)
def test_a_name_that_is_not_allowed_is_wrong_usage_told_in_words(
    command: Command, cluster: FakeCluster, arguments: list[str]
) -> None:
    code, out, err = command(*arguments)

    assert (code, out) == (2, "")
    assert err.startswith("error: InvalidNameError: ")
    assert "^[A-Za-z" not in err
    assert cluster.placed == {}


@pytest.mark.parametrize(
    "arguments",
    [
        ["subject", "list"],
        ["dead", "count", "nosuch"],
        ["dead", "count", "--group", "nosuch"],
        ["group", "ordered", "nosuch"],
        ["group", "ordered", "nosuch", "--group", "g"],
    ],
    ids=" ".join,
)
def test_that_there_is_nothing_is_said(command: Command, arguments: list[str]) -> None:
    code, out, err = command(*arguments)

    assert (code, out, len(err.splitlines())) == (4, "", 1)
    assert all(name in err for name in arguments[2:] if not name.startswith("-"))


@pytest.mark.parametrize(
    "arguments",
    [
        ["cluster", "import", "/nonexistent"],
        ["send", "orders", "--file", "/nonexistent"],
        ["dead", "resend", "orders", "1", "--group", "g", "--file", "/nonexistent"],
        ["log", "dump", "/nonexistent"],
    ],
    ids=" ".join,
)
def test_a_file_that_is_not_there_is_wrong_usage(command: Command, arguments: list[str]) -> None:
    code, out, err = command(*arguments)

    assert (code, out) == (2, "")
    assert err.startswith("error: UsageError: ")
    assert "/nonexistent: No such file or directory" in err


@pytest.mark.parametrize(
    "url", ["https://127.0.0.1", "127.0.0.1:7480", "http://", "http://a:b", "http://a/x"]
)
def test_a_wrong_address_is_wrong_usage(command: Command, url: str) -> None:
    code, _, err = command("subject", "list", "--admin", url)

    assert (code, err.startswith("error: ConfigError: --admin is")) == (2, True)


def test_nothing_is_asked_of_the_api_of_another_cluster(cluster: FakeCluster) -> None:
    with serving(cluster) as url:
        right = AdminClient(url, 20, cluster=cluster.id)
        wrong = AdminClient(url, 20, cluster="another")

        with pytest.raises(UnavailableError, match=f"{cluster.id!r}.*'another'.*--admin"):
            wrong.ask("PUT", "/brokers/b1/drain", {"draining": True})
        assert right.get("/cluster")["cluster"] == cluster.id
        assert not any(each["draining"] for each in right.rows("/brokers"))


def test_nobody_there_is_told_as_such(
    command: Command, running: dict[str, InProcessBroker]
) -> None:
    code, _, err = command("cluster", "show", "--admin", "http://127.0.0.1:1", "--timeout", "5")
    assert code == 3
    assert "PULQUE_ADMIN" in err
    # A broker answers, but not in HTTP.
    port = running["b1"].url.rpartition(":")[2]
    code, _, err = command("cluster", "show", "--admin", f"http://127.0.0.1:{port}")
    assert code in {1, 3}
    assert err.startswith("error: ")
    assert len(err.splitlines()) == 1


class DeafServer:
    """Hears requests, and closes each connection without an answer."""

    def __init__(self) -> None:
        self.heard: list[bytes] = []
        self._socket = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._socket.getsockname()[1]}"
        self._thread = threading.Thread(target=self._listen)
        self._thread.start()

    def _listen(self) -> None:
        while True:
            with self._socket.accept()[0] as line:
                heard = line.recv(65536)
                if not heard:
                    return
                self.heard.append(heard.partition(b" ")[0])

    def close(self) -> None:
        socket.create_connection(self._socket.getsockname()).close()
        self._thread.join()
        self._socket.close()


@pytest.fixture
def deaf() -> Iterator[DeafServer]:
    with contextlib.closing(DeafServer()) as server:
        yield server


def test_the_next_address_is_asked_when_one_does_not_answer(
    command: Command, deaf: DeafServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = os.environ["PULQUE_ADMIN"]
    monkeypatch.setenv("PULQUE_ADMIN", f"http://127.0.0.1:1,{deaf.url},{url}")
    # Nobody is at the first, and the second hears a read, or what may be repeated.
    assert command("cluster", "show")[0] == 0
    assert command("broker", "read-only", "b1") == (0, "b1 takes no sends\n", "")
    assert deaf.heard == [b"GET", b"PUT"]

    # Whether this was done is not known, and nobody else is asked to do it again.
    code, out, err = command("subject", "create", "orders")
    assert (code, out, deaf.heard[2:]) == (3, "", [b"POST"])
    assert "whether it was done is not known" in err
    monkeypatch.setenv("PULQUE_ADMIN", f"http://127.0.0.1:1,{url.removeprefix('http://')}")
    assert "orders" not in command("subject", "list")[1]
    assert command("subject", "create", "orders")[0] == 0

    code, _, err = command("subject", "list", "--admin", f"http://127.0.0.1:1,{deaf.url}")
    assert (code, "127.0.0.1:1 " in err, deaf.url in err) == (3, True, True)


def test_brokers(command: Command, cluster: FakeCluster) -> None:
    cluster.known["x"] = server("x", state="silent")

    out = command("broker", "list")[1].splitlines()
    assert [line.split()[0] for line in out] == ["name", "b1", "b2", "x"]
    assert command("broker", "read-only", "b1")[1] == "b1 takes no sends\n"
    assert command("broker", "read-only", "b1", "--off")[1] == "b1 takes sends\n"
    code, out_text, _ = command("broker", "drain", "b2")
    assert (code, out_text) == (0, "b2 takes no sends; 0 messages are left to consume\n")
    (shown,) = rows(command("broker", "show", "b2", "-o", "json"))
    assert (shown["draining"], shown["state"], shown["lag"]) == (True, "ready", 0)
    assert command("broker", "remove", "x")[:2] == (0, "x is removed\n")


def test_leaders_and_followers(command: Command, cluster: FakeCluster) -> None:
    with FakeLeader(cluster) as leader:
        cluster.known = {**led_group(leader.url), "x": server("x")}
        out = command("broker", "list")[1].splitlines()
        assert [line.split()[:6] for line in out[1:]] == [
            ["f", "g", "broker", "follower", "3", "yes"],
            ["l", "g", "broker", "leader", "3", "yes"],
            ["late", "g", "broker", "follower", "3", "no"],
            ["x", "x", "broker", "alone", "-", "-"],
        ]
        assert command("broker", "lead", "f")[:2] == (0, "f leads g in epoch 4\n")
        (again,) = rows(command("broker", "lead", "f", "-o", "json"))
        assert (again["standing"], again["epoch"]) == ("leader", 4)
        assert command("broker", "lead", "late")[0] == 1
    code, _, err = command("broker", "lead", "l")
    assert (code, "f that leads broker group g cannot be reached" in err) == (3, True)
    assert "short_of_copies" in command("cluster", "show")[1]


def test_clients_are_shown_with_control_characters_escaped(
    command: Command, cluster: FakeCluster
) -> None:
    cluster.watching = [WatchingClient("id", "a\x1b[31m\x9b", "127.0.0.1:9", 0, 1500, 1)]

    _, out, _ = command("client", "list")
    assert "a\\x1b[31m\\x9b" in out
    (row, *_) = rows(command("client", "list", "-o", "json"))
    assert row["application"] == "a\x1b[31m\x9b"


def test_lag_and_dead_letters(command: Command, running: dict[str, InProcessBroker]) -> None:
    with pulque.connect(running["b1"].url) as client:
        client.send_many("lag", [b"1", b"2"])
        with client.consumer("lag", "g") as consumer:
            for message in consumer.pull(timeout=5.0):
                message.reject("no")
        client.send("lag", b"3")

    (row,) = rows(command("group", "lag", "g", "-o", "json"))
    assert (row["broker_group"], row["lag"], row["next_sequence"]) == ("b1", 1, 2)
    assert command("group", "lag", "g")[1].splitlines()[1].split()[:3] == ["b1", "lag", "1"]
    assert command("dead", "count", "lag")[1].splitlines()[1].split() == ["lag", "g", "2"]
    assert command("dead", "count", "nothing")[0] == 4


def test_the_cluster_and_its_definitions(
    command: Command, tmp_path: Path, cluster: FakeCluster
) -> None:
    command("subject", "create", "one", "two")
    (shown,) = rows(command("cluster", "show", "-o", "json"))
    assert shown["brokers"] == {"ready": 2}

    file = tmp_path / "definitions.json"
    assert command("cluster", "export", str(file))[0] == 0
    definitions = {**json.loads(file.read_text()), "groups": []}  # those of other tests
    file.write_text(json.dumps(definitions, indent=2))
    cluster.placed.clear()
    code, out, _ = command("cluster", "import", str(file))
    assert (code, out.splitlines()[:2]) == (0, ["would be created: one", "would be created: two"])
    assert cluster.placed == {}
    assert command("cluster", "import", str(file), "--yes")[0] == 0
    again = json.loads(command("cluster", "export")[1])
    assert {**again, "groups": []} == definitions
    file.write_text("[" * 100_000)
    assert command("cluster", "import", str(file))[0] in {1, 2}
    file.write_bytes(b" " * 1024 * 1024 + b"{}")
    assert command("cluster", "import", str(file))[0] == 2


def test_settings_that_may_change(command: Command, cluster: FakeCluster) -> None:
    assert command("config", "set", "-o", "json")[1] == (
        '{"create": "first-send", "allowed": [], "spread": 2}\n'
    )
    assert command("config", "show", "--server", "cluster", "-o", "json") == command(
        "config", "set", "-o", "json"
    )
    assert command("config", "set", "spread=3", "allowed=a.*,b")[0] == 0
    assert (cluster.said.spread, cluster.said.allowed) == (3, ("a.*", "b"))
    for wrong in ("spread=0", "spread=x", "storage.directory=/etc", "create=sh"):
        code, _, err = command("config", "set", wrong)
        assert (code, err.startswith("error: InvalidRequestError")) == (1, True)
    assert command("config", "set", "spread")[0] == 2
    assert cluster.said.spread == 3
