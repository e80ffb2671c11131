"""What tests of followers do again and again."""

from random import Random

from pulque.model.actions import ConsumerLost, SubscriptionId
from pulque.storage.engine import Engine
from pulque.storage.options import StorageOptions
from pulque.storage.replication.replica_logs import ReplicaLogs
from pulque.testing.files import Cut, MemoryFileSystem
from tests.crash.opening import Heard
from tests.unit.storage.storing import opened, store

__all__ = [
    "act",
    "checkpoint",
    "copy",
    "copy_checkpoint",
    "flip",
    "follower",
    "led",
    "logs_in",
    "mend",
    "opened_logs",
    "power_cut",
    "record_ends",
    "sync",
]


def led(batches: int = 10, files: MemoryFileSystem | None = None) -> Engine:
    """Return an engine with several segments in both logs."""
    engine = opened(files or MemoryFileSystem(), segment_batches=3, action_segment_bytes=100)
    for i in range(batches):
        store(engine, f"p{i % 3}", b"%d" % i)
        act(engine)
    return engine


def act(engine: Engine) -> None:
    """Store a fact."""
    if engine.actions.needs_roll():
        engine.actions.start_segment(())
    engine.append_action(ConsumerLost(SubscriptionId(1), "silent", 7))


def checkpoint(engine: Engine) -> int:
    """Write a checkpoint and return its number."""
    job = engine.begin_checkpoint({})
    job.run()
    engine.finish_checkpoint(job)
    return engine.newest_checkpoint


def opened_logs(files: MemoryFileSystem, heard: Heard | None = None) -> ReplicaLogs:
    """Open the logs of a follower."""
    return ReplicaLogs(files, StorageOptions(), heard or Heard())


def copy(engine: Engine, logs: ReplicaLogs) -> None:
    """Copy all, and sync it."""
    while logs.message_end < engine.end:
        logs.append_messages(*engine.message_bytes(logs.message_end, 400))
    while logs.action_end < engine.actions.end:
        logs.append_actions(*engine.action_bytes(logs.action_end, 400))
    sync(logs)


def copy_checkpoint(engine: Engine, logs: ReplicaLogs) -> None:
    """Copy the newest checkpoint."""
    number = engine.newest_checkpoint
    logs.put_checkpoint(number, engine.checkpoint_part(number, 0, 1 << 20)[1])


def sync(logs: ReplicaLogs) -> None:
    """Make durable what was copied."""
    job = logs.begin_sync()
    if job is not None:
        job.run()
        logs.finish_sync(job)


def follower(engine: Engine) -> tuple[MemoryFileSystem, ReplicaLogs]:
    """Return a follower that has all."""
    files = MemoryFileSystem()
    logs = opened_logs(files)
    copy(engine, logs)
    return files, logs


def logs_in(files: MemoryFileSystem) -> dict[str, bytes]:
    """Return the segments of both logs."""
    return {p: c for p, c in files.contents().items() if p.endswith(".log")}


def flip(files: MemoryFileSystem, path: str, at: int) -> None:
    """Change one bit of a file."""
    file = files.open(path)
    file.write([bytes([file.read(1, at)[0] ^ 1])], at)


def power_cut(files: MemoryFileSystem, cut: Cut = Cut.LOST) -> MemoryFileSystem:
    """Return what a power cut leaves."""
    return files.after_power_cut(files.operations, cut, Random(1))


def record_ends(engine: Engine) -> list[int]:
    """Return where each record of the message log ends."""
    offset, found = 0, []
    while offset < engine.end:
        offset += len(engine.message_bytes(offset, 1).data)
        found.append(offset)
    return found


def mend(engine: Engine, logs: ReplicaLogs) -> None:
    """Copy again what is damaged, as a follower does."""
    for bad in logs.find_damage():
        at, end = bad.offset, min(bad.end, logs.segment_end(bad.offset))
        while at < end:
            at = logs.mend(*engine.message_bytes(at, 400))
    logs.has_holes = False
