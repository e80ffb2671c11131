"""What an engine does for those who copy its logs: it waits for them, and shows its bytes."""

import pytest

from pulque.errors import PositionLostError
from pulque.model.actions import ConsumerLost, SubscriptionId
from pulque.model.batch import read_header
from pulque.model.names import PartitionName
from pulque.model.positions import Epoch, MessageOffset
from pulque.model.record import Envelope, read_envelope
from pulque.storage.engine import Engine
from pulque.storage.files import WouldBlockError
from pulque.testing.files import MemoryFileSystem
from tests.unit.storage.storing import bodies_of, opened, packed, partition_of, store


def append(engine: Engine, name: str, body: bytes, *, wants_disk: bool = False) -> MessageOffset:
    partition = engine.create_partition(PartitionName(name), 1)
    batch = packed(name, body)
    return engine.append(partition, batch, read_header(batch), now_ms=1, wants_disk=wants_disk).end


def checkpoint(engine: Engine) -> None:
    job = engine.begin_checkpoint({})
    job.run()
    engine.finish_checkpoint(job)


def act(engine: Engine, count: int) -> None:
    for _ in range(count):
        engine.append_action(ConsumerLost(SubscriptionId(1), "silent", 7))


class TestConfirming:
    @pytest.mark.parametrize("wants_disk", [True, False])
    def test_neither_writing_nor_syncing_confirms_what_others_copy(
        self,
        wants_disk: bool,  # noqa: FBT001
    ) -> None:
        engine = opened(MemoryFileSystem(), is_replicated=True)
        append(engine, "orders", b"1", wants_disk=wants_disk)
        assert engine.write() == []
        job = engine.begin_sync(actions=True)
        assert job is not None
        job.run()
        assert engine.finish_sync(job) == []
        assert engine.synced == engine.end
        assert bodies_of(engine, "orders") == []

    def test_what_all_have_is_confirmed_and_nothing_behind_it(self) -> None:
        engine = opened(MemoryFileSystem(), is_replicated=True)
        ends = [append(engine, name, name.encode()) for name in ("a", "b", "a")]
        engine.write()
        assert engine.confirm(MessageOffset(ends[0] - 1)) == []
        assert engine.confirm(ends[1]) == [partition_of(engine, "a"), partition_of(engine, "b")]
        assert bodies_of(engine, "a") == [b"a"]
        assert engine.confirm(ends[2]) == [partition_of(engine, "a")]
        assert bodies_of(engine, "a") == [b"a", b"a"]

    def test_what_is_found_when_it_opens_is_confirmed(self) -> None:
        files = MemoryFileSystem()
        append(engine := opened(files, is_replicated=True), "a", b"1")
        engine.write()
        assert bodies_of(opened(files, is_replicated=True), "a") == [b"1"]

    def test_records_bear_the_epoch_that_they_were_written_under(self) -> None:
        files = MemoryFileSystem()
        store(opened(files), "a", b"1")
        engine = opened(files, epoch=Epoch(7))
        begin = engine.end
        store(engine, "b", b"2")
        offset, found = 0, []
        while offset < engine.end:
            envelope = read_envelope(engine.message_bytes(offset, 1).data)
            assert isinstance(envelope, Envelope)
            found.append((offset >= begin, envelope.epoch))
            offset += envelope.size
        assert set(found) == {(False, 0), (True, 7)}


