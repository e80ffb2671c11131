"""A power cut keeps what was synced, may do what the contract allows to the rest, and no more."""

from random import Random

import pytest

from pulque.errors import StorageError, StorageFullError
from pulque.storage.files import WouldBlockError
from pulque.testing.files import Cut, MemoryFileSystem

DRAWS = 4000
"""The rarest outcome that a test asks for comes once in about two hundred draws."""


def write(files: MemoryFileSystem, path: str, data: bytes, offset: int = 0) -> None:
    file = files.open(path, create=True)
    file.write([data], offset)
    file.close()


def sync(files: MemoryFileSystem, path: str) -> None:
    file = files.open(path)
    file.sync()
    file.close()


def durable(files: MemoryFileSystem, path: str, data: bytes) -> None:
    write(files, path, data)
    sync(files, path)
    files.sync_directory(path.rpartition("/")[0])


def left(files: MemoryFileSystem, cut: Cut, at: int | None = None) -> dict[str, bytes]:
    moment = files.operations if at is None else at
    return files.after_power_cut(moment, cut, Random(0)).contents()


def all_left(files: MemoryFileSystem, seed: int, cut: Cut = Cut.TORN) -> list[dict[str, bytes]]:
    random = Random(seed)
    at = files.operations
    return [files.after_power_cut(at, cut, random).contents() for _ in range(DRAWS)]


class TestContents:
    def test_before_a_sync_they_are_lost_and_after_it_kept(self) -> None:
        files = MemoryFileSystem()
        durable(files, "a", b"old")
        write(files, "a", b"new!")
        before = files.operations
        sync(files, "a")

        assert left(files, Cut.LOST, before) == {"a": b"old"}
        assert left(files, Cut.LOST) == {"a": b"new!"}
        assert left(files, Cut.KEPT, before) == {"a": b"new!"}

    def test_a_sync_covers_its_own_file_only(self) -> None:
        files = MemoryFileSystem()
        durable(files, "a", b"1")
        durable(files, "b", b"1")
        write(files, "a", b"2")
        write(files, "b", b"2")
        sync(files, "b")

        assert left(files, Cut.LOST) == {"a": b"1", "b": b"2"}

    def test_a_truncate_is_undone_until_it_is_synced(self) -> None:
        files = MemoryFileSystem()
        durable(files, "a", b"abcdef")
        files.open("a").truncate(2)

        assert left(files, Cut.LOST) == {"a": b"abcdef"}
        assert left(files, Cut.KEPT) == {"a": b"ab"}
        assert left(files, Cut.ZEROED) == {"a": b"ab"}

        sync(files, "a")
        assert left(files, Cut.LOST) == {"a": b"ab"}

    def test_every_moment_of_the_past_can_be_asked_for_in_any_order(self) -> None:
        files = MemoryFileSystem()
        durable(files, "a", b"")
        moments = {}
        for i in range(20):
            write(files, "a", b"x", i)
            sync(files, "a")
            moments[files.operations] = b"x" * (i + 1)

        for at in Random(1).sample(sorted(moments), len(moments)):
            assert left(files, Cut.LOST, at) == {"a": moments[at]}
            assert left(files, Cut.KEPT, at - 1) == {"a": moments[at]}

    def test_zeroed_and_garbage_keep_the_size_and_what_was_synced(self) -> None:
        files = MemoryFileSystem()
        durable(files, "a", b"old")
        write(files, "a", b"NEWdata")

        assert left(files, Cut.ZEROED) == {"a": b"old\0\0\0\0"}
        garbage = left(files, Cut.GARBAGE)["a"]
        assert (garbage[:3], len(garbage)) == (b"old", 7)
        assert garbage[3:] not in {b"data", bytes(4)}

    def test_torn_keeps_what_was_synced(self, seed: int) -> None:
        files = MemoryFileSystem()
        durable(files, "a", b"synced")
        write(files, "a", b"tail", 6)

        assert all(each["a"].startswith(b"synced") for each in all_left(files, seed))

    def test_torn_leaves_all_none_and_every_part(self, seed: int) -> None:
        files = MemoryFileSystem()
        durable(files, "a", b"")
        write(files, "a", b"abc")

        found = {each["a"] for each in all_left(files, seed)}

        assert {b"", b"a", b"ab", b"abc", b"\0", b"\0\0\0", b"a\0\0", b"\0\0c"} <= found
        assert all(byte in (0, b"abc"[i]) for each in found for i, byte in enumerate(each))

    def test_torn_may_keep_a_later_write_without_an_earlier_one(self, seed: int) -> None:
        files = MemoryFileSystem()
        durable(files, "a", b"")
        write(files, "a", b"first", 0)
        write(files, "a", b"second", 5)

        found = {each["a"] for each in all_left(files, seed)}

        assert bytes(5) + b"second" in found
        assert b"firstsecond" in found
        assert max(map(len, found)) == 11

    def test_torn_never_zeroes_what_is_overwritten(self, seed: int) -> None:
        files = MemoryFileSystem()
        durable(files, "a", b"aaaa")
        write(files, "a", b"bbbb")

        found = {each["a"] for each in all_left(files, seed)}

        assert all(set(each) <= set(b"ab") and len(each) == 4 for each in found)
        assert {b"aaaa", b"bbbb", b"bbaa", b"aabb"} <= found

    def test_the_damage_is_at_times_deep_in_a_run_of_writes(self, seed: int) -> None:
        files = MemoryFileSystem()
        durable(files, "a", b"")
        for i in range(20):
            write(files, "a", b"x" * 10, i * 10)

        intact = {len(each["a"].partition(b"\0")[0]) for each in all_left(files, seed)}

        assert min(intact) == 0
        assert max(intact) == 200
        assert sum(60 <= size <= 140 for size in intact) > 5


