"""Checkpoints: derived state, and the offsets to replay from.

State consists of named values. The servers pass only the changes since the last checkpoint;
this module merges and writes them, off the event loop. A checkpoint is a file of its
own: written to a temporary name, synced, renamed, and its directory synced; the last two are kept.
If the newest is damaged, recovery uses the one before, and if none is intact, the logs alone.

::

    magic "PLCP" | version u32 | crc u32 | count u32 | then (key size u32, value size u32,
    key, value) for each
"""

from collections.abc import Mapping
from struct import Struct
from typing import NamedTuple

import google_crc32c

from pulque.storage.directory.layout import CHECKPOINTS, LARGEST, base_of
from pulque.storage.events import Listener
from pulque.storage.files import FileSystem, replace

__all__ = [
    "DIRECTORY",
    "MARK_KEY",
    "Checkpoints",
    "Mark",
    "checkpoint_path",
    "decode_checkpoint",
    "read_checkpoint",
]

DIRECTORY = CHECKPOINTS
MARK_KEY = b"mark"
"""What a mark stands under in the state of a checkpoint."""
_MARK = Struct("<QQQQIq")
_HEAD = Struct("<4sIII")
_ITEM = Struct("<II")
_MAGIC = b"PLCP"
_VERSION = 1
_KEPT = 2


class Mark(NamedTuple):
    """How far a checkpoint reaches. Everything before its offsets was on disk by then."""

    message_offset: int = 0
    action_offset: int = 0
    index_base: int = 0
    """The segment whose entries were being collected …"""
    index_size: int = 0
    """… how many bytes of them are in its ``.open`` file …"""
    index_crc: int = 0
    """… and their CRC-32C."""
    stored_at_ms: int = 0
    """The store time of the newest batch."""

    def encode(self) -> bytes:
        """Return the mark as a checkpoint keeps it."""
        return _MARK.pack(*self)

    @classmethod
    def decode(cls, state: dict[bytes, bytes]) -> "Mark":
        """Return the mark of a checkpoint; all zero if there is none.

        Raises:
            ValueError: It is not what ``encode`` made.
        """
        data = state.get(MARK_KEY)
        if data is None:
            return cls()
        if len(data) != _MARK.size:
            raise ValueError(f"a mark of {len(data)} bytes")
        mark = cls._make(_MARK.unpack(data))
        if max(mark.message_offset, mark.action_offset, mark.index_size) > LARGEST:
            raise ValueError(f"a mark at offset {mark.message_offset} or {mark.action_offset}")
        return mark


class Checkpoints:
    """Reads the newest checkpoint and writes the next. Used by one thread at a time."""

    def __init__(self, files: FileSystem, listener: Listener) -> None:
        self._files = files
        self._listener = listener
        self._number = 0
        self.newest = 0
        """The number of the newest intact and durable checkpoint; 0 if there is none."""
        self._state: dict[bytes, bytes] = {}
        files.make_directory(DIRECTORY)
        for name in files.list(DIRECTORY):
            if name.endswith(".tmp"):
                files.remove(f"{DIRECTORY}/{name}")

    def load(self) -> dict[bytes, bytes]:
        """Return the newest intact state; empty if there is none."""
        for name in reversed(self._names()):
            self._number = max(self._number, base_of(name, "checkpoint") or 0)
            found = read_checkpoint(self._files, f"{DIRECTORY}/{name}")
            if isinstance(found, dict):
                self._state = found
                self.newest = base_of(name, "checkpoint") or 0
                return dict(found)
            self._listener.checkpoint_refused(f"{DIRECTORY}/{name}", found)
            self._files.remove(f"{DIRECTORY}/{name}")
        return {}

    def update(self, changes: Mapping[bytes, bytes | None]) -> None:
        """Apply changes since the last checkpoint; None removes a value."""
        # In order, so that the same history makes the same file.
        for key, value in sorted(changes.items()):
            if value is None:
                self._state.pop(key, None)
            else:
                self._state[key] = value

    def write(self) -> None:
        """Write a checkpoint of the present state."""
        self._number += 1
        path = checkpoint_path(self._number)
        parts: list[bytes] = []
        for key, value in self._state.items():
            parts += (_ITEM.pack(len(key), len(value)), key, value)
        payload = b"".join(parts)
        head = _HEAD.pack(_MAGIC, _VERSION, google_crc32c.value(payload), len(self._state))
        replace(self._files, path, [head, payload])
        self._files.sync_directory(DIRECTORY)
        self.newest = self._number
        for name in self._names()[:-_KEPT]:
            self._files.remove(f"{DIRECTORY}/{name}")
        self._listener.checkpoint_written(path, len(head) + len(payload))

    def _names(self) -> list[str]:
        return [
            name for name in self._files.list(DIRECTORY) if base_of(name, "checkpoint") is not None
        ]


def checkpoint_path(number: int) -> str:
    """Return the path of a checkpoint's file: its number in 20 digits."""
    return f"{DIRECTORY}/{number:020d}.checkpoint"


def read_checkpoint(files: FileSystem, path: str) -> dict[bytes, bytes] | str:
    """Read a checkpoint's file; return a text that describes the damage if there is any."""
    file = files.open(path, writable=False)
    try:
        data = file.read(file.size(), 0)
    finally:
        file.close()
    return decode_checkpoint(data)


def decode_checkpoint(data: bytes) -> dict[bytes, bytes] | str:
    """Decode a checkpoint; return a text that describes the damage if there is any."""
    if len(data) < _HEAD.size:
        return "it has no header"
    magic, version, crc, count = _HEAD.unpack_from(data)
    if magic != _MAGIC or version != _VERSION:
        return f"magic {magic!r} or version {version} is not ours"
    if google_crc32c.value(data[_HEAD.size :]) != crc:
        return "its crc does not match"
    state = {}
    at = _HEAD.size
    # The crc leaves the head out, so a count that lies must be found here.
    while at + _ITEM.size <= len(data):
        key_size, value_size = _ITEM.unpack_from(data, at)
        at += _ITEM.size
        state[data[at : at + key_size]] = data[at + key_size : at + key_size + value_size]
        at += key_size + value_size
    if len(state) != count or at != len(data):
        return f"it says {count} values and holds {len(state)}"
    return state
