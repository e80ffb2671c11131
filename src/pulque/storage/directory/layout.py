"""File names of a data directory, and the record of the oldest segment."""

import re

from pulque.storage.files import FileSystem, replace

__all__ = [
    "ACTIONS",
    "CHECKPOINTS",
    "DIRECTORIES",
    "LARGEST",
    "MESSAGES",
    "base_of",
    "read_oldest",
    "segment_path",
    "write_oldest",
]

MESSAGES = "messages"
ACTIONS = "actions"
CHECKPOINTS = "checkpoints"
DIRECTORIES = (MESSAGES, ACTIONS, CHECKPOINTS)
LARGEST = 2**62
"""Offsets and sequences are smaller; a larger one is damage."""
_OLDEST = f"{MESSAGES}/oldest"
_DIGITS = re.compile(r"[0-9]{20}", re.ASCII)


def segment_path(base: int, suffix: str = "log") -> str:
    """Return the path of a segment's file in the message log: its base in 20 digits."""
    return f"{MESSAGES}/{base:020d}.{suffix}"


def base_of(name: str, suffix: str) -> int | None:
    """Return the number in a file's name, or None for a foreign name."""
    stem, _, found = name.partition(".")
    if found != suffix or not _DIGITS.fullmatch(stem) or int(stem) > LARGEST:
        return None
    return int(stem)


def write_oldest(files: FileSystem, base: int) -> None:
    """Record the oldest segment, so that a missing one is not taken for a removed one.

    Not synced: after a power cut a partial file counts as unknown.
    """
    replace(files, _OLDEST, [f"{base}\n{base}\n".encode()], is_synced=False)


def read_oldest(files: FileSystem) -> int | None:
    """Return the recorded base of the oldest segment; None if unknown."""
    if not files.exists(_OLDEST):
        return 0
    file = files.open(_OLDEST, writable=False)
    try:
        first, _, second = file.read(64, 0).partition(b"\n")
    finally:
        file.close()
    return int(first) if first.isdigit() and second == first + b"\n" else None
