"""The power fails between a nack and a dead letter: nothing is lost, nothing counted wrong.

One life of consumers that mostly fail runs on a disk in memory, with messages that wait, come
back, die and are resent. Its power is cut at many points, in every way; a broker on what is left
lets time pass until nothing waits any more, and is compared with what the clients were told.
"""

from collections import Counter, defaultdict
from dataclasses import dataclass, field
from pathlib import Path
from random import Random

import pytest

from pulque.model.message import Message
from pulque.testing.clock import ManualClock
from pulque.testing.files import Cut, MemoryFileSystem
from pulque.testing.raw import RawConnection, RawRun
from pulque.wire.dead import Dead, DeadListed, Resend, Resent
from pulque.wire.requests import Acks
from tests.crash.one_thread import run_in_one_thread
from tests.unit.broker.running import Running, eventually

ORDERS, RETRY, WAIT, DEAD = "orders", "%retry%orders%g", "%wait%orders%g", "%dead%orders%g"
POLICY = {"delays": "200ms 500ms", "jitter_percent": 100, "attempts": 3}
CUTS_OF_EACH_KIND = 15
LAST = 2**64 - 1


@dataclass
class Life:
    """What clients were told, and after how many operations of the disk."""

    files: MemoryFileSystem
    clock: ManualClock
    confirmed: dict[bytes, int] = field(default_factory=dict)
    acked: dict[bytes, int] = field(default_factory=dict)
    purged: dict[bytes, int] = field(default_factory=dict)
    resent: dict[bytes, int] = field(default_factory=dict)
    """Letters that are on their way again for sure, from this many operations on."""
    dealt_with: dict[int, int] = field(default_factory=dict)
    """Sequences of letters that are not to be listed any more, from this many on."""


async def live(running: Running, life: Life, random: Random) -> None:
    """Send, fail, wait, come back, die, and come back from the dead, at random."""
    raw = await running.connect()
    sent = 0
    for _ in range(70):
        match random.choice(["send", "pull", "pull", "pull", "time", "time", "leave", "dead"]):
            case "send":
                bodies = [b"<%d>" % n for n in range(sent, sent + random.randint(1, 4))]
                sent += len(bodies)
                await raw.send(ORDERS, bodies, acks=Acks.DISK)
                life.confirmed |= dict.fromkeys(bodies, life.files.operations)
            case "pull":
                got = await raw.pull(ORDERS, RETRY, max_messages=5, timeout_ms=20)
                for run in got.runs:
                    await settle(raw, life, run, random)
            case "time":
                life.clock.advance(random.choice([50, 300, 1100]))
                await raw.status()
            case "leave" if random.random() < 0.3:
                await raw.pull(ORDERS, RETRY, consumer="leaver", max_messages=2)
                await raw.heartbeat(consumer="leaver", is_leaving=True)
            case "dead":
                await deal_with_dead(raw, life, random)
            case _:
                pass


async def settle(raw: RawConnection, life: Life, run: RawRun, random: Random) -> None:
    nacked = {run.first_pull + n: "no" for n in range(run.length) if random.random() < 0.8}
    began = life.files.operations
    await raw.settle(run, nacked=nacked, delay_ms=random.choice([-1, -1, 0, 700]))
    for n, message in enumerate(run.messages):
        if run.first_pull + n not in nacked:
            life.acked[message.body] = began


async def deal_with_dead(raw: RawConnection, life: Life, random: Random) -> None:
    listed = await raw.ask(Dead(ORDERS, "g", 0, LAST, 100), DeadListed)
    letters = [s for start, length in listed.ranges for s in range(start, start + length)]
    if not letters:
        return
    chosen = random.choice(letters)
    _, (letter,) = await raw.read(DEAD, chosen, max_messages=1)
    if random.random() < 0.7:
        answer = await raw.ask(Resend(ORDERS, "g", (chosen,)), Resent)
        assert answer.resent == (chosen,)
        life.resent[letter.body] = life.dealt_with[chosen] = life.files.operations
    elif chosen == letters[0]:
        began = life.files.operations
        await raw.ask(Dead(ORDERS, "g", 0, chosen, 0, is_purge=True), DeadListed)
        life.purged[letter.body] = began
        life.dealt_with[chosen] = life.files.operations


