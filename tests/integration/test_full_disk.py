"""A full disk refuses sends, and only those; with room again, they go on without a restart."""

import contextlib
import os
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from pulque.errors import ErrorCode, error_from_wire
from pulque.testing.process import BrokerProcess
from pulque.wire.requests import EARLIEST, Acks, Pull, Wanted
from pulque.wire.responses import Outcome, Pulled
from tests.robustness.brokers import flags, wait_until
from tests.robustness.load import Load
from tests.robustness.raw import RawClient, bodies_of

pytestmark = pytest.mark.server

MIB = 1024 * 1024
RESERVE = 4 * MIB
SETTINGS = {
    "storage.reserve": f"{RESERVE}",
    "storage.segment_size": "1MiB",
    "storage.checkpoint_interval": "1s",
}


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A small disk."""
    folder = tmp_path / "disk"
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=24m", "pulque-test", str(folder)]
    if os.geteuid() != 0 or shutil.which("mount") is None:
        pytest.skip("only root can mount a small disk")
    mounted = subprocess.run(command, capture_output=True, text=True, check=False)
    if mounted.returncode:
        pytest.skip(f"a small disk cannot be mounted here: {mounted.stderr.strip()}")
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=False)


@pytest.fixture
def broker(disk: Path) -> Iterator[BrokerProcess]:
    # Beside the data directory stands what it writes to stderr: that must not be on the disk.
    process = BrokerProcess(disk / "data", arguments=flags(SETTINGS))
    process._log_path = disk.with_name("stderr")  # noqa: SLF001  # there is no other way to say it
    process.restart()
    with process:
        yield process


def free(disk: Path) -> int:
    found = os.statvfs(disk)
    return found.f_bavail * found.f_frsize


def occupy(disk: Path, name: str, size: int | None = None) -> Path:
    """Make a file of somebody else; without a size, it takes all there is."""
    path = disk / name
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT)
    try:
        for piece in (MIB, 4096) if size is None else (size,):
            with contextlib.suppress(OSError):
                while os.write(descriptor, bytes(piece)) == piece and size is None:
                    pass
    finally:
        os.close(descriptor)
    return path


def send_until_full(client: RawClient, *, acks: Acks = Acks.DISK) -> tuple[int, Outcome]:
    """Send until the disk is full; return how many were confirmed, and the refusal."""
    for number in range(1000):
        outcome = client.send(
            "fill", [number.to_bytes(4, "little") + os.urandom(100_000)], acks=acks
        )
        if outcome.code is not ErrorCode.NONE:
            return number, outcome
    raise AssertionError("the disk is never full")


def is_taken(client: RawClient) -> bool:
    return client.send("after", [b"x"]).code is ErrorCode.NONE


def consume(client: RawClient, partition: str, *, nack: bool = False) -> list[bytes]:
    """Pull what is there, settle it, and return the bodies."""
    bodies = []
    for delivered in client.pull(partition).deliveries:
        bodies += bodies_of(partition, delivered)
        sequences = range(delivered.first_pull, delivered.first_pull + delivered.count)
        client.settle(partition, delivered, nacked=sequences if nack else ())
    return bodies


@pytest.mark.parametrize("acks", [Acks.MEMORY, Acks.DISK])
def test_sends_are_refused_before_the_disk_is_full_and_all_else_goes_on(
    broker: BrokerProcess, disk: Path, acks: Acks
) -> None:
    foreign = occupy(disk, "foreign", 8 * MIB)
    with RawClient(broker.url) as client:
        client.send("work", [b"0", b"1", b"2"])
        stored, outcome = send_until_full(client, acks=acks)
        refusal = error_from_wire(outcome.code, outcome.text)

        assert outcome.code is ErrorCode.STORAGE_FULL
        assert refusal.retryable
        assert free(disk) > RESERVE // 2
        assert client.status()["is_full"]

        assert consume(client, "work", nack=True) == [b"0", b"1", b"2"]
        retry = "%retry%work%g"
        wanted = (Wanted(retry, -1),)
        retried = client.expect(Pulled, Pull("g", "c", 1, 9, 999, 5000, EARLIEST, wanted))
        assert bodies_of(retry, retried.deliveries[0]) == [b"0", b"1", b"2"]
        client.settle(retry, retried.deliveries[0])
        assert client.send("new-subject", [b"x"]).code is ErrorCode.STORAGE_FULL
        assert "new-subject" not in {row["name"] for row in client.status()["partitions"]}

        foreign.unlink()
        wait_until(lambda: is_taken(client), within=10, what="sends are taken again")
        again, _ = send_until_full(client, acks=acks)
        assert again > 50
    broker.kill()
    broker.restart()
    with RawClient(broker.url) as client:
        numbers = [int.from_bytes(m.body[:4], "little") for m in client.stored("fill")]

        assert numbers == [*range(stored), *range(again)]
        assert not client.pull("work").deliveries


def test_a_disk_that_somebody_else_fills_to_the_last_byte_stops_sends_only(
    broker: BrokerProcess, disk: Path
) -> None:
    with RawClient(broker.url) as client:
        client.send("work", [b"0", b"1", b"2", b"3"])
        foreign = occupy(disk, "foreign")
        assert free(disk) == 0

        # There may still be room for a few bytes in the last page.
        assert client.send("work", [bytes(10_000)]).code is ErrorCode.STORAGE_FULL
        assert consume(client, "work") == [b"0", b"1", b"2", b"3"]
        assert [message.body for message in client.stored("work")] == [b"0", b"1", b"2", b"3"]
        # Long enough for checkpoints and the rest of the housekeeping to fail.
        deadline = time.monotonic() + 2
        while time.monotonic() < deadline:
            assert client.send("work", [bytes(10_000)]).code is ErrorCode.STORAGE_FULL
            assert not client.pull("work", timeout_ms=100).deliveries

        foreign.unlink()
        wait_until(lambda: is_taken(client), within=10, what="sends are taken again")
        client.send("work", [b"4"])
        assert consume(client, "work") == [b"4"]
    broker.kill()
    broker.restart()
    with RawClient(broker.url) as client:
        assert [message.body for message in client.stored("work")] == [
            b"0",
            b"1",
            b"2",
            b"3",
            b"4",
        ]
        assert not client.pull("work").deliveries
    assert "Traceback" not in broker.stderr


def test_nacks_on_a_full_disk_are_redelivered_when_there_is_room(
    broker: BrokerProcess, disk: Path
) -> None:
    with RawClient(broker.url) as client:
        client.send("work", [b"0", b"1"])
        foreign = occupy(disk, "foreign")
        assert consume(client, "work", nack=True) == [b"0", b"1"]
        foreign.unlink()
        wanted = (Wanted("%retry%work%g", -1),)
        retried = client.expect(Pulled, Pull("g", "c", 1, 9, 999, 9000, EARLIEST, wanted))

        assert bodies_of("%retry%work%g", retried.deliveries[0]) == [b"0", b"1"]


@pytest.mark.slow
def test_a_load_survives_a_disk_that_is_full_again_and_again(
    broker: BrokerProcess, disk: Path, tmp_path: Path
) -> None:
    with Load(broker.url, tmp_path / "load") as load:
        # With more in flight, one that is refused may come to lie behind the next.
        load.add_producers(2, "--most", "3000", "--in-flight", "1")
        load.add_consumers(2)
        for _ in range(3):
            load.go_on(200)
            foreign = occupy(disk, "foreign")
            time.sleep(0.5)
            assert load.count("send") < 6000
            foreign.unlink()
        load.go_on(200)
        total, problems = load.verdict()
    print(total.summary())

    assert problems == []


Start = Callable[..., BrokerProcess]


def test_old_segments_make_room_by_themselves(disk: Path) -> None:
    settings = SETTINGS | {"storage.retention_size": "6MiB"}
    process = BrokerProcess(disk / "data", arguments=flags(settings))
    process._log_path = disk.with_name("stderr")  # noqa: SLF001  # there is no other way to say it
    process.restart()
    with process, RawClient(process.url) as client:
        for number in range(600):
            body = number.to_bytes(4, "little") + bytes(100_000)
            wait_until(
                lambda body=body: client.send("flow", [body]).code is ErrorCode.NONE,  # type: ignore[misc]
                within=5,
                what="it is stored",
            )
        messages = client.stored("flow")
        numbers = [int.from_bytes(message.body[:4], "little") for message in messages]

        # More may have been removed while they were read: what is there is what was sent.
        assert numbers == [message.sequence for message in messages]
        assert numbers[0] > 0
        assert numbers[-1] == 599


def test_a_broker_starts_on_a_full_disk_and_serves_what_it_has(
    broker: BrokerProcess, disk: Path
) -> None:
    with RawClient(broker.url) as client:
        client.send("work", [b"0", b"1"])
    broker.kill()
    foreign = occupy(disk, "foreign")
    broker.restart()
    with RawClient(broker.url) as client:
        assert client.send("work", [bytes(10_000)]).code is ErrorCode.STORAGE_FULL
        assert consume(client, "work") == [b"0", b"1"]
        foreign.unlink()
        wait_until(lambda: is_taken(client), within=10, what="sends are taken again")
