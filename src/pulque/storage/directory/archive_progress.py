"""How far a data directory is archived, as whoever archives it has written down.

The broker only reads it: with ``storage.archive`` set it removes nothing that lies behind. A file
that cannot be read says that nothing is archived, so that nothing is lost by it.
"""

import re
from typing import NamedTuple

from pulque.storage.files import FileSystem, replace

__all__ = ["ArchivedUpTo", "read_archived", "write_archived"]

_FILE = "archived"
_LINE = re.compile(rb"messages ([0-9]{1,18}) actions ([0-9]{1,18})\n", re.ASCII)


class ArchivedUpTo(NamedTuple):
    """What lies before these offsets is archived."""

    messages: int
    actions: int


def read_archived(files: FileSystem) -> ArchivedUpTo:
    """Return how far a data directory is archived."""
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
    """Write down how far a data directory is archived, durably; it never goes back.

    Raises:
        StorageError: It is as it was.
    """
    before = read_archived(files)
    messages, actions = map(max, before, up_to)
    line = f"messages {messages} actions {actions}\n".encode()
    replace(files, _FILE, [line, line])
    files.sync_directory("")
