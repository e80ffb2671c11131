"""Brokers whose copy of a log is damaged: what followers have whole is never passed over."""

import contextlib
import json
import shutil
import sqlite3
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import pulque
from pulque.testing.cluster import ClusterProcesses
from pulque.testing.process import ServerProcess
from pulque.wire.requests import Seal
from pulque.wire.responses import Sealed
from tests.integration.test_replication import (
    META,
    WITHIN,
    ask,
    leader_of,
    leadership,
    log_of,
    status_of,
    until,
    until_in_sync,
)

pytestmark = [pytest.mark.server, pytest.mark.xdist_group("replication")]

SETTINGS: dict[str, dict[str, Any]] = {
    "storage": {"checkpoint_interval": "1s", "tail_cache": "0B"},
    "replication": {"lag": "2s", "min_in_sync": 1},
}
COUNT = 300


@pytest.fixture
def pair(tmp_path: Path) -> Iterator[ClusterProcesses]:
    """A leader and a follower, which keep nothing in memory."""
    with ClusterProcesses.start(
        tmp_path, brokers=2, copies=2, meta_settings=META, broker_settings=SETTINGS
    ) as cluster:
        until_in_sync(cluster, 2)
        yield cluster


def flip(folder: Path, body: bytes) -> None:
    """Change 8 bytes around a message in its segment."""
    (path,) = (each for each in folder.glob("messages/*.log") if body in each.read_bytes())
    content = bytearray(path.read_bytes())
    at = content.index(body)
    for index in range(at, at + 8):
        content[index] ^= 0xFF
    path.write_bytes(content)


@pytest.mark.parametrize(
    "filtering", [{}, {"tags": ["red"]}], ids=["everything", "only wanted tags"]
)
def test_what_is_damaged_on_the_leader_is_handed_out_by_a_follower(
    pair: ClusterProcesses, filtering: dict[str, Any]
) -> None:
    with pulque.connect(pair.url, timeout=WITHIN, acks="replica") as client:
        for number in range(COUNT):
            client.send("orders", b"body-%03d" % number, tags=["red"])
        leader = leader_of(pair)
        assert isinstance(ask(pair[leader], Seal()), Sealed)
        client.send("orders", b"of the next segment", tags=["red"])
        for victim in (b"body-000", b"body-150", b"body-299"):
            flip(pair.folder / leader, victim)

        wanted = {b"body-%03d" % number for number in range(COUNT)} | {b"of the next segment"}
        found = set()
        with client.consumer("orders", group="new", **filtering) as consumer:
            for message in consumer:
                found.add(bytes(message.body))
                message.ack()
                if found == wanted:
                    break

    assert leader_of(pair) != leader
    until_in_sync(pair, 2)
    until(lambda: log_of(pair, leader) == log_of(pair, leader_of(pair)), "it is mended")


def read_all(client: pulque.Client, victim: bytes) -> bool:
    return victim in {bytes(message.body) for message in client.read("orders")}


def find_by_key(client: pulque.Client, victim: bytes) -> bool:
    return bool(list(client.messages.find("orders", key=victim.decode())))


@pytest.mark.parametrize("way", [read_all, find_by_key], ids=["a read", "a search"])
def test_what_is_damaged_is_served_by_a_follower_however_it_is_asked_for(
    pair: ClusterProcesses, way: Callable[[pulque.Client, bytes], bool]
) -> None:
    with pulque.connect(pair.url, timeout=WITHIN, acks="replica") as client:
        for number in range(COUNT):
            client.send("orders", b"body-%03d" % number, key=f"body-{number:03d}")
        leader = leader_of(pair)
        assert isinstance(ask(pair[leader], Seal()), Sealed)
        client.send("orders", b"of the next segment")
        flip(pair.folder / leader, b"body-150")

        assert way(client, b"body-150")

    until(lambda: leader_of(pair) != leader, "another one leads")