class TestNames:
    def test_a_new_name_is_lost_though_its_file_was_synced(self) -> None:
        files = MemoryFileSystem()
        write(files, "a", b"abc")
        sync(files, "a")

        assert left(files, Cut.LOST) == {}

        files.sync_directory("")
        assert left(files, Cut.LOST) == {"a": b"abc"}

    def test_a_synced_name_of_an_unsynced_file_is_empty(self) -> None:
        files = MemoryFileSystem()
        write(files, "a", b"abc")
        files.sync_directory("")

        assert left(files, Cut.LOST) == {"a": b""}

    def test_a_removed_file_comes_back_until_the_directory_is_synced(self) -> None:
        files = MemoryFileSystem()
        durable(files, "a", b"abc")
        files.remove("a")

        assert left(files, Cut.LOST) == {"a": b"abc"}
        assert left(files, Cut.KEPT) == {}

        files.sync_directory("")
        assert left(files, Cut.LOST) == {}

    def test_a_directory_is_a_name_in_its_parent(self) -> None:
        files = MemoryFileSystem()
        files.make_directory("d/e")
        durable(files, "d/e/a", b"abc")
        files.sync_directory("d")
        assert left(files, Cut.LOST) == {}

        files.sync_directory("")
        survivor = files.after_power_cut(files.operations, Cut.LOST, Random(0))

        assert survivor.contents() == {"d/e/a": b"abc"}
        assert survivor.list("d") == ["e"]

    def test_a_rename_has_happened_or_not(self, seed: int) -> None:
        files = MemoryFileSystem()
        durable(files, "a", b"old")
        durable(files, "a.tmp", b"new")
        files.rename("a.tmp", "a")

        found = all_left(files, seed)

        before, after = {"a": b"old", "a.tmp": b"new"}, {"a": b"new"}
        assert before in found
        assert after in found
        assert all(each in (before, after) for each in found)
        assert left(files, Cut.LOST) == before

        files.sync_directory("")
        assert all(each == after for each in all_left(files, seed))

    def test_a_rename_of_an_unsynced_file_may_leave_it_empty(self, seed: int) -> None:
        files = MemoryFileSystem()
        durable(files, "a", b"old")
        write(files, "a.tmp", b"new")
        files.rename("a.tmp", "a")

        assert {"a": b""} in all_left(files, seed)

    def test_a_rename_into_another_directory_is_one_step_in_both(self, seed: int) -> None:
        files = MemoryFileSystem()
        files.make_directory("d")
        files.sync_directory("")
        durable(files, "a", b"abc")
        files.rename("a", "d/a")

        assert all(len(each) == 1 for each in all_left(files, seed))

        files.sync_directory("d")
        assert left(files, Cut.LOST) == {"d/a": b"abc"}

    def test_a_sync_covers_what_the_renames_into_a_directory_follow_from(self, seed: int) -> None:
        files = MemoryFileSystem()
        files.make_directory("d")
        files.make_directory("e")
        files.sync_directory("")
        write(files, "e/a", b"")
        files.rename("e/a", "d/a")

        files.sync_directory("d")
        assert all(list(each) == ["d/a"] for each in all_left(files, seed))

        files.sync_directory("e")
        assert left(files, Cut.LOST) == {"d/a": b""}

    def test_what_follows_a_rename_does_not_survive_it(self, seed: int) -> None:
        files = MemoryFileSystem()
        files.make_directory("d")
        files.make_directory("e")
        files.sync_directory("")
        durable(files, "d/a", b"")
        files.rename("d/a", "e/a")
        write(files, "d/b", b"")

        found = {" ".join(each) for each in all_left(files, seed)}

        assert found == {"d/a", "e/a", "d/b e/a"}

    def test_names_of_a_directory_change_in_order(self, seed: int) -> None:
        files = MemoryFileSystem()
        for name in "abcd":
            files.open(name, create=True).close()

        found = {"".join(each) for each in all_left(files, seed)}

        assert found == {"", "a", "ab", "abc", "abcd"}

    def test_directories_change_independently(self, seed: int) -> None:
        files = MemoryFileSystem()
        files.make_directory("d")
        files.make_directory("e")
        files.sync_directory("")
        write(files, "d/a", b"")
        write(files, "e/b", b"")

        found = {" ".join(each) for each in all_left(files, seed)}

        assert found == {"", "d/a", "e/b", "d/a e/b"}

    def test_a_sync_of_a_directory_leaves_others_unsynced(self) -> None:
        files = MemoryFileSystem()
        files.make_directory("d")
        files.sync_directory("")
        write(files, "d/a", b"")
        write(files, "b", b"")
        files.sync_directory("d")

        assert left(files, Cut.LOST) == {"d/a": b""}


