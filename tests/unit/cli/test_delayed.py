"""``pulque delay …`` and ``pulque send --delay``, against delay servers in memory."""

import json
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta

import pytest

import pulque
from pulque.cli.app import run
from pulque.cli.common.options import Tools
from tests.unit.client.fake_cluster import FakeCluster
from tests.unit.client.fake_delay import FakeDelay, delayed_routes

Command = Callable[..., int]


@pytest.fixture
def delay() -> Iterator[FakeDelay]:
    with FakeDelay("d") as delay:
        yield delay


@pytest.fixture
def command(delay: FakeDelay) -> Iterator[Command]:
    with FakeCluster(1) as cluster:
        cluster.meta.delayed_routes = delayed_routes([delay])

        def command(*arguments: str) -> int:
            tools = Tools(connect=pulque.connect)
            return run([*arguments, "--url", cluster.url], tools)

        yield command


def lines(capsys: pytest.CaptureFixture[str]) -> list[dict[str, object]]:
    return [json.loads(line) for line in capsys.readouterr().out.splitlines()]


def send(command: Command, capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert command("send", "orders", "tea", "-o", "json", *arguments) == 0
    (receipt,) = lines(capsys)
    return str(receipt["id"])


def test_send_says_when_it_is_due(
    command: Command, delay: FakeDelay, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command("send", "orders", "tea", "--delay", "1h30m") == 0
    out = capsys.readouterr().out
    ((due_ms, message),) = delay.scheduled.values()
    assert message.body == b"tea"
    due = datetime.fromtimestamp(due_ms / 1000, UTC)
    assert abs(due - datetime.now(UTC) - timedelta(minutes=90)) < timedelta(seconds=60)
    assert out.startswith(f"sent {message.id}, due {due:%Y-%m-%dT%H:%M}")
    assert out.endswith("to d\n")
    assert command("send", "orders", "tea", "--at", "2027-01-31T09:30:00+01:00", "-o", "json") == 0
    (receipt,) = lines(capsys)
    assert receipt["due_at"] == "2027-01-31T08:30:00.000Z"
    assert command("send", "orders", "tea", "--level", "18") == 0
    assert len(delay.scheduled) == 3


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--delay", "soon"], "--delay 'soon': a duration is written like 7d"),
        (["--delay", "-5s"], "a duration is written like"),
        (["--at", "2027-01-31T09:30:00"], "an instant with its time zone is allowed"),
        (["--at", "tomorrow"], "--at 'tomorrow': an instant with its time zone"),
        (["--level", "19"], "level is 19; a whole number from 1"),
        (["--level", "1", "--delay", "5s"], "only one of delay, at and level"),
    ],
)
def test_nonsense_is_refused(
    command: Command, capsys: pytest.CaptureFixture[str], arguments: list[str], said: str
) -> None:
    assert command("send", "orders", "tea", *arguments) == 2
    assert said in capsys.readouterr().err


def test_list_count_and_show(command: Command, capsys: pytest.CaptureFixture[str]) -> None:
    later = send(command, capsys, "--at", "2027-01-31T10:30:00Z")
    sooner = send(command, capsys, "--at", "2027-01-31T09:30:00Z")
    assert command("delay", "list", "-o", "json") == 0
    found = lines(capsys)
    assert [each["id"] for each in found] == [sooner, later]
    assert found[0] == {
        "id": sooner,
        "due_at": "2027-01-31T09:30:00.000Z",
        "subject": "orders",
        "partition": "orders",
        "group": None,
        "size": 100,
        "delay_server": "d",
    }
    assert command("delay", "list", "orders", "-n", "1") == 0
    assert capsys.readouterr().out.splitlines()[1].startswith("2027-01-31T09:30:00.000Z")
    assert command("delay", "list", "--from", "2027-01-31T09:30:01Z", "-o", "json") == 0
    assert [each["id"] for each in lines(capsys)] == [later]
    assert command("delay", "counts") == 0
    assert capsys.readouterr().out.splitlines()[1:] == [
        "2027-01-31 09:00Z  orders   1",
        "2027-01-31 10:00Z  orders   1",
    ]
    assert command("delay", "counts", "-o", "json", "--until", "2027-01-31T10:00:00Z") == 0
    assert lines(capsys) == [
        {"hour": "2027-01-31T09:00:00+00:00", "subject": "orders", "messages": 1}
    ]
    assert command("delay", "show", later) == 0
    assert capsys.readouterr().out == "due 2027-01-31T10:30:00.000Z orders tea\n"
    assert command("delay", "show", later, "-o", "raw") == 0
    assert capsys.readouterr().out == "tea\n"
    assert command("delay", "show", later, "-o", "json") == 0
    (shown,) = lines(capsys)
    assert (shown["body"], shown["due_at"]) == ("tea", "2027-01-31T10:30:00.000Z")
    assert "stored_at" not in shown


