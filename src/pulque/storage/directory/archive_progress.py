"""Up to where a data directory is archived, as the archive command recorded it.

The broker only reads it: with ``storage.archive`` it removes nothing beyond it. An unreadable
file counts as *nothing is archived*, so that no data is lost.
"""

import re
from typing import NamedTuple

from pulque.storage.files import FileSystem, replace

__all__ = ["ArchivedUpTo", "read_archived", "write_archived"]

_FILE = "archived"
_LINE = re.compile(rb"messages ([0-9]{1,18}) actions ([0-9]{1,18})\n", re.ASCII)


class ArchivedUpTo(NamedTuple):
    """Everything before these offsets is archived."""

    messages: int
    actions: int


def read_archived(files: FileSystem) -> ArchivedUpTo:
    """Return up to where a data directory is archived."""
    if not files.exists(_FILE):
        return ArchivedUpTo(0, 0)
    file = files.open(_FILE, writable=False)
    try:
        content = file.read(256, 0)
    finally:
        file.close()
    # It stands there twice, so that damage does not go for a number.
    line, found = content[: len(content) // 2], _LINE.match(content)
    if found is None or line * 2 != content or line != found[0]:
        return ArchivedUpTo(0, 0)
    return ArchivedUpTo(int(found[1]), int(found[2]))


def write_archived(files: FileSystem, up_to: ArchivedUpTo) -> None:
    """Record durably up to where a data directory is archived; it never goes back.

    Raises:
        StorageError: The write failed; the file is unchanged.
    """
    before = read_archived(files)
    messages, actions = map(max, before, up_to)
    line = f"messages {messages} actions {actions}\n".encode()
    replace(files, _FILE, [line, line])
    files.sync_directory("")
