"""Things become durable in an order in which a power cut between any two of them does no harm."""

import errno
import os
from collections.abc import Callable
from pathlib import Path
from random import Random

import pytest

from pulque.errors import StorageError, StorageFullError
from pulque.model.actions import ConsumerLost, SubscriptionId
from pulque.model.batch import read_header
from pulque.model.names import PartitionName
from pulque.storage.engine import Engine
from pulque.storage.files import OsFileSystem
from pulque.testing.files import Cut, MemoryFileSystem
from pulque.testing.power import DirectorySynced, Linked, Node, Synced
from tests.unit.storage.storing import opened, packed, partition_of, store

FACT = ConsumerLost(SubscriptionId(1), "silent", 5)


def steps(files: MemoryFileSystem, work: Callable[[], object]) -> list[str]:
    """Run something and tell its syncs and changes of names by path."""
    before = files.operations
    work()
    names = paths(files)
    told = []
    for i in range(before, files.operations):
        match files.operation(i):
            case Synced(node):
                told.append(f"sync {names[node]}")
            case DirectorySynced(node):
                told.append(f"sync {names.get(node, '/')}")
            case Linked(links) if len(links) == 2:
                told.append(f"rename to {links[1][1]}")
    return told


def paths(files: MemoryFileSystem) -> dict[Node, str]:
    """Return the last path of everything that ever had one."""
    found: dict[Node, str] = {}
    operations = [files.operation(i) for i in range(files.operations)]
    for operation in operations:
        for directory, name, node in operation.links if isinstance(operation, Linked) else ():
            if node is not None:
                found[node] = f"{found.get(directory, '')}{name}" + "/" * node.is_directory
    return found


def sync(engine: Engine, *, actions: bool = True) -> None:
    job = engine.begin_sync(actions=actions)
    assert job is not None
    job.run()
    engine.finish_sync(job)


def checkpoint(engine: Engine) -> None:
    job = engine.begin_checkpoint({})
    job.run()
    engine.finish_checkpoint(job)


def test_messages_come_before_the_facts_that_name_them() -> None:
    files = MemoryFileSystem()
    engine = opened(files)
    store(engine, "orders", b"1")
    engine.append_action(FACT)

    assert steps(files, lambda: sync(engine)) == [
        "sync messages/00000000000000000000.log",
        "sync actions/00000000000000000000.log",
    ]


def test_facts_wait_if_they_are_not_asked_for() -> None:
    files = MemoryFileSystem()
    engine = opened(files)
    store(engine, "orders", b"1")
    engine.append_action(FACT)

    assert steps(files, lambda: sync(engine, actions=False)) == [
        "sync messages/00000000000000000000.log"
    ]
    assert steps(files, lambda: sync(engine)) == ["sync actions/00000000000000000000.log"]
    assert engine.begin_sync(actions=True) is None


def test_every_unsynced_segment_comes_in_order_and_names_after_contents() -> None:
    files = MemoryFileSystem()
    engine = opened(files)
    for i in range(3):
        store(engine, "orders", b"%d" % i)
        engine.roll(1)

    told = steps(files, lambda: sync(engine))
    assert told[:-1] == [f"sync {segment.path}" for segment in engine.segments]
    assert told[-1] == "sync messages/"


def test_a_checkpoint_comes_after_all_that_it_covers() -> None:
    files = MemoryFileSystem()
    engine = opened(files)
    store(engine, "orders", b"1")
    for _ in range(2):
        engine.roll(1)
        store(engine, "orders", b"2")
    engine.append_action(FACT)

    name = "00000000000000000001.checkpoint"
    assert steps(files, lambda: checkpoint(engine)) == [
        *(f"sync {segment.path}" for segment in engine.segments),
        "sync messages/",
        "sync actions/00000000000000000000.log",
        f"sync messages/{engine.segments[-1].base:020d}.open",
        "sync messages/",
        f"sync checkpoints/{name}",
        f"rename to {name}",
        "sync checkpoints/",
    ]


def test_an_index_is_whole_before_it_has_its_name() -> None:
    files = MemoryFileSystem()
    engine = opened(files)
    store(engine, "orders", b"1")
    engine.roll(1)
    job = engine.begin_index()
    assert job is not None

    assert steps(files, job.run) == [
        "sync messages/00000000000000000000.index",
        "rename to 00000000000000000000.index",
    ]


def test_a_start_is_counted_and_what_was_recovered_synced_before_it_serves() -> None:
    files = MemoryFileSystem()
    told = steps(files, lambda: opened(files))
    assert told == [
        "sync format.json",
        "rename to format.json",
        "sync /",
        "sync start",
        "rename to start",
        "sync /",
        "sync messages/00000000000000000000.log",
        "sync messages/",
        "sync actions/",
    ]

    engine = opened(files)
    store(engine, "orders", b"1")
    engine.roll(1)
    store(engine, "orders", b"2")
    engine.append_action(FACT)
    # The process is killed: nobody synced that.
    told = steps(files, lambda: opened(files))
    assert [line for line in told if "start" not in line and "index" not in line] == [
        "sync /",
        "sync messages/00000000000000000000.log",
        f"sync {engine.segments[1].path}",
        "sync messages/",
        "sync actions/00000000000000000000.log",
        "sync actions/",
    ]


