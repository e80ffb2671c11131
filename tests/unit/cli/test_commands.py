"""What a command asks of the client, what it prints, and how it ends."""

import json
from pathlib import Path
from typing import Self

import pytest

from pulque import (
    ConfigError,
    DisconnectedError,
    InvalidNameError,
    OverloadedError,
    PulqueError,
    RequestTimeoutError,
    StorageFullError,
    UsageError,
)
from pulque.cli.app import run
from pulque.cli.common.exit_codes import ExitCode, exit_code_of
from pulque.cli.common.options import Tools
from tests.unit.cli.fakes import FakeClient, stored

URL = "pulque://127.0.0.1:1"
AT_ONCE = {"delay": None, "at": None, "level": None}


def command(client: FakeClient, *arguments: str) -> int:
    return run(arguments, Tools(connect=client.connect))


@pytest.fixture(autouse=True)
def _own_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PULQUE_URL", raising=False)


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (ConfigError("x"), 2),
        (UsageError("x"), 2),
        (DisconnectedError("x"), 3),
        (RequestTimeoutError("x"), 3),
        (OverloadedError("x"), 1),
        (InvalidNameError("x"), 2),
        (StorageFullError("x"), 1),
        (PulqueError("x"), 1),
    ],
)
def test_an_error_has_its_exit_code_and_one_plain_line(
    error: PulqueError, code: int, capsys: pytest.CaptureFixture[str]
) -> None:
    ended = command(FakeClient(error=error), "send", "orders", "tea")

    assert ended == exit_code_of(error) == code
    assert capsys.readouterr().err == f"error: {type(error).__name__}: x\n"


