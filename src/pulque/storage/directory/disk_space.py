"""Track free disk space, and refuse messages when it runs out.

Sends are refused while less than the reserve is free, so that our own messages never fill the
disk. Other programs may fill it all the same. So there is ballast, a file
that occupies a little space in advance; when a fact finds no space, the ballast is
deleted, and pulling and settling go on for a while.
"""

from pulque.errors import StorageError, StorageFullError
from pulque.storage.files import FileSystem
from pulque.storage.options import StorageOptions

__all__ = ["Room"]

_BALLAST = "ballast"
_PIECE = 64 * 1024
_CHECKED_EVERY = 16 * 1024 * 1024
_NEEDED_TO_START = 1024 * 1024


class Room:
    """Checks the free space now and then. Used by one thread."""

    def __init__(self, files: FileSystem, options: StorageOptions) -> None:
        self._files = files
        self._reserve = options.reserve_bytes
        self._ballast = options.ballast_bytes
        self._has_ballast = self._found() == self._ballast > 0
        self._unchecked = 0
        self._check_every = min(_CHECKED_EVERY, self._reserve // 4)
        self.is_full = False
        """Whether sends are refused."""
        self.promised = 0
        """Bytes that will be written elsewhere for messages already stored."""
        if files.free_bytes() < _NEEDED_TO_START:
            self.throw_ballast()

    def use(self, size: int) -> None:
        """Record that bytes are about to be written."""
        self._unchecked += size
        if self.is_full or self._unchecked >= self._check_every:
            self.check()

    def check(self) -> None:
        """Check the free space now."""
        self._unchecked = 0
        self.is_full = self._files.free_bytes() - self.promised < self._reserve
        if not self.is_full and not self._has_ballast:
            self._take_ballast()

    def refuse(self) -> StorageFullError:
        """Return the error that refuses a message."""
        return StorageFullError(
            f"less than {self._reserve} bytes are free on the disk; "
            "what is stored can still be pulled and settled"
        )

    def throw_ballast(self) -> bool:
        """Delete the ballast; return whether there was any."""
        if not self._found():
            return False
        self._has_ballast = False
        self._files.remove(_BALLAST)
        return True

    def _take_ballast(self) -> None:
        if not self._ballast:
            return
        # Not zeros: some file systems give them no room. One piece again and again will do.
        piece = self._files.random_bytes(_PIECE)
        try:
            file = self._files.open(_BALLAST, create=True)
        except StorageError:
            return  # there is room for bytes, and none for a name
        try:
            file.truncate(0)
            for at in range(0, self._ballast, _PIECE):
                file.write([piece[: self._ballast - at]], at)
            self._has_ballast = True
        except StorageError:
            file.truncate(0)
        finally:
            file.close()

    def _found(self) -> int:
        """Return the size of the existing ballast."""
        if not self._files.exists(_BALLAST):
            return 0
        file = self._files.open(_BALLAST, writable=False)
        try:
            return file.size()
        finally:
            file.close()
