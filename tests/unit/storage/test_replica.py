"""A follower keeps what its leader sent, and nothing that is wrong; what is cut is gone."""

from contextlib import suppress

import pytest

from pulque.errors import CorruptionError, StorageError, StorageFullError, UsageError
from pulque.model.leadership import EpochStart
from pulque.model.positions import ActionOffset, Epoch, MessageOffset
from pulque.testing.files import Cut, MemoryFileSystem
from tests.crash.opening import Heard
from tests.unit.storage.copying import (
    act,
    checkpoint,
    copy,
    copy_checkpoint,
    follower,
    led,
    logs_in,
    opened_logs,
    power_cut,
    record_ends,
    sync,
)
from tests.unit.storage.storing import bodies_of, opened, store


class TestCopying:
    def test_a_new_follower_has_nothing(self) -> None:
        logs = opened_logs(MemoryFileSystem())
        assert logs.is_empty
        assert logs.is_whole
        assert (logs.message_end, logs.action_end, logs.checkpoint, logs.epochs) == (0, 0, 0, ())
        assert logs.start_count == 1

    def test_what_was_synced_survives_a_power_cut(self) -> None:
        engine = led()
        files, logs = follower(engine)
        assert (logs.message_synced, logs.action_synced) == (engine.end, engine.actions.end)
        logs = opened_logs(power_cut(files))
        assert (logs.message_end, logs.action_end) == (engine.end, engine.actions.end)
        assert logs.start_count == 2

    @pytest.mark.parametrize("cut", Cut)
    def test_a_checkpoint_survives_a_power_cut_once_it_is_copied(self, cut: Cut) -> None:
        engine = led()
        files = MemoryFileSystem()
        logs = opened_logs(files)
        for _ in range(3):  # what only the first one needs goes with the third
            store(engine, "p0", b"more")
            act(engine)
            checkpoint(engine)
            copy(engine, logs)
            copy_checkpoint(engine, logs)

        left = opened_logs(power_cut(files, cut))
        assert left.checkpoint == engine.newest_checkpoint
        assert left.is_whole
        assert (left.message_end, left.action_end) == (engine.end, engine.actions.end)

    def test_a_record_that_is_not_complete_is_left_for_the_next_time(self) -> None:
        engine = led()
        logs = opened_logs(MemoryFileSystem())
        whole = engine.message_bytes(0, 1_000).data
        first = len(engine.message_bytes(0, 1).data)
        logs.append_messages(0, 0, whole[: first - 1])
        assert logs.message_end == 0
        logs.append_messages(0, 0, memoryview(whole)[: first + 5])
        assert logs.message_end == first
        fact = len(engine.action_bytes(0, 1).data)
        logs.append_actions(0, 0, engine.action_bytes(0, 100).data[: fact + 9])
        assert logs.action_end == fact

    @pytest.mark.parametrize(
        ("base", "offset"), [(0, 1), (0, 100_000), (5, 5), (100_000, 100_000)]
    )
    def test_bytes_that_do_not_follow_are_refused(self, base: int, offset: int) -> None:
        engine = led(1)
        _, logs = follower(engine)
        with pytest.raises(UsageError, match="do not follow"):
            logs.append_messages(base, offset, engine.message_bytes(0, 1000).data)
        assert logs.message_end == engine.end

    @pytest.mark.parametrize("which", ["messages", "actions"])
    def test_a_flipped_bit_is_never_kept(self, which: str) -> None:
        engine = led(4)
        read = engine.message_bytes if which == "messages" else engine.action_bytes
        piece = read(0, 10_000)
        refused = 0
        for at in range(len(piece.data)):
            changed = bytearray(piece.data)
            changed[at] ^= 1 << at % 8
            files = MemoryFileSystem()
            logs = opened_logs(files)
            append = logs.append_messages if which == "messages" else logs.append_actions
            with suppress(CorruptionError):
                append(piece.base, piece.offset, bytes(changed))
            kept = b"".join(logs_in(files).values())
            refused += not kept
            assert len(kept) < len(piece.data)
            assert piece.data.startswith(kept)
        # All but facts whose size grew: they look as if they were not complete.
        assert refused == len(piece.data) or which == "actions"
        assert refused > 0.9 * len(piece.data)

    def test_what_is_wrong_is_told_with_its_place(self) -> None:
        engine = led(4)
        piece = engine.message_bytes(0, 10_000)
        second = record_ends(engine)[0]
        changed = bytearray(piece.data)
        changed[second + 70] ^= 1
        with pytest.raises(CorruptionError, match=r"0\.log") as caught:
            opened_logs(MemoryFileSystem()).append_messages(0, 0, bytes(changed))
        assert caught.value.offset == second

    def test_records_of_another_place_are_refused(self) -> None:
        engine = led()
        second = engine.segments[1].base
        logs = opened_logs(MemoryFileSystem())
        with pytest.raises(CorruptionError, match=f"offset {second}"):
            logs.append_messages(0, 0, engine.message_bytes(second, 1000).data)
        assert logs.is_empty

    def test_a_batch_of_another_partition_is_refused(self) -> None:
        engine, other = opened(MemoryFileSystem()), opened(MemoryFileSystem())
        store(engine, "a", b"1")
        store(other, "b", b"1")
        logs = opened_logs(MemoryFileSystem())
        tables = len(engine.message_bytes(0, 1).data)
        tables += len(engine.message_bytes(tables, 1).data)
        logs.append_messages(0, 0, engine.message_bytes(0, tables).data)
        with pytest.raises(CorruptionError, match="crc"):
            logs.append_messages(0, tables, other.message_bytes(tables, 1000).data)
        assert logs.message_end == tables

    def test_partitions_are_known_after_a_restart_in_the_middle_of_a_segment(self) -> None:
        engine = opened(MemoryFileSystem())
        for name in ("a", "b"):
            store(engine, name, b"1")
        files, logs = follower(engine)
        checkpoint(engine)
        copy_checkpoint(engine, logs)
        logs = opened_logs(files)
        store(engine, "b", b"2")
        copy(engine, logs)
        assert logs.message_end == engine.end

    def test_a_full_disk_leaves_the_log_as_it_was(self) -> None:
        leading = MemoryFileSystem()
        engine = led(files=leading)
        files = MemoryFileSystem()
        logs = opened_logs(files)
        while logs.message_end < engine.end or logs.action_end < engine.actions.end:
            for append, read, end in (
                (logs.append_messages, engine.message_bytes, logs.message_end),
                (logs.append_actions, engine.action_bytes, logs.action_end),
            ):
                piece = read(end, 100)
                before = logs_in(files)
                if piece.data:
                    files.fail_after(1, StorageFullError("no room"), part=3)
                    with pytest.raises(StorageFullError):
                        append(*piece)
                    assert logs_in(files) == before
                append(*piece)
        sync(logs)
        assert logs_in(files).items() >= {p: c for p, c in logs_in(leading).items() if c}.items()

    def test_a_failed_write_is_final(self) -> None:
        engine = led()
        files = MemoryFileSystem()
        logs = opened_logs(files)
        files.fail_after(2, StorageError("broken"))
        with pytest.raises(StorageError, match="broken"):
            logs.append_messages(*engine.message_bytes(0, 100))
        with pytest.raises(StorageError, match="until a restart"):
            logs.append_messages(*engine.message_bytes(0, 100))
        with pytest.raises(StorageError, match="until a restart"):
            logs.begin_sync()

    def test_epochs_are_taken_over_durably(self) -> None:
        files = MemoryFileSystem()
        epochs = (EpochStart(Epoch(1), MessageOffset(0), ActionOffset(0)),)
        logs = opened_logs(files)
        logs.take_epochs(epochs)
        assert logs.epochs == epochs
        assert opened_logs(power_cut(files)).epochs == epochs


