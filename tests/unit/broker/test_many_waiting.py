"""Ten thousand pulls that wait cost memory, little of it, and nothing else."""

import asyncio
import resource
from pathlib import Path
from threading import active_count

import pytest

from pulque.testing.raw import RawConnection
from pulque.wire.requests import EARLIEST, FROM_SETTLED, Pull, Wanted, encode_request
from tests.unit.broker.running import Running, eventually

PULLS = 10_000
CONNECTIONS = 20


def pull_of(number: int) -> Pull:
    wanted = (Wanted(f"subject{number % 100}", FROM_SETTLED),)
    return Pull(f"group{number % 7}", f"c{number}", 1, 10, 1000, 60_000, EARLIEST, wanted)


async def has_waiting(raw: RawConnection, pulls: int) -> bool:
    return bool((await raw.status())["pulls_waiting"] == pulls)


def resident_bytes() -> int:
    """Return how much memory this process has."""
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    return pages * resource.getpagesize()


@pytest.mark.accepts("004-99")
async def test_ten_thousand_waiting_pulls_are_cheap(running: Running) -> None:
    raw = await running.connect()
    holders = [await running.connect() for _ in range(CONNECTIONS)]
    frames = [b"".join(encode_request(pull_of(n), n + 10, 0)) for n in range(PULLS)]
    bytes_of = [b"".join(frames[at::CONNECTIONS]) for at in range(CONNECTIONS)]
    tasks, threads, memory = len(asyncio.all_tasks()), active_count(), resident_bytes()

    for holder, data in zip(holders, bytes_of, strict=True):
        await holder.put_bytes(data)
    await eventually(lambda: has_waiting(raw, PULLS), limit_s=30)
    each = (resident_bytes() - memory) / PULLS
    print(f"{each:.0f} bytes for each waiting pull")

    # Neither a task nor a thread for each, and all of them together fit into some megabytes.
    assert len(asyncio.all_tasks()) == tasks
    assert active_count() <= threads + 5
    assert each < 4000
    # Nobody else is slowed: a message goes to the seven groups that wait for its subject.
    await raw.send("subject5", [b"x"])
    await eventually(lambda: has_waiting(raw, PULLS - 7))
    assert (await raw.status())["messages_delivered"] == 7
    # All are forgotten with their connections.
    for holder in holders:
        holder.close()
    await eventually(lambda: has_waiting(raw, 0), limit_s=30)
