"""A disk that fails is never trusted again by the same process, and nothing promised is lost."""

from collections.abc import Callable
from random import Random

import pytest

from pulque.errors import StorageError, StorageFullError, UsageError
from pulque.model.batch import read_header
from pulque.model.ids import IdSource
from pulque.model.names import PartitionName
from pulque.storage.engine import Engine
from pulque.testing.files import Cut, MemoryFileSystem
from tests.crash.ledger import read_all
from tests.crash.opening import EFFORT, open_engine
from tests.crash.workload import SMALL, Workload, make_batch, random_fact

NOW_MS = 1_700_000_000_000
NAME = PartitionName("a")
NTHS = range(1, 60, 4 if EFFORT == 1 else 1)


def open_with_message(files: MemoryFileSystem) -> Engine:
    engine = open_engine(files, SMALL, NOW_MS).engine
    engine.create_partition(NAME, NOW_MS)
    send(engine)
    sync(engine)
    return engine


def send(engine: Engine) -> None:
    batch = make_batch(NAME, [b"body"], ids=IdSource(1))
    partition = engine.partitions.by_name[NAME]
    engine.append(partition, batch, read_header(batch), now_ms=NOW_MS, wants_disk=True)
    engine.write()


def sync(engine: Engine) -> None:
    job = engine.begin_sync(actions=True)
    assert job is not None
    job.run()
    engine.finish_sync(job)


def checkpoint(engine: Engine) -> None:
    job = engine.begin_checkpoint({})
    job.run()
    engine.finish_checkpoint(job)


WRITING: dict[str, Callable[[Engine], object]] = {
    "append": send,
    "write": Engine.write,
    "fact": lambda engine: engine.append_action(random_fact(Random(1))),
    "sync": lambda engine: engine.begin_sync(actions=True),
    "checkpoint": lambda engine: engine.begin_checkpoint({}),
    "roll": lambda engine: engine.roll(NOW_MS),
    "partition": lambda engine: engine.create_partition(PartitionName("new"), NOW_MS),
}


def check_writes_nothing(files: MemoryFileSystem, engine: Engine) -> None:
    before = files.operations
    for name, call in WRITING.items():
        with pytest.raises(StorageError, match="until a restart") as raised:
            call(engine)
        assert not isinstance(raised.value, StorageFullError), name
    assert files.operations == before, "a failed disk was written to, or synced, again"


@pytest.mark.parametrize("actions", [True, False])
def test_a_failed_sync_is_final(*, actions: bool) -> None:
    files = MemoryFileSystem(random=Random(1))
    engine = open_with_message(files)
    send(engine)
    if actions:
        engine.append_action(random_fact(Random(1)))
    job = engine.begin_sync(actions=actions)
    assert job is not None
    files.fail_sync_after(2 if actions else 1, StorageError("sync failed"))

    with pytest.raises(StorageError, match="sync failed"):
        job.run()
    with pytest.raises(UsageError, match="confirms nothing"):
        engine.finish_sync(job)
    assert engine.partitions.by_name[NAME].confirmed == 1
    check_writes_nothing(files, engine)
    with pytest.raises(StorageError, match="until a restart"):
        job.run()
    assert len(read_all(engine, NAME)) == 1, "what is stored can still be read"


def test_a_sync_that_failed_in_a_checkpoint_is_final_too() -> None:
    files = MemoryFileSystem(random=Random(1))
    engine = open_with_message(files)
    send(engine)
    job = engine.begin_checkpoint({})
    files.fail_sync_after(1, StorageError("sync failed"))

    with pytest.raises(StorageError, match="sync failed"):
        job.run()
    check_writes_nothing(files, engine)


def test_a_sync_for_which_there_was_no_room_is_final() -> None:
    files = MemoryFileSystem(random=Random(1))
    engine = open_with_message(files)
    send(engine)
    job = engine.begin_sync(actions=False)
    assert job is not None
    files.fail_sync_after(1, StorageFullError("no room"))

    with pytest.raises(StorageFullError):
        job.run()
    check_writes_nothing(files, engine)


@pytest.mark.parametrize("call", [send, lambda e: e.append_action(random_fact(Random(1)))])
def test_a_failed_write_is_final(call: Callable[[Engine], object]) -> None:
    files = MemoryFileSystem(random=Random(1))
    engine = open_with_message(files)
    files.fail_after(1, StorageError("input/output error"), part=20)

    with pytest.raises(StorageError, match="input/output error"):
        call(engine)
    check_writes_nothing(files, engine)
    engine.close()
    opened = open_engine(files, SMALL, NOW_MS)
    assert len(read_all(opened.engine, NAME)) == 1
    assert opened.facts == []


def test_a_checkpoint_whose_own_file_fails_leaves_the_older_one(seed: int) -> None:
    files = MemoryFileSystem(random=Random(1))
    engine = open_with_message(files)
    checkpoint(engine)
    send(engine)
    sync(engine)
    job = engine.begin_checkpoint({})
    files.fail_sync_after(2, StorageError("sync failed"))  # the first is of the open index

    with pytest.raises(StorageError, match="sync failed"):
        job.run()
    for cut in (Cut.LOST, Cut.TORN):
        survivor = files.after_power_cut(files.operations, cut, Random(seed))
        opened = open_engine(survivor, SMALL, NOW_MS)
        assert len(read_all(opened.engine, NAME)) == 2
        assert not opened.heard.refused


def work_until_it_fails(
    seed: int, nth: int, cut: Cut, *, in_sync: bool
) -> tuple[list[MemoryFileSystem], bool]:
    """Let one sync or write fail and cut the power; check what is left.

    Returns:
        The disk, what the power cut left of it, and whether anything failed.
    """
    files = MemoryFileSystem(random=Random(1))
    random = Random(f"{seed}/{nth}")
    workload = Workload.begin(files, random)
    workload.never_refuse()
    if in_sync:
        files.fail_sync_after(nth, StorageError("sync failed"))
    else:
        part = random.choice((0, 10, 100, 1000))
        files.fail_after(nth, StorageError("input/output error"), part=part)
    has_failed = False
    try:
        workload.run(60)
    except StorageError:
        has_failed = True
    # An operation that raised may have written more than the ledger knows.
    workload.ledger.note(files.operations)
    survivor = files.after_power_cut(files.operations, cut, random)
    opened = open_engine(survivor, SMALL, workload.now_ms)
    workload.ledger.check(opened, files.operations)
    return [files, survivor], has_failed


@pytest.mark.parametrize("cut", [Cut.LOST, Cut.TORN, Cut.KEPT])
@pytest.mark.accepts("004-06")
def test_nothing_promised_is_lost_whichever_sync_fails(seed: int, cut: Cut) -> None:
    failed = sum(work_until_it_fails(seed, nth, cut, in_sync=True)[1] for nth in NTHS)
    assert failed > len(NTHS) * 0.6


@pytest.mark.parametrize("cut", [Cut.LOST, Cut.TORN, Cut.KEPT])
def test_nothing_promised_is_lost_whichever_write_fails(seed: int, cut: Cut) -> None:
    failed = sum(work_until_it_fails(seed, nth, cut, in_sync=False)[1] for nth in NTHS)
    assert failed > len(NTHS) * 0.6
