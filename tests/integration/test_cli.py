"""The commands as people and scripts run them: real processes, pipes, signals, exit codes."""

import base64
import contextlib
import json
import os
import pty
import re
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from pulque.testing.process import BrokerProcess, BrokerProcessError
from pulque.wire.requests import Seal
from pulque.wire.responses import Sealed
from tests.integration.test_replication import ask

pytestmark = pytest.mark.server

PULQUE = [sys.executable, "-m", "pulque"]
LIMIT = 60


def pulque(
    *arguments: str, given: bytes = b"", environ: dict[str, str] | None = None
) -> subprocess.CompletedProcess[bytes]:
    return subprocess.run(
        [*PULQUE, *arguments],
        input=given,
        capture_output=True,
        timeout=LIMIT,
        env={**os.environ, **(environ or {})},
        check=False,
    )


def objects(ended: subprocess.CompletedProcess[bytes]) -> list[dict[str, Any]]:
    assert ended.returncode == 0, ended.stderr.decode()
    return [json.loads(line) for line in ended.stdout.splitlines()]


def pulled(*options: str) -> list[dict[str, Any]]:
    return objects(pulque("pull", "orders", "--group", "g", "-o", "json", *options))


def start(*arguments: str, stdout: int = subprocess.PIPE) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [*PULQUE, *arguments], stdin=subprocess.DEVNULL, stdout=stdout, stderr=subprocess.PIPE
    )


def ended(process: subprocess.Popen[bytes]) -> tuple[int, bytes, bytes]:
    out, err = process.communicate(timeout=LIMIT)
    return process.returncode, out, err


def read_line(process: subprocess.Popen[bytes]) -> bytes:
    assert process.stdout is not None
    ready, _, _ = select.select([process.stdout], [], [], LIMIT)
    assert ready, "nothing was printed"
    return process.stdout.readline()


# -- up -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_up_prints_one_line_and_stops_cleanly(number: int, tmp_path: Path) -> None:
    process = start("up", "--data", str(tmp_path / "data"), "--port", "0")
    line = read_line(process)
    host, _, port = line.decode().removeprefix("ready pulque://").strip().partition(":")
    socket.create_connection((host, int(port)), timeout=LIMIT).close()
    process.send_signal(number)

    code, rest, err = ended(process)
    assert line.startswith(b"ready pulque://127.0.0.1:")
    assert (code, rest) == (0, b"")
    events = [json.loads(each)["event"] for each in err.splitlines()]
    wanted = ["meta_server_ready", "broker_started", "broker_stopped", "meta_server_stopped"]
    assert [each for each in events if each in wanted] == wanted


def test_up_takes_no_delayed_message_that_its_broker_would_refuse_later(tmp_path: Path) -> None:
    limit = ("--set", "limits.max_message=1KiB")
    process = start("up", "--data", str(tmp_path / "data"), "--port", "0", *limit)
    url = read_line(process).decode().removeprefix("ready ").strip()
    small, large = (
        pulque("send", "orders", "x" * size, "--delay", "1h", "--url", url) for size in (100, 2000)
    )
    process.terminate()
    ended(process)

    assert (small.returncode, large.returncode) == (0, 1)
    assert b"MessageTooLargeError" in large.stderr


