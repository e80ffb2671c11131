"""Files of removed segments are written again, and what they held before is never seen again."""

from collections.abc import Callable
from random import Random

import pytest

from pulque.cli.dump import print_file
from pulque.cli.output import Output
from pulque.errors import StorageFullError
from pulque.model.positions import ConsumeSequence, Epoch, MessageOffset
from pulque.model.record import ENVELOPE_SIZE, Envelope, pack_envelope, read_envelope
from pulque.storage.engine import Engine
from pulque.storage.inspection import DamagedRange, OldBytes, data_files, read_messages
from pulque.storage.options import StorageOptions
from pulque.storage.verification import Finding, verify
from pulque.testing.files import Cut, MemoryFileSystem
from pulque.testing.power import Linked, Node
from tests.crash.opening import Opened, open_engine
from tests.unit.storage.storing import bodies_of, store

OPTIONS = StorageOptions(reserve_bytes=0, spare_segments=2)
PER_SEGMENT = 4


def start(files: MemoryFileSystem, options: StorageOptions = OPTIONS) -> Opened:
    return open_engine(files, options, 1)


def sync(engine: Engine) -> None:
    job = engine.begin_sync(actions=True)
    if job is not None:
        job.run()
        engine.finish_sync(job)


def body(number: int) -> bytes:
    """All of the same size, so that records of each segment lie where those of the last did."""
    return b"%05d " % number * 50


def fill(engine: Engine, first: int, count: int = PER_SEGMENT) -> None:
    for number in range(first, first + count):
        store(engine, "orders", body(number))


def turn_over(engine: Engine, first: int) -> None:
    """Fill the open segment, begin another one, and remove the one before."""
    fill(engine, first)
    engine.roll(1)
    engine.remove_oldest().run()


def reusing(turns: int = 5) -> tuple[MemoryFileSystem, Engine]:
    """Return an engine whose open segment is written over an older one, with two records in it."""
    files = MemoryFileSystem()
    engine = start(files).engine
    for turn in range(turns):
        turn_over(engine, turn * PER_SEGMENT)
    fill(engine, turns * PER_SEGMENT, 2)
    assert old_bytes(files, engine)
    return files, engine


def old_bytes(files: MemoryFileSystem, engine: Engine) -> int:
    """Return how much lies in the open segment's file behind its end."""
    segment = engine.segments[-1]
    return len(files.contents()[segment.path]) - (segment.end - segment.base)


def names(files: MemoryFileSystem, suffix: str) -> list[str]:
    return [name for name in files.list("messages") if name.endswith(suffix)]


def files_made(files: MemoryFileSystem) -> set[Node]:
    """Return all files that ever were a segment's."""
    changes = map(files.operation, range(files.operations))
    links = [link for each in changes if isinstance(each, Linked) for link in each.links]
    return {node for _, name, node in links if name.endswith(".log") and node is not None}


def killed(files: MemoryFileSystem) -> MemoryFileSystem:
    return files.after_power_cut(files.operations, Cut.KEPT, Random(1))


def change(files: MemoryFileSystem, path: str, place: int, data: bytes) -> None:
    file = files.open(path)
    file.write([data], place)
    file.close()


def findings(files: MemoryFileSystem) -> list[Finding]:
    return verify(files, data_files(files)).findings


def check_goes_on(found: Opened, files: MemoryFileSystem, expected: list[bytes]) -> None:
    assert bodies_of(found.engine, "orders") == expected
    store(found.engine, "orders", b"next")
    again = start(killed(files))
    assert bodies_of(again.engine, "orders") == [*expected, b"next"]
    assert not again.heard.corruptions + again.heard.cuts


class TestWritingAgain:
    def test_no_more_files_are_made_however_often_a_segment_is_removed(self) -> None:
        files, engine = reusing()
        made = files_made(files)
        for turn in range(6, 26):
            turn_over(engine, turn * PER_SEGMENT)
            assert (len(names(files, ".log")), len(names(files, ".spare"))) == (1, 1)

        assert files_made(files) == made

    def test_no_more_spares_are_kept_than_were_asked_for(self) -> None:
        files = MemoryFileSystem()
        engine = start(files).engine
        for turn in range(5):
            fill(engine, turn)
            engine.roll(1)
        for _ in range(5):
            engine.remove_oldest().run()

        assert len(names(files, ".spare")) == OPTIONS.spare_segments

    def test_a_sealed_segment_ends_where_the_next_begins(self) -> None:
        files, engine = reusing()
        engine.roll(1)
        sealed, following = engine.segments

        assert sealed.base + len(files.contents()[sealed.path]) == following.base

    def test_a_clean_restart_finds_no_old_bytes(self) -> None:
        files, engine = reusing()
        engine.close()
        assert old_bytes(files, engine) == 0
        found = start(files)

        assert not found.heard.corruptions + found.heard.cuts
        check_goes_on(found, files, [body(20), body(21)])

    def test_a_spare_that_somebody_removed_is_not_missed(self) -> None:
        files, engine = reusing()
        for name in names(files, ".spare"):
            files.remove(f"messages/{name}")
        engine.roll(1)
        fill(engine, 22)

        assert bodies_of(engine, "orders", 20) == [body(number) for number in range(20, 26)]

    def test_a_spare_that_cannot_be_written_leaves_the_log_as_it_was(self) -> None:
        files, engine = reusing()
        engine.roll(1)
        engine.remove_oldest().run()
        end = engine.end
        files.fail_after(1, StorageFullError("no room"))
        with pytest.raises(StorageFullError):
            engine.roll(1)

        assert engine.end == end
        fill(engine, 22)
        found = start(killed(files))
        assert bodies_of(found.engine, "orders") == [body(number) for number in range(22, 26)]
        assert not found.heard.corruptions + found.heard.cuts


