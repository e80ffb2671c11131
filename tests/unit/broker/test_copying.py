"""A follower copies from a leader in the same process; the test decides when its disk is done."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from random import Random
from typing import Any

import pytest

from pulque.broker.replication.log_copier import Copier
from pulque.client.connection.url import parse_url
from pulque.errors import ErrorCode, NotAllowedError, PulqueError, StaleEpochError, StorageError
from pulque.model.leadership import EpochStart
from pulque.model.positions import ActionOffset, Epoch, MessageOffset
from pulque.rules.replication import LogPoint
from pulque.serving.listener import LoggingListener
from pulque.storage.files import FileSystem, OsFileSystem
from pulque.storage.options import StorageOptions
from pulque.storage.replication.replica_logs import ReplicaLogs
from pulque.testing.files import Cut, MemoryFileSystem
from pulque.testing.raw import expect, pack_batch
from pulque.wire.leadership import Led
from pulque.wire.requests import Acks, Send
from pulque.wire.responses import Adopted, Sent
from tests.unit.broker.test_adopt import adoption
from tests.unit.broker.test_leading import EPOCH, LEASE_MS, LeaderAlone, log_of, until


class HeldThread:
    """Waits for the disk when the test says so."""

    def __init__(self) -> None:
        self.work: list[tuple[Callable[[], None], Callable[[BaseException | None], None]]] = []
        self.is_held = False

    def run(self, work: Callable[[], None], done: Callable[[BaseException | None], None]) -> None:
        self.work.append((work, done))
        if not self.is_held:
            self.let_go()

    def let_go(self) -> None:
        """Do what is to be done."""
        self.is_held = False
        for work, done in self.work:
            problem: BaseException | None = None
            try:
                work()
            except StorageError as raised:
                problem = raised
            asyncio.get_running_loop().call_soon(done, problem)
        self.work = []


class Following:
    """A copier, and what it copies to."""

    def __init__(self, leader: LeaderAlone, folder: Path, files: FileSystem | None = None) -> None:
        folder.mkdir()
        self.folder = folder
        self.leader = leader
        self.thread = HeldThread()
        self.logs = logs_in(files or OsFileSystem(str(folder)))
        self.copier = self.copier_of(self.logs)
        self.copying: asyncio.Task[None] | None = None

    def copier_of(self, logs: Any) -> Copier:
        """Return a copier for some logs."""
        thread: Any = self.thread
        return Copier(logs, thread, self.leader.clock, "f", lambda *_, **__: None)

    @property
    def led(self) -> Led:
        """Who leads, as the meta servers would say."""
        assert self.leader.said.led is not None
        (address,) = parse_url(self.leader.broker.url)
        leadership = self.leader.said.led.leadership
        return Led(leadership, "leader", address.host, address.port, LEASE_MS)

    def start(self) -> None:
        """Begin to copy."""
        self.copying = asyncio.create_task(self.copier.copy(self.led))

    async def ended(self) -> None:
        """Wait until it gives up."""
        assert self.copying is not None
        with contextlib.suppress(PulqueError):
            await self.copying

    async def stop(self) -> None:
        """Stop as when another broker leads."""
        assert self.copying is not None
        self.copying.cancel()
        with contextlib.suppress(asyncio.CancelledError, PulqueError):
            await self.copying

    @property
    def is_connected(self) -> bool:
        """Whether the leader knows it."""
        report = self.leader.broker.leading
        assert report is not None
        return self.logs.identity.id in report.in_sync.followers


def logs_in(files: FileSystem) -> ReplicaLogs:
    return ReplicaLogs(files, StorageOptions(), LoggingListener())


class Claims:
    """What a follower told its leader, beside what a power cut would leave it at that moment."""

    def __init__(self, leader: LeaderAlone, files: MemoryFileSystem) -> None:
        self.made: list[tuple[LogPoint, LogPoint]] = []
        self._files = files
        leading: Any = leader.broker.leading
        self._heard = leading.heard
        leading.heard = self._note

    def _note(self, directory: str, synced: LogPoint, **ready: bool) -> None:
        left = self._files.after_power_cut(self._files.operations, Cut.LOST, Random(1))
        logs = logs_in(left)
        self.made.append((synced, LogPoint(logs.message_end, logs.action_end)))
        logs.close()
        self._heard(directory, synced, **ready)

    async def come(self, count: int) -> None:
        """Wait for so many more."""
        wanted = len(self.made) + count
        await until(lambda: len(self.made) >= wanted)

    def check(self) -> None:
        """Fail if one was not true when the leader heard it."""
        wrong = [(told, left) for told, left in self.made if not left.reaches(told)]
        assert not wrong, "the follower claimed more than a power cut would have left it"


@pytest.fixture
async def leader(tmp_path: Path) -> AsyncIterator[LeaderAlone]:
    """A leader that nobody has followed so far."""
    leader = LeaderAlone(tmp_path / "leader")
    await leader.broker.start()
    yield leader
    await leader.close()


@pytest.fixture
async def follower(leader: LeaderAlone, tmp_path: Path) -> AsyncIterator[Following]:
    """A follower with empty logs."""
    async for each in followers(Following(leader, tmp_path / "follower")):
        yield each


@pytest.fixture
def disk() -> MemoryFileSystem:
    """The disk of the follower below, whose power can be cut."""
    return MemoryFileSystem()


@pytest.fixture
async def cut_off(
    leader: LeaderAlone, disk: MemoryFileSystem, tmp_path: Path
) -> AsyncIterator[Following]:
    """A follower with empty logs on that disk."""
    async for each in followers(Following(leader, tmp_path / "follower", disk)):
        yield each


async def followers(follower: Following) -> AsyncIterator[Following]:
    yield follower
    if follower.copying is not None:
        follower.thread.let_go()
        await follower.stop()
    follower.logs.close()


def copy_of(follower: Following) -> bytes:
    paths = sorted((follower.folder / "messages").glob("*.log"))
    return b"".join(path.read_bytes() for path in paths)


async def test_a_follower_gets_all_and_is_in_sync_and_messages_are_confirmed_by_it(
    leader: LeaderAlone, follower: Following
) -> None:
    follower.start()
    await until(lambda: follower.logs.identity.id in in_sync(leader))
    raw = await leader.connect()
    sent = await raw.send("orders", [b"x"], acks=Acks.DISK)

    assert sent.first_sequence == 0
    assert copy_of(follower) == log_of(leader)
    assert follower.logs.checkpoint > 0


async def test_what_was_synced_of_another_leaders_log_is_not_told_to_the_next_one(
    leader: LeaderAlone, follower: Following
) -> None:
    follower.thread.is_held = True
    follower.start()
    await until(lambda: bool(follower.thread.work))  # bytes of the first leader, on their way
    copying = follower.copying
    assert copying is not None
    copying.cancel()
    await asyncio.sleep(0)
    copying.cancel()  # it waits for the disk, and is told that somebody else leads
    with contextlib.suppress(asyncio.CancelledError):
        await copying
    await until(lambda: not follower.is_connected)

    follower.start()
    for _ in range(50):
        await asyncio.sleep(0.001)
    assert not follower.is_connected  # it says nothing before the disk is done

    follower.thread.let_go()
    await until(lambda: follower.is_connected)
    await until(lambda: copy_of(follower) == log_of(leader))


async def test_nobody_follows_a_leader_of_an_epoch_that_is_over(
    leader: LeaderAlone, follower: Following
) -> None:
    follower.logs.take_epochs((EpochStart(Epoch(EPOCH + 1), MessageOffset(0), ActionOffset(0)),))

    with pytest.raises(StaleEpochError, match="there was epoch 4 since"):
        await follower.copier.copy(follower.led)
    assert not follower.is_connected


async def test_nothing_is_dropped_that_was_confirmed(
    leader: LeaderAlone, follower: Following
) -> None:
    follower.start()
    await until(lambda: follower.logs.identity.id in in_sync(leader))
    await (await leader.connect()).send("orders", [b"x"], acks=Acks.DISK)
    await until(lambda: follower.copier.confirmed == len(log_of(leader)))
    await follower.stop()
    kept = copy_of(follower)

    # As if the leader had lost what it once had: the follower's logs go further than its own.
    longer = follower.copier_of(Longer(follower.logs, follower.logs.message_end + 1000))
    longer.confirmed = follower.copier.confirmed + 1000
    with pytest.raises(NotAllowedError, match="does not follow"):
        await longer.copy(follower.led)
    assert copy_of(follower) == kept


class Longer:
    """Logs that end later than they do."""

    def __init__(self, logs: ReplicaLogs, end: int) -> None:
        self._logs = logs
        self.message_end = end

    def __getattr__(self, name: str) -> Any:
        return getattr(self._logs, name)


async def test_a_leader_that_says_it_is_over_releases_its_follower_from_its_promise(
    leader: LeaderAlone, follower: Following
) -> None:
    follower.start()
    await until(lambda: follower.logs.identity.id in in_sync(leader))
    assert follower.copier.promised_ms > leader.clock.monotonic_ms()

    follower.copier.is_parting = True
    assert leader.said.led is not None
    before = leader.said.led.leadership
    leader.said.say(
        before._replace(epoch=Epoch(EPOCH + 1), version=before.version + 1, token="another's")
    )
    await until(lambda: follower.copier.promised_ms == 0)


async def test_a_damaged_follower_is_out_of_sync_before_it_copies_all_anew(
    leader: LeaderAlone, follower: Following
) -> None:
    follower.start()
    await until(lambda: follower.logs.identity.id in in_sync(leader))
    await (await leader.connect()).send("orders", [b"x"], acks=Acks.DISK)
    follower.copier.mend()
    await follower.ended()

    follower.start()
    await follower.ended()
    await until(lambda: follower.logs.identity.id not in in_sync(leader))
    assert copy_of(follower)  # it is kept until then

    follower.start()
    await until(lambda: follower.logs.identity.id in in_sync(leader))
    assert copy_of(follower) == log_of(leader)


def in_sync(leader: LeaderAlone) -> tuple[str, ...]:
    assert leader.broker.leading is not None
    return leader.broker.leading.leadership.in_sync


async def test_a_follower_claims_nothing_that_a_power_cut_would_take_from_it(
    leader: LeaderAlone, disk: MemoryFileSystem, cut_off: Following
) -> None:
    claims = Claims(leader, disk)
    cut_off.start()
    await until(lambda: cut_off.logs.identity.id in in_sync(leader))
    raw = await leader.connect()
    await raw.send("orders", [b"x"], acks=Acks.DISK)
    await raw.pull("orders", expected=1)  # so that there are facts, too

    cut_off.thread.is_held = True
    request = await raw.put(Send(Acks.DISK, 10_000, (("orders", pack_batch("orders", [b"y"])),)))
    await until(lambda: bool(cut_off.thread.work))
    await until(lambda: cut_off.logs.message_end == len(log_of(leader)))
    await claims.come(3)  # it has asked for more by then, and told how far its disk is
    assert leader.broker.leading is not None
    told, _ = claims.made[-1]
    assert told.messages < cut_off.logs.message_end
    assert leader.broker.leading.in_sync.confirmed.messages < cut_off.logs.message_end

    cut_off.thread.let_go()
    answer = expect(await raw.answer_to(request), Sent)
    assert answer.outcomes[0].code is ErrorCode.NONE
    await raw.pull("orders", expected=1)
    end = leader.broker.leading.end
    await until(lambda: claims.made[-1][0] == end)
    claims.check()


async def test_an_adopted_nack_is_answered_when_the_followers_have_it_on_disk_too(
    leader: LeaderAlone, cut_off: Following
) -> None:
    cut_off.start()
    await until(lambda: cut_off.logs.identity.id in in_sync(leader))
    raw = await leader.connect()
    cut_off.thread.is_held = True
    request = await raw.put(adoption())
    await until(lambda: bool(cut_off.thread.work))
    leading = leader.broker.leading
    assert leading is not None
    await until(lambda: leading.own == leading.end)  # the leader's own disk has it

    assert not await raw.is_answered(request)
    cut_off.thread.let_go()
    assert expect(await raw.answer_to(request), Adopted).sequence == 0


async def test_what_a_killed_follower_left_in_the_page_cache_is_synced_before_it_counts(
    leader: LeaderAlone, disk: MemoryFileSystem, cut_off: Following
) -> None:
    cut_off.start()
    await until(lambda: cut_off.logs.identity.id in in_sync(leader))
    raw = await leader.connect()
    cut_off.thread.is_held = True
    request = await raw.put(Send(Acks.DISK, 10_000, (("orders", pack_batch("orders", [b"y"])),)))
    await until(lambda: bool(cut_off.thread.work))
    assert cut_off.copying is not None
    cut_off.copying.cancel()  # killed: what it wrote is in the page cache, and nobody synced it
    cut_off.thread.work.clear()

    claims = Claims(leader, disk)
    cut_off.thread, cut_off.logs = HeldThread(), logs_in(disk)
    cut_off.copier = cut_off.copier_of(cut_off.logs)
    cut_off.start()
    assert expect(await raw.answer_to(request), Sent).outcomes[0].code is ErrorCode.NONE
    claims.check()


async def test_a_follower_whose_disk_failed_claims_nothing_more_and_gives_up(
    leader: LeaderAlone, disk: MemoryFileSystem, cut_off: Following
) -> None:
    cut_off.start()
    await until(lambda: cut_off.logs.identity.id in in_sync(leader))
    claims = Claims(leader, disk)
    cut_off.thread.is_held = True
    raw = await leader.connect()
    await raw.put(Send(Acks.DISK, 10_000, (("orders", pack_batch("orders", [b"x"])),)))
    await until(lambda: bool(cut_off.thread.work))
    disk.fail_sync_after(1, StorageError("input/output error"))
    cut_off.thread.let_go()

    assert cut_off.copying is not None
    with pytest.raises(PulqueError):
        await cut_off.copying
    with pytest.raises(StorageError, match="input/output error"):
        await cut_off.copier.copy(cut_off.led)
    claims.check()
    assert cut_off.logs.message_synced < cut_off.logs.message_end
