"""Retries and dead letters with a real broker: through the clients, and as commands."""

import asyncio
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import pulque
from pulque import aio
from pulque.testing.process import BrokerProcess, UpProcess

pytestmark = pytest.mark.server

LIMIT = 60
StartBroker = Callable[..., BrokerProcess]


def settings(**values: object) -> list[str]:
    return [f"--set={key.replace('__', '.')}={value}" for key, value in values.items()]


@pytest.fixture
def broker(
    start_broker: StartBroker, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> BrokerProcess:
    """A broker that gives up after two attempts."""
    process = start_broker(arguments=settings(retry__attempts=2, retry__delays="100ms"))
    monkeypatch.setenv("PULQUE_URL", process.url)
    monkeypatch.setenv("PULQUE_STATE_DIR", str(tmp_path / "state"))
    return process


def command(*arguments: str, code: int = 0, given: bytes = b"") -> str:
    ended = subprocess.run(
        [sys.executable, "-m", "pulque", *arguments],
        input=given,
        capture_output=True,
        timeout=LIMIT,
        env=os.environ,
        check=False,
    )
    assert ended.returncode == code, ended.stderr.decode()
    return ended.stdout.decode()


def objects(text: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in text.splitlines()]


def fail_for_good(client: pulque.Client, *bodies: bytes) -> None:
    """Send messages and nack each of them as often as the broker lets us."""
    client.send_many("orders", list(bodies))
    left = 2 * len(bodies)
    deadline = time.monotonic() + LIMIT
    with client.consumer("orders", "kitchen") as consumer:
        while left and time.monotonic() < deadline:
            for message in consumer.pull(left, timeout=1.0):
                message.nack(f"no {message.body.decode()} {message.attempt}")
                left -= 1
    dead = client.dead("orders", "kitchen")
    while dead.count() < len(bodies):
        assert time.monotonic() < deadline
        time.sleep(0.02)


def pull_all(client: pulque.Client, count: int) -> list[pulque.ReceivedMessage]:
    found: list[pulque.ReceivedMessage] = []
    with client.consumer("orders", "kitchen") as consumer:
        while len(found) < count:
            messages = consumer.pull(count, timeout=LIMIT)
            assert messages
            for message in messages:
                message.ack()
            found += messages
    return found


def test_letters_are_listed_shown_edited_resent_and_purged(broker: BrokerProcess) -> None:
    with pulque.connect() as client:
        fail_for_good(client, b"tea", b"coffee", b"milk", b"water")
        dead = client.dead("orders", "kitchen")

        letters = dead.list()
        assert {letter.body for letter in letters} == {b"tea", b"coffee", b"milk", b"water"}
        assert [letter.attempt for letter in letters] == [2] * 4
        assert [letter.sequence for letter in dead.list(first=1, limit=2)] == [1, 2]
        shown = dead.show(0)
        assert shown is not None
        name = shown.body.decode()
        assert shown.headers["pulque.failed.1"].endswith(f"no {name} 1")
        assert shown.headers["pulque.failed.2"].endswith(f"no {name} 2")

        assert dead.resend(0, body=b"better", headers={"by": "hand"}).resent == (0,)
        assert dead.resend(0).done == (0,)
        (again,) = pull_all(client, 1)
        assert (again.body, again.attempt, again.headers["by"]) == (b"better", 1, "hand")

        assert dead.purge(until=1) == 1
        assert dead.show(0) is None
        assert dead.show(1) is None
        assert dead.resend_all() == 2
        assert len(pull_all(client, 2)) == 2
        assert dead.list() == []
        assert dead.count() == 0


def test_the_twin_for_asyncio_does_the_same(broker: BrokerProcess) -> None:
    with pulque.connect() as client:
        fail_for_good(client, b"tea", b"coffee", b"milk")

    async def work() -> None:
        async with aio.connect() as client:
            dead = client.dead("orders", "kitchen")
            assert await dead.count() == 3
            assert [letter.sequence for letter in await dead.list(limit=2)] == [0, 1]
            letter = await dead.show(2)
            assert letter is not None
            assert letter.headers["pulque.dead"] == "2 attempts failed"
            assert await dead.resend(2, 5) == ((2,), (), (5,))
            assert await dead.purge(until=0) == 1
            assert await dead.resend_all() == 1
            assert await dead.list() == []

    asyncio.run(work())
    with pulque.connect() as client:
        assert len(pull_all(client, 2)) == 2


@pytest.mark.parametrize(
    "call",
    [
        lambda dead: dead.list(limit=0),
        lambda dead: dead.list(limit=1001),
        lambda dead: dead.list(first=-1),
        lambda dead: dead.show(-1),
        lambda dead: dead.show("one"),
        lambda dead: dead.resend(),
        lambda dead: dead.resend(1, True),
        lambda dead: dead.resend(1, 2, body=b"x"),
        lambda dead: dead.resend(1, body=object()),
        lambda dead: dead.purge(until=-1),
    ],
)
def test_wrong_use_is_told_at_once(
    broker: BrokerProcess, call: Callable[[pulque.DeadLetters], object]
) -> None:
    with pulque.connect() as client, pytest.raises(pulque.UsageError):
        call(client.dead("orders", "kitchen"))


def test_the_commands_do_it_all(broker: BrokerProcess, tmp_path: Path) -> None:
    with pulque.connect() as client:
        fail_for_good(client, b"tea", b"coffee", b"milk", b"water", b"wine")
    where = ("orders", "--group", "kitchen")

    listed = objects(command("dead", "list", *where, "-o", "json"))
    assert [letter["sequence"] for letter in listed] == [0, 1, 2, 3, 4]
    table = command("dead", "list", *where, "-n", "2").splitlines()
    assert len(table) == 3
    assert "2 attempts failed" in table[1]
    (shown,) = objects(command("dead", "show", "orders", "1", "--group", "kitchen", "-o", "json"))
    assert shown["headers"]["pulque.failed.1"].endswith(f"no {shown['body']} 1")
    assert "pulque.failed.2" in command("dead", "show", "orders", "1", "--group", "kitchen")

    edited = tmp_path / "edited"
    edited.write_bytes(b"from a file")
    options = ("--file", str(edited), "--header", "by=hand")
    told = command("dead", "resend", "orders", "0", "--group", "kitchen", *options, "-o", "json")
    assert objects(told) == [{"resent": [0], "done": [], "missing": []}]
    (pulled,) = objects(command("pull", *where, "-o", "json"))
    assert (pulled["body"], pulled["attempt"], pulled["headers"]["by"]) == (
        "from a file",
        1,
        "hand",
    )
    command("dead", "resend", "orders", "0", "1", "--group", "kitchen", code=1)
    assert command("dead", "purge", *where, "--until", "2").strip() == "purged 1"
    assert objects(command("dead", "resend", *where, "--all", "-o", "json")) == [{"resent": 2}]
    assert command("dead", "list", *where, "-o", "json", code=4) == ""
    assert command("dead", "list", "orders", "--group", "unknown", code=4) == ""
    command("dead", "show", "orders", "4", "--group", "kitchen", code=4)
    for nothing in ("resend", "purge"):
        for subject, group in (
            ("orders", "kitchen"),
            ("orders", "unknown"),
            ("unknown", "kitchen"),
        ):
            command("dead", nothing, subject, "--group", group, "--all", code=4)
    for wrong in (
        ("resend", *where),
        ("resend", *where, "--all", "--body", "x"),
        ("resend", "orders", "1", "--all", "--group", "kitchen"),
        ("resend", "orders", "1", "--group", "kitchen", "--body", "x", "--file", "y"),
        ("purge", *where),
        ("purge", *where, "--all", "--until", "3"),
        ("list", "orders"),
    ):
        command("dead", *wrong, code=2)


def test_a_letter_names_its_broker_group(up_process: UpProcess) -> None:
    async def show() -> pulque.Message | None:
        async with aio.connect(up_process.url) as client:
            return await client.dead("orders", "kitchen").show(0)

    with pulque.connect() as client:
        sent = client.send("orders", b"tea")
        with client.consumer("orders", "kitchen") as consumer:
            (message,) = consumer.pull(1, timeout=LIMIT)
            message.reject("no tea")
            consumer.settle()
        dead = client.dead("orders", "kitchen")
        deadline = time.monotonic() + LIMIT
        while not dead.count():
            assert time.monotonic() < deadline
            time.sleep(0.02)
        letter, twin = dead.show(0), asyncio.run(show())
    assert letter is not None
    assert twin is not None
    assert sent.broker_group
    assert (letter.broker_group, twin.broker_group) == (sent.broker_group, sent.broker_group)
    shown = command("dead", "show", "orders", "0", "--group", "kitchen", "-o", "json")
    assert objects(shown)[0]["broker_group"] == sent.broker_group


def test_a_delay_can_be_asked_for_on_the_command_line(broker: BrokerProcess) -> None:
    where = ("orders", "--group", "kitchen")
    command("send", "orders", "tea")
    command("pull", *where, "--nack", "--delay", "0")
    (again,) = objects(command("pull", *where, "-o", "json"))
    assert again["attempt"] == 2
    command("send", "orders", "more")
    command("pull", *where, "--nack", "--delay", "1e9", code=2)
    command("pull", *where, "--delay", "1", code=2)


@pytest.mark.accepts("000-44")
def test_ten_thousand_that_wait_survive_a_kill_and_come_once(
    start_broker: StartBroker, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PULQUE_STATE_DIR", str(tmp_path / "state"))
    process = start_broker(arguments=settings(retry__delays="3s", retry__jitter_percent=50))
    count = 10_000
    with pulque.connect(process.url) as client:
        client.send_many("orders", [b"%d" % n for n in range(count)])
        with client.consumer("orders", "kitchen") as consumer:
            left = count
            while left:
                messages = consumer.pull(1000, timeout=LIMIT)
                left -= len(messages)
                for message in messages:
                    message.nack("not now")
        # Some wait, some are just coming back, some are not even written down to wait.
        process.kill()
        process.restart()
        time.sleep(3.2)
        process.kill()
        process.restart()
        seen: dict[bytes, list[int]] = {}
        with client.consumer("orders", "kitchen") as consumer:
            deadline = time.monotonic() + LIMIT
            while len(seen) < count and time.monotonic() < deadline:
                for message in consumer.pull(1000, timeout=5.0):
                    seen.setdefault(message.body, []).append(message.attempt)
                    message.ack()
    assert len(seen) == count
    assert {tuple(attempts) for attempts in seen.values()} == {(2,)}
    with pulque.connect(process.url) as client:
        ends = {row["name"]: row["end"] for row in client.status()["partitions"]}
    # What was due before it was written down to wait did not have to.
    assert 0 < ends["%wait%orders%kitchen"] <= count
    assert ends["%retry%orders%kitchen"] == count
