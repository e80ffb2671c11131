"""A simulation does the same from the same seed, in every process.

Otherwise a failure that it finds cannot be repeated. What could differ between processes: drawn
ids, clocks, the order of sets (``PYTHONHASHSEED``), the order of threads.
"""

import os
import subprocess
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory

import pytest

from pulque.testing.files import Cut, MemoryFileSystem
from tests.crash.archive import Archive
from tests.crash.one_thread import run_in_one_thread
from tests.crash.test_delay_power_cut import History, after_cut, removing, scenario
from tests.crash.test_failing_disk import work_until_it_fails
from tests.crash.test_power_cut import recover, run_workload
from tests.crash.test_replica_power_cut import check, lead_and_copy
from tests.unit.broker import (
    test_power_cut,
    test_power_cut_locks,
    test_power_cut_retries,
    test_unreadable,
)

ROOT = Path(__file__).resolve().parents[2]


def broker(seed: int) -> list[MemoryFileSystem]:
    """Work, lose power in the middle, recover, and go on."""
    return cut_in_the_middle(seed, removes_often=False)


def retention(seed: int) -> list[MemoryFileSystem]:
    """Do the same with segments that are removed all the time."""
    return cut_in_the_middle(seed, removes_often=True)


def cut_in_the_middle(seed: int, *, removes_often: bool) -> list[MemoryFileSystem]:
    random = Random(seed)
    files, ledger, workload = run_workload(random, 150, removes_often=removes_often)
    moments = sorted(set(range(files.operations)) - ledger.unknown)
    at = moments[len(moments) // 2]
    after = recover(files, ledger, workload, at, Cut.TORN, random)
    after.go_on()
    return [files, after.files]


def follower(seed: int) -> list[MemoryFileSystem]:
    """Copy a leader, lose power in the middle, and go on."""
    engine, copied = lead_and_copy(f"{seed}")
    at = copied.files.operations // 2
    return [copied.files, check(copied, engine, at, Cut.TORN, Random(seed))]


def delay_server(seed: int) -> list[MemoryFileSystem]:
    """Schedule and deliver, lose power in the middle, and go on."""
    return run_in_one_thread(cut_delay_server(seed, scenario))


def delay_retention(seed: int) -> list[MemoryFileSystem]:
    """Do the same with segments that are removed all the time."""
    return run_in_one_thread(cut_delay_server(seed, removing))


async def cut_delay_server(
    seed: int, run: Callable[[], Awaitable[History]]
) -> list[MemoryFileSystem]:
    history = await run()
    survivor = await after_cut(history, history.now // 2, Cut.TORN, f"{seed}")
    return [history.files, survivor]


def failing_sync(seed: int) -> list[MemoryFileSystem]:
    """Work until a sync fails, lose power, and recover."""
    return work_until_it_fails(seed, 20, Cut.TORN, in_sync=True)[0]


def failing_write(seed: int) -> list[MemoryFileSystem]:
    """Work until a write fails, lose power, and recover."""
    return work_until_it_fails(seed, 40, Cut.TORN, in_sync=False)[0]


def archive(seed: int) -> list[MemoryFileSystem]:
    """Build logs that are damaged by others afterwards."""
    return [Archive.build(seed, checkpoints=True).files]


def whole_broker(seed: int) -> list[MemoryFileSystem]:
    """Send, pull and settle at a broker, lose power, and go on."""
    return cut_broker(test_power_cut.live_and_lose_power, seed)


def retries(seed: int) -> list[MemoryFileSystem]:
    """Do the same with messages that wait, die and are sent again."""
    return cut_broker(test_power_cut_retries.live_and_lose_power, seed)


def locks(seed: int) -> list[MemoryFileSystem]:
    """Do the same with partitions that change hands."""
    return cut_broker(test_power_cut_locks.live_and_lose_power, seed)


def unreadable(seed: int) -> list[MemoryFileSystem]:
    """Do the same with batches that nobody can decode."""
    return cut_broker(test_unreadable.reject_and_lose_power, seed)


def cut_broker(
    run: Callable[[Path, str, Cut], Awaitable[list[MemoryFileSystem]]], seed: int
) -> list[MemoryFileSystem]:
    async def running() -> list[MemoryFileSystem]:
        return await run(Path(directory), f"{seed}", Cut.TORN)

    with TemporaryDirectory() as directory:
        return run_in_one_thread(running(), seed)


SIMULATIONS = {
    each.__name__: each
    for each in (
        broker,
        retention,
        follower,
        delay_server,
        delay_retention,
        failing_sync,
        failing_write,
        archive,
        whole_broker,
        retries,
        locks,
        unreadable,
    )
}


def operations_of(name: str, seed: int) -> str:
    """Return what one simulation does to its files, one operation in each line."""
    return "\n".join(
        str(files.operation(index))
        for files in SIMULATIONS[name](seed)
        for index in range(files.operations)
    )


@pytest.mark.parametrize("name", SIMULATIONS)
def test_two_processes_do_the_same_operations(name: str, seed: int, tmp_path: Path) -> None:
    found = []
    for hash_seed in ("1", "2"):
        path = tmp_path / hash_seed
        program = (
            "import pathlib; from tests.crash.test_same_operations import operations_of; "
            f"pathlib.Path({str(path)!r}).write_text(operations_of({name!r}, {seed}))"
        )
        subprocess.run(
            [sys.executable, "-c", program],
            cwd=ROOT,
            env={**os.environ, "PYTHONHASHSEED": hash_seed},
            check=True,
            capture_output=True,
            timeout=140,
        )
        found.append(path.read_text().splitlines())

    assert len(found[0]) > 50
    assert found[0] == found[1]
