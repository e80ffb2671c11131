"""The list of epochs is what was written, or the broker does not start with it."""

from random import Random

import pytest

from pulque.errors import DataDirectoryError, StorageError, UsageError
from pulque.model.leadership import EpochStart
from pulque.model.positions import ActionOffset, Epoch, MessageOffset
from pulque.storage.files import replace
from pulque.storage.replication.leadership_epochs import (
    begin_epoch,
    has_followed,
    read_epochs,
    write_epochs,
)
from pulque.testing.files import Cut, MemoryFileSystem
from tests.unit.storage.storing import opened, store


def start(epoch: int, messages: int, actions: int) -> EpochStart:
    return EpochStart(Epoch(epoch), MessageOffset(messages), ActionOffset(actions))


def begin(files: MemoryFileSystem, epoch: int, messages: int, actions: int) -> None:
    begin_epoch(files, Epoch(epoch), MessageOffset(messages), ActionOffset(actions))


EPOCHS = (start(0, 0, 0), start(3, 1200, 88), start(4, 1200, 90))


def test_a_new_directory_has_seen_no_epoch() -> None:
    assert read_epochs(MemoryFileSystem()) == ()


def test_what_a_broker_wrote_alone_is_of_epoch_0() -> None:
    files = MemoryFileSystem()
    store(opened(files), "orders", b"body")
    assert read_epochs(files) == (start(0, 0, 0),)


def test_what_was_written_survives_a_power_cut() -> None:
    files = MemoryFileSystem()
    write_epochs(files, EPOCHS)
    survivor = files.after_power_cut(files.operations, Cut.LOST, Random(1))
    assert read_epochs(survivor) == EPOCHS


def test_an_epoch_that_cannot_be_written_has_not_begun() -> None:
    files = MemoryFileSystem()
    write_epochs(files, EPOCHS)
    files.fail_after(1, StorageError("broken"))
    with pytest.raises(StorageError):
        begin(files, 5, 2000, 100)
    assert read_epochs(files) == EPOCHS


def test_any_changed_byte_of_a_number_is_refused() -> None:
    files = MemoryFileSystem()
    write_epochs(files, EPOCHS)
    content = files.contents()["epochs.json"]
    for at, byte in enumerate(content):
        if not chr(byte).isdigit():
            continue
        changed = bytearray(content)
        changed[at] = ord("7") if byte != ord("7") else ord("8")
        replace(files, "epochs.json", [bytes(changed)])
        with pytest.raises(DataDirectoryError, match="restore it"):
            read_epochs(files)


@pytest.mark.parametrize(
    "content",
    [b"", b"[]", b"{}", b'{"epochs": 7, "crc": 0}', b'{"epochs": [[1]], "crc": 0}', b"\0" * 9],
)
def test_what_is_something_else_is_refused(content: bytes) -> None:
    files = MemoryFileSystem()
    replace(files, "epochs.json", [content])
    with pytest.raises(DataDirectoryError, match="restore it"):
        read_epochs(files)


def test_epochs_out_of_order_are_refused() -> None:
    files = MemoryFileSystem()
    write_epochs(files, EPOCHS[::-1])
    with pytest.raises(DataDirectoryError):
        read_epochs(files)


def test_an_epoch_begins_where_the_logs_end() -> None:
    files = MemoryFileSystem()
    write_epochs(files, EPOCHS)
    begin(files, 7, 5000, 300)
    assert read_epochs(files) == (*EPOCHS, start(7, 5000, 300))


def test_an_epoch_of_which_nothing_is_here_is_forgotten() -> None:
    files = MemoryFileSystem()
    write_epochs(files, (*EPOCHS, start(5, 1500, 200)))
    begin(files, 6, 1400, 199)
    assert read_epochs(files) == (*EPOCHS, start(6, 1400, 199))


@pytest.mark.parametrize(("messages", "actions"), [(1400, 200), (1500, 199)])
def test_an_epoch_that_one_log_has_something_of_is_kept(messages: int, actions: int) -> None:
    files = MemoryFileSystem()
    before = (*EPOCHS, start(5, 1500, 200))
    write_epochs(files, before)
    begin(files, 6, messages, actions)
    assert read_epochs(files) == (*before, start(6, messages, actions))


@pytest.mark.parametrize("epoch", [0, 3, 4])
def test_no_epoch_begins_twice(epoch: int) -> None:
    files = MemoryFileSystem()
    write_epochs(files, EPOCHS)
    with pytest.raises(UsageError, match="epoch 4"):
        begin(files, epoch, 5000, 300)
    assert read_epochs(files) == EPOCHS


def test_a_directory_knows_whether_somebody_else_led_in_its_last_epoch() -> None:
    files = MemoryFileSystem()
    assert not has_followed(files)

    begin_epoch(files, Epoch(1), MessageOffset(0), ActionOffset(0))
    assert not has_followed(files)

    write_epochs(
        files, (*read_epochs(files), EpochStart(Epoch(2), MessageOffset(5), ActionOffset(5)))
    )
    assert has_followed(files)

    begin_epoch(files, Epoch(3), MessageOffset(9), ActionOffset(9))
    assert not has_followed(files)