def test_a_batch_is_confirmed_only_after_its_sync() -> None:
    files = MemoryFileSystem()
    engine = opened(files)
    partition = engine.create_partition(PartitionName("orders"), 1)
    batch = packed("orders", b"1", b"2")

    engine.append(partition, batch, read_header(batch), now_ms=1, wants_disk=True)
    assert (partition.confirmed, partition.end) == (0, 2)
    assert engine.write() == []
    job = engine.begin_sync(actions=False)
    assert job is not None
    job.run()
    assert partition.confirmed == 0
    assert engine.finish_sync(job) == [partition]
    assert partition.confirmed == 2


def test_whatever_comes_behind_a_waiting_batch_waits_too() -> None:
    engine = opened(MemoryFileSystem())
    partition = engine.create_partition(PartitionName("orders"), 1)
    batch = packed("orders", b"1")
    engine.append(partition, batch, read_header(batch), now_ms=1, wants_disk=True)
    engine.append(partition, batch, read_header(batch), now_ms=1, wants_disk=False)
    store(engine, "others", b"1")

    assert partition.confirmed == 0
    assert engine.partitions.by_name["others"].confirmed == 1
    sync(engine)
    assert partition.confirmed == 2


def test_a_second_sync_does_not_confirm_what_the_first_has_not_made_durable() -> None:
    files = MemoryFileSystem()
    engine = opened(files)
    partition = engine.create_partition(PartitionName("orders"), 1)
    batch = packed("orders", b"1")
    engine.append(partition, batch, read_header(batch), now_ms=1, wants_disk=True)
    engine.write()
    first = engine.begin_sync(actions=False)
    engine.append_action(FACT)
    second = engine.begin_sync(actions=True)
    assert first is not None
    assert second is not None

    # Only the second one runs: it must do all that it claims by itself.
    assert steps(files, second.run)[0] == "sync messages/00000000000000000000.log"
    assert engine.finish_sync(second) == [partition]
    first.run()
    assert engine.finish_sync(first) == []


def test_retention_keeps_no_sync_from_ending() -> None:
    files = MemoryFileSystem()
    engine = opened(files)
    store(engine, "orders", b"1")
    engine.roll(1)
    job = engine.begin_sync(actions=True)
    assert job is not None
    engine.remove_oldest().run()

    job.run()
    engine.finish_sync(job)


@pytest.mark.parametrize("times", [1, 4])
def test_names_that_retention_removed_are_synced_with_the_next_batch(times: int) -> None:
    files = MemoryFileSystem()
    engine = opened(files)
    for _ in range(5):
        store(engine, "orders", b"1")
        engine.roll(1)
    sync(engine)
    for _ in range(times):
        engine.remove_oldest().run()

    assert steps(files, lambda: sync(engine)) == ["sync messages/"]


@pytest.mark.parametrize("cut", list(Cut))
def test_numbering_goes_on_wherever_the_power_fails_while_a_segment_is_removed(cut: Cut) -> None:
    files = MemoryFileSystem()
    engine = opened(files)
    store(engine, "orders", b"0", b"1")
    sync(engine)
    engine.roll(1)
    before = files.operations
    engine.remove_oldest().run()

    for at in range(before, files.operations + 1):
        left = opened(files.after_power_cut(at, cut, Random(1)))
        assert partition_of(left, "orders").end == 2, f"{cut} after {files.operation(at - 1)}"


def test_a_segment_that_could_not_be_begun_never_comes_back() -> None:
    """The log has gone on in the segment before it: two would have the same offsets."""
    files = MemoryFileSystem()
    engine = opened(files)
    store(engine, "orders", b"0")
    sync(engine)
    files.fail_after(1, StorageFullError("no room"))

    def roll() -> None:
        with pytest.raises(StorageFullError):
            engine.roll(1)

    assert steps(files, roll) == ["sync messages/"]
    store(engine, "orders", b"1")
    sync(engine)
    for seed in range(20):
        left = opened(files.after_power_cut(files.operations, Cut.TORN, Random(seed)))
        assert partition_of(left, "orders").end == 2


def test_a_directory_of_the_real_file_system_is_synced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody can see that without a power cut, but for the call itself."""
    synced: list[int] = []
    fsync = os.fsync

    def noted(descriptor: int) -> None:
        synced.append(os.fstat(descriptor).st_ino)
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", noted)
    files = OsFileSystem(str(tmp_path))
    files.make_directory("messages")
    synced.clear()
    files.sync_directory("messages")

    assert synced == [(tmp_path / "messages").stat().st_ino]


def test_a_directory_that_cannot_be_synced_is_a_failure_of_the_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(_: int) -> None:
        raise OSError(errno.EIO, "Input/output error")

    files = OsFileSystem(str(tmp_path))
    monkeypatch.setattr(os, "fsync", fail)

    with pytest.raises(StorageError, match="sync failed"):
        files.sync_directory("")