async def drain(raw: RawConnection, clock: ManualClock) -> Counter[bytes]:
    """Let time pass until nothing waits, and take what there is for the group."""
    for consumer in ("c", "leaver"):
        await raw.heartbeat(consumer=consumer, incarnation=9, is_leaving=True)

    async def is_quiet() -> bool:
        clock.advance(500)
        status = await raw.status()
        pending = sum(group["redeliveries_pending"] for group in status["groups"])
        return not pending and not status["messages_waiting"]

    found: Counter[bytes] = Counter()
    await eventually(is_quiet)
    while (got := await raw.pull(ORDERS, RETRY, consumer="last")).runs:
        for run in got.runs:
            found.update(run.bodies)
            await raw.settle(run, consumer="last")
    return found


def check_attempts(retries: list[Message], letters: list[Message], *, is_whole: bool) -> None:
    """Each attempt of a message is in the log once, and none is left out."""
    origins = Counter(message.headers["pulque.origin"] for message in [*retries, *letters])
    if is_whole:
        assert set(origins.values()) <= {1}
    attempts: dict[bytes, list[int]] = defaultdict(list)
    for message in retries:
        attempts[message.body].append(message.attempt)
    for message in letters:
        failures = [name for name in message.headers if name.startswith("pulque.failed.")]
        assert len(failures) == message.attempt == POLICY["attempts"]
        assert set(attempts[message.body]) >= {2, 3}


async def check(
    life: Life, at: int, cut: Cut, random: Random, directory: Path
) -> MemoryFileSystem:
    """Start a broker on what a power cut left, compare, and return its disk."""
    left = life.files.after_power_cut(at, cut, random)
    clock = ManualClock(life.clock.now_ms())
    running = Running(directory, {"retry": POLICY}, clock, left)
    await running.start()
    raw = await running.connect()

    handed = await drain(raw, clock)
    stored = {name: (await raw.read(name, max_bytes=8 * 1024 * 1024))[1] for name in (RETRY, DEAD)}
    listed = await raw.ask(Dead(ORDERS, "g", 0, LAST, 1000), DeadListed)
    named = {s for start, length in listed.ranges for s in range(start, start + length)}
    dead = {letter.body for letter in stored[DEAD] if letter.sequence in named}

    # Every message is acked, purged, dead, or comes again; in the end nothing is on its way.
    done = {body for body, since in (life.acked | life.purged).items() if since < at}
    confirmed = {body for body, since in life.confirmed.items() if since <= at}
    assert confirmed <= set(handed) | done | dead
    # A letter is dealt with once that was answered, and a resent one is on its way.
    assert not named & {s for s, since in life.dealt_with.items() if since <= at}
    resent = {letter.body for letter in stored[RETRY] if "%dead%" in letter.headers[_ORIGIN]}
    assert {body for body, since in life.resent.items() if since <= at} <= resent
    # Where nothing that was written is lost, as after a kill, no attempt is made twice.
    is_whole = cut is Cut.KEPT
    check_attempts(stored[RETRY], stored[DEAD], is_whole=is_whole)
    if is_whole:
        assert set(handed.values()) <= {1}
    raw.close()
    await running.close()

    again = Running(directory, {"retry": POLICY}, clock, left)
    await again.start()
    raw = await again.connect()
    assert await drain(raw, clock) == {}
    assert await raw.ask(Dead(ORDERS, "g", 0, LAST, 1000), DeadListed) == listed
    await again.close()
    return left


async def live_and_lose_power(
    directory: Path, seed: str, cut: Cut, count: int = CUTS_OF_EACH_KIND
) -> list[MemoryFileSystem]:
    """Cut the power of one life at some points; return its disk, and what the cuts left."""
    random = Random(seed)
    life = Life(MemoryFileSystem(random=random), ManualClock())
    sections = {"retry": POLICY, "storage": {"sync_interval": "5ms", "checkpoint_records": 7}}
    running = Running(directory, sections, life.clock, life.files)
    await running.start()
    await live(running, life, random)
    await running.close()

    points = {random.randint(0, life.files.operations) for _ in range(count)}
    disks = [life.files]
    for at in sorted(points | {life.files.operations}):
        print(f"{cut} after {at} of {life.files.operations} operations")
        disks.append(await check(life, at, cut, Random(f"{seed} {at}"), directory))
    return disks


_ORIGIN = "pulque.origin"


@pytest.mark.accepts("000-44", "000-45", "003-53")
@pytest.mark.parametrize("cut", Cut)
def test_a_message_is_retried_or_dead_whenever_the_power_fails(
    tmp_path: Path, seed: int, cut: Cut
) -> None:
    name = f"{seed} {cut} retries"
    run_in_one_thread(live_and_lose_power(tmp_path / "data", name, cut), name)
