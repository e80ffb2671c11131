"""A consumer's id is the same after a restart, and never the same for two that run."""

import errno
import os
import shutil
import stat
import subprocess
import sys
from pathlib import Path

import pytest

import pulque
from pulque.client.persistence.consumer_identity import (
    STATE_VARIABLE,
    ConsumerIdentity,
    application_name,
    state_folder,
)
from pulque.errors import InvalidNameError
from pulque.testing.broker import InProcessBroker


def take(folder: Path, **changes: str) -> ConsumerIdentity:
    names = {"application": "shop", "group": "kitchen", "subject": "orders"}
    return ConsumerIdentity.take(folder, **{**names, **changes})


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

    again = take(tmp_path)
    assert again.incarnation == 100000000000000
    again.release()


def test_a_slot_with_nonsense_in_it_is_used(tmp_path: Path) -> None:
    take(tmp_path).release()
    (slot,) = (tmp_path / "consumers").iterdir()
    slot.write_text("nonsense")

    again = take(tmp_path)
    assert again.incarnation > 0
    again.release()


def test_the_folder_is_for_its_owner_only(tmp_path: Path) -> None:
    folder = tmp_path / "new" / "state"
    take(folder).release()

    assert stat.S_IMODE(folder.stat().st_mode) == 0o700


def test_names_that_are_long_or_strange_make_valid_ids(tmp_path: Path) -> None:
    identity = take(tmp_path, application="Mein Programm é" * 20, subject="x" * 255)
    other = take(tmp_path, application="Mein Programm é" * 20, subject="x" * 254 + "y")

    assert len(identity.consumer) <= 255
    assert identity.consumer != other.consumer
    identity.release()
    other.release()


