"""The last known leadership of a broker's group, and the confirmed end of its log.

From its version the meta servers detect that their database is older than what they said before.
From the rest the broker detects a leader of another history: one that lacks confirmed messages,
or has the epoch of another leader. It is a lower bound, so it need not survive a power cut.
"""

import json
from typing import NamedTuple

from pulque.storage.files import FileSystem, replace

__all__ = ["Told", "read_told", "write_told"]

_FILE = "told.json"


class Told(NamedTuple):
    """What a broker knew of its group before its start."""

    version: int = 0
    """The version of the last known leadership."""
    epoch: int = 0
    token: str = ""
    """The token of the process that led in that epoch."""
    confirmed: int = 0
    """The confirmed end of the message log."""


def read_told(files: FileSystem) -> Told:
    """Return the recorded state; an empty one if the file is unreadable."""
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
    """Record the state.

    Raises:
        StorageError: The write failed; the file is unchanged.
    """
    replace(files, _FILE, [json.dumps(told._asdict()).encode()], is_synced=False)
