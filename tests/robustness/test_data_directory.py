"""A data directory that cannot be used as it is is refused, with what to do about it."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from pulque.testing.process import BrokerProcess
from tests.robustness.brokers import StartBroker
from tests.robustness.raw import RawClient

pytestmark = pytest.mark.server


def refusal(data: Path, *, code: int = 1) -> str:
    """Start a broker that must not start; return what it says."""
    ended = subprocess.run(
        [sys.executable, "-m", "pulque", "broker", "--data", str(data), "--port", "0"],
        capture_output=True,
        text=True,
        timeout=20,
        check=False,
    )
    assert ended.returncode == code, (ended.returncode, ended.stdout, ended.stderr)
    assert "ready" not in ended.stdout
    assert "Traceback" not in ended.stderr
    return ended.stderr


def contents(folder: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file() and path.name != "lock"
    }


def test_a_directory_of_another_version_is_left_alone(broker: BrokerProcess) -> None:
    with RawClient(broker.url) as client:
        client.send("a", [b"x"])
    broker.stop()
    path = broker.data / "format.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"format": 99}))
    before = contents(broker.data)
    said = refusal(broker.data)

    assert "format 99" in said
    assert "run the version that wrote it" in said
    assert contents(broker.data) == before


@pytest.mark.parametrize("text", ["", "{", "[]", '{"system": "pulque"}', "\x00" * 10])
def test_a_directory_whose_format_cannot_be_read_is_left_alone(
    broker: BrokerProcess, text: str
) -> None:
    broker.stop()
    (broker.data / "format.json").write_text(text)

    assert "restore it" in refusal(broker.data)


def test_a_directory_of_something_else_is_left_alone(tmp_path: Path) -> None:
    data = tmp_path / "data"
    data.mkdir()
    (data / "thesis.tex").write_text("years of work")
    said = refusal(data)

    assert "thesis.tex" in said
    assert "choose an empty one" in said
    assert contents(data) == {"thesis.tex": b"years of work"}


def test_a_directory_in_use_is_refused_and_its_owner_named(start_broker: StartBroker) -> None:
    broker = start_broker()
    said = refusal(broker.data)

    assert f"in use by process {broker.pid}" in said
    assert "stop it first" in said
    with RawClient(broker.url) as client:
        assert client.send("a", [b"x"]).first_sequence == 0


def test_a_directory_can_be_used_again_after_a_kill(start_broker: StartBroker) -> None:
    broker = start_broker()
    broker.kill()
    broker.restart()

    assert broker.is_running


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a directory away")
def test_a_directory_of_another_user_is_refused(tmp_path: Path) -> None:
    data = tmp_path / "data"
    data.mkdir()
    os.chown(data, 12345, 12345)
    said = refusal(data)

    assert "belongs to user 12345" in said
    assert "chown" in said


@pytest.mark.parametrize("start", ["", "many", "-1", "1.5"])
def test_a_count_of_starts_that_is_no_number_is_refused(broker: BrokerProcess, start: str) -> None:
    """Guessing would be worse: settles of an earlier start could be taken for today's."""
    broker.stop()
    (broker.data / "start").write_text(start)

    assert "start" in refusal(broker.data)


def test_a_file_in_the_place_of_the_directory_is_refused(tmp_path: Path) -> None:
    (tmp_path / "data").write_text("a file")

    assert "is not a directory" in refusal(tmp_path / "data", code=2)


def test_links_in_the_place_of_files_are_not_followed(broker: BrokerProcess) -> None:
    with RawClient(broker.url) as client:
        client.send("a", [b"x"])
    broker.stop()
    victim = broker.data.with_name("victim")
    victim.write_text("somebody's file")
    (broker.data / "lock").unlink()
    (broker.data / "lock").symlink_to(victim)
    refusal(broker.data)

    assert victim.read_text() == "somebody's file"


def test_nobody_else_can_read_what_a_broker_stores(broker: BrokerProcess) -> None:
    with RawClient(broker.url) as client:
        client.send("a", [b"secret"])
    open_to_others = [
        str(path) for path in (broker.data, *broker.data.rglob("*")) if path.stat().st_mode & 0o077
    ]

    assert open_to_others == []