def test_a_damaged_message_that_failed_comes_again_from_a_follower(
    pair: ClusterProcesses,
) -> None:
    with (
        pulque.connect(pair.url, timeout=WITHIN, acks="replica") as client,
        client.consumer("orders", group="g", retry=pulque.RetryPolicy(delays=[0.1])) as consumer,
    ):
        client.send("orders", b"body-000")
        leader = leader_of(pair)
        first = next(iter(consumer))
        assert isinstance(ask(pair[leader], Seal()), Sealed)
        flip(pair.folder / leader, b"body-000")
        first.nack("it failed")

        again = next(iter(consumer))

        assert (bytes(again.body), again.attempt) == (b"body-000", 2)
        again.ack()
    assert leader_of(pair) != leader


def test_with_no_follower_in_sync_what_is_damaged_waits(pair: ClusterProcesses) -> None:
    with pulque.connect(pair.url, timeout=WITHIN, acks="replica") as client:
        for number in range(COUNT):
            client.send("orders", b"body-%03d" % number)
        leader = leader_of(pair)
        (follower,) = (name for name in pair.brokers if name != leader)
        pair[follower].stop()
        until_in_sync(pair, 1)
        flip(pair.folder / leader, b"body-000")

        with (
            pulque.connect(pair.url, timeout=2) as impatient,
            pytest.raises(pulque.UnavailableError, match="damaged on this broker"),
        ):
            impatient.read("orders")
        status = status_of(pair[leader])
        assert (status["replication"]["is_whole"], status["messages_damaged"]) == (False, 0)
        with client.consumer("orders", group="new") as consumer:
            until(lambda: "damaged_log_leads" in pair[leader].stderr, "it says so")
            groups = {row["group"]: row["lag"] for row in status_of(pair[leader])["groups"]}
            assert groups.get("new", COUNT) == COUNT

            pair[follower].restart()

            found = set()
            for message in consumer:
                found.add(bytes(message.body))
                message.ack()
                if len(found) == COUNT:
                    break
    assert leader_of(pair) == follower


def is_known_to_have_all(cluster: ClusterProcesses, names: list[str]) -> bool:
    """Whether the meta server's database knows all that is on the disks of brokers."""
    with contextlib.closing(sqlite3.connect(cluster.folder / "meta.sqlite")) as database:
        rows = dict(database.execute("SELECT name, message_end FROM pulque_replicas").fetchall())
    sizes = {
        name: sum(path.stat().st_size for path in (cluster.folder / name).glob("*s/*.log"))
        for name in names
    }
    return all(rows[name] >= size for name, size in sizes.items())


@pytest.mark.parametrize("role", ["leader", "follower"])
def test_an_older_copy_of_a_directory_that_was_in_sync_does_not_lead(
    pair: ClusterProcesses, tmp_path: Path, role: str
) -> None:
    leader = leader_of(pair)
    (follower,) = (name for name in pair.brokers if name != leader)
    name, other = (leader, follower) if role == "leader" else (follower, leader)
    directory, copy = pair.folder / name, tmp_path / "copy"
    with pulque.connect(pair.url, timeout=WITHIN, acks="replica") as client:
        client.send("orders", b"before")
        shutil.copytree(directory, copy, ignore=shutil.ignore_patterns("lock"))
        for number in range(COUNT):
            client.send("orders", b"body-%03d" % number)
    until(lambda: is_known_to_have_all(pair, [name, other]), "the meta server knows of all")
    for each in pair.brokers:
        pair[each].kill()
    shutil.rmtree(directory)
    copy.rename(directory)

    # Alone it does not lead, and what it lacks is not cut off elsewhere.
    pair[name].restart()
    until(
        lambda: "older copy" in pair[name].stderr or name not in leadership(pair)["in_sync"],
        "the copy is known to be old",
    )
    pair[other].restart()
    until(lambda: leader_of(pair) == other, "the one that has all leads")
    until_in_sync(pair, 2)

    wanted = {b"before"} | {b"body-%03d" % number for number in range(COUNT)}
    with pulque.connect(pair.url, timeout=WITHIN) as client:
        until(
            lambda: {bytes(message.body) for message in client.read("orders")} == wanted,
            "all is there",
        )


