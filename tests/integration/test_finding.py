"""Finding messages with real brokers: by key, id, time and position, and after kill -9."""

import asyncio
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

import pulque
from pulque import aio
from pulque.testing.process import BrokerProcess, UpProcess

pytestmark = pytest.mark.server

LIMIT_S = 60
# Two keys with the same CRC-32C.
TWINS = ("6352603e", "33f2a4a7")


def send_all(client: pulque.Client) -> dict[str, list[pulque.Receipt]]:
    """Send messages with keys, plain and compressed; return the receipts of each key."""
    sent: dict[str, list[pulque.Receipt]] = {}
    for number in range(40):
        key = f"customer {number % 4}"
        sent.setdefault(key, []).append(client.send("orders", b"%d" % number, key=key))
    for compression in (None, "lz4", "zstd"):
        with client.producer(compression=compression) as producer:
            keys = [TWINS[number % 2] for number in range(10)]
            pending = [producer.send("orders", b"x" * 300, key=key) for key in keys]
            producer.flush()
        for key, each in zip(keys, pending, strict=True):
            sent.setdefault(key, []).append(each.result())
    client.send("invoices", b"of another subject", key="customer 1")
    return sent


def check_all(client: pulque.Client, sent: dict[str, list[pulque.Receipt]]) -> None:
    """Look for each key and some messages, and compare with what was sent."""
    for key, receipts in sent.items():
        found = client.messages.find("orders", key=key, limit=1000)
        assert found.missing == {}
        assert {message.key for message in found} == {key}
        assert [m.id for m in found] == [each.id for each in reversed(receipts)]
        for receipt in receipts[::7]:
            for what in (receipt.id, receipt, receipt.position):
                message = client.messages.get(what)
                assert (message.id, message.key) == (receipt.id, key)
                assert message.sequence == receipt.sequence
    assert len(client.messages.find("orders", limit=1000)) == 70
    assert len(client.messages.find("orders")) == 32, "unless it is told otherwise"


def wait_for_index(directory: Path) -> list[Path]:
    """Wait until every sealed segment has its key index; return the files."""
    end = time.monotonic() + LIMIT_S
    while time.monotonic() < end:
        logs = sorted(path.stem for path in directory.glob("messages/*.log"))
        files = sorted(directory.glob("messages/*.keys"))
        if set(logs[:-1]) <= {path.stem for path in files}:
            return files
        time.sleep(0.05)
    raise AssertionError("the key index was not written")


