"""Which leadership of its group a broker was told of last, and how much of its log was confirmed.

By the version the meta servers know that their database is older than what they said before. By
the rest the broker itself knows a leader of another history: one that lacks what was confirmed,
or has the epoch of another leader. It is a lower bound, so it need not survive a power cut.
"""

import json
from typing import NamedTuple

from pulque.storage.files import FileSystem, replace

__all__ = ["Told", "read_told", "write_told"]

_FILE = "told.json"


class Told(NamedTuple):
    """What a broker knows of its group from before its start."""

    version: int = 0
    """Of the leadership that it was told of last."""
    epoch: int = 0
    token: str = ""
    """Of the process that led in that epoch."""
    confirmed: int = 0
    """How much of the message log was confirmed."""


def read_told(files: FileSystem) -> Told:
    """Return what is written down; nothing, if it cannot be read."""
    if not files.exists(_FILE):
        return Told()
    file = files.open(_FILE, writable=False)
    try:
        text = file.read(4096, 0)
    finally:
        file.close()
    try:
        values = json.loads(text)
        numbers = [max(int(values.get(name, 0)), 0) for name in ("version", "epoch", "confirmed")]
        return Told(numbers[0], numbers[1], str(values.get("token", "")), numbers[2])
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return Told()


def write_told(files: FileSystem, told: Told) -> None:
    """Write down what a broker was told.

    Raises:
        StorageError: It is as it was.
    """
    replace(files, _FILE, [json.dumps(told._asdict()).encode()], is_synced=False)