def test_a_meta_database_from_an_older_backup_costs_no_message(
    pair: ClusterProcesses, tmp_path: Path
) -> None:
    """What was confirmed since is on the broker that led since, which nobody else knows of."""
    database, newest = pair.folder / "meta.sqlite", tmp_path / "newest.sqlite"
    backup, meta = tmp_path / "backup.sqlite", pair["meta-1"]
    first = leader_of(pair)
    (second,) = (name for name in pair.brokers if name != first)
    meta.stop()
    shutil.copy(database, backup)
    meta.restart()
    pair[first].kill()
    until(lambda: leader_of(pair) == second, "the other one leads")
    until(lambda: len(leadership(pair)["in_sync"]) == 1, "alone")
    with pulque.connect(pair.url, timeout=WITHIN, acks="replica") as client:
        client.send("orders", b"confirmed since")
    pair[second].kill()
    meta.stop()
    shutil.copy(database, newest)
    shutil.copy(backup, database)

    meta.restart()
    pair[second].restart()
    pair[first].restart()

    for name in (second, first):
        until(
            lambda name=name: "restored from an older backup" in pair[name].stderr,  # type: ignore[misc]
            f"{name} is told",
        )
    meta.stop()
    shutil.copy(newest, database)
    meta.restart()
    with pulque.connect(pair.url, timeout=WITHIN) as client:
        until(
            lambda: [bytes(each.body) for each in client.read("orders")] == [b"confirmed since"],
            "it is there",
        )
    assert leader_of(pair) == second


@pytest.mark.parametrize("role", ["leader", "follower"])
def test_an_older_copy_that_lacks_facts_alone_does_not_lead(
    pair: ClusterProcesses, tmp_path: Path, role: str
) -> None:
    """What a group was handed once must not come again."""
    with pulque.connect(pair.url, timeout=WITHIN, acks="replica") as client:
        for number in range(20):
            client.send("orders", b"body-%03d" % number)
    leader = leader_of(pair)
    (follower,) = (name for name in pair.brokers if name != leader)
    name, other = (leader, follower) if role == "leader" else (follower, leader)
    until(lambda: is_known_to_have_all(pair, [name, other]), "the meta server knows of all")
    directory, copy = pair.folder / name, tmp_path / "copy"
    shutil.copytree(directory, copy, ignore=shutil.ignore_patterns("lock"))
    consume_once(pair, 20)
    until(lambda: is_known_to_have_all(pair, [name, other]), "the meta server knows of the facts")
    for each in pair.brokers:
        pair[each].kill()
    shutil.rmtree(directory)
    copy.rename(directory)

    pair[name].restart()
    until(
        lambda: "older copy" in pair[name].stderr or name not in leadership(pair)["in_sync"],
        "the copy is known to be old",
    )
    pair[other].restart()
    until(lambda: leader_of(pair) == other, "the one that has all leads")
    until_in_sync(pair, 2)

    with pulque.connect(pair.url, timeout=WITHIN, acks="replica") as client:
        client.send("orders", b"the next one")
    assert consume_once(pair, 1) == [b"the next one"]


def consume_once(cluster: ClusterProcesses, count: int) -> list[bytes]:
    """Return what a group that is handed each message once gets next."""
    found: list[bytes] = []
    with (
        pulque.connect(cluster.url, timeout=WITHIN) as client,
        client.consumer("orders", group="once", mode="once") as consumer,
    ):
        for message in consumer:
            found.append(bytes(message.body))
            if len(found) == count:
                return found
    return found


def test_who_followed_since_keeps_all_when_an_older_meta_database_elects_another(  # noqa: PLR0915
    tmp_path: Path,
) -> None:
    """The broker that led at the time of the backup, and was away since, is started first."""
    with ClusterProcesses.start(
        tmp_path, brokers=3, copies=3, meta_settings=META, broker_settings=SETTINGS
    ) as trio:
        until_in_sync(trio, 3)
        database, backup, newest = (tmp_path / f"{n}.sqlite" for n in ("meta", "old", "new"))
        meta, first = trio["meta-1"], leader_of(trio)
        meta.stop()
        shutil.copy(database, backup)
        meta.restart()
        trio[first].kill()
        until(lambda: leader_of(trio) != first, "another one leads")
        others = [name for name in trio.brokers if name != first]
        until_in_sync(trio, 2)
        with pulque.connect(trio.url, timeout=WITHIN, acks="replica") as client:
            for number in range(COUNT):
                client.send("orders", b"body-%03d" % number)
        until(
            lambda: all(confirmed_by(tmp_path / n) == size_of(trio, n) for n in others),
            "both know what is confirmed",
        )
        for name in others:
            trio[name].kill()
        meta.stop()
        shutil.copy(database, newest)
        shutil.copy(backup, database)
        meta.restart()
        before = {name: log_of(trio, name) for name in others}

        trio[first].restart()
        until(lambda: '"leadership_begun"' in trio[first].stderr, "the first one leads again")
        for name in others:
            trio[name].restart()
            until(
                lambda name=name: "keeps them" in trio[name].stderr,  # type: ignore[misc]
                f"{name} does not follow",
            )
        assert {name: log_of(trio, name) for name in others} == before

        for name in trio.brokers:
            trio[name].kill()
        meta.stop()
        shutil.copy(newest, database)
        (tmp_path / first / "told.json").unlink()  # it alone was told of what is no more
        meta.restart()
        for name in trio.brokers:
            trio[name].restart()
        until_in_sync(trio, 3)
        wanted = {b"body-%03d" % number for number in range(COUNT)}
        with pulque.connect(trio.url, timeout=WITHIN) as client:
            until(
                lambda: {bytes(each.body) for each in client.read("orders")} == wanted,
                "all is there",
            )


