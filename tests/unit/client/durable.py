"""What a power cut would leave of real folders: only what was synced by then.

A test cannot cut the power of the machine that it runs on, and ``kill -9`` leaves the page cache
as it is. But the calls that make things durable can be noted.
"""

import os
import stat

import pytest

__all__ = ["DurableFolders"]


class DurableFolders:
    """Notes what ``os.fsync`` makes durable: the bytes of a file, the names in a folder."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._names: dict[int, dict[str, int]] = {}
        self._contents: dict[int, bytes] = {}
        self._fsync = os.fsync
        self.failure: OSError | None = None
        """What the next sync of a folder raises."""
        monkeypatch.setattr(os, "fsync", self._note)

    def _note(self, descriptor: int) -> None:
        found = os.fstat(descriptor)
        if not stat.S_ISDIR(found.st_mode):
            # Through its path in /proc, as it may be open for writing alone.
            with open(f"/proc/self/fd/{descriptor}", "rb") as file:
                self._contents[found.st_ino] = file.read()
        elif self.failure is not None:
            failure, self.failure = self.failure, None
            raise failure
        else:
            with os.scandir(descriptor) as entries:
                self._names[found.st_ino] = {each.name: each.inode() for each in entries}
        self._fsync(descriptor)

    def left_in(self, folder: str | os.PathLike[str]) -> dict[str, bytes]:
        """Return the files that a power cut would leave in a folder now, by name."""
        names = self._names.get(os.stat(folder).st_ino, {})
        return {name: self._contents.get(inode, b"") for name, inode in names.items()}
