"""Files of removed segments that are written again, instead of being removed and made anew.

To write over pages that are in memory is cheaper than to have new ones, and a file that does not
grow is synced faster. It is for logs whose segments are removed soon after they are sealed, and
that nobody reads any more by then: whoever still had the file open would read other bytes.

Bytes of older records lie behind the end of a segment whose file is a spare. They never pass for
records of it, as an envelope says where it stands, and a file only ever gets a higher base. For
that a spare must not outlive its process: after a power cut it may hold records of a segment
that was begun, whose name was lost, and that is begun again at the same base.
"""

from collections import deque

from pulque.storage.files import File, FileSystem
from pulque.storage.layout import MESSAGES, base_of, segment_path

__all__ = ["Spares"]


class Spares:
    """The files that can be written again. One thread keeps them, another one takes them."""

    def __init__(self, files: FileSystem, limit: int) -> None:
        self._files = files
        self._limit = limit
        self._paths: deque[str] = deque()
        for name in files.list(MESSAGES) if files.exists(MESSAGES) else ():
            if base_of(name, "spare") is not None:
                files.remove(f"{MESSAGES}/{name}")

    def keep(self, base: int) -> bool:
        """Make a removed segment's file a spare; say whether one was wanted.

        May be called from any thread.
        """
        if len(self._paths) >= self._limit:
            return False
        path = segment_path(base, "spare")
        self._files.rename(segment_path(base), path)
        # Else a power cut could bring back the segment's name, with the contents of another.
        self._files.sync_directory(MESSAGES)
        self._paths.append(path)
        return True

    def take(self, path: str) -> File | None:
        """Give a spare the name of a new segment and return it, if there is one."""
        while self._paths:
            # The last one that was written is the one that is most likely in memory.
            spare = self._paths.pop()
            try:
                file = self._files.open(spare)
            except FileNotFoundError:
                continue  # somebody removed it: it was of no use to anybody else
            self._files.rename(spare, path)
            return file
        return None

    def throw(self) -> bool:
        """Remove all spares, to have their room; say whether there were any."""
        has_thrown = False
        while self._paths:
            path = self._paths.pop()
            if self._files.exists(path):
                self._files.remove(path)
                has_thrown = True
        return has_thrown
