"""A power cut loses nothing that was promised, invents nothing, and what is left goes on working.

A random workload runs once over a file system that remembers every operation. Then the power is
cut after each of them, in every way: what was not synced is lost, kept, torn, zeroed or noise.
Whatever is left must be recovered to what the ledger allows, must take new messages and facts,
and must survive the next cut, which may come while the first is being recovered from.
"""

from dataclasses import replace
from random import Random

import pytest

from pulque.testing.files import Cut, MemoryFileSystem
from tests.crash.ledger import Ledger
from tests.crash.opening import EFFORT, open_engine
from tests.crash.workload import SMALL, Workload

CUTS = (Cut.LOST, Cut.KEPT, Cut.TORN, Cut.TORN, Cut.ZEROED, Cut.GARBAGE)
SHARES = 12
LEAST_OPERATIONS = 150
LEAST_POINTS = LEAST_OPERATIONS * len(CUTS)
ROUNDS = max(1, EFFORT // 10)
"""More than one in the nightly profile."""


def run_workload(
    random: Random, operations: int, *, removes_often: bool
) -> tuple[MemoryFileSystem, Ledger, Workload]:
    files = MemoryFileSystem(random=Random(random.getrandbits(64)))
    options = replace(
        SMALL,
        segment_bytes=random.choice((900, 2500, 6000)),
        action_segment_bytes=random.choice((150, 400, 2000)),
    )
    workload = Workload.begin(files, random, options)
    if removes_often:
        workload.remove_often()
    while files.operations - len(workload.ledger.unknown) < operations:
        workload.run(5)
    return files, workload.ledger, workload


def recover(
    files: MemoryFileSystem, ledger: Ledger, workload: Workload, at: int, cut: Cut, random: Random
) -> Workload:
    """Cut the power, recover, check, and return who goes on with what is left."""
    survivor = files.after_power_cut(at, cut, random)
    opened = open_engine(survivor, workload.options, workload.now_ms)
    ledger.check(opened, at)
    return Workload(
        survivor,
        random,
        ledger=ledger.fork(opened, at),
        opened=opened,
        options=workload.options,
        now_ms=workload.now_ms,
    )


def cut_everywhere(name: str, operations: int, *, removes_often: bool = False) -> int:
    """Cut the power at every point of one workload; return how many points that were."""
    files, ledger, workload = run_workload(Random(name), operations, removes_often=removes_often)
    points = 0
    for at in sorted(set(range(files.operations + 1)) - ledger.unknown):
        for draw, cut in enumerate(CUTS):
            random = Random(f"{name}/{at}/{draw}")
            try:
                after = recover(files, ledger, workload, at, cut, random)
                after.go_on()
                points += 1
                if random.random() < 0.2:
                    moments = set(range(after.files.operations + 1)) - after.ledger.unknown
                    again = random.choice(sorted(moments))
                    second = recover(
                        after.files, after.ledger, after, again, random.choice(CUTS), random
                    )
                    second.go_on()
                    points += 1
            except BaseException as error:
                error.add_note(f"workload {name}, {cut} after {at} of {files.operations}: ")
                error.add_note(str(files.operation(at - 1)) if at else "the very beginning")
                raise
    print(f"{points} points, {files.operations} operations")
    return points


@pytest.mark.slow
@pytest.mark.parametrize("share", range(SHARES))
def test_everything_promised_survives_at_every_point(share: int, seed: int) -> None:
    for turn in range(ROUNDS):
        assert cut_everywhere(f"{seed}/{share}/{turn}", LEAST_OPERATIONS) >= LEAST_POINTS


def test_everything_promised_survives_at_some_points(seed: int) -> None:
    assert cut_everywhere(f"{seed}/fast", 84) >= 500


@pytest.mark.slow
def test_what_is_left_of_removed_segments_survives_at_every_point(seed: int) -> None:
    for turn in range(ROUNDS):
        name = f"{seed}/removing/{turn}"
        assert cut_everywhere(name, 600, removes_often=True) >= 600 * len(CUTS)


def test_what_is_left_of_removed_segments_survives_at_some_points(seed: int) -> None:
    assert cut_everywhere(f"{seed}/removing", 150, removes_often=True) >= 800


def test_there_are_ten_thousand_points() -> None:
    assert SHARES * LEAST_POINTS >= 10_000
