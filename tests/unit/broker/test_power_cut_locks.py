"""The power fails while partitions change hands: no token is granted twice, and order holds."""

from dataclasses import dataclass, field
from pathlib import Path
from random import Random

import pytest

from pulque.model.ordered import OrderStrategy
from pulque.testing.files import Cut, MemoryFileSystem
from pulque.wire.ordered import Lock, Locked
from pulque.wire.requests import Acks
from tests.unit.broker.running import Running, Start, numbered
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


@pytest.mark.parametrize("cut", Cut)
async def test_a_token_that_somebody_heard_of_is_never_granted_again(
    start: Start, tmp_path: Path, seed: int, cut: Cut
) -> None:
    random = Random(f"{seed} {cut}")
    files = MemoryFileSystem()
    running = await start(files=files, storage={"sync_interval": "5ms"})
    life = await live(running, files, random)
    await running.close()

    for at in sorted(random.randint(life.tokens[0][0], files.operations) for _ in range(CUTS)):
        print(f"{cut} after {at} of {files.operations} operations")
        again = Running(tmp_path / "left", {}, None, files.after_power_cut(at, cut, random))
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
