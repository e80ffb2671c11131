"""The real file system and the one in memory behave alike as long as the power is on."""

from collections.abc import Callable
from mmap import mmap
from pathlib import Path

import pytest

from pulque.errors import StorageError
from pulque.storage.files import READ_BLOCK, FileSystem, OsFileSystem
from pulque.testing.files import MemoryFileSystem


@pytest.fixture(params=["os", "memory"])
def files(request: pytest.FixtureRequest, tmp_path: Path) -> FileSystem:
    return OsFileSystem(str(tmp_path)) if request.param == "os" else MemoryFileSystem()


def written(files: FileSystem, path: str, data: bytes) -> None:
    file = files.open(path, create=True)
    assert file.write([data], 0) == len(data)
    file.close()


def content(files: FileSystem, path: str) -> bytes:
    file = files.open(path, writable=False)
    data = file.read(file.size() + 1, 0)
    file.close()
    return data


def test_what_is_written_is_read(files: FileSystem) -> None:
    file = files.open("a", create=True)

    assert file.write([b"one", memoryview(b"two"), b"three"], 0) == 11
    assert file.write([b"TWO"], 3) == 3
    assert file.read(100, 0) == b"oneTWOthree"
    assert file.read(4, 2) == b"eTWO"
    assert file.read(5, 11) == b""
    assert file.size() == 11


def test_more_buffers_than_the_system_takes_at_once(files: FileSystem) -> None:
    file = files.open("a", create=True)

    assert file.write([b"ab"] * 3000, 1) == 6000
    assert file.read(10_000, 0) == b"\0" + b"ab" * 3000


def test_a_write_beyond_the_end_leaves_zeros_between(files: FileSystem) -> None:
    file = files.open("a", create=True)
    file.write([b"x"], 3)

    assert file.read(10, 0) == b"\0\0\0x"


def test_truncate_cuts_and_fills_up(files: FileSystem) -> None:
    file = files.open("a", create=True)
    file.write([b"abcdef"], 0)
    file.truncate(2)
    assert file.read(10, 0) == b"ab"

    file.truncate(4)

    assert file.read(10, 0) == b"ab\0\0"
    assert file.size() == 4


def test_reads_that_need_not_wait_give_the_same(files: FileSystem) -> None:
    file = files.open("a", create=True)
    file.write([b"abc"], 0)

    assert file.read(2, 1, may_block=False) == b"bc"
    assert file.read(9, 1, may_block=False) == b"bc"
    assert file.read(9, 7, may_block=False) == b""


@pytest.mark.parametrize("is_cached", [True, False])
@pytest.mark.parametrize("size", [0, 1, 4095, 4096, 4097, 12_288, 20_000])
def test_a_buffer_is_filled_with_what_a_read_gives(
    files: FileSystem, size: int, *, is_cached: bool
) -> None:
    data = bytes(at * 7 % 251 for at in range(size))
    written(files, "a", data)
    file = files.open("a", writable=False)
    for offset in (0, 4096, 8192):
        for blocks in (1, 2, 5):
            buffer = memoryview(mmap(-1, blocks * READ_BLOCK))

            count = file.read_into(buffer, offset, is_cached=is_cached)

            expected = data[offset : offset + len(buffer)]
            assert bytes(buffer[:count]) == expected
    file.close()


def test_what_was_written_last_is_read_around_the_cache(files: FileSystem) -> None:
    file = files.open("a", create=True)
    buffer = memoryview(mmap(-1, READ_BLOCK))
    for number in range(5):
        file.write([b"%d" % number * 6000], 0)
        assert file.read_into(buffer, 0, is_cached=False) == READ_BLOCK
        assert bytes(buffer) == b"%d" % number * READ_BLOCK


def test_sync_changes_nothing_that_can_be_seen(files: FileSystem) -> None:
    file = files.open("a", create=True)
    file.write([b"abc"], 0)
    file.sync()
    files.sync_directory("")

    assert file.read(9, 0) == b"abc"
    assert files.list("") == ["a"]


def test_open_creates_only_when_told_and_keeps_what_is_there(files: FileSystem) -> None:
    with pytest.raises(FileNotFoundError):
        files.open("a")
    written(files, "a", b"abc")
    files.open("a", create=True).close()

    assert content(files, "a") == b"abc"


def test_directories_hold_names_of_their_own(files: FileSystem) -> None:
    files.make_directory("d/e")
    files.make_directory("d/e")
    written(files, "d/e/f", b"1")
    written(files, "d/a", b"2")

    assert files.list("") == ["d"]
    assert files.list("d") == ["a", "e"]
    assert files.exists("d/e/f")
    assert files.exists("d")
    assert not files.exists("d/f")
    assert not files.exists("d/a/x")


def test_rename_replaces_its_target(files: FileSystem) -> None:
    files.make_directory("d")
    written(files, "a", b"new")
    written(files, "d/b", b"old")

    files.rename("a", "d/b")

    assert content(files, "d/b") == b"new"
    assert not files.exists("a")


def test_a_removed_file_lives_on_for_who_has_it_open(files: FileSystem) -> None:
    file = files.open("a", create=True)
    file.write([b"abc"], 0)

    files.remove("a")

    assert not files.exists("a")
    assert file.read(9, 0) == b"abc"
    file.close()


def test_two_handles_see_one_file(files: FileSystem) -> None:
    first = files.open("a", create=True)
    second = files.open("a", writable=False)
    first.write([b"abc"], 0)

    assert second.read(9, 0) == b"abc"


def test_a_file_opened_to_be_read_refuses_writes(files: FileSystem) -> None:
    written(files, "a", b"abc")
    file = files.open("a", writable=False)

    with pytest.raises(StorageError):
        file.write([b"x"], 0)
    with pytest.raises(OSError, match="Invalid argument"):
        file.truncate(0)
    assert content(files, "a") == b"abc"


def test_a_closed_file_refuses_all_but_to_be_closed(files: FileSystem) -> None:
    file = files.open("a", create=True)
    file.close()
    file.close()

    for call in (lambda: file.read(1, 0), file.size, lambda: file.truncate(0)):
        with pytest.raises(OSError, match="Bad file descriptor"):
            call()
    with pytest.raises(StorageError):
        file.write([b"x"], 0)
    with pytest.raises((StorageError, ValueError)):
        file.sync()


@pytest.mark.parametrize(
    "call",
    [
        lambda files: files.open("gone/a", create=True),
        lambda files: files.list("gone"),
        lambda files: files.remove("gone"),
        lambda files: files.rename("gone", "a"),
        lambda files: files.rename("file", "gone/a"),
        lambda files: files.sync_directory("gone"),
    ],
    ids=["open", "list", "remove", "rename", "rename-into", "sync"],
)
def test_what_is_not_there_is_not_found(
    files: FileSystem, call: Callable[[FileSystem], object]
) -> None:
    written(files, "file", b"")

    with pytest.raises(FileNotFoundError):
        call(files)


def test_files_and_directories_are_not_taken_for_each_other(files: FileSystem) -> None:
    written(files, "file", b"")
    files.make_directory("directory")

    with pytest.raises(StorageError):
        files.open("directory")
    with pytest.raises(FileExistsError):
        files.make_directory("file")
    with pytest.raises(IsADirectoryError):
        files.remove("directory")
    with pytest.raises(NotADirectoryError):
        files.list("file")
    with pytest.raises(NotADirectoryError):
        files.sync_directory("file")


def test_there_is_room(files: FileSystem) -> None:
    assert files.free_bytes() > 0