class TestBytes:
    def test_pieces_of_any_size_make_up_the_segments(self) -> None:
        for size in (1, 7, 100, 1000, 1_000_000):
            files = MemoryFileSystem()
            engine = opened(files, segment_batches=3, action_segment_bytes=60)
            for i in range(10):
                store(engine, f"p{i % 3}", b"x" * i * 9)
                if engine.actions.needs_roll():
                    engine.actions.start_segment(())
                act(engine, 1)
            copied: dict[str, bytes] = {}
            for read, under, end in (
                (engine.message_bytes, "messages", engine.end),
                (engine.action_bytes, "actions", engine.actions.end),
            ):
                offset = 0
                while offset < end:
                    piece = read(offset, size)
                    path = f"{under}/{piece.base:020d}.log"
                    assert piece.data
                    assert piece.base + len(copied.get(path, b"")) == piece.offset == offset
                    copied[path] = copied.get(path, b"") + piece.data
                    offset += len(piece.data)
                assert read(offset, size).data == b""
            found = {p: c for p, c in files.contents().items() if p.endswith(".log")}
            assert copied == {path: content for path, content in found.items() if content}

    def test_one_whole_record_comes_however_little_is_asked_for(self) -> None:
        engine = opened(MemoryFileSystem())
        store(engine, "a", b"x" * 100_000)
        first = len(engine.message_bytes(0, 1).data)
        second = len(engine.message_bytes(first, 1).data)
        batch = engine.message_bytes(first + second, 10).data
        assert first + second + len(batch) == engine.end
        assert len(batch) > 100_000
        assert len(engine.message_bytes(0, 1000).data) == 1000

    def test_nothing_comes_if_nothing_is_asked_for(self) -> None:
        engine = opened(MemoryFileSystem())
        assert engine.message_bytes(0, 0) == (0, 0, b"")

    def test_bytes_that_are_not_written_yet_are_not_shown(self) -> None:
        engine = opened(MemoryFileSystem())
        store(engine, "a", b"1")
        end = engine.end
        append(engine, "a", b"2")
        assert engine.message_bytes(end, 1000).data == b""

    def test_an_offset_that_is_not_in_the_log_is_lost(self) -> None:
        engine = opened(MemoryFileSystem(), segment_batches=1)
        for _ in range(3):
            store(engine, "a", b"1")
        engine.remove_oldest().run()
        begin = engine.segments[0].base
        with pytest.raises(PositionLostError, match=f"begins at {begin}"):
            engine.message_bytes(begin - 1, 1)
        with pytest.raises(PositionLostError, match=f"ends at {engine.end}"):
            engine.message_bytes(engine.end + 1, 1)
        with pytest.raises(PositionLostError, match=f"ends at {engine.actions.end}"):
            engine.action_bytes(engine.actions.end + 1, 1)
        assert engine.message_bytes(begin, 1).data

    def test_a_hole_among_the_facts_is_passed_over(self) -> None:
        files = MemoryFileSystem()
        engine = opened(files)
        act(engine, 3)
        checkpoint(engine)
        end = engine.actions.end
        file = files.open("actions/00000000000000000000.log")
        file.truncate(len(engine.action_bytes(0, 1).data))
        engine = opened(files)
        act(engine, 1)
        hole = len(engine.action_bytes(0, 1).data)
        assert hole < end
        assert engine.action_bytes(hole, 1)[:2] == (end, end)

    def test_who_may_not_wait_is_told_to_ask_again(self) -> None:
        files = MemoryFileSystem()
        engine = opened(files)
        store(engine, "a", b"1")
        files.cold = True
        with pytest.raises(WouldBlockError):
            engine.message_bytes(0, 100, may_block=False)
        assert engine.message_bytes(0, 100).data


class TestCheckpoints:
    def test_the_newest_one_is_shown_in_parts(self) -> None:
        files = MemoryFileSystem()
        engine = opened(files)
        assert engine.newest_checkpoint == 0
        store(engine, "a", b"1")
        for _ in range(2):
            checkpoint(engine)
        assert engine.newest_checkpoint == 2
        whole = files.contents()["checkpoints/00000000000000000002.checkpoint"]
        assert engine.checkpoint_part(2, 0, 7) == (len(whole), whole[:7])
        assert engine.checkpoint_part(2, 7, 10_000) == (len(whole), whole[7:])
        assert opened(files).newest_checkpoint == 2

    def test_one_that_is_gone_is_lost(self) -> None:
        engine = opened(MemoryFileSystem())
        for _ in range(3):
            checkpoint(engine)
        with pytest.raises(PositionLostError, match="checkpoint 1 is gone"):
            engine.checkpoint_part(1, 0, 7)

    def test_a_damaged_one_is_not_the_newest(self) -> None:
        files = MemoryFileSystem()
        engine = opened(files)
        for _ in range(2):
            checkpoint(engine)
        files.open("checkpoints/00000000000000000002.checkpoint").truncate(20)
        assert opened(files).newest_checkpoint == 1

    def test_an_index_file_that_is_missing_is_written_whole_again(self) -> None:
        files = MemoryFileSystem()
        engine = opened(files)
        store(engine, "a", b"1")
        checkpoint(engine)
        whole = files.contents()["messages/00000000000000000000.open"]
        files.remove("messages/00000000000000000000.open")
        engine = opened(files)
        checkpoint(engine)
        assert files.contents()["messages/00000000000000000000.open"] == whole
