"""A follower's logs are its leader's, byte for byte, whatever happens to either of them.

The leader is an engine under the random workload of the power cut tests. The follower copies in
pieces of any size, and the power of both may be cut. What the follower had synced survives; it
goes on where it was; and in the end its segments are those of the leader, and an engine that
opens them finds what the leader's finds.
"""

from collections.abc import Callable
from random import Random

from hypothesis import given
from hypothesis import strategies as st

from pulque.errors import PositionLostError, UsageError
from pulque.storage.checkpoint import Mark, decode_checkpoint
from pulque.storage.engine import Engine
from pulque.storage.replication.replica_logs import ReplicaLogs
from pulque.testing.files import Cut, MemoryFileSystem
from tests.crash.opening import Heard, Opened, open_engine
from tests.crash.workload import SMALL, Workload

STEPS = (
    "lead",
    "lead",
    "copy messages",
    "copy messages",
    "copy actions",
    "copy checkpoint",
    "sync",
    "sync meanwhile",
    "retain",
    "index",
    "note",
    "kill follower",
    "cut follower",
    "cut leader",
)
CUTS = (Cut.LOST, Cut.TORN, Cut.TORN, Cut.ZEROED, Cut.GARBAGE, Cut.KEPT)


class Pair:
    """A leader and its follower."""

    def __init__(self, random: Random) -> None:
        self.random = random
        self.leader = Workload.begin(MemoryFileSystem(), random)
        self.files = MemoryFileSystem()
        self.logs = ReplicaLogs(self.files, SMALL, Heard())
        self.was_emptied = False

    @property
    def engine(self) -> Engine:
        return self.leader.opened.engine

    def step(self, name: str) -> None:
        getattr(self, name.replace(" ", "_"))()

    # The leader.

    def lead(self) -> None:
        self.leader.run(self.random.randint(1, 8))

    def cut_leader(self) -> None:
        """Cut the leader's power; it leads again, and the follower drops what it has not."""
        before, at = self.leader, self.leader.files.operations
        survivor = before.files.after_power_cut(at, self.random.choice(CUTS), self.random)
        logs = ReplicaLogs(survivor, SMALL, Heard())
        assert logs.is_whole
        common = (
            min(logs.message_end, self.logs.message_end),
            min(logs.action_end, self.logs.action_end),
        )
        logs.close()
        opened = open_engine(survivor, SMALL, before.now_ms)
        assert not opened.heard.cuts
        before.ledger.check(opened, at)
        self.leader = Workload(
            survivor,
            self.random,
            ledger=before.ledger.fork(opened, at),
            opened=opened,
            now_ms=before.now_ms,
        )
        self.logs.cut(*common)
        if not self.logs.is_empty:
            assert (self.logs.message_end, self.logs.action_end) == common

    # The follower.

    def copy_messages(self) -> None:
        self._copy(lambda: self.logs.append_messages(*self._message_bytes()))

    def copy_actions(self) -> None:
        self._copy(lambda: self.logs.append_actions(*self._action_bytes()))

    def copy_checkpoint(self) -> None:
        number = self.engine.newest_checkpoint
        if not number:
            return
        data = b""
        size = 1
        while len(data) < size:
            size, part = self.engine.checkpoint_part(number, len(data), self._size())
            data += part
        state = decode_checkpoint(data)
        assert isinstance(state, dict)
        mark = Mark.decode(state)
        try:
            self.logs.put_checkpoint(number, data)
        except UsageError:
            assert (
                self.logs.message_end < mark.message_offset
                or self.logs.action_end < mark.action_offset
                or self.logs.is_empty
            )
        else:
            assert self.logs.checkpoint >= number
            assert self.logs.message_synced >= mark.message_offset
            assert self.logs.action_synced >= mark.action_offset

    def sync(self) -> None:
        job = self.logs.begin_sync()
        if job is not None:
            job.run()
            self.logs.finish_sync(job)
        assert self.logs.message_synced == self.logs.message_end
        assert self.logs.action_synced == self.logs.action_end

    def sync_meanwhile(self) -> None:
        ends = self.logs.message_end, self.logs.action_end
        job = self.logs.begin_sync()
        self.copy_messages()
        self.copy_actions()
        if job is not None:
            job.run()
            self.logs.finish_sync(job)
        if not self.was_emptied:
            assert self.logs.message_synced >= ends[0]
            assert self.logs.action_synced >= ends[1]

    def retain(self) -> None:
        self.logs.remove_before(self.engine.segments[0].base)

    def index(self) -> None:
        job = self.logs.begin_index()
        if job is not None:
            job.run()
            self.logs.finish_index(job)

    def note(self) -> None:
        self.logs.note_synced()

    def kill_follower(self) -> None:
        ends = self.logs.message_end, self.logs.action_end
        self._restart(Cut.KEPT)
        assert self.logs.message_end == ends[0]
        assert self.logs.action_end == ends[1] or self.logs.is_empty

    def cut_follower(self) -> None:
        synced = self.logs.message_synced, self.logs.action_synced
        self._restart(self.random.choice(CUTS))
        assert self.logs.message_end >= synced[0]
        assert self.logs.action_end >= synced[1] or self.logs.is_empty

    def _restart(self, cut: Cut) -> None:
        self.files = self.files.after_power_cut(self.files.operations, cut, self.random)
        self.logs = ReplicaLogs(self.files, SMALL, Heard())
        assert self.logs.is_whole or self.was_emptied
        self.check_prefix()
        # What was judged once is clean.
        heard = Heard()
        ends = self.logs.message_end, self.logs.action_end
        checkpoint, is_whole = self.logs.checkpoint, self.logs.is_whole
        self.logs.close()
        self.logs = ReplicaLogs(self.files, SMALL, heard)
        assert not heard.cuts
        assert (self.logs.message_end, self.logs.action_end) == ends
        assert (self.logs.checkpoint, self.logs.is_whole) == (checkpoint, is_whole)

    def _copy(self, copy: Callable[[], None]) -> None:
        try:
            copy()
        except PositionLostError:
            self._begin_anew()

    def _begin_anew(self) -> None:
        self.was_emptied = True
        self.logs.empty()
        assert self.logs.is_empty
        assert not self.logs.checkpoint

    def _message_bytes(self) -> tuple[int, int, bytes]:
        if self.logs.is_empty and self.engine.segments[0].base:
            self._begin_anew()
            return self.engine.message_bytes(self.engine.segments[0].base, self._size())
        return self.engine.message_bytes(self.logs.message_end, self._size())

    def _action_bytes(self) -> tuple[int, int, bytes]:
        offset = int(self.logs.action_end)
        if not self.files.list("actions"):
            offset = self.engine.actions.segments[0].base
        return self.engine.action_bytes(offset, self._size())

    def _size(self) -> int:
        return self.random.choice((1, 40, 100, 300, 1000, 100_000))

    # What must hold.

    def check_prefix(self) -> None:
        """What the follower has is what the leader has there; damage is left while not whole."""
        if not self.logs.is_whole:
            return
        ours, theirs = self.files.contents(), self.leader.files.contents()
        for path, content in ours.items():
            if path.endswith(".log") and path in theirs:
                assert theirs[path].startswith(content), path

    def catch_up(self) -> None:
        while True:
            self.copy_messages()
            self.copy_actions()
            has_messages = self.logs.message_end == self.engine.end
            if has_messages and self.logs.action_end == self.engine.actions.end:
                break
        self.copy_checkpoint()
        self.sync()
        self.retain()
        self.note()

    def check_same(self) -> None:
        self.catch_up()
        assert self.logs.is_whole
        # A power cut can bring back what the leader had removed, and the follower as well.
        first = min(_segments(self.files.contents(), "messages/"))
        while self.engine.segments[0].path < first:
            self.engine.remove_oldest().run()
        ours, theirs = self.files.contents(), self.leader.files.contents()
        assert _segments(ours, "messages/") == _segments(theirs, "messages/")
        found, wanted = _segments(ours, "actions/"), _segments(theirs, "actions/")
        first = max(min(found, default=""), min(wanted, default=""))
        assert _from(first, found) == _from(first, wanted)
        self.logs.close()
        heard = Heard()
        ReplicaLogs(self.files, SMALL, heard).close()
        copied = open_engine(self.files, SMALL, self.leader.now_ms)
        leading = open_engine(self.leader.files, SMALL, self.leader.now_ms)
        assert not heard.cuts
        assert not copied.heard.cuts
        assert not copied.heard.corruptions
        assert _shown(copied) == _shown(leading)


def _segments(contents: dict[str, bytes], under: str) -> dict[str, bytes]:
    """Return the segments that have anything: a follower makes one when bytes for it come."""
    return {p: c for p, c in contents.items() if p.startswith(under) and p.endswith(".log") and c}


def _from(first: str, segments: dict[str, bytes]) -> dict[str, bytes]:
    return {path: content for path, content in segments.items() if path >= first}


def _shown(opened: Opened) -> list[object]:
    engine = opened.engine
    partitions = {
        (p.id, p.name, p.start, p.confirmed, p.end) for p in engine.partitions.by_id.values()
    }
    return [engine.end, engine.actions.end, partitions, opened.state, opened.seen, opened.facts]


@given(st.integers(0, 2**32), st.lists(st.sampled_from(STEPS), min_size=20, max_size=100))
def test_a_follower_ends_up_with_the_logs_of_its_leader(seed: int, steps: list[str]) -> None:
    pair = Pair(Random(seed))
    for step in steps:
        pair.step(step)
    pair.lead()
    pair.check_same()
