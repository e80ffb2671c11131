"""A follower whose power is cut, at any moment, has what it had synced and copies the rest.

One leader is copied once, over a file system that remembers every operation: in pieces, with
syncs, checkpoints, retention, cuts and a new beginning. Then the power is cut after each of them.
"""

from contextlib import suppress
from dataclasses import dataclass, field
from random import Random

import pytest

from pulque.errors import UsageError
from pulque.storage.engine import Engine
from pulque.storage.replication.replica_logs import ReplicaLogs
from pulque.testing.files import Cut, MemoryFileSystem
from tests.crash.opening import EFFORT, Heard, open_engine
from tests.crash.workload import SMALL, Workload
from tests.unit.storage.copying import mend

CUTS = (Cut.LOST, Cut.KEPT, Cut.TORN, Cut.TORN, Cut.ZEROED, Cut.GARBAGE)


@dataclass(slots=True)
class Copied:
    """A follower's life: what it could promise, and after which operation."""

    files: MemoryFileSystem
    promises: list[tuple[int, int, int]] = field(default_factory=list)
    emptied_at: int = 1 << 60

    def note(self, logs: ReplicaLogs) -> None:
        self.promises.append((self.files.operations, logs.message_synced, logs.action_synced))

    def promised(self, at: int) -> tuple[int, int]:
        """Return what must be there after ``at`` operations: a cut may be under way."""
        before = [each for each in self.promises if each[0] <= at][-1:]
        after = [each for each in self.promises if each[0] > at][:1]
        around = before + after if before else [(0, 0, 0)]
        return min(each[1] for each in around), min(each[2] for each in around)


def copy(engine: Engine, logs: ReplicaLogs, files: MemoryFileSystem, size: int) -> None:
    """Copy a piece of each log."""
    message_offset, action_offset = int(logs.message_end), int(logs.action_end)
    if logs.is_empty:
        message_offset = engine.segments[0].base
    if not files.list("actions"):
        action_offset = engine.actions.segments[0].base
    logs.append_messages(*engine.message_bytes(message_offset, size))
    logs.append_actions(*engine.action_bytes(action_offset, size))


def copy_all(engine: Engine, logs: ReplicaLogs, files: MemoryFileSystem) -> None:
    if logs.is_empty:
        logs.empty()
    while logs.message_end < engine.end or logs.action_end < engine.actions.end:
        copy(engine, logs, files, 5000)


def sync(logs: ReplicaLogs) -> None:
    job = logs.begin_sync()
    if job is not None:
        job.run()
        logs.finish_sync(job)


def put_checkpoint(engine: Engine, logs: ReplicaLogs) -> None:
    number = engine.newest_checkpoint
    logs.put_checkpoint(number, engine.checkpoint_part(number, 0, 1 << 30)[1])


def checkpoint(leader: Workload) -> bytes:
    """Let a leader work until there is another checkpoint, and return that."""
    before = leader.opened.engine.newest_checkpoint
    while leader.opened.engine.newest_checkpoint == before:
        leader.run(5)
    engine = leader.opened.engine
    return engine.checkpoint_part(engine.newest_checkpoint, 0, 1 << 30)[1]


def live(engine: Engine, random: Random, older: bytes) -> Copied:
    """Copy a leader, with everything that can happen on the way."""
    copied = Copied(MemoryFileSystem(random=random))
    logs = ReplicaLogs(copied.files, SMALL, Heard())
    places: list[tuple[int, int]] = []
    while places[-1:] != [(engine.end, engine.actions.end)]:
        copy(engine, logs, copied.files, random.choice((1, 200, 700)))
        places.append((logs.message_end, logs.action_end))
        do_something(random.randrange(12), logs, copied, places)
        copied.note(logs)
    with suppress(UsageError):  # the leader has no facts any more that go back so far
        logs.put_checkpoint(1, older)
    put_checkpoint(engine, logs)
    copied.note(logs)
    logs.cut(engine.segments[-1].base, engine.actions.end)  # below the checkpoint
    copied.note(logs)
    copy_all(engine, logs, copied.files)
    sync(logs)
    put_checkpoint(engine, logs)
    copied.note(logs)
    logs.remove_before(engine.segments[-1].base)
    copied.note(logs)
    copied.emptied_at = copied.files.operations
    logs.empty()
    copied.note(logs)
    copy_all(engine, logs, copied.files)
    sync(logs)
    put_checkpoint(engine, logs)
    copied.note(logs)
    return copied


def do_something(
    what: int, logs: ReplicaLogs, copied: Copied, places: list[tuple[int, int]]
) -> None:
    match what:
        case 0 | 1 | 2:
            sync(logs)
        case 3:
            logs.note_synced()
        case 4:
            job = logs.begin_index()
            if job is not None:
                job.run()
                logs.finish_index(job)
        case 5 if len(places) > 3:
            copied.note(logs)
            logs.cut(*places[-3])
            del places[-2:]


def check(copied: Copied, engine: Engine, at: int, cut: Cut, random: Random) -> MemoryFileSystem:
    """Cut the power, let the follower go on, and return its disk."""
    survivor = copied.files.after_power_cut(at, cut, random)
    logs = ReplicaLogs(survivor, SMALL, Heard())
    messages, actions = copied.promised(at)
    assert logs.message_end >= messages
    assert logs.action_end >= actions or logs.is_empty
    assert logs.is_whole or at >= copied.emptied_at
    logs.close()

    heard = Heard()
    logs = ReplicaLogs(survivor, SMALL, heard)
    assert not heard.cuts
    if logs.has_holes:
        assert at >= copied.emptied_at
        mend(engine, logs)
    copy_all(engine, logs, survivor)
    put_checkpoint(engine, logs)
    sync(logs)
    assert logs.is_whole
    logs.close()
    opened = open_engine(survivor, SMALL, 1_800_000_000_000)
    assert not opened.heard.cuts
    assert not opened.heard.corruptions
    ends = {name: p.end for name, p in engine.partitions.by_name.items()}
    assert {name: p.end for name, p in opened.engine.partitions.by_name.items()} == ends
    assert opened.engine.end == engine.end
    assert opened.engine.actions.end >= engine.actions.end  # a full segment is followed by one
    return survivor


def lead_and_copy(name: str) -> tuple[Engine, Copied]:
    """Let a leader work, and a follower copy it."""
    random = Random(name)
    leader = Workload.begin(MemoryFileSystem(random=random), random)
    leader.run(20)
    older = checkpoint(leader)
    leader.run(15)
    checkpoint(leader)
    engine = leader.opened.engine
    return engine, live(engine, random, older)


@pytest.mark.parametrize("turn", range(max(1, EFFORT // 2)))
def test_a_follower_survives_a_power_cut_at_any_moment(turn: int, seed: int) -> None:
    name = f"replica {seed}/{turn}"
    engine, copied = lead_and_copy(name)
    for at in range(copied.files.operations + 1):
        for draw, cut in enumerate(CUTS):
            try:
                check(copied, engine, at, cut, Random(f"{name}/{at}/{draw}"))
            except BaseException as error:
                error.add_note(f"workload {name}, {cut} after {at} of {copied.files.operations}")
                error.add_note(str(copied.files.operation(at - 1)) if at else "the beginning")
                raise