class TestKilled:
    def test_old_bytes_are_cut_off_and_nobody_is_told(self) -> None:
        files, engine = reusing()
        left = killed(files)
        assert findings(left) == []
        found = start(left)

        assert not found.heard.corruptions + found.heard.cuts
        assert old_bytes(left, found.engine) == 0
        assert found.engine.end == engine.end
        check_goes_on(found, left, [body(20), body(21)])

    def test_a_record_of_its_own_that_is_torn_is_told(self) -> None:
        files, engine = reusing()
        offset = engine.end
        segment = engine.segments[-1]
        fill(engine, 22, 1)
        left = killed(files)
        change(left, segment.path, engine.end - segment.base - 1, b"\xff")
        assert [(f.offset, f.is_torn_tail) for f in findings(left)] == [(offset, True)]
        found = start(left)

        assert [cut[:2] for cut in found.heard.cuts] == [(segment.path, offset)]
        assert not found.heard.corruptions
        check_goes_on(found, left, [body(20), body(21)])

    def test_a_record_of_its_own_that_the_file_ends_in_is_told(self) -> None:
        files, engine = reusing()
        offset = engine.end
        segment = engine.segments[-1]
        fill(engine, 22, 1)
        left = killed(files)
        left.open(segment.path).truncate(engine.end - segment.base - 1)
        assert [(f.offset, f.is_torn_tail) for f in findings(left)] == [(offset, True)]
        found = start(left)

        assert [cut[:2] for cut in found.heard.cuts] == [(segment.path, offset)]
        check_goes_on(found, left, [body(20), body(21)])

    def test_an_old_message_that_looks_like_a_record_of_this_place_is_none(self) -> None:
        files, engine = reusing()
        segment = engine.segments[-1]
        start_of_log = segment.read(segment.base, segment.end - segment.base)
        head = read_envelope(start_of_log)
        assert isinstance(head, Envelope)
        real = read_envelope(start_of_log, head.size)
        assert isinstance(real, Envelope)
        batch = start_of_log[head.size + ENVELOPE_SIZE :][: real.size - ENVELOPE_SIZE]
        place = MessageOffset(engine.end + 7)
        sequence = ConsumeSequence(real.first_sequence + 2)
        made = real._replace(offset=place, synced=place, epoch=Epoch(0), first_sequence=sequence)
        left = killed(files)
        change(left, segment.path, place - segment.base, pack_envelope(made) + batch)
        assert findings(left) == []
        found = start(left)

        assert not found.heard.corruptions + found.heard.cuts
        check_goes_on(found, left, [body(20), body(21)])

    def test_a_segment_that_only_has_its_name_goes(self) -> None:
        files, engine = reusing()
        engine.roll(1)
        sync(engine)
        engine.remove_oldest().run()
        fill(engine, 22)
        spare = files.contents()[f"messages/{names(files, '.spare')[0]}"]
        end = engine.end
        engine.roll(1)
        path = engine.segments[-1].path
        left = killed(files)
        change(left, path, 0, spare)
        found = start(left)

        assert not found.heard.corruptions + found.heard.cuts
        assert found.engine.segments[-1].base == end
        check_goes_on(found, left, [body(number) for number in range(22, 26)])

    def test_spares_of_a_process_that_ended_are_not_used(self) -> None:
        """One of them may hold a segment whose name was lost, and that is begun again."""
        files, engine = reusing()
        fill(engine, 22)
        sync(engine)
        spare = names(files, ".spare")[0]
        engine.roll(1)
        fill(engine, 26)
        left = killed(files)
        left.rename(engine.segments[-1].path, f"messages/{spare}")
        found = start(left)
        assert names(left, ".spare") == []
        found.engine.roll(1)
        fill(found.engine, 90, 1)
        again = start(killed(left))

        expected = [*(body(number) for number in range(20, 26)), body(90)]
        assert bodies_of(again.engine, "orders") == expected

    def test_whoever_keeps_none_removes_those_that_are_there(self) -> None:
        files, _ = reusing()
        start(files, StorageOptions(reserve_bytes=0))

        assert names(files, ".spare") == []


