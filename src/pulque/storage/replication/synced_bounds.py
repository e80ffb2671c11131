"""The known durable ends of a directory's logs.

They are a lower bound, from which a restarted follower detects whether it lost confirmed bytes.
So they need not be recent, and need not survive a power cut; but a loss of bytes must not
lower them.
"""

import json
from typing import NamedTuple

import google_crc32c

from pulque.storage.files import FileSystem, replace

__all__ = ["Known", "read_known", "write_known"]

_FILE = "replica.json"


class Known(NamedTuple):
    """Everything before these offsets was on disk once."""

    messages: int = 0
    actions: int = 0

    def joined(self, messages: int, actions: int) -> "Known":
        """Return the larger of these and other durable offsets."""
        return Known(max(self.messages, messages), max(self.actions, actions))


def read_known(files: FileSystem) -> Known:
    """Return the recorded ends; 0 if the file is unreadable."""
    if not files.exists(_FILE):
        return Known()
    file = files.open(_FILE, writable=False)
    try:
        text = file.read(4096, 0)
    finally:
        file.close()
    try:
        values = json.loads(text)
        known = Known(int(values["message_synced"]), int(values["action_synced"]))
        return known if values["crc"] == _crc_of(known) else Known()
    except (ValueError, KeyError, TypeError, RecursionError):
        return Known()


def write_known(files: FileSystem, known: Known, *, is_durable: bool) -> None:
    """Record the ends.

    Raises:
        StorageError: The write failed; the file is unchanged.
    """
    values = {
        "message_synced": known.messages,
        "action_synced": known.actions,
        "crc": _crc_of(known),
    }
    replace(files, _FILE, [json.dumps(values).encode()], is_synced=is_durable)
    if is_durable:
        files.sync_directory("")


def _crc_of(known: Known) -> int:
    return int(google_crc32c.value(f"{known.messages} {known.actions}".encode()))
