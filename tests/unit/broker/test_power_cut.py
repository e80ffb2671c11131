"""A whole broker loses its power: nothing confirmed is lost, and every message finds a consumer.

One life of producers and consumers runs on a disk in memory. Its power is cut at many points, in
every way; a broker on what is left is compared with what the clients of that life were told.
"""

from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from random import Random

import pytest

from pulque.errors import ErrorCode
from pulque.model.pack import ProducedBy
from pulque.testing.files import Cut, MemoryFileSystem
from pulque.testing.raw import RawConnection, RawRun
from pulque.wire.requests import Acks, Seal
from pulque.wire.responses import Sealed
from tests.crash.one_thread import run_in_one_thread
from tests.unit.broker.running import Running, eventually

RETRY = "%retry%orders%g"
CONSUMERS = ("a", "b")
CUTS_OF_EACH_KIND = 12


@dataclass
class Life:
    """What clients were told, and after how many operations of the disk."""

    files: MemoryFileSystem
    sent: list[bytes] = field(default_factory=list)
    confirmed: dict[bytes, int] = field(default_factory=dict)
    """Bodies that are on disk for sure, from this many operations on."""
    acked: dict[bytes, int] = field(default_factory=dict)
    """Bodies whose consumer said that it is done, after this many operations."""


async def live(running: Running, files: MemoryFileSystem, random: Random) -> Life:
    """Send, pull, settle, nack, leave and seal at random."""
    life = Life(files)
    raw = await running.connect()
    held: dict[str, list[RawRun]] = {consumer: [] for consumer in CONSUMERS}
    for step in range(60):
        consumer = random.choice(CONSUMERS)
        match random.choice(["send", "send", "pull", "pull", "settle", "settle", "leave", "seal"]):
            case "send":
                await send(raw, life, random, step)
            case "pull":
                await pull(raw, held[consumer], consumer, random)
            case "settle" if held[consumer]:
                await settle(raw, life, held[consumer].pop(0), consumer, random)
            case "leave" if random.random() < 0.3:
                await raw.heartbeat(consumer=consumer, is_leaving=True)
                held[consumer].clear()
            case "seal" if random.random() < 0.3:
                await raw.ask(Seal(), Sealed)
            case _:
                pass
    return life


async def send(raw: RawConnection, life: Life, random: Random, step: int) -> None:
    bodies = [b"<%d.%d>" % (step, n) for n in range(random.randint(1, 4))]
    acks = random.choice([Acks.MEMORY, Acks.DISK])
    outcome = await raw.send(
        "orders", bodies, acks=acks, produced_by=ProducedBy(7, 1, len(life.sent))
    )
    assert outcome.code is ErrorCode.NONE
    life.sent += bodies
    if acks is Acks.DISK:
        life.confirmed |= dict.fromkeys(bodies, life.files.operations)


async def pull(raw: RawConnection, held: list[RawRun], consumer: str, random: Random) -> None:
    expected = [
        max((run.last_pull + 1 for run in held if run.partition == name), default=-1)
        for name in ("orders", RETRY)
    ]
    got = await raw.pull(
        "orders",
        RETRY,
        consumer=consumer,
        expected=expected,
        max_messages=random.randint(1, 5),
        timeout_ms=20,
    )
    held += got.runs


async def settle(
    raw: RawConnection, life: Life, run: RawRun, consumer: str, random: Random
) -> None:
    nacked = {run.first_pull + n: "no" for n in range(run.length) if random.random() < 0.3}
    began = life.files.operations
    await raw.settle(run, consumer=consumer, nacked=nacked)
    for n, message in enumerate(run.messages):
        if run.first_pull + n not in nacked:
            life.acked[message.body] = began


async def drain(raw: RawConnection) -> Counter[bytes]:
    """Take everything that there is for the group, and settle it."""
    for consumer in CONSUMERS:
        await raw.heartbeat(consumer=consumer, incarnation=9, is_leaving=True)

    async def is_redelivered() -> bool:
        groups = (await raw.status())["groups"]
        return all(group["redeliveries_pending"] == 0 for group in groups)

    await eventually(is_redelivered)
    found: Counter[bytes] = Counter()
    while (got := await raw.pull("orders", RETRY, consumer="last")).runs:
        for run in got.runs:
            found.update(run.bodies)
            await raw.settle(run, consumer="last")
    return found


async def check(
    life: Life, at: int, cut: Cut, random: Random, directory: Path
) -> MemoryFileSystem:
    """Start a broker on what a power cut left, compare, and return its disk."""
    left = life.files.after_power_cut(at, cut, random)
    running = Running(directory, {}, None, left)
    await running.start()
    raw = await running.connect()
    _, messages = await raw.read("orders", max_bytes=8 * 1024 * 1024)
    stored = [message.body for message in messages]

    # What is stored is a beginning of what was sent, and holds all that was confirmed.
    assert stored == life.sent[: len(stored)]
    assert {body for body, since in life.confirmed.items() if since <= at} <= set(stored)

    # Every message is acked by somebody, or comes again.
    handed = await drain(raw)
    acked = {body for body, since in life.acked.items() if since < at}
    assert set(handed) <= set(stored)
    assert set(stored) <= set(handed) | acked
    if cut is Cut.KEPT and at == life.files.operations:
        # Nothing was lost, so nothing acked comes again and nothing comes twice.
        assert not set(handed) & acked
        assert set(handed.values()) <= {1}

    # The broker goes on: numbers follow, and what is settled stays settled.
    outcome = await raw.send("orders", [b"after"], acks=Acks.DISK)
    assert outcome.first_sequence == len(stored)
    assert await drain(raw) == {b"after": 1}
    raw.close()
    await running.close()
    again = Running(directory, {}, None, left)
    await again.start()
    assert await drain(await again.connect()) == {}
    await again.close()
    return left


async def live_and_lose_power(
    directory: Path, seed: str, cut: Cut, count: int = CUTS_OF_EACH_KIND
) -> list[MemoryFileSystem]:
    """Cut the power of one life at some points; return its disk, and what the cuts left."""
    random = Random(seed)
    files = MemoryFileSystem(random=random)
    running = Running(directory, {"storage": {"sync_interval": "5ms"}}, None, files)
    await running.start()
    life = await live(running, files, random)
    await running.close()

    points = {random.randint(0, files.operations) for _ in range(count)}
    disks = [files]
    for at in sorted(points | {files.operations}):
        print(f"{cut} after {at} of {files.operations} operations")
        disks.append(await check(life, at, cut, Random(f"{seed} {at}"), directory))
    return disks


@pytest.mark.accepts("004-06", "004-46", "004-60")
@pytest.mark.parametrize("cut", Cut)
def test_every_message_is_acked_or_comes_again_whenever_the_power_fails(
    tmp_path: Path, seed: int, cut: Cut
) -> None:
    name = f"{seed} {cut}"
    run_in_one_thread(live_and_lose_power(tmp_path / "data", name, cut), name)