class TestDamage:
    def test_in_the_middle_is_reported_and_the_rest_kept(self) -> None:
        files, engine = reusing()
        sync(engine)
        offset = engine.end
        fill(engine, 22, 1)
        sync(engine)
        fill(engine, 23, 1)
        left = killed(files)
        segment = engine.segments[-1]
        change(left, segment.path, offset - segment.base, b"\0\0")
        assert [(f.offset, f.is_torn_tail) for f in findings(left)] == [(offset, False)]
        found = start(left)

        assert [c[:2] for c in found.heard.corruptions] == [(segment.path, offset)]
        assert not found.heard.cuts
        assert bodies_of(found.engine, "orders") == [body(20), body(21), body(23)]

    def test_before_the_checkpoint_is_found_where_the_log_ends(self) -> None:
        files, engine = reusing()
        offset = engine.end
        fill(engine, 22, 1)
        checkpoint = engine.begin_checkpoint({})
        checkpoint.run()
        left = killed(files)
        segment = engine.segments[-1]
        change(left, segment.path, offset - segment.base, b"\0\0")

        assert [(f.offset, f.is_torn_tail) for f in findings(left)] == [(offset, False)]

    @pytest.mark.parametrize("is_synced", [False, True])
    def test_a_sealed_segment_that_is_longer_again_is_none(self, *, is_synced: bool) -> None:
        """Its truncation was not synced, so that a power cut may undo it."""
        files, engine = reusing()
        segment = engine.segments[-1]
        whole = files.contents()[segment.path]
        engine.roll(1)
        fill(engine, 22)
        if is_synced:
            checkpoint = engine.begin_checkpoint({})
            checkpoint.run()
        left = killed(files)
        size = segment.end - segment.base
        change(left, segment.path, size, whole[size:])
        assert findings(left) == []
        found = start(left)

        assert not found.heard.corruptions + found.heard.cuts
        check_goes_on(found, left, [body(number) for number in range(20, 26)])

    def test_a_last_record_of_a_sealed_segment_is_not_taken_for_old_bytes(self) -> None:
        files, engine = reusing()
        offset = engine.end
        segment = engine.segments[-1]
        fill(engine, 22, 1)
        engine.roll(1)
        sync(engine)
        fill(engine, 23, 1)
        left = killed(files)
        change(left, segment.path, offset - segment.base, b"\0\0")
        assert [f.offset for f in findings(left) if not f.is_torn_tail] == [offset]
        found = start(left)

        assert [c[1] for c in found.heard.corruptions] == [offset]
        assert bodies_of(found.engine, "orders") == [body(20), body(21), body(23)]

    def test_a_segment_that_was_never_a_spare_may_not_be_longer(self) -> None:
        files = MemoryFileSystem()
        engine = start(files).engine
        fill(engine, 0)
        engine.roll(1)
        sealed = engine.segments[0]
        left = killed(files)
        change(left, sealed.path, sealed.end, b"more")

        assert next(f.reason for f in findings(left)) == "4 bytes at its end are too many"
        found = start(left)
        assert [c[3] for c in found.heard.corruptions] == ["the next segment begins earlier"]


class TestRoom:
    def test_spares_go_before_a_send_is_refused(self) -> None:
        files, engine = self.nearly_full(lambda used, spare: used + 4000 + spare // 2)
        engine.check_room()

        assert not engine.is_full
        assert names(files, ".spare") == []
        fill(engine, 22)

    def test_no_spare_is_kept_while_sends_are_refused(self) -> None:
        files, engine = self.nearly_full(lambda used, spare: used + 100)
        engine.roll(1)
        engine.check_room()
        assert engine.is_full
        engine.remove_oldest().run()

        assert names(files, ".spare") == []

    @staticmethod
    def nearly_full(room: Callable[[int, int], int]) -> tuple[MemoryFileSystem, Engine]:
        """Return an engine that lacks room by its rule, with a spare that takes some."""
        files = MemoryFileSystem()
        options = StorageOptions(reserve_bytes=5000, spare_segments=2)
        engine = start(files, options).engine
        for turn in range(5):
            turn_over(engine, turn * PER_SEGMENT)
        (spare,) = names(files, ".spare")
        contents = files.contents()
        files.room = room(sum(map(len, contents.values())), len(contents[f"messages/{spare}"]))
        return files, engine


def test_what_lies_behind_the_end_is_shown_as_what_it_is(
    capsys: pytest.CaptureFixture[str],
) -> None:
    files, engine = reusing()
    segment = engine.segments[-1]
    *records, last = read_messages(files, segment.path, segment.base)

    assert not [record for record in records if isinstance(record, DamagedRange)]
    assert last == OldBytes(engine.end, old_bytes(files, engine))
    for each in data_files(files):
        assert not each.path.endswith(".spare")
        print_file(files, each, Output.TABLE, with_messages=True)
    shown = capsys.readouterr().out
    assert f"{segment.path} old_bytes offset={last.offset} size={last.size}" in shown
    assert "damage" not in shown
