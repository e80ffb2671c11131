"""How far a directory is archived is believed only if it is what was written."""

import pytest

from pulque.storage.directory.archive_progress import ArchivedUpTo, read_archived, write_archived
from pulque.storage.files import replace
from pulque.testing.files import MemoryFileSystem


def test_what_was_written_is_read() -> None:
    files = MemoryFileSystem()
    assert read_archived(files) == ArchivedUpTo(0, 0)
    write_archived(files, ArchivedUpTo(1200, 34))
    assert read_archived(files) == ArchivedUpTo(1200, 34)


def test_it_never_goes_back() -> None:
    files = MemoryFileSystem()
    write_archived(files, ArchivedUpTo(1200, 34))
    write_archived(files, ArchivedUpTo(1000, 35))
    assert read_archived(files) == ArchivedUpTo(1200, 35)


@pytest.mark.parametrize("at", range(2 * len("messages 1200 actions 34\n")))
def test_a_changed_byte_means_that_nothing_is_archived(at: int) -> None:
    files = MemoryFileSystem()
    content = bytearray(b"messages 1200 actions 34\n" * 2)
    content[at] ^= 1
    replace(files, "archived", [bytes(content)])
    assert read_archived(files) == ArchivedUpTo(0, 0)


@pytest.mark.parametrize("content", [b"", b"\n", b"messages 1 actions 1\n", b"x" * 1000])
def test_what_is_something_else_means_that_nothing_is_archived(content: bytes) -> None:
    files = MemoryFileSystem()
    replace(files, "archived", [content])
    assert read_archived(files) == ArchivedUpTo(0, 0)