class EmptyClient(FakeClient):
    """Of a cluster in which there is nothing."""

    def groups(self, subject: str | None) -> list[object]:
        return []

    def statuses(self) -> dict[str, dict[str, object]]:
        return {}

    def delayed(self, subject: str | None) -> Self:
        return self

    def next(self, number: int, **_: object) -> list[object]:
        return []

    def stuck(self, number: int) -> list[object]:
        return []

    def counts(self, *_: object) -> list[object]:
        return []


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["group", "list", "nosuch"], "no groups have consumed nosuch here"),
        (["group", "list", "nosuch", "-o", "json"], "no groups have consumed nosuch here"),
        (["group", "list"], "no groups have consumed here"),
        (["delay", "list", "nosuch"], "no messages of nosuch wait"),
        (["delay", "stuck", "nosuch"], "no messages of nosuch are overdue"),
        (["delay", "counts"], "no messages wait"),
    ],
)
def test_that_there_is_nothing_is_said_on_stderr(
    arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command(EmptyClient(), *arguments) == ExitCode.NOTHING
    assert capsys.readouterr() == ("", f"{said}\n")


def test_foreign_text_in_an_error_is_escaped(capsys: pytest.CaptureFixture[str]) -> None:
    command(FakeClient(error=InvalidNameError("bad \x1b[31m")), "send", "orders", "tea")

    assert capsys.readouterr().err == "error: InvalidNameError: bad \\x1b[31m\n"


@pytest.mark.parametrize(
    "arguments",
    [
        ["nonsense"],
        ["send"],
        ["send", "orders"],
        ["send", "orders", "tea", "--file", "x"],
        ["send", "orders", "tea", "--count", "0"],
        ["send", "orders", "tea", "--count", "many"],
        ["send", "orders", "tea", "--header", "nothing"],
        ["send", "orders", "tea", "--header", "=x"],
        ["send", "orders", "tea", "--acks", "none"],
        ["send", "orders", "tea", "--timeout", "0"],
        ["send", "orders", "a\nb", "--lines", "--count", "2"],
        ["send", "orders", "--file", "no-such-file"],
        ["pull", "orders"],
        ["pull", "orders", "--group", "g", "-n", "0"],
        ["pull", "orders", "--broadcast", "--once"],
        ["pull", "orders", "--group", "g", "--tags", "a |"],
        ["pull", "orders", "--group", "g", "--start", "yesterday"],
        ["pull", "orders", "--group", "g", "--start", "2026-11-16T09:30:00"],
        ["group", "change", "orders", "--group", "g"],
        ["group", "change", "orders", "--group", "g", "--tags", "a", "--no-filter"],
        ["group", "change", "orders", "--group", "g", "--tags", "a && b || c"],
        ["pull", "orders", "--group", "g", "--reason", "x"],
        ["pull", "orders", "--group", "g", "-o", "yaml"],
        ["tail", "orders", "--from", "yesterday"],
        ["tail", "orders", "--from", "-1"],
        ["broker"],
        ["log", "verify", "no-such-directory"],
        ["config", "show", "--set", "nothing"],
        ["config", "check", "--port", "99999"],
        ["bench", "send", "--size", "1"],
    ],
    ids=" ".join,
)
def test_wrong_usage_exits_with_2_and_one_line(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    client = FakeClient()
    assert command(client, *arguments) == ExitCode.USAGE

    told = capsys.readouterr()
    assert told.out == ""
    assert told.err.startswith("error: ")
    assert told.err.count("\n") == 1
    assert client.sent == []


def test_ctrl_c_ends_with_130(capsys: pytest.CaptureFixture[str]) -> None:
    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    assert run(["status"], Tools(connect=interrupted)) == ExitCode.INTERRUPTED
    assert capsys.readouterr().err == ""


def test_help_is_for_people_and_no_error(capsys: pytest.CaptureFixture[str]) -> None:
    assert command(FakeClient()) == 0
    assert command(FakeClient(), "pull", "-h") == 0

    assert "Exit codes:" in capsys.readouterr().out


def test_send_hands_over_every_part_of_a_message(capsys: pytest.CaptureFixture[str]) -> None:
    client = FakeClient()
    arguments = ["--key", "k", "--order-key", "o", "--tag", "a", "--tag", "b", "--header", "h=v=w"]
    arguments += ["--priority", "7"]
    ended = command(client, "send", "orders", "tea", *arguments, "--acks", "memory", "--url", URL)

    assert ended == 0
    parts = {"key": "k", "order_key": "o", "tags": ["a", "b"], "headers": {"h": "v=w"}}
    assert client.sent == [("orders", b"tea", {**parts, "priority": 7, **AT_ONCE})]
    assert (client.asked["acks"], client.asked["url"]) == ("memory", URL)
    assert capsys.readouterr().out == f"sent {'0' * 32} as orders/0\n"


def test_send_tells_a_receipt_per_message_in_json(capsys: pytest.CaptureFixture[str]) -> None:
    command(FakeClient(), "send", "orders", "tea", "--count", "2", "-o", "json")

    receipts = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [each["sequence"] for each in receipts] == [0, 1]
    assert receipts[0] == {
        "id": "0" * 32,
        "partition": "orders",
        "sequence": 0,
        "stored_at": "2023-11-14T22:13:20.007Z",
        "broker_group": "broker",
        "is_duplicate": False,
        "due_at": None,
    }


def test_send_sums_up_many_messages(capsys: pytest.CaptureFixture[str]) -> None:
    command(FakeClient(), "send", "orders", "tea", "--count", "1500")

    assert capsys.readouterr().out.startswith("sent 1,500 messages to orders in ")


@pytest.mark.parametrize(
    ("content", "bodies"),
    [
        (b"a\nb\n", [b"a", b"b"]),
        (b"a\r\nb", [b"a", b"b"]),
        (b"\n\n", [b"", b""]),
        (b"\xff\n", [b"\xff"]),
        (b"", []),
    ],
)
def test_send_takes_each_line_of_a_file(
    content: bytes, bodies: list[bytes], tmp_path: Path
) -> None:
    file = tmp_path / "lines"
    file.write_bytes(content)
    client = FakeClient()
    command(client, "send", "orders", "--file", str(file), "--lines")

    assert [body for _, body, _ in client.sent] == bodies


def test_send_takes_a_whole_file_as_it_is(tmp_path: Path) -> None:
    file = tmp_path / "body"
    file.write_bytes(b"\x00\xff\n\n")
    client = FakeClient()
    command(client, "send", "orders", "--file", str(file), "--count", "2")

    assert [body for _, body, _ in client.sent] == [b"\x00\xff\n\n"] * 2


def test_pull_acks_what_it_printed(capsys: pytest.CaptureFixture[str]) -> None:
    messages = stored(b"a", b"b", b"c")
    ended = command(
        FakeClient(messages=messages), "pull", "orders", "--group", "g", "-n", "2", "-o", "json"
    )

    assert ended == 0
    bodies = [json.loads(line)["body"] for line in capsys.readouterr().out.splitlines()]
    assert bodies == ["a", "b"]
    assert [each.outcome for each in messages] == ["acked", "acked", None]


def test_pull_nacks_if_asked_to() -> None:
    messages = stored(b"a")
    options = ["--group", "g", "-n", "5", "--nack", "--reason", "too hot"]
    ended = command(FakeClient(messages=messages), "pull", "orders", *options)

    assert ended == 0
    assert messages[0].outcome == "nacked: too hot"


def test_pull_without_a_message_exits_with_4(capsys: pytest.CaptureFixture[str]) -> None:
    assert command(FakeClient(), "pull", "orders", "--group", "g") == ExitCode.NOTHING
    assert capsys.readouterr().out == ""


def test_pull_hands_over_its_options() -> None:
    client = FakeClient(messages=stored(b"a"))
    command(client, "pull", "orders", "--group", "g", "--start", "latest", "--consumer-id", "c/1")

    assert client.asked["subject"] == "orders"
    assert client.asked["group"] == "g"
    assert client.asked["start"] == "latest"
    assert client.asked["consumer_id"] == "c/1"


@pytest.mark.parametrize(("text", "start"), [("earliest", "earliest"), ("17", 17)])
def test_tail_prints_until_it_has_enough(
    text: str, start: object, capsys: pytest.CaptureFixture[str]
) -> None:
    client = FakeClient(messages=stored(b"a", b"b", b"c"))
    assert command(client, "tail", "orders", "--from", text, "-n", "2", "-o", "json") == 0

    assert client.asked["start"] == start
    assert len(capsys.readouterr().out.splitlines()) == 2


def test_status_is_tables_or_json(capsys: pytest.CaptureFixture[str]) -> None:
    command(FakeClient(), "status")
    table = [line.split() for line in capsys.readouterr().out.splitlines()]
    command(FakeClient(), "status", "-o", "json")

    assert table == [
        ["what", "value"],
        ["pid", "7"],
        ["message_log.end", "5"],
        [],
        ["groups:"],
        ["group", "lag"],
        ["g", "2"],
        ["h", "0"],
    ]
    assert json.loads(capsys.readouterr().out) == FakeClient().status()


def test_seal_tells_where_the_next_segment_begins(capsys: pytest.CaptureFixture[str]) -> None:
    assert command(FakeClient(), "broker", "seal", "-o", "json") == 0
    assert json.loads(capsys.readouterr().out) == {"broker_group": "b1", "end": 99}


def test_config_show_tells_value_and_origin_of_every_setting(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    file = tmp_path / "broker.toml"
    file.write_text("[storage]\ndirectory = 'there'\n")
    monkeypatch.setenv("PULQUE_BROKER__STORAGE__RETENTION", "P7D")
    arguments = ["--config", str(file), "--port", "1", "--set", "log.level=debug", "-o", "json"]
    assert command(FakeClient(), "config", "show", *arguments) == 0

    shown = json.loads(capsys.readouterr().out)
    assert shown["storage.directory"] == {"value": "there", "origin": f"{file}:2"}
    assert shown["storage.retention"] == {
        "value": "7d",
        "origin": "PULQUE_BROKER__STORAGE__RETENTION",
    }
    assert shown["listen.port"] == {"value": "1", "origin": "--port"}
    assert shown["log.level"] == {"value": "debug", "origin": "--set"}
    assert shown["storage.retention_size"] == {"value": None, "origin": "default"}


def test_config_show_without_a_file_shows_what_up_would_use(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert command(FakeClient(), "config", "show") == 0

    rows = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert ["storage.directory", "pulque-data", "default"] in rows
    assert ["storage.retention_size", "-", "default"] in rows


def test_config_check_tells_every_problem(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    file = tmp_path / "broker.toml"
    file.write_text("[listen]\nport = -1\nhost = '0.0.0.0'\n")
    assert command(FakeClient(), "config", "check", "--config", str(file)) == ExitCode.USAGE

    problems = capsys.readouterr().err.splitlines()
    assert len(problems) == 3
    assert all(problem.startswith(f"error: ConfigError: {file}") for problem in problems)
    assert command(FakeClient(), "config", "check") == 0


def test_version_is_that_of_the_package(capsys: pytest.CaptureFixture[str]) -> None:
    command(FakeClient(), "version")

    assert capsys.readouterr().out.startswith("pulque 0.")
