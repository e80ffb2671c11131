"""The file of nacks: what is in it is whole, and what is not whole is not in it."""

import os
from pathlib import Path
from random import Random

import pytest

from pulque.client.persistence.nack_spool import Spool, SpooledNack, pack_one
from pulque.model.batch import seed_of
from pulque.model.message import Message, StoredBatch
from pulque.model.names import PartitionName
from pulque.model.pack import BatchPacker, encode_headers
from pulque.model.positions import ConsumeSequence, Epoch, StartCount, Tenure
from tests.unit.client.durable import DurableFolders

ORDERS = PartitionName("orders")


def batch() -> StoredBatch:
    packer = BatchPacker()
    packer.add(b"plain")
    packer.add(b"rich", key="k", order_key="o", tags=["a", "b"], expires_at_ms=9)
    packer.add_encoded(
        b"retried", headers=encode_headers({"pulque.origin": "x"}, is_system=True), attempt=7
    )
    data = packer.encode(seed=seed_of(ORDERS), ids=bytes(range(48)), created_at_ms=5, priority=8)
    return StoredBatch(
        data, partition=ORDERS, first_sequence=ConsumeSequence(40), stored_at_ms=1234
    )


def nack(number: int = 0, reason: str = "no milk", size: int = 10) -> SpooledNack:
    tenure = Tenure(Epoch(1), StartCount(2))
    return SpooledNack(ORDERS, tenure, number, 40 + number, 1234, -1, reason, b"m" * size)


def parts(message: Message) -> tuple[object, ...]:
    return (
        message.id,
        message.body,
        message.key,
        message.order_key,
        message.tags,
        message.headers,
        message.attempt,
        message.created_at_ms,
        message.expires_at_ms,
        message.priority,
    )


@pytest.mark.parametrize("index", [0, 1, 2])
def test_a_message_is_packed_whole(index: int) -> None:
    original = Message(batch(), index)
    kept = nack()._replace(message=pack_one(batch(), index))

    assert parts(Message(kept.read_message(), 0)) == parts(original)


def test_what_was_put_is_read_by_the_next_process(tmp_path: Path) -> None:
    nacks = [nack(0), nack(1, "\0 ümläut \N{PILE OF POO}"), nack(2, "", 100_000)]
    spool = Spool(tmp_path / "nacks")
    assert spool.put(nacks[:2]) == 2
    assert spool.put(nacks[2:]) == 1

    again = Spool(tmp_path / "nacks")
    assert again.read() == nacks
    assert again.put([nack(3)]) == 1
    assert Spool(tmp_path / "nacks").read() == [*nacks, nack(3)]


def test_the_file_is_readable_by_its_owner_only(tmp_path: Path) -> None:
    Spool(tmp_path / "nacks").put([nack()])

    assert (tmp_path / "nacks").stat().st_mode & 0o777 == 0o600


def test_nothing_is_there_after_a_clear(tmp_path: Path) -> None:
    spool = Spool(tmp_path / "nacks")
    spool.put([nack()])
    spool.clear()
    spool.put([nack(1)])

    assert Spool(tmp_path / "nacks").read() == [nack(1)]


def test_a_torn_end_is_cut_off_wherever_it_is_torn(tmp_path: Path) -> None:
    path = tmp_path / "nacks"
    Spool(path).put([nack(0), nack(1)])
    whole = path.read_bytes()
    first = len(whole) // 2  # both records have one size
    for at in range(first, len(whole)):
        path.write_bytes(whole[:at])
        spool = Spool(path)
        assert spool.read() == [nack(0)]
        spool.put([nack(2)])
        assert Spool(path).read() == [nack(0), nack(2)]


def test_a_flipped_bit_never_makes_another_nack(tmp_path: Path, seed: int) -> None:
    path = tmp_path / "nacks"
    Spool(path).put([nack(0), nack(1), nack(2)])
    whole = path.read_bytes()
    random = Random(seed)
    for _ in range(300):
        damaged = bytearray(whole)
        damaged[random.randrange(len(whole))] ^= 1 << random.randrange(8)
        path.write_bytes(damaged)
        found = Spool(path).read()
        assert found == [nack(0), nack(1), nack(2)][: len(found)]
        assert len(found) < 3


def test_what_has_no_room_is_not_safe(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    spool = Spool(tmp_path / "nacks", limit=2500)

    assert spool.put([nack(n, size=800) for n in range(4)]) == 2
    assert spool.put([nack(9, size=800)]) == 0

    assert len(Spool(tmp_path / "nacks").read()) == 2
    assert "no room for nacks" in caplog.text


def test_a_failed_write_leaves_no_half_record(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spool = Spool(tmp_path / "nacks")
    spool.put([nack(0)])
    real = os.pwrite

    def full(file: int, data: bytes, offset: int) -> int:
        real(file, data[:20], offset)
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "pwrite", full)
    with pytest.raises(OSError, match="No space"):
        spool.put([nack(1)])
    monkeypatch.setattr(os, "pwrite", real)

    assert spool.put([nack(2)]) == 1
    assert Spool(tmp_path / "nacks").read() == [nack(0), nack(2)]


def after_power_cut(durable: DurableFolders, folder: Path) -> list[SpooledNack]:
    """Return what is read after the power failed now."""
    left = folder.with_name("left")
    left.mkdir(exist_ok=True)
    for name in os.listdir(left):
        (left / name).unlink()
    for name, contents in durable.left_in(folder).items():
        (left / name).write_bytes(contents)
    return Spool(left / "nacks").read()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    found = tmp_path / "state"
    found.mkdir()
    return found


def test_what_is_safe_survives_a_power_cut(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    durable = DurableFolders(monkeypatch)
    spool = Spool(folder / "nacks")
    for number in range(3):
        assert spool.put([nack(number)]) == 1
        assert after_power_cut(durable, folder) == [nack(n) for n in range(number + 1)]
    spool.clear()
    assert spool.put([nack(9)]) == 1
    assert after_power_cut(durable, folder) == [nack(9)]


def test_a_file_whose_name_was_not_synced_is_not_safe_until_it_is(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    durable = DurableFolders(monkeypatch)
    spool = Spool(folder / "nacks")
    durable.failure = OSError(5, "Input/output error")
    with pytest.raises(OSError, match="Input/output error"):
        spool.put([nack(0)])

    assert spool.put([nack(1)]) == 1
    assert after_power_cut(durable, folder) == [nack(1)]


def test_what_a_killed_process_left_without_a_durable_name_gets_one(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    durable = DurableFolders(monkeypatch)
    killed = Spool(folder / "nacks")
    durable.failure = OSError(5, "killed before the folder was synced")
    with pytest.raises(OSError, match="killed"):
        killed.put([nack(0)])
    spool = Spool(folder / "nacks")
    assert spool.read() == [nack(0)]

    assert spool.put([nack(1)]) == 1
    assert after_power_cut(durable, folder) == [nack(0), nack(1)]
