"""How much of its logs a directory is known to have had on disk.

It is a lower bound, by which a follower that is started again knows whether it lost what it had
confirmed. So it need not be new, and it need not survive a power cut; but it must not be made
lower because something was lost.
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
        """Return what is known with other offsets that were on disk."""
        return Known(max(self.messages, messages), max(self.actions, actions))


def read_known(files: FileSystem) -> Known:
    """Return what is written down; nothing, if it cannot be read."""
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
    """Write down what is known.

    Raises:
        StorageError: It is as it was.
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