def test_without_a_folder_the_id_is_random(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("not a folder")

    first, second = take(blocked), take(blocked)

    assert first.consumer != second.consumer
    assert "no state folder" in caplog.text
    first.release()


@pytest.mark.parametrize("call", ["pwrite", "fsync"])
def test_a_full_disk_keeps_no_slot_from_those_that_come_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    def fail(*_: object) -> None:
        raise OSError(errno.ENOSPC, "no space left on the device")

    before = os.listdir("/proc/self/fd")
    with monkeypatch.context() as patched:
        patched.setattr(os, call, fail)
        without_slot = take(tmp_path)
    assert without_slot.stem is None
    assert os.listdir("/proc/self/fd") == before

    first = take(tmp_path)
    assert first.stem is not None
    assert "-0-" in first.stem.name, "the first slot is still taken"
    first.release()


def given(folder: Path, consumer_id: str) -> ConsumerIdentity:
    return ConsumerIdentity.given(consumer_id, folder, group="kitchen", subject="orders")


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
from pulque.client.persistence.consumer_identity import ConsumerIdentity
identity = ConsumerIdentity.take(Path(sys.argv[1]), application="shop", group="g", subject="s")
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


def test_two_state_folders_of_one_host_give_different_ids(tmp_path: Path) -> None:
    first, second = take(tmp_path / "a"), take(tmp_path / "b")

    assert first.consumer != second.consumer
    first.release()
    second.release()


def test_consumers_with_two_state_folders_do_not_fence_each_other(
    pulque_broker: InProcessBroker, tmp_path: Path
) -> None:
    def connect(folder: str) -> pulque.Client:
        return pulque.connect(pulque_broker.url, name="shop", state_dir=tmp_path / folder)

    with (
        connect("a") as one,
        connect("b") as other,
        one.consumer("orders", group="kitchen") as first,
        other.consumer("orders", group="kitchen") as second,
    ):
        one.send("orders", b"one")
        (message,) = first.pull(1, timeout=10)
        one.send("orders", b"two")
        (another,) = second.pull(1, timeout=10)
        message.ack()
        another.ack()
        first.settle()
        second.settle()
        assert {message.body, another.body} == {b"one", b"two"}


def test_a_copy_of_a_state_folder_gives_another_id(tmp_path: Path) -> None:
    """As in a container image that has the folder of a first run in it."""
    take(tmp_path / "image").release()
    for name in ("a", "b"):
        shutil.copytree(tmp_path / "image", tmp_path / name)
    running = [take(tmp_path / name) for name in ("image", "a", "b")]

    assert len({each.consumer for each in running}) == 3
    for each in running:
        each.release()


def test_a_copy_keeps_its_own_id_over_restarts(tmp_path: Path) -> None:
    take(tmp_path / "image").release()
    shutil.copytree(tmp_path / "image", tmp_path / "a")
    first = take(tmp_path / "a")
    first.release()

    again = take(tmp_path / "a")
    assert again.consumer == first.consumer
    again.release()


def test_a_copy_does_not_take_over_what_the_first_kept(tmp_path: Path) -> None:
    first = take(tmp_path / "image")
    first.release()
    shutil.copytree(tmp_path / "image", tmp_path / "a")
    copy = take(tmp_path / "a")

    assert copy.stem is not None
    assert first.stem is not None
    assert copy.stem.name != first.stem.name
    copy.release()


def test_ids_differ_where_copies_cannot_be_told_apart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on two snapshots of one disk, where the files have the same inodes."""
    monkeypatch.setattr("pulque.client.persistence.consumer_identity._place_of", lambda _: "17")
    take(tmp_path / "image").release()
    shutil.copytree(tmp_path / "image", tmp_path / "a")
    first, second = take(tmp_path / "image"), take(tmp_path / "a")

    assert first.consumer != second.consumer
    first.release()
    second.release()


def test_containers_of_one_image_have_different_ids(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their files have the image's inodes, and each container has a device of its own."""
    inodes: list[float] = []

    def as_in(container: str, device: int) -> ConsumerIdentity:
        mounts = tmp_path / f"mounts-{container}"
        mounts.write_text(f"36 35 0:{device} / / rw - overlay overlay rw\n")
        monkeypatch.setattr("pulque.client.persistence.consumer_identity._MOUNTS", mounts)
        real = os.fstat

        def fstat(descriptor: int) -> os.stat_result:
            values = list(real(descriptor))
            inodes.append(values[stat.ST_INO])
            values[stat.ST_INO] = inodes[0]
            values[stat.ST_DEV] = os.makedev(0, device)
            return os.stat_result(values)

        with monkeypatch.context() as patched:
            patched.setattr(os, "fstat", fstat)
            return take(tmp_path / container)

    as_in("image", 40).release()
    for name in ("a", "b"):
        shutil.copytree(tmp_path / "image", tmp_path / name)
    ids = [as_in(name, device) for name, device in (("a", 41), ("b", 42))]
    for each in ids:
        each.release()  # in separate network namespaces no name would be taken
    assert len({str(each.consumer) for each in ids}) == 2
    again = as_in("a", 41)
    assert again.consumer == ids[0].consumer
    again.release()


def test_consumers_with_copies_of_a_state_folder_do_not_fence_each_other(
    pulque_broker: InProcessBroker, tmp_path: Path
) -> None:
    def connect(folder: str) -> pulque.Client:
        return pulque.connect(pulque_broker.url, name="shop", state_dir=tmp_path / folder)

    with connect("image") as client:
        client.send_many("orders", [b"one", b"two"])
        client.consumer("orders", group="kitchen").close()
    shutil.copytree(tmp_path / "image", tmp_path / "a")
    with (
        connect("image") as one,
        connect("a") as other,
        one.consumer("orders", group="kitchen") as first,
        other.consumer("orders", group="kitchen") as second,
    ):
        messages = [*first.pull(1, timeout=10), *second.pull(1, timeout=10)]
        for message in messages:
            message.ack()
        first.settle()
        second.settle()
        assert sorted(message.body for message in messages) == [b"one", b"two"]