def test_what_is_stuck_is_listed_with_the_reason(
    command: Command, delay: FakeDelay, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command("delay", "stuck") == 4
    one = send(command, capsys, "--at", "2027-01-31T10:30:00Z")
    send(command, capsys, "--at", "2027-01-31T09:30:00Z")
    delay.refused[bytes.fromhex(one)] = "too large"
    assert command("delay", "stuck", "-o", "json") == 0
    (found,) = lines(capsys)
    assert (found["id"], found["reason"]) == (one, "too large")
    assert command("delay", "stuck", "orders", "-n", "1") == 0
    header, row = capsys.readouterr().out.splitlines()
    assert header.split()[-1] == "reason"
    assert row.endswith("too large")
    assert command("delay", "stuck", "others") == 4


def test_nothing_there_is_an_exit_of_its_own(
    command: Command, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command("delay", "list") == 4
    assert command("delay", "counts") == 4
    assert command("delay", "show", "0" * 32) == 4
    assert f"no delay server has {'0' * 32}" in capsys.readouterr().err


def test_cancel_tells_what_became_of_each(
    command: Command, delay: FakeDelay, capsys: pytest.CaptureFixture[str]
) -> None:
    one, other = (send(command, capsys, "--delay", "1d") for _ in range(2))
    assert command("delay", "cancel", one) == 0
    assert capsys.readouterr().out == f"{one} cancelled\n"
    assert command("delay", "cancel", one, "0" * 32, "-o", "json") == 4
    assert [each["outcome"] for each in lines(capsys)] == ["already_cancelled", "unknown"]
    delay.gone.add(bytes.fromhex(other))
    assert command("delay", "cancel", other) == 1
    assert "too late" in capsys.readouterr().out
    assert command("delay", "cancel", "nonsense") == 2
    assert "is no message" in capsys.readouterr().err


def test_reschedule(
    command: Command, delay: FakeDelay, capsys: pytest.CaptureFixture[str]
) -> None:
    one = send(command, capsys, "--delay", "1d")
    assert command("delay", "reschedule", one, "--at", "2027-03-01T00:00:00Z") == 0
    assert capsys.readouterr().out == f"{one} moved to 2027-03-01T00:00:00.000Z\n"
    assert [due for due, _ in delay.scheduled.values()] == [1_803_859_200_000]
    assert command("delay", "reschedule", one) == 2
    assert command("delay", "cancel", one) == 0
    assert command("delay", "reschedule", one, "--level", "1", "-o", "json") == 1
    assert command("delay", "reschedule", "0" * 32, "--level", "1") == 4


def test_help_names_the_commands(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["delay", "--help"], Tools(connect=pulque.connect)) == 0
    out = capsys.readouterr().out
    for name in ("list", "counts", "stuck", "show", "cancel", "reschedule"):
        assert name in out


@pytest.mark.parametrize("text", ["90", "90.0", "90s", "1m30s", "PT1M30S"])
def test_durations_read_the_same_everywhere(
    command: Command, delay: FakeDelay, capsys: pytest.CaptureFixture[str], text: str
) -> None:
    assert command("send", "orders", "tea", "--delay", text, "--timeout", text) == 0
    ((due_ms, _),) = delay.scheduled.values()
    due = datetime.fromtimestamp(due_ms / 1000, UTC)
    assert abs(due - datetime.now(UTC) - timedelta(seconds=90)) < timedelta(seconds=60)
    assert command("delay", "list", "--timeout", text) == 0
    assert command("delay", "list", "--timeout", f"-{text}") == 2
    assert command("delay", "list", "--timeout", "soon") == 2
    assert "a duration is written like" in capsys.readouterr().err


def test_a_bare_number_removes_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    tools = Tools(connect=pulque.connect)
    for wrong in ("365", "1h"):
        expire = ["pipeline", "expire", "--lake", ".", "--older-than", wrong]
        assert run(expire, tools) == 2
    assert "a day or more" in capsys.readouterr().err
