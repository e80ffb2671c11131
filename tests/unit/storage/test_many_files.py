"""Syncing many files at once: by the whole file system, or one by one where that cannot be."""

import os
from pathlib import Path

import pytest

from pulque.errors import StorageError
from pulque.storage import files as module
from pulque.storage.files import OsFileSystem


def written(directory: Path, count: int) -> tuple[OsFileSystem, list[str]]:
    files = OsFileSystem(str(directory))
    names = [f"{i}.log" for i in range(count)]
    for name in names:
        files.open(name, create=True).write([b"x"], 0)
    return files, names


@pytest.mark.parametrize("count", [0, 3, 200])
def test_any_number_of_files_is_synced(tmp_path: Path, count: int) -> None:
    files, names = written(tmp_path, count)

    files.sync_files(names)


def test_where_the_system_cannot_sync_all_each_file_is_synced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files, names = written(tmp_path, 200)
    synced: list[int] = []
    monkeypatch.setattr(os, "fdatasync", synced.append)
    monkeypatch.setattr(module, "_syncfs", lambda: None)

    files.sync_files(names)

    assert len(synced) == len(names)


def test_a_failed_sync_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files, names = written(tmp_path, 200)
    monkeypatch.setattr(module, "_syncfs", lambda: lambda _: -1)

    with pytest.raises(StorageError, match="sync failed"):
        files.sync_files(names)
