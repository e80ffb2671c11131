"""The identity of a data directory: its id, its format, and the number of starts."""

import json
from dataclasses import dataclass

from pulque.errors import DataDirectoryError
from pulque.model.positions import StartCount
from pulque.storage.directory.layout import DIRECTORIES
from pulque.storage.files import FileSystem, replace

__all__ = ["FORMAT", "DirectoryIdentity"]

FORMAT = 1
_FORMAT_FILE = "format.json"
_START_FILE = "start"
_NEIGHBOURS = ("lock", f"{_FORMAT_FILE}.tmp", "meta", "delay")
"""Allowed in a new directory: ``pulque up`` keeps the files of its other servers inside."""
_ID_BYTES = 8
_REMEDY = (
    "restore it from a backup, or write a number there that is higher than all before, "
    "on two lines of their own"
)


@dataclass(frozen=True, slots=True)
class DirectoryIdentity:
    """The contents of ``format.json``.

    Attributes:
        format: The number of the format.
        id: A random id made with the directory, by which archives distinguish brokers; empty
            if there is none.
    """

    format: int
    id: str = ""

    @classmethod
    def open(cls, files: FileSystem) -> "DirectoryIdentity":
        """Read the identity of a directory, or create one in an empty directory.

        Raises:
            DataDirectoryError: It is not a data directory, or has another version.
        """
        if not files.exists(_FORMAT_FILE):
            foreign = [n for n in files.list("") if n not in _NEIGHBOURS]
            if foreign:
                raise DataDirectoryError(
                    f"the directory holds {foreign[0]!r} and no {_FORMAT_FILE}, so it is not a "
                    "data directory of Pulque: choose an empty one"
                )
            made = {
                "format": FORMAT,
                "system": "pulque",
                "id": files.random_bytes(_ID_BYTES).hex(),
            }
            text = json.dumps(made)
            replace(files, _FORMAT_FILE, [text.encode()])
            files.sync_directory("")
        text = _read(files, _FORMAT_FILE)
        try:
            values = json.loads(text)
            found = values["format"]
        except (ValueError, KeyError, TypeError, RecursionError):
            raise DataDirectoryError(
                f"{_FORMAT_FILE} cannot be read: restore it, or choose another directory"
            ) from None
        if type(found) is not int or found != FORMAT:
            raise DataDirectoryError(
                f"the data directory has format {found}, and this version reads {FORMAT}: "
                "run the version that wrote it, or choose another directory"
            )
        return cls(found, str(values.get("id", "")))

    def count_start(self, files: FileSystem) -> StartCount:
        """Increment the number of starts durably, and return it.

        The file has the number twice, so that damage is not taken for a number.

        Raises:
            DataDirectoryError: The number is damaged or missing.
        """
        before = 0
        if files.exists(_START_FILE):
            text = _read(files, _START_FILE)
            first, _, second = text.partition("\n")
            is_number = first.isascii() and first.isdigit() and len(first) < 10
            if not is_number or second != f"{first}\n":
                raise DataDirectoryError(f"{_START_FILE} holds {text[:40]!r}: {_REMEDY}")
            before = int(first)
        elif any(files.list(directory) for directory in DIRECTORIES if files.exists(directory)):
            raise DataDirectoryError(f"{_START_FILE} is missing: {_REMEDY}")
        replace(files, _START_FILE, [f"{before + 1}\n{before + 1}\n".encode()])
        files.sync_directory("")
        return StartCount(before + 1)


def _read(files: FileSystem, path: str) -> str:
    file = files.open(path, writable=False)
    try:
        return file.read(4096, 0).decode(errors="replace")
    finally:
        file.close()
