"""What is due goes from one disk to the next: it is on each before the one before it lets go."""

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest

from pulque.delay.dispatch.broker_connections import BrokerConnections
from pulque.delay.schedule import replay
from pulque.model.names import PartitionName
from pulque.model.routes import PartitionRoute
from pulque.testing.clock import ManualClock
from pulque.testing.raw import expect, pack_batch
from pulque.wire.requests import Acks, Send
from pulque.wire.responses import Sent
from tests.unit.broker.disks import GatedDisk
from tests.unit.broker.running import Running
from tests.unit.delay.running import FakeBrokers, StartDelay, delayed_batch, eventually

HOUR = 3_600_000


@pytest.fixture
def disk() -> Iterator[GatedDisk]:
    """A disk that is not in the way of whoever stops; asked for behind all that use it."""
    found = GatedDisk()
    yield found
    found.open_gate()


async def test_what_is_due_goes_to_no_broker_before_it_is_written_down_that_it_does(
    start_delay: StartDelay, clock: ManualClock, brokers: FakeBrokers, disk: GatedDisk
) -> None:
    delay = await start_delay(files=disk, storage={"sync_interval": "1m"})
    due_ms = clock.now_ms() + HOUR
    await delay.send([(b"later", due_ms)])
    await delay.caught_up()
    disk.close_gate()
    clock.set_now_ms(due_ms)
    await eventually(lambda: disk.syncs_waiting > 0)

    # A restart would send it again under another number, and nobody would know it.
    assert not await delay.raw.is_answered(0)
    assert brokers.batches == []
    disk.open_gate()
    await eventually(lambda: brokers.bodies == [b"later"])


async def test_what_nobody_confirmed_is_not_in_the_schedule_and_holds_back_what_follows(
    start_delay: StartDelay,
    clock: ManualClock,
    monkeypatch: pytest.MonkeyPatch,
    disk: GatedDisk,
) -> None:
    monkeypatch.setattr(replay, "_PAUSE_S", 0)
    delay = await start_delay(files=disk, storage={"sync_interval": "1m"})
    batch, _ = delayed_batch([(b"first", clock.now_ms() + HOUR)])
    disk.close_gate()
    first = await delay.raw.put(Send(Acks.DISK, 10_000, (("orders", batch),)))
    await eventually(lambda: disk.syncs_waiting > 0)
    for _ in range(5):
        await delay.send([(b"next", clock.now_ms() + HOUR)], acks=Acks.MEMORY)
        assert not await delay.raw.is_answered(first)

    assert delay.server.status()["schedule"]["messages"] == 0
    disk.open_gate()
    assert not expect(await delay.raw.answer_to(first), Sent).outcomes[0].code
    await eventually(lambda: delay.server.status()["schedule"]["messages"] == 6)


async def test_a_broker_counts_as_having_what_is_due_once_it_has_it_on_disk(
    tmp_path: Path, clock: ManualClock, disk: GatedDisk
) -> None:
    running = Running(tmp_path / "broker", {"storage": {"sync_interval": "1m"}}, None, disk)
    await running.start()
    raw = await running.connect()
    host, port = running.broker.url.removeprefix("pulque://").rsplit(":", 1)
    target = PartitionRoute(PartitionName("orders"), "g", host, int(port))
    brokers = BrokerConnections((), "d1", clock, timeout_s=20.0)
    disk.close_gate()
    sending = asyncio.create_task(brokers.send(target, "orders", pack_batch("orders", [b"due"])))
    try:
        await eventually(lambda: disk.syncs_waiting > 0)
        assert not await raw.is_answered(0)
        assert not sending.done()
        disk.open_gate()
        await sending
    finally:
        disk.open_gate()
        sending.cancel()
        await brokers.close()
        await running.close()
