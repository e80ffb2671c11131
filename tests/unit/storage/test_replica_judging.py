"""A follower knows what it lost, which checkpoints it can begin with, and what may go."""

import pytest

from pulque.errors import CorruptionError, UsageError
from pulque.storage.replication.replica_logs import ReplicaLogs
from pulque.testing.files import Cut, MemoryFileSystem
from tests.unit.storage.copying import (
    act,
    checkpoint,
    copy,
    copy_checkpoint,
    flip,
    follower,
    led,
    logs_in,
    mend,
    opened_logs,
    power_cut,
    record_ends,
    sync,
)
from tests.unit.storage.storing import opened, store

CHECKPOINT = "checkpoints/{:020d}.checkpoint"


def index(logs: ReplicaLogs) -> None:
    """Make all indexes that are missing."""
    while (job := logs.begin_index()) is not None:
        job.run()
        logs.finish_index(job)


class TestJudging:
    @pytest.mark.parametrize("cut", list(Cut))
    def test_a_torn_tail_is_cut_and_nothing_is_missed(self, cut: Cut) -> None:
        engine = led(5)
        files, logs = follower(engine)
        synced = logs.message_end, logs.action_end
        logs.note_synced()
        store(engine, "p0", b"more")
        act(engine)
        logs.append_messages(*engine.message_bytes(logs.message_end, 1000))
        logs.append_actions(*engine.action_bytes(logs.action_end, 1000))
        logs = opened_logs(power_cut(files, cut))
        assert logs.is_whole
        assert (logs.message_end, logs.action_end) >= synced

    @pytest.mark.parametrize("path", ["messages", "actions"])
    def test_damage_below_what_was_noted_is_told_until_it_is_copied_again(self, path: str) -> None:
        engine = led()
        files, logs = follower(engine)
        logs.note_synced()
        whole = logs_in(files)
        last = max(p for p in whole if p.startswith(path) and len(whole[p]) > 20)
        flip(files, last, 20)
        damaged = logs_in(files)
        for _ in range(2):
            logs = opened_logs(files)
            assert not logs.is_whole
            assert logs_in(files) == damaged, "nobody said that there is another copy"
        mend(engine, logs)
        copy(engine, logs)
        assert logs.is_whole
        assert logs_in(files) == whole
        assert opened_logs(files).is_whole

    @pytest.mark.parametrize("is_known_by", ["what was noted", "a checkpoint"])
    def test_nothing_is_cut_behind_damage_that_is_mended(self, is_known_by: str) -> None:
        """Nobody else may have what lies behind it."""
        engine = led()
        files, logs = follower(engine)
        logs.note_synced()
        if is_known_by == "a checkpoint":
            checkpoint(engine)
            copy_checkpoint(engine, logs)
        whole = logs_in(files)
        ends = record_ends(engine)
        path = engine.segments[0].path
        flip(files, path, ends[2] - 1)
        logs = opened_logs(files)
        assert logs.message_end == engine.end
        logs.cut(engine.end, engine.actions.end)

        (bad,) = logs.find_damage()
        assert (bad.offset, bad.end) == (ends[1], ends[2])
        found = engine.message_bytes(bad.offset, 1)
        broken = bytearray(found.data)
        broken[-1] ^= 1
        with pytest.raises(CorruptionError):
            logs.mend(found.base, found.offset, bytes(broken))
        with pytest.raises(UsageError):
            logs.mend(found.base, found.offset, found.data[:-1])
        assert {p for p, c in logs_in(files).items() if c != whole[p]} == {path}
        assert logs.mend(*found) == bad.end
        assert logs_in(files) == whole
        assert not logs.find_damage()

    @pytest.mark.parametrize("cut", list(Cut))
    def test_what_was_mended_survives_a_power_cut(self, cut: Cut) -> None:
        engine = led()
        files, logs = follower(engine)
        logs.note_synced()
        whole = logs_in(files)
        flip(files, engine.segments[0].path, 20)
        files.open(engine.segments[0].path).sync()
        logs = opened_logs(files)
        mend(engine, logs)

        left = power_cut(files, cut)
        assert logs_in(left) == whole
        assert opened_logs(left).is_whole

    def test_a_torn_end_in_front_of_what_is_missing_is_cut_and_not_mended(self) -> None:
        """There is nothing whole to mend it with: it is copied again with what follows."""
        engine = led()
        files, logs = follower(engine)
        logs.note_synced()
        files.open(engine.segments[0].path).truncate(engine.segments[0].end - 10)
        logs = opened_logs(files)
        assert not logs.has_holes

        logs.cut(logs.message_end, logs.action_end)
        copy(engine, logs)
        assert logs.is_whole
        assert logs_in(files) == logs_in(follower(engine)[0])

    def test_after_a_damaged_partition_table_was_mended_copying_goes_on(self) -> None:
        engine = opened(MemoryFileSystem())
        store(engine, "p0", b"one")
        table = engine.end
        store(engine, "new", b"first")
        store(engine, "p0", b"another")
        files, logs = follower(engine)
        logs.note_synced()
        segment = engine.segments[-1]
        flip(files, segment.path, table - segment.base + 50)
        logs = opened_logs(files)
        assert [bad.offset for bad in logs.find_damage()] == [table]
        mend(engine, logs)

        store(engine, "new", b"second")
        copy(engine, logs)
        assert logs.is_whole
        assert logs_in(files) == logs_in(follower(engine)[0])

    def test_an_index_that_was_made_of_damaged_bytes_goes_with_them(self) -> None:
        engine = led()
        files, logs = follower(engine)
        logs.note_synced()
        flip(files, engine.segments[0].path, record_ends(engine)[1] + 20)
        logs = opened_logs(files)
        index(logs)
        made = {p: c for p, c in files.contents().items() if p.endswith((".index", ".keys"))}

        mend(engine, logs)
        assert f"messages/{0:020d}.index" not in files.contents()
        index(logs)
        again = {p: c for p, c in files.contents().items() if p.endswith((".index", ".keys"))}
        assert {p for p in again if again[p] != made[p]} == {
            f"messages/{0:020d}.index",
        }

    @pytest.mark.parametrize("cut", list(Cut))
    def test_what_was_emptied_is_missed_after_a_power_cut_too(self, cut: Cut) -> None:
        files, logs = follower(led())
        assert logs.message_synced > 0
        logs.empty()
        logs = opened_logs(power_cut(files, cut))
        assert logs.is_empty
        assert not logs.is_whole

    def test_what_was_here_beyond_all_that_the_leader_has_is_of_no_account(self) -> None:
        shorter, longer = led(3), led(9)
        files, logs = follower(longer)
        logs.note_synced()
        logs.empty()
        copy(shorter, logs)
        sync(logs)
        assert logs.message_end < longer.end
        assert not logs.is_whole

        logs.settle_known()
        assert opened_logs(files).is_whole

    def test_damage_below_the_checkpoint_is_seen_by_its_seams(self) -> None:
        engine = led()
        files, logs = follower(engine)
        checkpoint(engine)
        copy_checkpoint(engine, logs)
        files.open("messages/00000000000000000000.log").truncate(100)
        logs = opened_logs(files)
        assert not logs.is_whole
        assert logs.checkpoint == 0
        assert logs.message_end <= 100
        copy(engine, logs)
        copy_checkpoint(engine, logs)
        assert logs.is_whole

    @pytest.mark.parametrize("which", [0, 1, -1])
    def test_a_missing_segment_is_missed(self, which: int) -> None:
        engine = led()
        files, logs = follower(engine)
        logs.note_synced()
        files.remove(engine.segments[which].path)
        logs = opened_logs(files)
        assert not logs.is_whole
        assert logs.message_end == (engine.segments[which].base if which else 0)

    def test_missing_facts_behind_the_checkpoint_are_missed(self) -> None:
        engine = led()
        files, logs = follower(engine)
        checkpoint(engine)
        copy_checkpoint(engine, logs)
        for _ in range(10):
            act(engine)
        copy(engine, logs)
        for segment in engine.actions.segments[:-1]:
            files.remove(segment.path)
        logs = opened_logs(files)
        assert not logs.is_whole
        assert logs.action_end == 0

    def test_a_gap_that_nobody_knows_to_be_the_leaders_is_a_torn_tail(self) -> None:
        engine = led()
        files, logs = follower(engine)
        files.open(engine.actions.segments[0].path).truncate(len(engine.action_bytes(0, 1).data))
        logs = opened_logs(files)
        assert logs.action_end == len(engine.action_bytes(0, 1).data)
        assert logs.is_whole
        copy(engine, logs)
        assert logs.action_end == engine.actions.end

    def test_what_only_a_checkpoint_knew_is_missed_when_that_is_gone(self) -> None:
        engine = led()
        files, logs = follower(engine)
        checkpoint(engine)
        copy_checkpoint(engine, logs)
        files.open(engine.segments[1].path).truncate(100)
        logs = opened_logs(files)
        assert not logs.is_whole
        logs.cut(engine.segments[1].base, engine.actions.end)
        assert logs.checkpoint == 0
        assert not opened_logs(files).is_whole

    def test_an_action_log_without_facts_says_how_far_it_reaches(self) -> None:
        engine = led()
        base = engine.actions.segments[1].base
        files = MemoryFileSystem()
        logs = opened_logs(files)
        logs.append_messages(*engine.message_bytes(0, 1000))
        logs.append_actions(*engine.action_bytes(base, 1))
        logs.cut(int(logs.message_end), base)
        assert logs.action_end == base
        assert opened_logs(files).action_end == base

    def test_facts_without_any_message_are_nothing_to_build_on(self) -> None:
        engine = led()
        files = MemoryFileSystem()
        logs = opened_logs(files)
        logs.append_actions(*engine.action_bytes(0, 1000))
        sync(logs)
        logs = opened_logs(files)
        assert logs.is_empty
        assert logs.action_end == 0
        assert not logs_in(files)

    def test_a_leader_that_was_killed_finds_itself_whole(self) -> None:
        leading = MemoryFileSystem()
        engine = led(files=leading)
        checkpoint(engine)
        store(engine, "p1", b"more")
        logs = opened_logs(leading)
        assert logs.is_whole
        assert (logs.message_end, logs.action_end) == (engine.end, engine.actions.end)
        assert logs.checkpoint == 1

    def test_what_is_told_to_be_cut_is_not_missed(self) -> None:
        engine = led()
        files, logs = follower(engine)
        checkpoint(engine)
        copy_checkpoint(engine, logs)
        logs.note_synced()
        logs.cut(engine.segments[1].base, 0)
        logs = opened_logs(power_cut(files, Cut.KEPT))
        assert logs.is_whole
        assert logs.checkpoint == 0

    def test_a_hole_of_the_leader_is_no_damage(self) -> None:
        leading = MemoryFileSystem()
        engine = opened(leading)
        act(engine)
        act(engine)
        checkpoint(engine)
        first = len(engine.action_bytes(0, 1).data)
        leading.open("actions/00000000000000000000.log").truncate(first)
        engine = opened(leading)
        act(engine)
        files, logs = follower(engine)
        logs.note_synced()
        assert logs.action_end == engine.actions.end
        logs = opened_logs(files)
        assert logs.is_whole
        assert logs.action_end == engine.actions.end


