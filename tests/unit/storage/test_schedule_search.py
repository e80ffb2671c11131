"""An id is looked for in the bytes of a schedule log as they lie, window by window."""

import pytest

from pulque.storage.events import SilentListener
from pulque.storage.schedule.schedule_log import SCHEDULE, TickFile
from pulque.testing.files import MemoryFileSystem

WINDOW = 4 * 1024 * 1024
SIZE = 2 * WINDOW + 1000
ID = bytes(range(1, 17))


def log_with_id_at(offset: int) -> TickFile:
    files = MemoryFileSystem()
    files.make_directory(SCHEDULE)
    log = TickFile(files, 0, SilentListener())
    log.append([bytes(offset), ID, bytes(SIZE - offset - len(ID))], 0)
    return log


@pytest.mark.parametrize("offset", [0, WINDOW - 17, WINDOW - 8, WINDOW, 2 * WINDOW - 1, SIZE - 16])
def test_an_id_is_found_wherever_it_lies(offset: int) -> None:
    log = log_with_id_at(offset)

    assert log.may_hold(ID, 0, SIZE)
    assert log.may_hold(ID, offset, offset + 16)
    assert not log.may_hold(ID, offset + 1, SIZE)
    assert not log.may_hold(ID, 0, offset + 15)
    assert not log.may_hold(ID[::-1], 0, SIZE)