@pytest.mark.accepts("004-45", "004-86", "004-87", "004-93", "004-94")
def test_messages_are_found_before_and_after_a_kill_and_without_their_index(
    broker_process: BrokerProcess, tmp_path: Path
) -> None:
    directory = tmp_path / "data"
    with pulque.connect() as client:
        sent = send_all(client)
        check_all(client, sent)
        client.seal()
        client.send("orders2", b"in the next segment", key="customer 1")
        check_all(client, sent)
        files = wait_for_index(directory)
        broker_process.kill()
        broker_process.restart()
        check_all(client, sent)

        # Gone, of another segment, spoilt in the middle: the same is found, and it is made again.
        content = files[0].read_bytes()
        files[0].unlink()
        check_all(client, sent)
        broker_process.kill()
        broken = bytearray(content)
        broken[len(broken) // 2 :] = bytes(len(broken) - len(broken) // 2)
        files[0].write_bytes(broken)
        broker_process.restart()
        check_all(client, sent)
        wait_for_index(directory)
        assert files[0].read_bytes() == content


def test_what_cannot_be_found_is_said(start_broker: Callable[..., BrokerProcess]) -> None:
    process = start_broker(arguments=["--set=storage.retention_size=1MiB"])
    with pulque.connect(process.url) as client:
        old = client.send("orders", b"x" * 700_000, key="a")
        client.send("others", b"x" * 700_000)
        client.seal()
        new = client.send("orders", b"new", key="a")
        end = time.monotonic() + LIMIT_S
        while client.positions("orders")[0].start <= old.sequence:
            assert time.monotonic() < end
            time.sleep(0.05)
        assert [m.id for m in client.messages.find("orders", key="a")] == [new.id]
        with pytest.raises(pulque.UnknownMessageError, match="the oldest one is 1"):
            client.messages.get(old)
        with pytest.raises(pulque.UnknownMessageError, match="no broker has message"):
            client.messages.get(old.id)
        with pytest.raises(pulque.UnknownMessageError, match="the next one to come is 2"):
            client.messages.get(new.position._replace(sequence=pulque.ConsumeSequence(2)))
        with pytest.raises(pulque.UnknownMessageError, match="is message"):
            client.messages.get(new._replace(id="0" * 32))
        with pytest.raises(pulque.UnknownSubjectError):
            client.messages.find("nothing", key="a")
        assert len(client.messages.find("orders", key="never sent")) == 0
        now = datetime.now(UTC)
        for call in (
            lambda: client.messages.get("12345"),
            lambda: client.messages.get(b"short"),
            lambda: client.messages.find("orders", key=""),
            lambda: client.messages.find("orders", key="x" * 70_000),
            lambda: client.messages.find("orders", limit=0),
            lambda: client.messages.find("orders", limit=1001),
            lambda: client.messages.find("orders", since=now, until=now - timedelta(seconds=1)),
            lambda: client.messages.find("orders", since=datetime(2026, 1, 1)),  # noqa: DTZ001
        ):
            with pytest.raises(pulque.UsageError):
                call()
        assert client.messages.get(new).body == b"new"


def test_the_asyncio_client_finds_the_same(broker_process: BrokerProcess) -> None:
    async def look(receipt: pulque.Receipt) -> None:
        async with aio.connect(broker_process.url) as client:
            found = await client.messages.find("orders", key="a")
            assert [message.id for message in found] == [receipt.id]
            for what in (receipt.id, receipt, receipt.position):
                assert (await client.messages.get(what)).body == b"found"
            with pytest.raises(pulque.UnknownMessageError):
                await client.messages.get("0" * 32)

    with pulque.connect() as client:
        client.send("orders", b"another", key="b")
        receipt = client.send("orders", b"found", key="a")
    asyncio.run(look(receipt))


def test_ranges_of_time_are_exact(broker_process: BrokerProcess) -> None:
    with pulque.connect() as client:
        receipts = []
        for number in range(8):
            receipts.append(client.send("orders", b"%d" % number, key="a", priority=number % 3))
            time.sleep(0.002)
        times = [each.stored_at_ms for each in receipts]
        since, until = times[2], times[6]
        expected = [e.id for e in reversed(receipts) if since <= e.stored_at_ms < until]
        for key in ("a", None):
            found = client.messages.find(
                "orders",
                key=key,
                since=datetime.fromtimestamp(0, UTC) + timedelta(milliseconds=since),
                until=datetime.fromtimestamp(0, UTC) + timedelta(milliseconds=until),
            )
            assert [message.id for message in found] == expected
        assert [m.id for m in client.messages.find("orders", limit=2)] == [
            each.id for each in reversed(receipts[-2:])
        ]


def command(*arguments: str, code: int = 0) -> tuple[str, str]:
    ended = subprocess.run(
        [sys.executable, "-m", "pulque", *arguments],
        capture_output=True,
        timeout=LIMIT_S,
        env=os.environ,
        check=False,
    )
    assert ended.returncode == code, ended.stderr.decode()
    return ended.stdout.decode(), ended.stderr.decode()


def test_the_commands_find_and_show(broker_process: BrokerProcess) -> None:
    with pulque.connect() as client:
        first = client.send("orders", b"one \x1b[31m", key="a", headers={"who": "me"})
        client.send("orders", b"two", key="b")
        third = client.send("orders", b"three", key="a")
    text, _ = command("message", "find", "orders", "--key", "a")
    assert first.id in text
    assert "orders/2" in text
    assert r"one \x1b[31m" in text
    assert "\x1b" not in text
    rows = command("message", "find", "orders", "--key", "a", "-o", "json")[0].splitlines()
    assert [json.loads(row)["id"] for row in rows] == [third.id, first.id]
    for which in (first.id, "orders/0"):
        shown = json.loads(command("message", "show", which, "-o", "json")[0])
        assert (shown["id"], shown["headers"]) == (first.id, {"who": "me"})
    assert command("message", "show", "orders/2", "-o", "raw")[0] == "three\n"
    assert "next one to come is 3" in command("message", "show", "orders/3", code=4)[1]
    command("message", "find", "orders", "--key", "never sent", code=4)
    command("message", "show", "nonsense", code=2)
    command("message", "find", "orders", "--since", "yesterday", code=2)


def test_a_subject_that_nobody_has_and_a_position_without_a_broker_group(
    up_process: UpProcess,
) -> None:
    async def look(url: str) -> pulque.Message:
        async with aio.connect(url) as client:
            for call in (client.messages.find("nothing"), client.messages.get(nowhere)):
                with pytest.raises(pulque.UnknownSubjectError, match="nothing"):
                    await call
            return await client.messages.get(receipt.position._replace(broker_group=""))

    nowhere = pulque.Position("", "nothing", pulque.ConsumeSequence(0))
    with pulque.connect() as client:
        with pytest.raises(pulque.UnknownSubjectError, match="no broker has a subject nothing"):
            client.messages.find("nothing")
        with pytest.raises(pulque.UnknownSubjectError):
            client.messages.find("nothing", broker="default")
        with pytest.raises(pulque.UnknownSubjectError):
            client.messages.get(nowhere)
        receipt = client.send("orders", b"tea")
        found = client.messages.get(receipt.position._replace(broker_group=""))
        assert (found.body, found.broker_group) == (b"tea", receipt.broker_group)
        with pytest.raises(pulque.UnavailableError, match="elsewhere is not there now"):
            client.messages.get(receipt.position._replace(broker_group="elsewhere"))
    assert asyncio.run(look(up_process.url)).broker_group == receipt.broker_group
    text = command("message", "find", "nothing", code=1)[1]
    assert text == "error: UnknownSubjectError: no broker has a subject nothing\n"
    shown = json.loads(command("message", "show", "orders/0", "-o", "json")[0])
    assert (shown["body"], shown["broker_group"]) == ("tea", receipt.broker_group)
