"""The cluster of a data directory, and the broker's last known standing there.

A broker that starts while all meta servers are away continues with it:
one that was being drained takes no sends, and none ever serves another cluster by mistake.
"""

import json

from pulque.errors import DataDirectoryError
from pulque.model.standing import ALONE, Standing
from pulque.storage.files import FileSystem, replace

__all__ = ["read_standing", "write_standing"]

_FILE = "cluster.json"
_LARGEST = 16 * 1024 * 1024


def read_standing(files: FileSystem) -> Standing:
    """Return the recorded standing; ``ALONE`` if the directory never was in a cluster.

    Raises:
        DataDirectoryError: The file cannot be read.
    """
    if not files.exists(_FILE):
        return ALONE
    file = files.open(_FILE, writable=False)
    try:
        text = file.read(_LARGEST, 0)
    finally:
        file.close()
    try:
        found = json.loads(text)
        return Standing(
            cluster=_text(found["cluster"]),
            is_read_only=bool(found["is_read_only"]),
            is_draining=bool(found["is_draining"]),
            may_create=bool(found["may_create"]),
            read_only=frozenset(map(_text, found["read_only"])),
        )
    except (ValueError, KeyError, TypeError, RecursionError):
        raise DataDirectoryError(
            f"{_FILE} cannot be read: restore it from a backup; or remove it, and the broker "
            "joins the cluster whose meta servers its settings name"
        ) from None


def write_standing(files: FileSystem, standing: Standing) -> None:
    """Record the standing durably."""
    values = standing._asdict() | {"read_only": sorted(standing.read_only)}
    replace(files, _FILE, [json.dumps(values).encode()])
    files.sync_directory("")


def _text(value: object) -> str:
    if not isinstance(value, str):
        raise TypeError(value)
    return value
