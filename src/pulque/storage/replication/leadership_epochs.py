"""The ends of the logs when each leadership of the broker group began.

By comparing these lists, two brokers find up to where their logs are the same. So a new entry is
durable before anything is written under its epoch.
"""

import json
from itertools import pairwise

import google_crc32c

from pulque.errors import DataDirectoryError, UsageError
from pulque.model.leadership import EpochStart
from pulque.model.positions import ActionOffset, Epoch, MessageOffset
from pulque.storage.directory.layout import LARGEST, MESSAGES, base_of
from pulque.storage.files import FileSystem, replace

__all__ = ["begin_epoch", "has_followed", "read_epochs", "write_epochs"]

_FILE = "epochs.json"
_LARGEST_FILE = 16 * 1024 * 1024
_ALONE = EpochStart(Epoch(0), MessageOffset(0), ActionOffset(0))


def read_epochs(files: FileSystem) -> tuple[EpochStart, ...]:
    """Return the recorded epochs of a directory, the oldest first; none if it is empty.

    Raises:
        DataDirectoryError: The file cannot be read.
    """
    if not files.exists(_FILE):
        # Without the file, whatever is here was written by a broker that stood alone.
        return (_ALONE,) if _has_messages(files) else ()
    try:
        return _decoded(_read(files))[0]
    except (ValueError, KeyError, TypeError, RecursionError):
        raise DataDirectoryError(
            f"{_FILE} cannot be read: restore it from a backup; or, if another broker of the "
            "group leads, empty the data directory, and all is copied anew"
        ) from None


def has_followed(files: FileSystem) -> bool:
    """Return whether another broker led in the last recorded epoch.

    Then this broker may have promised that leader not to lead for a while.

    Raises:
        DataDirectoryError: The file cannot be read.
    """
    epochs = read_epochs(files)
    if not epochs or epochs[-1].epoch == _ALONE.epoch:
        return False
    return _decoded(_read(files))[1] != epochs[-1].epoch


def write_epochs(files: FileSystem, epochs: tuple[EpochStart, ...], *, led: int = 0) -> None:
    """Record the epochs of a directory durably.

    Args:
        files: The directory.
        epochs: All of them, the oldest first.
        led: The last one, if this directory leads in it.

    Raises:
        StorageError: The write failed; the file is unchanged.
    """
    crc = _crc_of(epochs, led)
    values = {"epochs": [list(each) for each in epochs], "led": led, "crc": crc}
    replace(files, _FILE, [json.dumps(values).encode()])
    files.sync_directory("")


def begin_epoch(
    files: FileSystem, epoch: Epoch, messages: MessageOffset, actions: ActionOffset
) -> tuple[EpochStart, ...]:
    """Record durably that a leadership begins at the ends of the logs; return all epochs.

    Epochs that began beyond the ends of both logs are dropped: this directory has nothing of them.

    Raises:
        UsageError: The epoch is not higher than all before.
        StorageError: The write failed; the file is unchanged.
    """
    known = read_epochs(files)
    if known and epoch <= known[-1].epoch:
        raise UsageError(f"epoch {epoch} cannot begin: there was epoch {known[-1].epoch} before")
    kept = [each for each in known if each.messages <= messages or each.actions <= actions]
    epochs = (*kept, EpochStart(epoch, messages, actions))
    write_epochs(files, epochs, led=epoch)
    return epochs


def _read(files: FileSystem) -> bytes:
    file = files.open(_FILE, writable=False)
    try:
        return file.read(_LARGEST_FILE, 0)
    finally:
        file.close()


def _decoded(text: bytes) -> tuple[tuple[EpochStart, ...], int]:
    """Return the epochs, and the one that the directory leads in, if it is the last."""
    values = json.loads(text)
    epochs, led = tuple([_entry(*each) for each in values["epochs"]]), values["led"]
    # A digit that changed would let logs be cut where they are the same.
    if type(led) is not int or values["crc"] != _crc_of(epochs, led):
        raise ValueError("the crc does not match")
    if any(before.epoch >= after.epoch for before, after in pairwise(epochs)):
        raise ValueError("the epochs are not in order")
    return epochs, led


def _entry(epoch: object, messages: object, actions: object) -> EpochStart:
    for value in (epoch, messages, actions):
        if type(value) is not int or not 0 <= value <= LARGEST:
            raise ValueError(f"{value!r} is neither an epoch nor an offset")
    return EpochStart(epoch, messages, actions)  # type: ignore[arg-type]  # looked at above


def _crc_of(epochs: tuple[EpochStart, ...], led: int) -> int:
    return int(google_crc32c.value(repr((led, [tuple(each) for each in epochs])).encode()))


def _has_messages(files: FileSystem) -> bool:
    if not files.exists(MESSAGES):
        return False
    return any(base_of(name, "log") is not None for name in files.list(MESSAGES))
