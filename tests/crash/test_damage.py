"""Damage to what was durable is never served, never silent, and costs only what it hit.

Bits are flipped, sectors zeroed and swapped, files cut and removed, in every kind of file. What
the damage did not hit is readable and numbering goes on; what it hit is reported with file and
offset; what is derived is made again.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import cache
from random import Random

import pytest

from pulque.errors import CorruptionError, DataDirectoryError
from pulque.model.batch import read_header
from pulque.model.ids import IdSource
from pulque.storage.files import FileSystem
from tests.crash.archive import NOW_MS, OPTIONS, Archive, readable
from tests.crash.opening import EFFORT, Heard, Opened, open_engine
from tests.crash.workload import make_batch

DRAWS = 4 + 2 * EFFORT
SECTOR = 64


@cache
def archive(seed: int, *, checkpoints: bool = True) -> Archive:
    return Archive.build(seed, checkpoints=checkpoints)


def change(files: FileSystem, path: str, start: int, data: bytes) -> None:
    file = files.open(path)
    file.write([data], start)
    file.close()


def content(files: FileSystem, path: str) -> bytes:
    file = files.open(path, writable=False)
    data = file.read(file.size(), 0)
    file.close()
    return data


def cut(files: FileSystem, path: str, size: int) -> None:
    file = files.open(path)
    file.truncate(size)
    file.close()


def damages(
    source: Archive, path: str, random: Random
) -> Iterator[tuple[FileSystem, int, int, str]]:
    """Yield copies with one damage each, the range it covers, and what it is."""
    size = source.size(path)
    before = content(source.files, path)
    for _ in range(DRAWS):
        files = source.copy()
        at = random.randrange(size)
        change(files, path, at, bytes([before[at] ^ 1 << random.randrange(8)]))
        yield files, at, at + 1, f"bit flip at {at}"
    for _ in range(DRAWS // 2):
        files = source.copy()
        at = random.randrange(size)
        end = min(at + SECTOR, size)
        change(files, path, at, bytes(end - at))
        yield files, at, end, f"zeros at {at}..{end}"
    if size > 2 * SECTOR:
        for _ in range(DRAWS // 4):
            files = source.copy()
            at = random.randrange(size - 2 * SECTOR)
            change(files, path, at, before[at + SECTOR : at + 2 * SECTOR])
            change(files, path, at + SECTOR, before[at : at + SECTOR])
            yield files, at, at + 2 * SECTOR, f"sectors swapped at {at}"


def files_of(source: Archive, prefix: str, suffix: str) -> list[str]:
    return [p for p in source.paths() if p.startswith(prefix) and p.endswith(suffix)]


def same(files: FileSystem, source: Archive, path: str) -> bool:
    return content(files, path) == content(source.files, path)


def check_goes_on(files: FileSystem, opened: Opened, source: Archive) -> None:
    """Append to every partition, sync, reopen: all is there, and numbering went on."""
    engine = opened.engine
    expected = readable(engine)
    for name in source.ledger.sent:
        partition = engine.create_partition(name, NOW_MS)  # type: ignore[arg-type]
        used = [first for known, first in expected if known == name]
        batch = make_batch(name, [b"new"], ids=IdSource(1))
        appended = engine.append(
            partition, batch, read_header(batch), now_ms=NOW_MS + 10**6, wants_disk=True
        )
        engine.write()
        assert appended.entry.first_sequence > max(used, default=-1)
        expected[name, appended.entry.first_sequence] = batch
    source.sync(engine)
    assert readable(engine) == expected
    engine.close()
    again = open_engine(files, OPTIONS, NOW_MS)
    assert readable(again.engine) == expected


def reported(heard: Heard, path: str, start: int, end: int) -> bool:
    """Say whether a corruption was told that has part of a range in a log's segment."""
    base = int(path.rpartition("/")[2][:20])
    return any(
        p == path and offset < base + end and base + start < offset + max(size, 1)
        for p, offset, size, _ in heard.corruptions
    )


WITH_AND_WITHOUT = pytest.mark.parametrize("checkpoints", [True, False])


