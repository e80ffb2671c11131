"""Brokers of a group that copies its messages are killed and paused under load; all is judged.

Nothing that was confirmed is lost or doubled, nobody ever saw another message at one place of the
log, nothing counts as done that nobody handled, and the logs of all brokers are the same bytes.

``PULQUE_FAILOVERS`` sets for how many seconds (40 by default), ``PULQUE_TEST_SEED`` repeats the
draw.
"""

import os
import random
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.robustness.replicated_group import (
    LEASE_S,
    Faults,
    ReplicatedGroup,
    check_copies,
    ends_of,
)
from tests.robustness.replicated_load import ReplicatedLoad

pytestmark = [pytest.mark.server, pytest.mark.slow]

SECONDS = float(os.environ.get("PULQUE_FAILOVERS", "40"))
CONSUMERS = ("c0", "c1")

FAULTS = (
    Faults.kill_leader,
    Faults.kill_follower,
    Faults.pause_leader,
    Faults.kill_leader_and_follower,
    Faults.stop_leader,
    Faults.pause_leader_shortly,
    Faults.pause_follower,
    Faults.command,
    Faults.restart_follower_of_paused_leader,
    Faults.kill_metas,
    Faults.kill_all,
)


def endure(
    group: ReplicatedGroup, folder: Path, draw: random.Random, seconds: float
) -> Sequence[str]:
    """Let things happen under load for some time; return what is wrong afterwards."""
    happened: list[str] = []
    with ReplicatedLoad(group, folder) as load:
        load.add_producers(2, "--acks", "replica", "--rate", "300")
        for name in CONSUMERS:
            load.start_consumer(name)
        faults = Faults(group, draw)
        deadline = time.monotonic() + seconds
        # The first ones in order, so that each run has those that matter most.
        coming = [*FAULTS[:4]]
        while time.monotonic() < deadline:
            load.go_on(100)
            time.sleep(draw.uniform(0, 1.5))
            fault = coming.pop(0) if coming else draw.choice(FAULTS)
            began = time.monotonic()
            fault(faults)
            load.go_on(1)
            happened.append(f"{fault.__name__} {time.monotonic() - began:.1f}s")
        group.wait_until_whole()
        total, problems = load.verdict()
    print(f"{happened}; {total.summary()}; epoch {group.leadership['epoch']}")
    assert not total.refused
    return problems


def check_group(folder: Path, problems: Sequence[str]) -> None:
    """Compare what brokers that have stopped left behind."""
    assert problems == []
    assert check_copies(folder) == []
    ends = ends_of(folder)
    assert {log: len(found) for log, found in ends.items()} == {"messages": 1, "actions": 1}, ends
    for path in folder.glob("*.stderr"):
        said = path.read_text(errors="replace")
        assert "Traceback" not in said, f"{path.name}: {said[-4000:]}"
        assert "corruption_found" not in said, path.name


@pytest.mark.timeout(240 + 3 * SECONDS)
def test_nothing_is_lost_or_doubled_whatever_happens_to_the_brokers_of_a_group(
    tmp_path: Path, seed: int
) -> None:
    with ReplicatedGroup(tmp_path / "group") as group:
        problems = endure(group, tmp_path / "load", random.Random(seed), SECONDS)
        group.kill_as_copies()

    check_group(tmp_path / "group", problems)


@pytest.mark.long
@pytest.mark.timeout(3600)
def test_nothing_is_lost_in_a_long_run_with_two_meta_servers(tmp_path: Path, seed: int) -> None:
    with ReplicatedGroup(tmp_path / "group", metas=2) as group:
        problems = endure(group, tmp_path / "load", random.Random(seed), max(SECONDS, 600))
        group.kill_as_copies()

    check_group(tmp_path / "group", problems)


@pytest.mark.timeout(120)
def test_another_broker_takes_sends_soon_after_the_leader_was_killed(tmp_path: Path) -> None:
    with ReplicatedGroup(tmp_path / "group") as group, ReplicatedLoad(group, tmp_path) as load:
        load.add_producers(2, "--acks", "replica", "--rate", "300")
        load.go_on(100)
        before = group.leadership

        group[group.leader].kill()
        began = time.monotonic()
        load.go_on(10)
        waited = time.monotonic() - began
        load.go_on(100)

        assert group.leadership["epoch"] > before["epoch"]
        assert group.leadership["leader"] != before["leader"]
        # A lease until it is replaced, the time until the dead one is out of sync, and some more.
        assert waited < 10 * LEASE_S, f"{waited:.1f} s"


def test_a_byte_that_differs_between_two_brokers_is_found(tmp_path: Path) -> None:
    for name, written in {"b1": b"same", "b2": b"same, and more", "b3": b"sane"}.items():
        for log in ("messages", "actions"):
            (tmp_path / name / log).mkdir(parents=True)
            (tmp_path / name / log / "00000000000000000064.log").write_bytes(written)

    assert check_copies(tmp_path) == [
        "messages/64: b3 differs from b1 at 2",
        "actions/64: b3 differs from b1 at 2",
    ]
    assert ends_of(tmp_path) == {"messages": {68, 78}, "actions": {68, 78}}
