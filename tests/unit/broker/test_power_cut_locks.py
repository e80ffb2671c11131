"""The power fails while partitions change hands: no token is granted twice, and order holds."""

from dataclasses import dataclass, field
from pathlib import Path
from random import Random

import pytest

from pulque.model.ordered import OrderStrategy
from pulque.testing.files import Cut, MemoryFileSystem
from pulque.wire.ordered import Lock, Locked
from pulque.wire.requests import Acks
from tests.crash.one_thread import run_in_one_thread
from tests.unit.broker.running import Running, numbered
from tests.unit.broker.test_locks import lock, row_of, subscribe, unlock

CUTS = 10
MESSAGES = 40


@dataclass
class Life:
    """What consumers were told, and after how many operations of the disk."""

    tokens: list[tuple[int, int]] = field(default_factory=list)
    settled: list[tuple[int, int]] = field(default_factory=list)


async def live(running: Running, files: MemoryFileSystem, random: Random) -> Life:
    """Have consumers take turns, each settling some of what it is handed."""
    life = Life()
    raw = await running.connect()
    await raw.send("orders", numbered(MESSAGES), acks=Acks.DISK)
    await subscribe(raw)
    for _ in range(12):
        consumer = random.choice("abc")
        token = (await lock(raw, consumer)).token
        life.tokens.append((files.operations, token))
        got = await raw.pull("orders", consumer=consumer, token=token, max_messages=5)
        if got.runs:
            run = got.runs[0]
            last = random.randint(run.first_pull, run.last_pull)
            done = await raw.settle(run, consumer=consumer, last=last, token=token)
            life.settled.append((files.operations, done.settled))
        await unlock(raw, token, consumer)
    return life


async def live_and_lose_power(directory: Path, seed: str, cut: Cut) -> list[MemoryFileSystem]:
    """Cut the power of one life at some points; return its disk, and what the cuts left."""
    random = Random(seed)
    files = MemoryFileSystem(random=random)
    running = Running(directory, {"storage": {"sync_interval": "5ms"}}, None, files)
    await running.start()
    life = await live(running, files, random)
    await running.close()

    disks = [files]
    for at in sorted(random.randint(life.tokens[0][0], files.operations) for _ in range(CUTS)):
        print(f"{cut} after {at} of {files.operations} operations")
        disks.append(await check(life, at, files.after_power_cut(at, cut, random), directory))
    return disks


async def check(life: Life, at: int, left: MemoryFileSystem, directory: Path) -> MemoryFileSystem:
    """Start a broker on what a power cut left, compare, and return its disk."""
    again = Running(directory, {}, None, left)
    await again.start()
    raw = await again.connect()
    row = await row_of(raw)
    heard = max(token for since, token in life.tokens if since <= at)
    assert row.token >= heard
    told = [settled for _, settled in life.settled]
    assert row.settled in {0, *told}, "progress is what somebody settled"
    if row.holder:
        request = Lock("orders", "g", row.holder, 2, OrderStrategy.STRICT)
        token = (await raw.ask(request, Locked)).token
    else:
        token = (await lock(raw, "d", incarnation=2)).token
    assert token == row.token + 1
    who = row.holder or "d"
    rest = await raw.pull("orders", consumer=who, incarnation=2, token=token)
    assert rest.bodies == numbered(MESSAGES)[row.settled :]
    await again.close()
    return left


@pytest.mark.parametrize("cut", Cut)
def test_a_token_that_somebody_heard_of_is_never_granted_again(
    tmp_path: Path, seed: int, cut: Cut
) -> None:
    name = f"{seed} {cut} locks"
    run_in_one_thread(live_and_lose_power(tmp_path / "data", name, cut), name)