class TestMessageLog:
    @WITH_AND_WITHOUT
    @pytest.mark.accepts("004-46")
    def test_costs_the_batches_it_hit_and_no_others(self, seed: int, *, checkpoints: bool) -> None:
        source = archive(seed, checkpoints=checkpoints)
        everything = source.everything()
        for path in files_of(source, "messages/", ".log"):
            for files, start, end, what in damages(source, path, Random(f"{seed}{path}")):
                opened = open_engine(files, OPTIONS, NOW_MS)
                found = readable(opened.engine)
                missing = set(everything) - set(found)

                assert all(everything[key] == batch for key, batch in found.items()), what
                hit = source.hit_by(path, start, end)
                if same(files, source, path):
                    hit = set()
                assert missing <= hit, f"{path}: {what}"
                if missing and not is_tail(source, path, end):
                    assert reported(opened.heard, path, start, end), f"{path}: {what}"
                    check_goes_on(files, opened, source)

    @WITH_AND_WITHOUT
    def test_a_shortened_segment_costs_its_end(self, seed: int, *, checkpoints: bool) -> None:
        source = archive(seed, checkpoints=checkpoints)
        everything = source.everything()
        for path in files_of(source, "messages/", ".log")[:-1]:
            size = source.size(path)
            for kept in (0, 1, size // 3, size // 2, size - 1):
                files = source.copy()
                cut(files, path, kept)
                opened = open_engine(files, OPTIONS, NOW_MS)
                found = readable(opened.engine)

                assert set(everything) - set(found) == source.hit_by(path, kept, size)
                assert all(everything[key] == batch for key, batch in found.items())
                assert reported(opened.heard, path, kept, size)
                check_goes_on(files, opened, source)

    @WITH_AND_WITHOUT
    def test_a_missing_segment_costs_what_it_held(self, seed: int, *, checkpoints: bool) -> None:
        source = archive(seed, checkpoints=checkpoints)
        everything = source.everything()
        for path in files_of(source, "messages/", ".log")[:-1]:
            files = source.copy()
            files.remove(path)
            opened = open_engine(files, OPTIONS, NOW_MS)
            found = readable(opened.engine)

            assert set(everything) - set(found) == source.hit_by(path, 0, source.size(path))
            assert all(everything[key] == batch for key, batch in found.items())
            base, size = int(path[9:29]), source.size(path)
            assert [(o, s) for _, o, s, _ in opened.heard.corruptions] == [(base, size)]
            check_goes_on(files, opened, source)

    def test_the_end_before_the_checkpoint_is_not_taken_for_torn(self, seed: int) -> None:
        source = archive(seed)
        path = files_of(source, "messages/", ".log")[-1]
        for damage in (lambda f: f.remove(path), lambda f: cut(f, path, 100)):
            files = source.copy()
            damage(files)
            opened = open_engine(files, OPTIONS, NOW_MS)

            assert "the end of the log is missing" in opened.heard.corruptions[-1][3]
            assert set(source.everything()) - set(readable(opened.engine)) <= source.hit_by(
                path, 0, source.size(path)
            )
            check_goes_on(files, opened, source)

    def test_all_segments_gone_is_not_an_empty_log(self, seed: int) -> None:
        source = archive(seed)
        files = source.copy()
        for path in files_of(source, "messages/", ".log"):
            files.remove(path)
        opened = open_engine(files, OPTIONS, NOW_MS)

        assert [reason for *_, reason in opened.heard.corruptions] == [
            "the end of the log is missing"
        ]
        assert readable(opened.engine) == {}
        ends = {n: p.end for n, p in opened.engine.partitions.by_name.items()}
        assert all(ends[name] > 0 for name in source.ledger.sent), "numbering started again"
        check_goes_on(files, opened, source)


def is_tail(source: Archive, path: str, end: int) -> bool:
    """Say whether damage reaches the very last record, which says that all before was synced."""
    newest = max(
        (sent.entry for all_sent in source.ledger.sent.values() for sent in all_sent),
        key=lambda entry: entry.offset,
    )
    return int(path[9:29]) + end > newest.offset


class TestIndexes:
    @pytest.mark.accepts("003-18", "004-56")
    def test_any_damage_is_mended_and_costs_nothing(self, seed: int) -> None:
        source = archive(seed)
        everything = source.everything()
        for path in files_of(source, "messages/", ".index"):
            for files, _, _, what in damages(source, path, Random(f"{seed}{path}")):
                opened = open_engine(files, OPTIONS, NOW_MS)

                assert readable(opened.engine) == everything, f"{path}: {what}"
                if not same(files, source, path):
                    assert opened.heard.rebuilt == [path], f"{path}: {what}"
                    check_mended(files, opened, source, path)

    @pytest.mark.parametrize(
        "damage",
        [
            lambda files, path: files.remove(path),
            lambda files, path: cut(files, path, 0),
            lambda files, path: cut(files, path, 50),
            lambda files, path: cut(files, path, len(content(files, path)) - 1),
        ],
    )
    @pytest.mark.accepts("003-18", "003-20", "004-56")
    def test_a_missing_or_shortened_one_is_made_again(
        self, seed: int, damage: Callable[[FileSystem, str], None]
    ) -> None:
        source = archive(seed)
        for path in files_of(source, "messages/", ".index"):
            files = source.copy()
            damage(files, path)
            opened = open_engine(files, OPTIONS, NOW_MS)

            assert readable(opened.engine) == source.everything()
            assert opened.heard.rebuilt == [path]
            check_mended(files, opened, source, path)

    def test_a_missing_one_is_made_again_without_being_read(self, seed: int) -> None:
        source = archive(seed)
        path = files_of(source, "messages/", ".index")[1]
        files = source.copy()
        files.remove(path)
        opened = open_engine(files, OPTIONS, NOW_MS)
        check_mended(files, opened, source, path)

        assert opened.heard.rebuilt == [path]
        assert readable(opened.engine) == source.everything()

    def test_one_of_another_segment_is_not_used(self, seed: int) -> None:
        source = archive(seed)
        first, second = files_of(source, "messages/", ".index")[:2]
        files = source.copy()
        files.rename(first, second)
        opened = open_engine(files, OPTIONS, NOW_MS)

        assert readable(opened.engine) == source.everything()
        assert sorted(opened.heard.rebuilt) == [first, second]

    def test_all_derived_files_gone_cost_nothing(self, seed: int) -> None:
        source = archive(seed)
        files = source.copy()
        for path in source.paths():
            if path.endswith((".index", ".open", ".checkpoint")):
                files.remove(path)
        opened = open_engine(files, OPTIONS, NOW_MS)

        assert readable(opened.engine) == source.everything()
        assert opened.facts == source.ledger.facts[-len(opened.facts) :]
        check_goes_on(files, opened, source)

    def test_damage_to_the_open_segments_entries_costs_nothing(self, seed: int) -> None:
        source = archive(seed)
        (path,) = files_of(source, "messages/", ".open")
        size = source.size(path)
        copies = [files for files, *_ in damages(source, path, Random(seed))]
        for kept in (0, size // 2, size - 1):
            copies.append(source.copy())
            cut(copies[-1], path, kept)
        copies.append(source.copy())
        copies[-1].remove(path)
        for files in copies:
            is_damaged = not files.exists(path) or not same(files, source, path)
            opened = open_engine(files, OPTIONS, NOW_MS)

            assert readable(opened.engine) == source.everything()
            assert opened.heard.rebuilt == ([path] if is_damaged else [])


def check_mended(files: FileSystem, opened: Opened, source: Archive, path: str) -> None:
    while (job := opened.engine.begin_index()) is not None:
        job.run()
        opened.engine.finish_index(job)
    assert same(files, source, path)
    again = open_engine(files, OPTIONS, NOW_MS)
    assert readable(again.engine) == source.everything()
    assert not again.heard.rebuilt


class TestActionLog:
    @WITH_AND_WITHOUT
    def test_costs_the_facts_it_hit_and_no_others(self, seed: int, *, checkpoints: bool) -> None:
        source = archive(seed, checkpoints=checkpoints)
        for path in files_of(source, "actions/", ".log"):
            for files, start, end, what in damages(source, path, Random(f"{seed}{path}")):
                opened = open_engine(files, OPTIONS, NOW_MS)
                whole = source.ledger.facts[int(opened.state.get(b"test:facts", b"0")) :]
                hit = facts_hit(source, path, start, end)

                assert is_subsequence(opened.facts, whole), f"{path}: {what}"
                assert len(whole) - len(opened.facts) <= hit, f"{path}: {what}"
                if len(opened.facts) < len(whole) and opened.facts[-1:] == whole[-1:]:
                    assert reported(opened.heard, path, start, end), f"{path}: {what}"
                assert readable(opened.engine) == source.everything()

    def test_a_missing_or_shortened_segment_is_reported(self, seed: int) -> None:
        source = archive(seed, checkpoints=False)
        for path in files_of(source, "actions/", ".log")[:-1]:
            for damage in (lambda f, p=path: f.remove(p), lambda f, p=path: cut(f, p, 100)):
                files = source.copy()
                damage(files)
                opened = open_engine(files, OPTIONS, NOW_MS)

                assert is_subsequence(opened.facts, source.ledger.facts)
                assert opened.facts[-1] == source.ledger.facts[-1]
                assert len(opened.facts) < len(source.ledger.facts)
                assert opened.heard.corruptions
                assert not opened.heard.cuts

    def test_facts_go_on_behind_what_is_missing(self, seed: int) -> None:
        source = archive(seed)
        for damage in (lambda f, p: f.remove(p), lambda f, p: cut(f, p, 10)):
            files = source.copy()
            for path in files_of(source, "actions/", ".log"):
                damage(files, path)
            opened = open_engine(files, OPTIONS, NOW_MS)
            assert opened.facts == []
            # A segment that begins where the checkpoint ends may have been torn, for all it shows.
            assert opened.heard.corruptions or opened.heard.cuts
            new = source.ledger.facts[:3]
            for fact in new:
                opened.engine.append_action(fact)
            source.sync(opened.engine)
            opened.engine.close()

            assert open_engine(files, OPTIONS, NOW_MS).facts == new


def facts_hit(source: Archive, path: str, start: int, end: int) -> int:
    """Say how many facts have bytes in a range, counting each record by its own size."""
    data = content(source.files, path)
    at = hit = 0
    while at < len(data):
        size = 8 + int.from_bytes(data[at : at + 4], "little")
        hit += at < end and start < at + size
        at += size
    return hit


def is_subsequence(part: Sequence[object], whole: Sequence[object]) -> bool:
    rest = iter(whole)
    return all(any(each == other for other in rest) for each in part)


class TestCheckpoints:
    @pytest.mark.accepts("003-21")
    def test_the_older_one_serves_if_the_newest_is_damaged(self, seed: int) -> None:
        source = archive(seed)
        older, newest = files_of(source, "checkpoints/", ".checkpoint")
        size = source.size(newest)
        copies = [files for files, *_ in damages(source, newest, Random(seed))]
        for kept in (0, 5, size // 2, size - 1):
            copies.append(source.copy())
            cut(copies[-1], newest, kept)
        for files in copies:
            if same(files, source, newest):
                continue
            opened = open_engine(files, OPTIONS, NOW_MS)

            assert opened.heard.refused == [newest]
            assert opened.state == source.ledger.states[-2]
            assert opened.facts == source.ledger.facts[int(opened.state[b"test:facts"]) :]
            assert readable(opened.engine) == source.everything()
            assert not files.exists(newest)
            assert files.exists(older)

    def test_the_logs_alone_serve_if_both_are_damaged(self, seed: int) -> None:
        source = archive(seed)
        paths = files_of(source, "checkpoints/", ".checkpoint")
        files = source.copy()
        for path in paths:
            change(files, path, source.size(path) // 2, b"\xff\x00\xff")
        opened = open_engine(files, OPTIONS, NOW_MS)

        assert sorted(opened.heard.refused) == paths
        assert opened.state == {}
        assert readable(opened.engine) == source.everything()
        assert len(opened.facts) >= len(source.ledger.facts) - int(
            source.ledger.states[-2][b"test:facts"]
        )
        assert opened.facts == source.ledger.facts[-len(opened.facts) :]
        check_goes_on(files, opened, source)

    def test_a_missing_newest_one_is_like_none_written(self, seed: int) -> None:
        source = archive(seed)
        files = source.copy()
        files.remove(files_of(source, "checkpoints/", ".checkpoint")[1])
        opened = open_engine(files, OPTIONS, NOW_MS)

        assert opened.state == source.ledger.states[-2]
        assert opened.facts == source.ledger.facts[int(opened.state[b"test:facts"]) :]
        assert readable(opened.engine) == source.everything()


class TestIdentity:
    @pytest.mark.parametrize("path", ["format.json", "start"])
    def test_a_damaged_one_is_refused_or_harmless(self, seed: int, path: str) -> None:
        source = archive(seed)
        before = content(source.files, path)
        for at in range(len(before)):
            for bit in range(8):
                files = source.copy()
                change(files, path, at, bytes([before[at] ^ 1 << bit]))
                try:
                    opened = open_engine(files, OPTIONS, NOW_MS)
                except DataDirectoryError:
                    continue
                assert path == "format.json", "a damaged number was taken for a number"
                assert readable(opened.engine) == source.everything()

    @pytest.mark.parametrize("path", ["format.json", "start"])
    @pytest.mark.parametrize("kept", [None, 0, 1, 2, 3])
    def test_a_missing_or_shortened_one_is_refused(
        self, seed: int, path: str, kept: int | None
    ) -> None:
        source = archive(seed)
        files = source.copy()
        if kept is None:
            files.remove(path)
        else:
            cut(files, path, kept)

        with pytest.raises(DataDirectoryError, match=path):
            open_engine(files, OPTIONS, NOW_MS)


def test_corruption_errors_name_file_and_offset() -> None:
    error = CorruptionError("messages/0.log", 17, "the crc does not match")

    assert str(error) == "messages/0.log at offset 17: the crc does not match"
    assert (error.path, error.offset) == ("messages/0.log", 17)
