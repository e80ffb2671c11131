"""A consumer's id is the same after a restart, and never the same for two that run."""

import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from pulque.client.identity import STATE_VARIABLE, Identity, application_name, state_folder
from pulque.errors import InvalidNameError


def take(folder: Path, **changes: str) -> Identity:
    names = {"application": "shop", "group": "kitchen", "subject": "orders"}
    return Identity.take(folder, **{**names, **changes})


def test_two_that_run_have_different_ids(tmp_path: Path) -> None:
    first, second = take(tmp_path), take(tmp_path)

    assert first.consumer != second.consumer
    first.release()
    second.release()


def test_a_restarted_one_has_its_old_id_and_a_higher_incarnation(tmp_path: Path) -> None:
    first, second = take(tmp_path), take(tmp_path)
    first.release()
    again = take(tmp_path)

    assert again.consumer == first.consumer
    assert again.incarnation > first.incarnation
    again.release()
    again.release()
    second.release()


def test_the_incarnation_grows_though_the_clock_was_set_back(tmp_path: Path) -> None:
    first = take(tmp_path)
    first.release()
    (slot,) = (tmp_path / "consumers").iterdir()
    slot.write_text("99999999999999")

    assert take(tmp_path).incarnation == 100000000000000


def test_a_slot_with_nonsense_in_it_is_used(tmp_path: Path) -> None:
    take(tmp_path).release()
    (slot,) = (tmp_path / "consumers").iterdir()
    slot.write_text("nonsense")

    assert take(tmp_path).incarnation > 0


def test_the_folder_is_for_its_owner_only(tmp_path: Path) -> None:
    folder = tmp_path / "new" / "state"
    take(folder).release()

    assert stat.S_IMODE(folder.stat().st_mode) == 0o700


def test_names_that_are_long_or_strange_make_valid_ids(tmp_path: Path) -> None:
    identity = take(tmp_path, application="Mein Programm é" * 20, subject="x" * 255)
    other = take(tmp_path, application="Mein Programm é" * 20, subject="x" * 254 + "y")

    assert len(identity.consumer) <= 255
    assert identity.consumer != other.consumer


def test_without_a_folder_the_id_is_random(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("not a folder")

    first, second = take(blocked), take(blocked)

    assert first.consumer != second.consumer
    assert "no state folder" in caplog.text
    first.release()


def given(folder: Path, consumer_id: str) -> Identity:
    return Identity.given(consumer_id, folder, group="kitchen", subject="orders")


def test_a_given_id_must_be_valid(tmp_path: Path) -> None:
    assert given(tmp_path, "me@home").consumer == "me@home"
    with pytest.raises(InvalidNameError):
        given(tmp_path, "no spaces")


def test_of_two_with_one_given_id_only_the_first_has_files(tmp_path: Path) -> None:
    first, second = given(tmp_path, "me"), given(tmp_path, "me")
    assert first.stem is not None
    assert second.stem is None

    first.release()
    assert given(tmp_path, "me").stem == first.stem


def test_the_folder_is_given_or_named_or_the_users_own(tmp_path: Path) -> None:
    assert state_folder(tmp_path, {}) == tmp_path
    assert state_folder(None, {STATE_VARIABLE: "/a"}) == Path("/a")
    assert state_folder(None, {"XDG_STATE_HOME": "/b"}) == Path("/b/pulque")
    assert state_folder(None, {}) == Path.home() / ".local/state/pulque"


def test_an_application_is_named_after_its_script(monkeypatch: pytest.MonkeyPatch) -> None:
    assert application_name("shop") == "shop"
    for script, name in [
        ("/opt/shop.py", "shop"),
        ("/opt/shop/__main__.py", "shop"),
        ("-c", "python"),
        ("", "python"),
    ]:
        monkeypatch.setattr(sys, "argv", [script])
        assert application_name(None) == name


_HOLD = """
import sys
from pathlib import Path
from pulque.client.identity import Identity
identity = Identity.take(Path(sys.argv[1]), application="shop", group="g", subject="s")
print(identity.consumer, flush=True)
sys.stdin.read()
"""


@pytest.mark.server
def test_processes_have_ids_of_their_own_and_a_killed_one_frees_its_slot(tmp_path: Path) -> None:
    def start() -> tuple[subprocess.Popen[str], str]:
        process = subprocess.Popen(
            [sys.executable, "-c", _HOLD, str(tmp_path)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ,
        )
        assert process.stdout is not None
        return process, process.stdout.readline().strip()

    def kill(process: subprocess.Popen[str]) -> None:
        process.kill()
        process.communicate()

    first, first_id = start()
    second, second_id = start()
    kill(first)
    third, third_id = start()
    kill(second)
    kill(third)

    assert first_id != second_id
    assert third_id == first_id
