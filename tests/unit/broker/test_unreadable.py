"""The power fails around a batch that nobody can decode: its dead letter is there, and once."""

from collections import Counter
from pathlib import Path
from random import Random

import pytest

from pulque.rules.retry import parse_sequences
from pulque.testing.clock import ManualClock
from pulque.testing.files import Cut, MemoryFileSystem
from pulque.testing.raw import RawConnection
from pulque.wire.requests import (
    EARLIEST,
    FROM_SETTLED,
    Acks,
    Nacked,
    Pull,
    Send,
    Settle,
    Wanted,
)
from pulque.wire.responses import Pulled, Sent, Settled
from tests.crash.one_thread import run_in_one_thread
from tests.malformed import odd, torn
from tests.unit.broker.running import Running, eventually

NO_RETRY = -2
CUTS = 25


async def reject_all(raw: RawConnection, consumer: str, most: int) -> None:
    """Pull what there is and reject it, a few messages at a time, without looking at it."""
    while True:
        wanted = (Wanted("orders", FROM_SETTLED),)
        pull = Pull("g", consumer, 1, most, 2**20, 0, EARLIEST, wanted)
        found = (await raw.ask(pull, Pulled)).deliveries
        for each in found:
            first, last = each.first_pull, each.first_pull + each.count - 1
            nacked = tuple(Nacked(n, NO_RETRY, "no") for n in range(first, last + 1))
            settle = Settle("orders", "g", consumer, 1, each.tenure, first, last, nacked)
            await raw.ask(settle, Settled)
        if not found:
            return


async def letters(raw: RawConnection) -> Counter[int]:
    """Wait until nothing is pending; return how often each sequence is in a dead letter."""

    async def is_quiet() -> bool:
        return not any(g["redeliveries_pending"] for g in (await raw.status())["groups"])

    await eventually(is_quiet)
    found: Counter[int] = Counter()
    for letter in (await raw.read("%dead%orders%g", max_bytes=2**23))[1]:
        headers = letter.headers
        alone = headers["pulque.origin"].rpartition("/")[2]
        found.update(parse_sequences(headers.get("pulque.unreadable", alone)))
    return found


async def reject_and_lose_power(directory: Path, seed: str, cut: Cut) -> list[MemoryFileSystem]:
    """Cut the power of one life at some points; return its disk, and what the cuts left."""
    random = Random(seed)
    files, clock = MemoryFileSystem(random=random), ManualClock()
    storage = {"sync_interval": "5ms", "checkpoint_records": 3}
    running = Running(directory, {"storage": storage}, clock, files)
    await running.start()
    raw = await running.connect()
    for batch in (torn("orders"), odd("orders")):
        await raw.ask(Send(Acks.DISK, 9, (("orders", batch),)), Sent)
    stored_after = files.operations
    await reject_all(raw, "c", 2)
    await letters(raw)
    await running.close()

    points = {random.randint(stored_after, files.operations) for _ in range(CUTS)}
    disks = [files]
    for at in sorted({*points, stored_after, files.operations}):
        print(f"{cut} after {at} of {files.operations} operations")
        disks.append(files.after_power_cut(at, cut, random))
        left = Running(directory, {}, clock, disks[-1])
        await left.start()
        again = await left.connect()
        await again.heartbeat(consumer="c", incarnation=9, is_leaving=True)
        await letters(again)
        await reject_all(again, "last", 1000)
        found = await letters(again)
        await left.close()

        # What comes behind a message that was handed back is rejected once more from the retries.
        unreadable = {0, 1, 2, 4, 5}
        assert unreadable <= set(found)
        if cut is Cut.KEPT:
            assert {found[each] for each in unreadable} == {1}
    return disks


@pytest.mark.parametrize("cut", Cut)
def test_a_bad_batch_is_in_dead_letters_whenever_the_power_fails(
    tmp_path: Path, seed: int, cut: Cut
) -> None:
    name = f"{seed} {cut} unreadable"
    run_in_one_thread(reject_and_lose_power(tmp_path / "data", name, cut), name)