class TestCheckpoints:
    def test_one_that_the_logs_do_not_reach_is_refused(self) -> None:
        engine = led()
        files, logs = follower(engine)
        store(engine, "p0", b"more")
        checkpoint(engine)
        with pytest.raises(UsageError, match="the logs end at"):
            copy_checkpoint(engine, logs)
        copy(engine, logs)
        copy_checkpoint(engine, logs)
        assert logs.checkpoint == 1
        assert opened_logs(power_cut(files)).checkpoint == 1

    def test_a_damaged_one_is_refused(self) -> None:
        engine = led()
        files, logs = follower(engine)
        checkpoint(engine)
        data = engine.checkpoint_part(1, 0, 1 << 20)[1]
        for at in range(len(data)):
            changed = bytearray(data)
            changed[at] ^= 1
            with pytest.raises(CorruptionError):
                logs.put_checkpoint(1, bytes(changed))
        assert not [p for p in files.contents() if p.startswith("checkpoints/")]

    def test_the_logs_are_synced_up_to_it(self) -> None:
        engine = led()
        checkpoint(engine)
        files = MemoryFileSystem()
        logs = opened_logs(files)
        while logs.message_end < engine.end:
            logs.append_messages(*engine.message_bytes(logs.message_end, 1000))
        while logs.action_end < engine.actions.end:
            logs.append_actions(*engine.action_bytes(logs.action_end, 1000))
        copy_checkpoint(engine, logs)
        logs = opened_logs(power_cut(files))
        assert logs.is_whole
        assert logs.message_end == engine.end

    def test_two_are_kept_and_facts_that_neither_needs_go(self) -> None:
        leading = MemoryFileSystem()
        engine = led(files=leading)
        files, logs = follower(engine)
        for _ in range(4):
            for _ in range(6):
                act(engine)
            checkpoint(engine)
            copy(engine, logs)
            copy_checkpoint(engine, logs)
        assert [p for p in files.contents() if p.startswith("checkpoints/")] == [
            CHECKPOINT.format(3),
            CHECKPOINT.format(4),
        ]
        wanted = {p for p in logs_in(leading) if p.startswith("actions/")}
        assert {p for p in logs_in(files) if p.startswith("actions/")} == wanted

    def test_another_leaders_is_newer_if_it_reaches_further(self) -> None:
        engine = led()
        files, logs = follower(engine)
        checkpoint(engine)
        data = engine.checkpoint_part(1, 0, 1 << 20)[1]
        logs.put_checkpoint(9, data)
        store(engine, "p0", b"more")
        checkpoint(engine)
        copy(engine, logs)
        copy_checkpoint(engine, logs)
        assert logs.checkpoint == 2
        assert opened_logs(files).checkpoint == 2


class TestRetention:
    def test_old_segments_go_with_all_their_files(self) -> None:
        engine = led()
        files, logs = follower(engine)
        while (job := logs.begin_index()) is not None:
            job.run()
            logs.finish_index(job)
        engine.remove_oldest().run()
        oldest = engine.segments[0].base
        logs.remove_before(oldest)
        assert not [p for p in files.contents() if p.startswith(f"messages/{0:020d}")]
        logs = opened_logs(files)
        assert logs.is_whole
        sync(logs)
        logs.remove_before(1 << 60)
        left = [p for p in logs_in(files) if p.startswith("messages/")]
        assert left == [engine.segments[-1].path]

    def test_a_segment_stays_until_the_next_one_is_durable(self) -> None:
        engine = led()
        files = MemoryFileSystem()
        logs = opened_logs(files)
        while logs.message_end < engine.end:
            logs.append_messages(*engine.message_bytes(logs.message_end, 1000))
        logs.remove_before(engine.end)
        assert engine.segments[0].path in files.contents()
        sync(logs)
        logs.remove_before(engine.end)
        assert engine.segments[0].path not in files.contents()
