"""Whose directory this is, of which format, and how often it was opened."""

import json
from dataclasses import dataclass

from pulque.errors import DataDirectoryError
from pulque.model.positions import StartCount
from pulque.storage.files import FileSystem

__all__ = ["FORMAT", "Identity"]

FORMAT = 1
_FORMAT_FILE = "format.json"
_START_FILE = "start"


@dataclass(frozen=True, slots=True)
class Identity:
    """What ``format.json`` says."""

    format: int

    @classmethod
    def open(cls, files: FileSystem) -> "Identity":
        """Read the identity of a directory, or give a new one to an empty directory.

        Raises:
            DataDirectoryError: The directory is not one of ours, or of another version.
        """
        if not files.exists(_FORMAT_FILE):
            foreign = [n for n in files.list("") if n not in ("lock", f"{_FORMAT_FILE}.tmp")]
            if foreign:
                raise DataDirectoryError(
                    f"the directory holds {foreign[0]!r} and no {_FORMAT_FILE}, so it is not a "
                    "data directory of Pulque: choose an empty one"
                )
            _replace(files, _FORMAT_FILE, json.dumps({"format": FORMAT, "system": "pulque"}))
        text = _read(files, _FORMAT_FILE)
        try:
            found = json.loads(text)["format"]
        except (ValueError, KeyError, TypeError):
            raise DataDirectoryError(
                f"{_FORMAT_FILE} cannot be read: restore it, or choose another directory"
            ) from None
        if found != FORMAT:
            raise DataDirectoryError(
                f"the data directory has format {found}, and this version reads {FORMAT}: "
                "run the version that wrote it, or choose another directory"
            )
        return cls(found)

    def count_start(self, files: FileSystem) -> StartCount:
        """Count one more start, durably, and return how many there were."""
        before = 0
        if files.exists(_START_FILE):
            text = _read(files, _START_FILE)
            if not text.strip().isdigit():
                raise DataDirectoryError(
                    f"{_START_FILE} holds {text[:20]!r}, not a number: restore it from a backup, "
                    "or write a number there that is higher than all before"
                )
            before = int(text)
        _replace(files, _START_FILE, f"{before + 1}\n")
        return StartCount(before + 1)


def _read(files: FileSystem, path: str) -> str:
    file = files.open(path, writable=False)
    try:
        return file.read(4096, 0).decode(errors="replace")
    finally:
        file.close()


def _replace(files: FileSystem, path: str, text: str) -> None:
    temporary = f"{path}.tmp"
    file = files.open(temporary, create=True)
    try:
        file.truncate(0)
        file.write([text.encode()], 0)
        file.sync()
    finally:
        file.close()
    files.rename(temporary, path)
    files.sync_directory("")