class TestSurvivor:
    def test_its_power_can_fail_again(self) -> None:
        files = MemoryFileSystem()
        durable(files, "a", b"abc")
        survivor = files.after_power_cut(files.operations, Cut.LOST, Random(0))
        assert survivor.operations == 0

        write(survivor, "a", b"xyz")
        write(survivor, "b", b"new")

        assert left(survivor, Cut.LOST) == {"a": b"abc"}
        assert left(survivor, Cut.KEPT) == {"a": b"xyz", "b": b"new"}

    def test_it_shares_nothing_with_what_it_came_from(self) -> None:
        files = MemoryFileSystem()
        durable(files, "a", b"abc")
        survivor = files.after_power_cut(files.operations, Cut.KEPT, Random(0))
        write(survivor, "a", b"xyz")
        survivor.remove("a")

        assert files.contents() == {"a": b"abc"}
        assert left(files, Cut.LOST) == {"a": b"abc"}

    def test_a_moment_that_never_was_is_refused(self) -> None:
        files = MemoryFileSystem()

        with pytest.raises(ValueError, match="1 of 0 operations"):
            files.after_power_cut(1, Cut.LOST, Random(0))


class TestFaults:
    def test_the_nth_write_fails_once(self) -> None:
        files = MemoryFileSystem()
        file = files.open("a", create=True)
        files.fail_after(2, StorageError("the disk is on fire"))
        file.write([b"1"], 0)

        with pytest.raises(StorageError, match="on fire"):
            file.write([b"2"], 1)
        assert file.read(9, 0) == b"1"

        file.write([b"2"], 1)
        assert file.read(9, 0) == b"12"

    def test_a_write_may_fail_half_way(self) -> None:
        files = MemoryFileSystem()
        file = files.open("a", create=True)
        files.fail_after(1, StorageFullError("full"), part=2)

        with pytest.raises(StorageFullError):
            file.write([b"ab", b"cd"], 0)
        assert file.read(9, 0) == b"ab"

    def test_a_failed_sync_loses_its_writes_for_good(self) -> None:
        files = MemoryFileSystem()
        durable(files, "a", b"old")
        file = files.open("a")
        file.write([b"new"], 3)
        files.fail_sync_after(1, StorageError("sync failed"))
        with pytest.raises(StorageError, match="sync failed"):
            file.sync()
        file.write([b"more"], 6)
        file.sync()

        assert file.read(20, 0) == b"oldnewmore"
        assert left(files, Cut.LOST) == {"a": b"old\0\0\0more"}

    def test_a_full_disk_takes_what_fits_and_recovers(self) -> None:
        files = MemoryFileSystem()
        write(files, "a", b"12345")
        files.room = 8
        file = files.open("b", create=True)

        assert files.free_bytes() == 3
        with pytest.raises(StorageFullError, match="b: No space left"):
            file.write([b"abcdef"], 0)
        assert file.read(9, 0) == b"abc"
        assert files.free_bytes() == 0
        file.write([b"ABC"], 0)

        files.room = 20
        file.write([b"def"], 3)
        assert file.read(9, 0) == b"ABCdef"

    def test_removing_a_file_makes_room(self) -> None:
        files = MemoryFileSystem()
        write(files, "a", b"12345")
        files.room = 5
        files.remove("a")

        write(files, "b", b"12345")

    def test_a_cold_file_makes_who_must_not_wait_come_back(self) -> None:
        files = MemoryFileSystem()
        write(files, "a", b"abc")
        files.cold = True
        file = files.open("a")

        with pytest.raises(WouldBlockError):
            file.read(1, 0, may_block=False)
        assert file.read(1, 0) == b"a"