def confirmed_by(directory: Path) -> int:
    """Return how much of its message log a broker wrote down as confirmed."""
    return int(json.loads((directory / "told.json").read_text())["confirmed"])


def size_of(cluster: ClusterProcesses, name: str) -> int:
    return sum(map(len, log_of(cluster, name).values()))


def test_a_copy_that_is_started_under_the_same_name_runs_alone(pair: ClusterProcesses) -> None:
    """Neither takes turns with the other: the process before ends, and says why."""
    with pulque.connect(pair.url, timeout=WITHIN, acks="replica") as client:
        client.send("orders", b"before")
        leader = leader_of(pair)
        shutil.copytree(
            pair.folder / leader, pair.folder / "copy", ignore=shutil.ignore_patterns("lock")
        )
        client.send("orders", b"after")
    original = pair.brokers.pop(leader)
    settings = (pair.folder / f"{leader}.toml").read_text()
    told = settings.replace(str(pair.folder / leader), str(pair.folder / "copy"))
    assert told != settings
    path = pair.folder / "copy.toml"
    path.write_text(told)
    twin = ServerProcess(["broker", "--config", str(path)], log=pair.folder / "copy.stderr")
    try:
        twin.restart()
        until(lambda: original.is_running is False, "the process before ends")
        assert "this broker stops" in original.stderr
        assert "one of them is a copy" in original.stderr or "older copy" in original.stderr
        pair.brokers[leader] = twin
        until_in_sync(pair, 2)
        with pulque.connect(pair.url, timeout=WITHIN) as client:
            until(
                lambda: [bytes(m.body) for m in client.read("orders")] == [b"before", b"after"],
                "all is there",
            )
        assert leadership(pair)["epoch"] <= 4
    finally:
        twin.close()
        original.close()


def test_brokers_that_are_damaged_at_different_places_mend_each_other(
    pair: ClusterProcesses,
) -> None:
    """Neither gives up its own copy, which has what the other one lacks."""
    with pulque.connect(pair.url, timeout=WITHIN, acks="replica") as client:
        for number in range(COUNT):
            client.send("orders", b"body-%03d" % number)
        leader = leader_of(pair)
        (follower,) = (name for name in pair.brokers if name != leader)
        assert isinstance(ask(pair[leader], Seal()), Sealed)
        client.send("orders", b"of the next segment")
        until(lambda: log_of(pair, leader) == log_of(pair, follower), "both have all")
        whole = log_of(pair, leader)
        flip(pair.folder / leader, b"body-100")
        flip(pair.folder / follower, b"body-200")

        wanted = {b"body-%03d" % number for number in range(COUNT)} | {b"of the next segment"}
        found: set[bytes] = set()
        with client.consumer("orders", group="new") as consumer:

            def has_all() -> bool:
                for message in consumer.pull(timeout=1.0):
                    found.add(bytes(message.body))
                    message.ack()
                return found == wanted

            until(has_all, "all messages have come")

    for name in (leader, follower):
        until(lambda name=name: log_of(pair, name) == whole, f"{name} is mended")  # type: ignore[misc]
    until_in_sync(pair, 2)