def test_up_keeps_its_data_in_the_current_folder_by_default(tmp_path: Path) -> None:
    process = subprocess.Popen(
        [*PULQUE, "up", "--port", "0"],
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    assert read_line(process).startswith(b"ready ")
    process.terminate()
    ended(process)

    assert (tmp_path / "pulque-data" / "format.json").exists()


def test_the_broker_runs_with_a_file_of_settings(tmp_path: Path) -> None:
    file, data = tmp_path / "broker.toml", tmp_path / "there"
    file.write_text(f"name = 'b7'\n[storage]\ndirectory = '{data}'\n[listen]\nport = 0\n")
    process = start("broker", "--config", str(file))
    url = read_line(process).decode().split()[1]
    (report,) = objects(pulque("status", "--url", url, "-o", "json"))
    process.terminate()

    assert ended(process)[0] == 0
    assert report["broker"] == "b7"
    assert (data / "format.json").exists()


def test_wrong_settings_exit_with_2_before_any_data_is_opened(tmp_path: Path) -> None:
    file = tmp_path / "broker.toml"
    file.write_text(f"[storage]\ndirectory = '{tmp_path / 'data'}'\nretension = '7d'\n")
    told = pulque("broker", "--config", str(file))

    assert told.returncode == 2
    assert told.stdout == b""
    assert told.stderr.startswith(f"error: ConfigError: {file}:3: ".encode())
    assert b"did you mean storage.retention?" in told.stderr
    assert b"Traceback" not in told.stderr
    assert not (tmp_path / "data").exists()


def test_a_port_in_use_exits_with_2_before_any_data_is_opened(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = str(server.getsockname()[1])
        told = pulque("up", "--data", str(tmp_path / "data"), "--port", port)

    assert told.returncode == 2
    assert b"error: ConfigError: --port: listen.port is " in told.stderr
    assert not (tmp_path / "data").exists()


@pytest.mark.parametrize(
    ("names", "says"),
    [
        ({"notes.txt": "mine"}, b"choose an empty one"),
        ({"format.json": '{"format": 99}'}, b"run the version that wrote it"),
        ({"format.json": "}"}, b"restore it"),
    ],
)
def test_a_foreign_directory_is_refused_with_the_remedy(
    names: dict[str, str], says: bytes, tmp_path: Path
) -> None:
    for name, text in names.items():
        (tmp_path / name).write_text(text)
    told = pulque("up", "--data", str(tmp_path), "--port", "0")

    assert told.returncode == 1
    assert b"error: DataDirectoryError: " in told.stderr
    assert says in told.stderr
    assert b"Traceback" not in told.stderr


def test_a_directory_in_use_is_refused(broker_process: BrokerProcess) -> None:
    told = pulque("up", "--data", str(broker_process.data), "--port", "0")

    assert told.returncode == 1
    assert f"in use by process {broker_process.pid}".encode() in told.stderr
    assert broker_process.is_running


# -- send, pull, tail ---------------------------------------------------------------------------


@pytest.mark.usefixtures("broker_process")
def test_a_message_comes_out_as_it_went_in() -> None:
    options = ["--key", "k-1", "--tag", "hot", "--tag", "sweet", "--header", "trace=a=b"]
    (receipt,) = objects(pulque("send", "orders", "two teas ☕", *options, "-o", "json"))
    (message,) = pulled()

    assert message["id"] == receipt["id"]
    assert (message["subject"], message["partition"], message["sequence"]) == (
        "orders",
        "orders",
        0,
    )
    assert (message["key"], message["order_key"]) == ("k-1", None)
    assert (message["tags"], message["headers"]) == (["hot", "sweet"], {"trace": "a=b"})
    assert (message["body"], message["attempt"]) == ("two teas ☕", 1)
    assert message["created_at"][-1] == message["stored_at"][-1] == "Z"
    assert set(message) >= {"priority"}


@pytest.mark.usefixtures("broker_process")
def test_bytes_go_through_stdin_and_come_out_raw() -> None:
    body = bytes(range(256))
    assert pulque("send", "orders", "--file", "-", given=body).returncode == 0

    assert pulque("tail", "orders", "--from", "earliest", "-n", "1", "-o", "raw").stdout == (
        body + b"\n"
    )
    (message,) = pulled()
    assert base64.b64decode(message["body_base64"]) == body


@pytest.mark.usefixtures("broker_process")
def test_each_line_of_a_pipe_is_a_message() -> None:
    told = pulque("send", "orders", "--file", "-", "--lines", given=b"a\nb\n\nc")

    assert told.stdout.startswith(b"sent 4 messages to orders")
    pulled = objects(
        pulque("pull", "orders", "--group", "g", "-n", "9", "--timeout", "1", "-o", "json")
    )
    assert [message["body"] for message in pulled] == ["a", "b", "", "c"]


@pytest.mark.usefixtures("broker_process")
def test_a_nacked_message_comes_again_with_its_reason() -> None:
    pulque("send", "orders", "tea")
    first = pulque("pull", "orders", "--group", "g", "--nack", "--reason", "cold", "-o", "json")
    second = pulque("pull", "orders", "--group", "g", "-o", "json")
    third = pulque("pull", "orders", "--group", "g", "--timeout", "0.5")

    assert [message["attempt"] for message in objects(first)] == [1]
    (again,) = objects(second)
    assert (again["attempt"], again["subject"], again["body"]) == (2, "orders", "tea")
    assert "cold" in json.dumps(again["headers"])
    assert (third.returncode, third.stdout) == (4, b"")


@pytest.mark.usefixtures("broker_process")
def test_tail_prints_what_is_stored_later_and_moves_no_group() -> None:
    pulque("send", "orders", "before")
    process = start("tail", "orders", "--from", "1", "-n", "2", "-o", "json")
    pulque("send", "orders", "after", "--count", "2")

    code, out, _ = ended(process)
    assert code == 0
    assert [json.loads(line)["body"] for line in out.splitlines()] == ["after", "after"]
    pulled = objects(
        pulque("pull", "orders", "--group", "g", "-n", "9", "--timeout", "1", "-o", "json")
    )
    assert [message["sequence"] for message in pulled] == [0, 1, 2]


@pytest.mark.usefixtures("broker_process")
def test_evil_text_steers_no_terminal() -> None:
    evil = "\x1b]0;owned\x07\x1b[31m\u202e"
    pulque("send", "orders", evil, "--key", evil, "--header", f"h={evil}")
    for output in ("table", "json"):
        told = pulque("tail", "orders", "--from", "earliest", "-n", "1", "-o", output)
        assert told.stdout.decode().removesuffix("\n").isprintable()


def test_status_and_seal_answer(broker_process: BrokerProcess) -> None:
    (report,) = objects(pulque("status", "-o", "json"))
    (sealed,) = objects(pulque("broker", "seal", "-o", "json"))

    assert report["pid"] == broker_process.pid
    assert sealed["end"] >= 0
    assert pulque("status").returncode == 0


@pytest.mark.usefixtures("broker_process")
def test_bench_measures_all_three_ways() -> None:
    (sent,) = objects(pulque("bench", "send", "--count", "5000", "--size", "50", "-o", "json"))
    (drained,) = objects(pulque("bench", "pull", "--count", "5000", "-o", "json"))
    (both,) = objects(pulque("bench", "e2e", "--count", "5000", "--acks", "memory", "-o", "json"))

    assert sent["messages"] == drained["messages"] == both["messages"] == 5000
    assert sent["bytes"] == drained["bytes"] == 250_000
    assert both["latency_ms_p99"] >= both["latency_ms_p50"] > 0
    assert pulque("bench", "pull", "--subject", "empty", "--timeout", "1").returncode == 4


# -- refusals and signals -----------------------------------------------------------------------


@pytest.mark.parametrize(
    "arguments",
    [
        ("send", "orders", "tea"),
        ("pull", "orders", "--group", "g"),
        ("tail", "orders"),
        ("status",),
        ("broker", "seal"),
        ("bench", "send"),
        ("bench", "e2e"),
    ],
    ids=" ".join,
)
def test_without_a_broker_every_client_command_exits_with_3(arguments: Sequence[str]) -> None:
    with socket.socket() as reserved:
        reserved.bind(("127.0.0.1", 0))
        url = f"pulque://127.0.0.1:{reserved.getsockname()[1]}"
        told = pulque(*arguments, "--url", url)

    assert told.returncode == 3, told.stderr
    assert told.stderr.startswith(b"error: DisconnectedError: ")
    assert told.stderr.count(b"\n") == 1


@pytest.mark.parametrize("url", ["http://127.0.0.1", "pulque://", "pulque://h:99999", "7450"])
def test_a_url_that_is_none_exits_with_2(url: str) -> None:
    assert pulque("status", "--url", url).returncode == 2
    assert pulque("status", environ={"PULQUE_URL": url}).returncode == 2


@pytest.mark.usefixtures("broker_process")
@pytest.mark.parametrize("subject", ["../x", "", "a" * 300, "a\x1bb", "a b", "%retry%a%b"])
def test_a_name_that_is_not_allowed_exits_with_2(subject: str) -> None:
    told = pulque("send", subject, "tea")

    assert told.returncode == 2
    assert told.stderr.startswith(b"error: InvalidNameError: ")
    assert told.stderr.removesuffix(b"\n").decode().isprintable()


@pytest.mark.usefixtures("broker_process")
def test_a_message_over_the_limit_exits_with_1() -> None:
    told = pulque("send", "orders", "--file", "-", given=bytes(5 * 1024 * 1024))

    assert told.returncode == 1
    assert told.stderr.startswith(b"error: MessageTooLargeError: ")


@pytest.mark.usefixtures("broker_process")
def test_ctrl_c_in_tail_ends_with_130_and_says_nothing() -> None:
    pulque("send", "orders", "tea")
    process = start("tail", "orders", "--from", "earliest", "-o", "raw")
    assert read_line(process) == b"tea\n"
    process.send_signal(signal.SIGINT)

    code, _, err = ended(process)
    assert (code, err) == (130, b"")


@pytest.mark.usefixtures("broker_process")
def test_ctrl_c_in_pull_ends_with_130_and_says_nothing() -> None:
    process = start("pull", "orders", "--group", "g", "--timeout", "60")
    wait_until(lambda: status()["pulls_waiting"] == 1)
    process.send_signal(signal.SIGINT)

    code, out, err = ended(process)
    assert (code, out, err) == (130, b"", b"")


def test_ctrl_c_while_starting_says_nothing(tmp_path: Path) -> None:
    for after in (0.1, 0.2, 0.3):
        process = start("up", "--data", str(tmp_path / "data"), "--port", "0")
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(after)
        process.send_signal(signal.SIGINT)

        code, _, err = ended(process)
        # Before Python has set itself up, a signal ends it the hard way, in its own words.
        if code != -signal.SIGINT and b"Fatal Python error" not in err:
            assert code in {0, 130}
            assert b"Traceback" not in err


def status() -> dict[str, Any]:
    (report,) = objects(pulque("status", "-o", "json"))
    return report


def wait_until(condition: Callable[[], bool]) -> None:
    limit = time.monotonic() + LIMIT
    while not condition():
        assert time.monotonic() < limit, "it did not happen in time"


@pytest.mark.usefixtures("broker_process")
def test_a_reader_that_has_seen_enough_is_no_error() -> None:
    pulque("send", "orders", "x" * 1000, "--count", "2000")
    process = start("tail", "orders", "--from", "earliest", "-o", "json")
    assert read_line(process)
    assert process.stdout is not None
    process.stdout.close()

    assert process.wait(LIMIT) == 0
    assert process.stderr is not None
    assert process.stderr.read() == b""
    process.stderr.close()


@pytest.mark.usefixtures("broker_process")
def test_what_nobody_read_is_not_acked() -> None:
    pulque("send", "orders", "x" * 1000, "--count", "2000")
    process = start("pull", "orders", "--group", "g", "-n", "2000", "-o", "json")
    assert read_line(process)
    assert process.stdout is not None
    process.stdout.close()
    assert process.wait(LIMIT) == 0
    assert process.stderr is not None
    process.stderr.close()

    rest = objects(
        pulque("pull", "orders", "--group", "g", "-n", "1", "--timeout", "20", "-o", "json")
    )
    assert len(rest) == 1


# -- terminals ----------------------------------------------------------------------------------


def on_terminal(
    arguments: Sequence[str], *, columns: int, environ: dict[str, str] | None = None
) -> tuple[int, str]:
    """Run a command whose streams are a terminal; return its code and what was shown."""
    ours, theirs = pty.openpty()
    process = subprocess.Popen(
        [*PULQUE, *arguments],
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        env={**os.environ, "COLUMNS": str(columns), "TERM": "xterm-256color", **(environ or {})},
    )
    os.close(theirs)
    shown = b""
    try:
        while data := os.read(ours, 65536):
            shown += data
    except OSError:
        pass  # the terminal's other side is closed
    os.close(ours)
    return process.wait(LIMIT), shown.decode()


def test_a_table_fits_into_forty_columns() -> None:
    code, shown = on_terminal(["config", "show"], columns=40)
    lines = re.sub(r"\x1b\[[\d;]*m", "", shown).splitlines()

    assert code == 0
    assert max(map(len, lines)) <= 40
    assert "pulque-data" in shown


def test_no_color_is_respected() -> None:
    _, shown = on_terminal(["config", "show"], columns=80, environ={"NO_COLOR": "1"})

    assert "\x1b[3" not in shown


@pytest.mark.usefixtures("broker_process")
def test_a_progress_bar_is_shown_to_people_only() -> None:
    code, shown = on_terminal(["bench", "send", "--count", "2000"], columns=80)
    piped = pulque("bench", "send", "--count", "2000")

    assert code == 0
    assert "sent" in shown
    assert piped.stderr == b""
    assert b"\x1b" not in piped.stdout


@pytest.mark.usefixtures("broker_process")
@pytest.mark.parametrize("locale", ["C", "POSIX", "en_US.ISO-8859-1"])
def test_any_locale_will_do(locale: str) -> None:
    environ = {"LC_ALL": locale, "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    assert pulque("send", "orders", "ñ ☕", "--key", "☕").returncode == 0

    told = pulque("pull", "orders", "--group", "g", "-o", "json", environ=environ)
    assert json.loads(told.stdout)["body"] == "ñ ☕"
    shown = pulque("tail", "orders", "--from", "earliest", "-n", "1", environ=environ)
    assert shown.returncode == 0
    assert b"Traceback" not in shown.stderr


# -- files of a stopped broker ------------------------------------------------------------------


def test_the_files_of_a_stopped_broker_can_be_dumped_and_verified(
    broker_process: BrokerProcess,
) -> None:
    data = str(broker_process.data)
    pulque("send", "orders", "tea", "--count", "3")
    pulque("pull", "orders", "--group", "g")
    locked = pulque("log", "verify", data)
    assert (locked.returncode, pulque("log", "verify", data, "--force").returncode) == (1, 0)
    assert b"in use by process" in locked.stderr
    broker_process.stop()

    (verified,) = objects(pulque("log", "verify", data, "-o", "json"))
    assert (verified["is_damaged"], verified["messages"], verified["findings"]) == (False, 3, [])
    rows = objects(pulque("log", "dump", data, "--messages", "-o", "json"))
    assert [row["body"] for row in rows if row["type"] == "message"] == ["tea"] * 3
    assert {"batch", "partition_table", "Pulled", "mark"} <= {row["type"] for row in rows}
    assert pulque("log", "dump", data).returncode == 0


def test_damage_is_told_with_file_and_offset_and_nothing_is_changed(
    broker_process: BrokerProcess,
) -> None:
    pulque("send", "orders", "tea")
    pulque("send", "orders", "coffee")
    broker_process.stop()
    segment = next((broker_process.data / "messages").glob("*.log"))
    content = bytearray(segment.read_bytes())
    at = content.index(b"tea")
    content[at] ^= 1
    segment.write_bytes(content)

    told = pulque("log", "verify", str(broker_process.data), "-o", "json")
    report = json.loads(told.stdout)
    assert told.returncode == 1
    (finding,) = report["findings"]
    assert finding["file"] == f"messages/{segment.name}"
    assert finding["offset"] <= at < finding["offset"] + finding["size"]
    assert segment.read_bytes() == content
    assert pulque("log", "verify", str(segment)).returncode == 1


def test_a_broker_killed_in_the_middle_leaves_no_damage(broker_process: BrokerProcess) -> None:
    process = start("bench", "send", "--count", "1000000", "--acks", "memory", "-o", "json")
    wait_until(lambda: status()["messages_sent"] > 10_000 or process.poll() is not None)
    broker_process.kill()
    process.kill()
    process.communicate(timeout=LIMIT)

    (verified,) = objects(pulque("log", "verify", str(broker_process.data), "-o", "json"))
    assert verified["is_damaged"] is False


# -- odd circumstances --------------------------------------------------------------------------


@pytest.mark.parametrize("package", ["typer", "pydantic"])
def test_without_the_extra_the_command_says_what_it_needs(package: str) -> None:
    code = f"import sys; sys.modules[{package!r}] = None; from pulque.cli.main import main; main()"
    told = subprocess.run([sys.executable, "-c", code], capture_output=True, check=False)

    assert told.returncode == 2
    assert told.stderr.decode() == (
        f"error: ConfigError: the command needs {package}: pip install 'pulque[server]'\n"
    )


def test_a_full_disk_behind_stdout_is_an_error() -> None:
    with Path("/dev/full").open("wb") as full:
        told = subprocess.run(
            [*PULQUE, "config", "show"], stdout=full, stderr=subprocess.PIPE, check=False
        )

    assert told.returncode == 1
    assert told.stderr.startswith(b"error: OSError: ")
    assert b"Traceback" not in told.stderr


def test_a_broker_serves_although_nobody_hears_that_it_is_ready(tmp_path: Path) -> None:
    with socket.socket() as reserved:
        reserved.bind(("127.0.0.1", 0))
        port = reserved.getsockname()[1]
    process = start("up", "--data", str(tmp_path / "data"), "--port", str(port))
    assert process.stdout is not None
    process.stdout.close()
    url = f"pulque://127.0.0.1:{port}"
    wait_until(lambda: pulque("status", "--url", url).returncode == 0)
    process.terminate()

    assert process.wait(LIMIT) == 0
    assert process.stderr is not None
    assert b"Traceback" not in process.stderr.read()
    process.stderr.close()


# -- the process fixture itself -----------------------------------------------------------------


def test_a_broker_comes_back_where_it_was(broker_process: BrokerProcess) -> None:
    url, pid = broker_process.url, broker_process.pid
    pulque("send", "orders", "tea")
    broker_process.kill()
    broker_process.restart()

    assert broker_process.url == url
    assert broker_process.pid != pid
    assert [
        m["body"] for m in objects(pulque("pull", "orders", "--group", "g", "-o", "json"))
    ] == ["tea"]
    assert broker_process.stderr.count("broker_started") == 2
    assert broker_process.stop() == 0


def test_a_broker_that_cannot_start_is_told_with_its_last_words(tmp_path: Path) -> None:
    with pytest.raises(BrokerProcessError, match="ConfigError"):
        BrokerProcess.start(tmp_path / "data", arguments=["--set", "nonsense=1"])


def test_groups_are_shown_with_what_is_damaged_for_them(broker_process: BrokerProcess) -> None:
    bodies = b"".join(b"body-%03d-of-a-lone-broker\n" % number for number in range(3))
    for body in bodies.splitlines():
        assert pulque("send", "orders", body.decode()).returncode == 0
    assert isinstance(ask(broker_process, Seal()), Sealed)
    assert pulque("send", "orders", "of the next segment").returncode == 0
    for path in broker_process.data.glob("messages/*.log"):
        content = bytearray(path.read_bytes())
        at = content.find(b"body-001")
        if at >= 0:
            content[at : at + 8] = b"\xff" * 8
            path.write_bytes(content)
    broker_process.kill()
    broker_process.restart()  # so that nothing comes from memory

    assert len(pulled("-n", "3", "--timeout", "20")) == 3

    for command in (("group", "show", "g"), ("group", "list")):
        shown = pulque(*command, environ={"PULQUE_URL": broker_process.url})
        assert shown.returncode == 0
        assert b"messages 1 to 1 of orders are damaged" in shown.stderr