class TestCutting:
    def test_what_lies_behind_a_cut_is_gone_for_good(self) -> None:
        engine = led()
        starts = record_ends(engine)
        bases = {segment.base for segment in engine.segments}
        for at in starts:
            files, logs = follower(engine)
            whole = logs_in(files)
            logs.cut(at, engine.actions.end)
            files = power_cut(files)
            for heard in (Heard(), Heard()):
                logs = opened_logs(files, heard)
                assert not heard.cuts
                assert (logs.message_end, logs.action_end) == (at, engine.actions.end)
                assert logs.is_whole
            left = {p: c for p, c in logs_in(files).items() if p.startswith("messages/")}
            assert sum(map(len, left.values())) == at
            assert all(
                whole[path].startswith(content) and content for path, content in left.items()
            )
            copy(engine, logs)
            assert logs_in(files) == whole
        assert bases < {0, *starts}

    def test_facts_are_cut_alike(self) -> None:
        engine = led()
        for segment in engine.actions.segments:
            for at in {
                segment.base,
                segment.base + len(engine.action_bytes(segment.base, 1).data),
            }:
                files, logs = follower(engine)
                whole = logs_in(files)
                logs.cut(engine.end, at)
                logs = opened_logs(power_cut(files))
                assert (logs.message_end, logs.action_end) == (engine.end, at)
                copy(engine, logs)
                assert logs.action_end == engine.actions.end
                assert whole

    def test_a_cut_behind_the_end_changes_nothing(self) -> None:
        engine = led()
        files, logs = follower(engine)
        before = files.contents()
        logs.cut(engine.end, engine.actions.end)
        logs.cut(engine.end + 5, engine.actions.end + 5)
        assert logs_in(files) == {p: c for p, c in before.items() if p.endswith(".log")}

    def test_an_index_of_what_was_cut_goes(self) -> None:
        engine = led()
        files, logs = follower(engine)
        while (job := logs.begin_index()) is not None:
            job.run()
            logs.finish_index(job)
        indexed = [p for p in files.contents() if p.endswith(".index")]
        assert len(indexed) == len(engine.segments) - 1
        logs.cut(engine.segments[1].end, engine.actions.end)
        assert [p for p in files.contents() if p.endswith(".index")] == indexed[:1]

    def test_an_index_that_comes_too_late_is_thrown_away(self) -> None:
        engine = led()
        files, logs = follower(engine)
        job = logs.begin_index()
        assert job is not None
        logs.cut(record_ends(engine)[1], 0)
        job.run()
        logs.finish_index(job)
        assert not [p for p in files.contents() if p.endswith(".index")]

    def test_a_sync_that_began_before_a_cut_says_nothing_about_what_came_after(self) -> None:
        engine = led()
        logs = opened_logs(MemoryFileSystem())
        logs.append_messages(*engine.message_bytes(0, 1000))
        job = logs.begin_sync()
        assert job is not None
        job.run()
        first = record_ends(engine)[1]
        logs.cut(first, 0)
        logs.append_messages(*engine.message_bytes(first, 1000))
        logs.finish_sync(job)
        assert logs.message_synced <= first

    def test_an_emptied_follower_may_begin_anywhere(self) -> None:
        engine = led()
        files, logs = follower(engine)
        checkpoint(engine)
        copy_checkpoint(engine, logs)
        logs.empty()
        assert not logs_in(files)
        assert not [p for p in files.contents() if p.startswith("checkpoints/")]
        assert (logs.is_empty, logs.is_whole) == (True, False)
        engine.remove_oldest().run()
        begin = engine.segments[0].base
        logs.append_messages(*engine.message_bytes(begin, 1))
        logs.append_actions(*engine.action_bytes(engine.actions.segments[0].base, 1))
        copy(engine, logs)
        copy_checkpoint(engine, logs)
        assert logs.is_whole
        logs.close()
        heard = Heard()
        opened_logs(files, heard).close()
        assert bodies_of(opened(files), "p0") == bodies_of(engine, "p0")
        assert not heard.cuts
