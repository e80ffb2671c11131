"""A broker that leads a group: the test is its follower, and its meta server."""

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest

from pulque.broker.cluster.membership import ClusterSide
from pulque.broker.config import BrokerSettings
from pulque.broker.receiving.admission import Gate
from pulque.broker.replication.leader import Rule
from pulque.broker.replication.leadership_client import Authority
from pulque.broker.server import Broker, Reign
from pulque.errors import (
    ErrorCode,
    NotAllowedError,
    NotLeaderError,
    PulqueError,
    ReadOnlyError,
    RejectedError,
    StaleEpochError,
    UnavailableError,
)
from pulque.model.groups import Mode
from pulque.model.leadership import EpochStart, Leadership
from pulque.model.pack import ProducedBy
from pulque.model.positions import ActionOffset, Epoch, MessageOffset
from pulque.serving.listener import LoggingListener
from pulque.storage.directory.identity import DirectoryIdentity
from pulque.storage.files import OsFileSystem
from pulque.storage.replication.leadership_epochs import begin_epoch
from pulque.testing.clock import ManualClock
from pulque.testing.raw import RawConnection, expect, pack_batch
from pulque.wire.leadership import ChangeInSync, HandedOver, HandOver, InSyncChanged, Lead, Led
from pulque.wire.replication import (
    CheckpointPart,
    CopyCheckpoint,
    Follow,
    Followed,
    Replicate,
    Replicated,
)
from pulque.wire.requests import (
    EARLIEST,
    FROM_SETTLED,
    Acks,
    Pull,
    Send,
    Status,
    Subscribe,
    Wanted,
)
from pulque.wire.responses import Adopted, Pulled, Sent, StatusReport
from tests.unit.broker.running import eventually
from tests.unit.broker.test_adopt import adoption

EPOCH = 3
ME, OTHER = "me", "other"
LEASE_MS = 1000
LAG_MS = 5000


class Said(Authority):
    """Meta servers that say what the test tells them to, and change what they are asked to."""

    def __init__(self, led: Led, clock: ManualClock) -> None:
        super().__init__((), _no_question, clock, lambda *_, **__: None)
        self.led, self.heard_ms = led, clock.monotonic_ms()
        self.asked: list[ChangeInSync] = []
        self.is_away = False
        self.tries = 0

    async def change(self, change: ChangeInSync) -> InSyncChanged:
        self.tries += 1
        if self.is_away:
            raise UnavailableError("no meta server can be reached")
        assert self.led is not None
        self.asked.append(change)
        before = self.led.leadership
        leader, epoch = before.leader, before.epoch
        if leader not in change.in_sync:
            leader, epoch = change.in_sync[0], Epoch(epoch + 1)
        after = before._replace(
            version=before.version + 1, in_sync=change.in_sync, leader=leader, epoch=epoch
        )
        self.say(after)
        return InSyncChanged(True, after)

    def say(self, leadership: Leadership) -> None:
        """Have the leader hear of a leadership, asked now."""
        self.heard_ms = self._clock.monotonic_ms()
        self.led = Led(leadership, "somebody", "127.0.0.1", 1, LEASE_MS)
        self.on_led(self.led)


def _no_question(version: int, wait_ms: int) -> Lead:
    raise AssertionError("nobody asks")


class LeaderAlone:
    """A leader, and what it takes to play those around it."""

    def __init__(
        self, directory: Path, *in_sync: str, min_in_sync: int = 2, epoch: int = EPOCH
    ) -> None:
        self.clock = ManualClock()
        self.directory = directory
        settings = BrokerSettings.model_validate(
            {
                "listen": {"port": 0},
                "storage": {"directory": str(directory), "reserve": "1MiB"},
                "retry": {"delays": "1ms", "jitter_percent": 0},
            }
        )
        members = tuple(sorted({ME, *in_sync}))
        leadership = Leadership("g1", Epoch(epoch), 7, ME, "token", members, min_in_sync)
        led = Led(leadership, "broker", "127.0.0.1", 1, LEASE_MS)
        self.said = Said(led, self.clock)
        directory.mkdir(exist_ok=True)
        files = OsFileSystem(str(directory))
        DirectoryIdentity.open(files)
        epochs = begin_epoch(files, Epoch(epoch), MessageOffset(0), ActionOffset(0))
        gate = Gate("broker")
        rule = Rule(led, self.said, epochs, LAG_MS, 0)
        reign = Reign(rule, ClusterSide("g1", gate), 0, LoggingListener())
        self.broker = Broker(settings, self.clock, files, reign)
        self.connections: list[RawConnection] = []

    async def connect(self) -> RawConnection:
        raw = await RawConnection.open(self.broker.url)
        self.connections.append(raw)
        return raw

    async def close(self) -> None:
        """Stop it; fail if it had to stop before, for whatever reason."""
        for raw in self.connections:
            raw.close()
        self.broker.stop()
        try:
            await self.broker.stopped()
        finally:
            await self.broker.close()


class Follower:
    """What a follower says; it keeps the bytes that it was given."""

    def __init__(self, raw: RawConnection, name: str = OTHER) -> None:
        self.raw = raw
        self.name = name
        self.messages = b""
        self.actions = b""
        self.is_ready = True

    async def follow(self, **changes: Any) -> Followed:
        fields: dict[str, Any] = {
            "broker_group": "g1",
            "name": self.name,
            "directory": self.name,
            "epoch": EPOCH,
            "message_end": 0,
            "action_end": 0,
            "epochs": (),
        }
        return await self.raw.ask(Follow(**fields | changes), Followed)

    async def copy(self, *, wait_ms: int = 0, epoch: int = EPOCH) -> Replicated:
        """Ask for what is new, and have it in memory."""
        request = self._question(1 << 20, wait_ms, epoch)
        answer = await self.raw.ask(request, Replicated)
        self.messages += bytes(answer.messages)
        self.actions += bytes(answer.actions)
        return answer

    async def copy_all(self, leader: LeaderAlone, body: bytes = b"") -> None:
        """Ask until there is nothing new, and a body has come."""
        while body not in self.messages or len(self.messages) < len(log_of(leader)):
            await self.copy(wait_ms=5000)

    async def sync(self) -> None:
        """Say that all that was given is on disk."""
        await self.raw.ask(self._question(0, 0, EPOCH, is_synced=True), Replicated)

    def _question(
        self, max_bytes: int, wait_ms: int, epoch: int, *, is_synced: bool = False
    ) -> Replicate:
        ends = (len(self.messages), len(self.actions))
        synced = ends if is_synced else self._synced
        self._synced = synced
        return Replicate(self.name, epoch, *ends, *synced, self.is_ready, max_bytes, wait_ms)

    _synced = (0, 0)


@pytest.fixture
async def leader(tmp_path: Path) -> AsyncIterator[LeaderAlone]:
    """A leader that nobody has followed so far."""
    leader = LeaderAlone(tmp_path / "data")
    await leader.broker.start()
    yield leader
    await leader.close()


@pytest.fixture
async def follower(leader: LeaderAlone) -> Follower:
    """Its follower, which is in sync."""
    follower = Follower(await leader.connect())
    await follower.follow()
    await follower.copy()
    await follower.sync()
    await until(lambda: in_sync(leader) == (ME, OTHER))
    return follower


async def until(condition: Callable[[], bool]) -> None:
    async def holds() -> bool:
        return condition()

    await eventually(holds)


def in_sync(leader: LeaderAlone) -> tuple[str, ...]:
    assert leader.broker.leading is not None
    return leader.broker.leading.leadership.in_sync


def log_of(leader: LeaderAlone, log: str = "messages") -> bytes:
    return b"".join(path.read_bytes() for path in sorted((leader.directory / log).glob("*.log")))


async def begin_send(
    raw: RawConnection, body: bytes = b"x", *, acks: Acks = Acks.DISK, batches: int = 1
) -> int:
    """Send a message, or it again and again, and do not wait for the answer."""
    batch = ("orders", pack_batch("orders", [body]))
    return await raw.put(Send(acks, 10_000, (batch,) * batches))


async def outcome(raw: RawConnection, request_id: int) -> ErrorCode:
    answer = await raw.answer_to(request_id)
    assert isinstance(answer, Sent)
    return answer.outcomes[0].code


async def seen(raw: RawConnection) -> list[bytes]:
    """Return the bodies that can be read."""
    _, messages = await raw.read("orders")
    return [message.body for message in messages]


async def test_messages_are_taken_once_a_follower_is_in_sync(leader: LeaderAlone) -> None:
    raw = await leader.connect()
    refused = await raw.send("orders", [b"x"])
    assert refused.code is ErrorCode.READ_ONLY
    assert "1 brokers of group g1 are in sync, and 2 have to be" in refused.text

    follower = Follower(await leader.connect())
    follower.is_ready = False
    assert (await follower.follow()).is_anew
    await follower.copy()
    await follower.sync()
    leader.clock.advance(100)
    assert in_sync(leader) == (ME,)  # without a checkpoint it could not lead

    follower.is_ready = True
    await follower.sync()
    await until(lambda: in_sync(leader) == (ME, OTHER))
    assert (await raw.send("orders", [b"x"])).code is ErrorCode.NONE


@pytest.mark.accepts("003-41")
@pytest.mark.parametrize("acks", [Acks.DISK, Acks.REPLICA])
@pytest.mark.parametrize("batches", [1, 2])
async def test_a_send_is_answered_and_seen_when_the_follower_has_it_on_disk(
    leader: LeaderAlone, follower: Follower, acks: Acks, batches: int
) -> None:
    raw = await leader.connect()
    sending = await begin_send(raw, acks=acks, batches=batches)
    await follower.copy_all(leader, b"x")
    leading = leader.broker.leading
    assert leading is not None
    await until(lambda: leading.own == leading.end)  # the leader's own disk has it
    assert await seen(await leader.connect()) == []
    assert not await raw.is_answered(sending)

    await follower.sync()
    assert await outcome(raw, sending) is ErrorCode.NONE
    assert await seen(raw) == [b"x"] * batches
    assert follower.messages == log_of(leader)


async def test_a_batch_that_is_sent_again_for_the_followers_is_answered_when_they_have_it(
    leader: LeaderAlone, follower: Follower
) -> None:
    raw = await leader.connect()
    batch = ("orders", pack_batch("orders", [b"x"], produced_by=ProducedBy(7, 0, 1)))
    first = await raw.ask(Send(Acks.MEMORY, 10_000, (batch,)), Sent)
    again = await raw.put(Send(Acks.REPLICA, 10_000, (batch,)))
    await follower.copy_all(leader, b"x")
    assert not await raw.is_answered(again)

    await follower.sync()
    answer = await raw.answer_to(again)
    assert isinstance(answer, Sent)
    assert answer.outcomes[0][:3] == (ErrorCode.NONE, True, first.outcomes[0].first_sequence)


async def test_what_is_confirmed_from_memory_is_answered_at_once_and_seen_later(
    leader: LeaderAlone, follower: Follower
) -> None:
    raw = await leader.connect()
    assert (await raw.send("orders", [b"x"], acks=Acks.MEMORY)).code is ErrorCode.NONE
    assert await seen(raw) == []

    await follower.copy_all(leader, b"x")
    await follower.sync()

    async def is_seen() -> bool:
        return await seen(raw) == [b"x"]

    await eventually(is_seen)  # once the leader's own disk has it, too


async def test_a_follower_that_waits_is_given_what_is_written_meanwhile(
    leader: LeaderAlone, follower: Follower
) -> None:
    raw = await leader.connect()
    waiting = await follower.raw.put(
        Replicate(OTHER, EPOCH, len(follower.messages), 0, 0, 0, True, 1 << 20, 10_000)
    )
    await begin_send(raw, b"new")

    answer = await follower.raw.answer_to(waiting)
    assert isinstance(answer, Replicated)
    assert bytes(answer.messages)


async def test_facts_are_copied_though_nobody_waits_for_them(
    leader: LeaderAlone, follower: Follower
) -> None:
    raw = await leader.connect()
    sending = await begin_send(raw)
    await follower.copy_all(leader, b"x")
    await follower.sync()
    await outcome(raw, sending)
    await raw.pull("orders")
    while len(follower.actions) < len(log_of(leader, "actions")):
        await follower.copy(wait_ms=5000)

    assert follower.actions == log_of(leader, "actions")


@pytest.mark.parametrize(
    ("changes", "error", "text"),
    [
        ({"epoch": EPOCH - 1}, StaleEpochError, "leads in epoch 3, and epoch 2 is followed"),
        ({"epoch": EPOCH + 1}, StaleEpochError, "leads in epoch 3, and epoch 4 is followed"),
        ({"broker_group": "g2"}, NotAllowedError, "of broker group g2"),
        (
            {
                "message_end": 900,
                "epochs": (EpochStart(Epoch(1), MessageOffset(0), ActionOffset(0)),),
            },
            NotAllowedError,
            "never merged",
        ),
        (
            {
                "message_end": 900,
                "epochs": (EpochStart(Epoch(4), MessageOffset(0), ActionOffset(0)),),
            },
            StaleEpochError,
            "it was replaced",
        ),
    ],
)
async def test_a_follower_that_does_not_fit_is_refused(
    leader: LeaderAlone, changes: dict[str, Any], error: type[PulqueError], text: str
) -> None:
    follower = Follower(await leader.connect())

    with pytest.raises(error, match=text):
        await follower.follow(**changes)


async def test_bytes_are_given_only_to_who_said_what_it_has_and_in_this_epoch(
    leader: LeaderAlone, follower: Follower
) -> None:
    stranger = Follower(await leader.connect(), "stranger")
    with pytest.raises(NotAllowedError, match="before it asks for more"):
        await stranger.copy()
    with pytest.raises(StaleEpochError):
        await follower.copy(epoch=EPOCH - 1)


async def test_what_a_follower_has_behind_the_common_end_is_named(
    leader: LeaderAlone, follower: Follower
) -> None:
    end = len(follower.messages)
    epochs = (EpochStart(Epoch(EPOCH), MessageOffset(0), ActionOffset(0)),)
    found = await follower.follow(message_end=end + 500, action_end=0, epochs=epochs)

    assert (found.is_anew, found.message_end) == (False, end)
    assert found.epochs == epochs


async def test_one_that_is_in_sync_and_has_nothing_is_out_of_sync_before_it_begins_anew(
    leader: LeaderAlone, follower: Follower
) -> None:
    with pytest.raises(UnavailableError, match="counts as in sync"):
        await follower.follow()

    await until(lambda: in_sync(leader) == (ME,))
    assert (await follower.follow()).is_anew


async def test_a_leader_that_nobody_hears_serves_nobody(
    leader: LeaderAlone, follower: Follower
) -> None:
    raw = await leader.connect()
    leader.said.is_away = True
    leader.clock.advance(LEASE_MS)
    with pytest.raises(NotLeaderError, match="cannot tell whether it still leads"):
        await raw.read("orders")

    # A follower that asks promises not to lead, from when it was last answered.
    await follower.copy()
    await follower.copy()
    assert await seen(raw) == []
    leader.clock.advance(LEASE_MS)
    with pytest.raises(NotLeaderError):
        await raw.read("orders")

    assert leader.said.led is not None
    leader.said.say(leader.said.led.leadership)
    assert await seen(raw) == []


async def test_a_leader_that_hears_of_another_one_stops_and_tells_its_followers(
    leader: LeaderAlone, follower: Follower
) -> None:
    raw = await leader.connect()
    sending = await begin_send(raw)
    await follower.copy_all(leader, b"x")
    waiting = await follower.raw.put(
        Replicate(OTHER, EPOCH, len(follower.messages), 0, 0, 0, True, 1 << 20, 10_000)
    )
    assert leader.said.led is not None
    before = leader.said.led.leadership
    leader.said.say(
        before._replace(epoch=Epoch(EPOCH + 1), version=before.version + 1, leader=OTHER, token="")
    )

    assert leader.broker.is_deposed
    assert isinstance(await follower.raw.answer_to(waiting), NotLeaderError)
    with pytest.raises(NotLeaderError):
        await raw.read("orders")
    # Its follower had it on disk, and says so too late: it confirms nothing any more.
    with pytest.raises(NotLeaderError):
        await follower.sync()
    await leader.broker.close()
    assert await outcome(raw, sending) is ErrorCode.UNAVAILABLE


async def test_while_too_few_are_in_sync_nobody_is_told_that_a_message_is_kept(
    leader: LeaderAlone, follower: Follower
) -> None:
    raw = await leader.connect()
    sending = await begin_send(raw)
    await follower.copy_all(leader, b"x")
    leader.clock.advance(LAG_MS + 1)
    assert leader.said.led is not None
    leader.said.say(leader.said.led.leadership)  # the lease goes on
    await until(lambda: in_sync(leader) == (ME,))

    assert await outcome(raw, sending) is ErrorCode.UNAVAILABLE
    assert await seen(raw) == [b"x"]  # all that are in sync have it
    assert (await raw.send("orders", [b"y"])).code is ErrorCode.READ_ONLY


async def fall_short(leader: LeaderAlone) -> None:
    """Have the follower drop out of the in-sync set while the lease goes on."""
    leader.clock.advance(LAG_MS + 1)
    assert leader.said.led is not None
    leader.said.say(leader.said.led.leadership)
    await until(lambda: in_sync(leader) == (ME,))


async def test_while_too_few_are_in_sync_nobody_is_told_that_an_adopted_message_is_kept(
    leader: LeaderAlone, follower: Follower
) -> None:
    raw = await leader.connect()
    adopting = await raw.put(adoption())
    await follower.copy_all(leader, b"body")
    assert not await raw.is_answered(adopting)
    await fall_short(leader)

    with pytest.raises(UnavailableError, match="whether it will be kept is not known"):
        expect(await raw.answer_to(adopting), Adopted)
    with pytest.raises(ReadOnlyError, match="1 brokers of group g1 are in sync"):
        await raw.ask(adoption(), Adopted)  # the same one: the leader alone has it
    await follower.copy_all(leader)
    await follower.sync()
    await until(lambda: in_sync(leader) == (ME, OTHER))
    assert (await raw.ask(adoption(), Adopted)).is_duplicate
    assert (await raw.pull("%retry%orders%g", timeout_ms=5000)).bodies == [b"body"]


async def test_while_too_few_are_in_sync_nobody_is_told_that_a_repeated_message_is_kept(
    leader: LeaderAlone, follower: Follower
) -> None:
    raw = await leader.connect()
    batch = ("orders", pack_batch("orders", [b"x"], produced_by=ProducedBy(7, 0, 1)))
    await raw.ask(Send(Acks.MEMORY, 10_000, (batch,)), Sent)
    again = await raw.put(Send(Acks.REPLICA, 10_000, (batch,)))
    await follower.copy_all(leader, b"x")
    assert not await raw.is_answered(again)
    await fall_short(leader)

    assert await outcome(raw, again) is ErrorCode.UNAVAILABLE
    await follower.copy_all(leader)
    await follower.sync()
    await until(lambda: in_sync(leader) == (ME, OTHER))
    repeated = await raw.ask(Send(Acks.REPLICA, 10_000, (batch,)), Sent)
    assert repeated.outcomes[0][:2] == (ErrorCode.NONE, True)


@pytest.mark.parametrize("is_short_before", [False, True], ids=["under way", "asked while short"])
async def test_while_too_few_are_in_sync_pulls_of_a_once_group_go_on(
    leader: LeaderAlone, follower: Follower, *, is_short_before: bool
) -> None:
    raw = await leader.connect()
    subscribing = await raw.put(Subscribe("g", "c", 1, "orders", Mode.ONCE))
    while not await raw.is_answered(subscribing):
        await follower.copy()
        await follower.sync()
    sending = await begin_send(raw)
    await follower.copy_all(leader, b"x")
    await follower.sync()
    assert await outcome(raw, sending) is ErrorCode.NONE
    if is_short_before:
        await fall_short(leader)
    wanted = (Wanted("orders", FROM_SETTLED),)
    pulling = await raw.put(Pull("g", "c", 1, 10, 1 << 20, 0, EARLIEST, wanted))
    if not is_short_before:
        assert not await raw.is_answered(pulling)
        await fall_short(leader)

    # It is settled already: were it not answered, nobody would ever handle it.
    answer = await raw.answer_to(pulling)
    assert isinstance(answer, Pulled)
    assert len(answer.deliveries) == 1


async def test_a_send_whose_outcome_nobody_knew_is_answered_when_it_comes_again(
    leader: LeaderAlone, follower: Follower
) -> None:
    raw = await leader.connect()
    again = pack_batch("orders", [b"x"], produced_by=ProducedBy(7, 0, 1))
    request = Send(Acks.DISK, 10_000, (("orders", again),))
    sending = await raw.put(request)
    await follower.copy_all(leader, b"x")
    leading, said = leader.broker.leading, leader.said.led
    assert leading is not None
    assert said is not None
    before = said.leadership
    await until(lambda: leading.own == leading.end)
    # Too few are in sync, twice in a row, and the one that is has everything.
    leader.said.say(before._replace(version=before.version + 1, min_in_sync=3))
    leader.said.say(before._replace(version=before.version + 2, min_in_sync=4))
    assert await outcome(raw, sending) is ErrorCode.UNAVAILABLE

    leader.said.say(before._replace(version=before.version + 3))
    repeated = await raw.put(request)
    await follower.sync()
    assert await outcome(raw, repeated) is ErrorCode.NONE
    assert await seen(raw) == [b"x"]


async def test_a_change_whose_outcome_nobody_knows_is_asked_for_again(
    leader: LeaderAlone, follower: Follower
) -> None:
    raw = await leader.connect()
    sending = await begin_send(raw)
    await follower.copy_all(leader, b"x")
    leader.said.is_away = True
    leader.clock.advance(LAG_MS + 1)
    await until(lambda: leader.said.tries > 1)
    assert in_sync(leader) == (ME, OTHER)

    leader.said.is_away = False
    await until(lambda: in_sync(leader) == (ME,))
    assert leader.said.asked[-1].in_sync == (ME,)
    assert await outcome(raw, sending) is ErrorCode.UNAVAILABLE


async def test_a_retry_that_is_due_before_it_is_confirmed_waits_for_that(
    leader: LeaderAlone, follower: Follower
) -> None:
    raw = await leader.connect()
    sending = await begin_send(raw)
    await follower.copy_all(leader, b"x")
    await follower.sync()
    await outcome(raw, sending)
    (run,) = (await raw.pull("orders")).runs
    await raw.settle(run, nacked={0: "failed"}, delay_ms=100)
    leader.clock.advance(200)
    # It is due, and nobody but the leader has it: looked at many times, it is not given up.
    for _ in range(20):
        await follower.copy(wait_ms=20)

    again: list[bytes] = []
    for _ in range(200):
        await follower.copy(wait_ms=20)
        await follower.sync()
        again = (await raw.pull("%retry%orders%g")).bodies
        if again:
            break
    assert again == [b"x"]


async def test_a_retry_is_left_to_do_before_and_after_it_is_confirmed(
    leader: LeaderAlone, follower: Follower
) -> None:
    raw = await leader.connect()
    sending = await begin_send(raw)
    await follower.copy_all(leader, b"x")
    await follower.sync()
    await outcome(raw, sending)
    (run,) = (await raw.pull("orders")).runs
    await raw.settle(run, nacked={0: "failed"}, delay_ms=0)

    # The follower has not synced what the leader wrote since.
    await follower.copy_all(leader, b"%retry%orders%g")
    status = await raw.status()
    ends = {each["name"]: each["end"] for each in status["partitions"]}
    assert (ends["%retry%orders%g"], status["messages_left"]) == (0, 1)
    await follower.sync()
    assert (await raw.status())["messages_left"] == 1


async def test_a_leader_hands_over_to_a_follower_that_has_all(
    leader: LeaderAlone, follower: Follower
) -> None:
    raw = await leader.connect()
    with pytest.raises(NotAllowedError, match="not in sync"):
        await raw.ask(HandOver("stranger"), HandedOver)

    sending = await begin_send(raw)
    asking = await raw.put(HandOver(OTHER))
    await follower.copy_all(leader, b"x")
    with pytest.raises(NotLeaderError, match="hands its leadership over"):
        await (await leader.connect()).read("orders")
    assert leader.said.asked[1:] == []  # it does not have all on its disk

    await follower.sync()
    answer = await raw.answer_to(asking)
    assert isinstance(answer, HandedOver)
    assert (answer.leadership.leader, answer.leadership.epoch) == (OTHER, EPOCH + 1)
    assert await outcome(raw, sending) is ErrorCode.NONE
    assert leader.broker.is_deposed


async def test_a_checkpoint_is_given_to_followers_only_and_no_question_about_it_does_harm(
    leader: LeaderAlone, follower: Follower
) -> None:
    stranger = await leader.connect()
    with pytest.raises(NotAllowedError, match="before it asks for more"):
        await stranger.ask(CopyCheckpoint(1, 0, 1000), CheckpointPart)

    whole = await follower.raw.ask(CopyCheckpoint(1, 0, 1 << 20), CheckpointPart)
    assert len(whole.data) == whole.size > 0
    for offset in (whole.size, 2**40, 2**63, 2**64 - 1):
        beyond = await follower.raw.ask(CopyCheckpoint(1, offset, 1 << 20), CheckpointPart)
        assert (beyond.size, bytes(beyond.data)) == (whole.size, b"")
    assert (await follower.raw.ask(CopyCheckpoint(999, 0, 10), CheckpointPart)).number == 0


@pytest.mark.parametrize("offset", [10**9, 2**62, 2**63, 2**64 - 1])
async def test_a_follower_that_claims_what_there_is_not_is_refused(
    leader: LeaderAlone, follower: Follower, offset: int
) -> None:
    for request in (
        Replicate(OTHER, EPOCH, offset, 0, 0, 0, True, 1 << 20, 0),
        Replicate(OTHER, EPOCH, 0, offset, 0, 0, True, 1 << 20, 0),
        Replicate(OTHER, EPOCH, 0, 0, offset, 0, True, 1 << 20, 0),
        Replicate(OTHER, EPOCH, 0, 0, 0, offset, True, 1 << 20, 0),
    ):
        answer = await follower.raw.answer_to(await follower.raw.put(request))
        assert isinstance(answer, RejectedError), request

    assert not leader.broker.is_deposed
    await follower.copy()


async def test_one_connection_follows_for_one_directory(
    leader: LeaderAlone, follower: Follower
) -> None:
    with pytest.raises(NotAllowedError, match="is that of other already"):
        await Follower(follower.raw, "another").follow()


async def test_a_pull_that_was_held_is_not_answered_by_one_that_leads_no_more(
    leader: LeaderAlone, follower: Follower
) -> None:
    raw = await leader.connect()
    sending = await begin_send(raw)
    await follower.copy_all(leader, b"x")
    puller = await leader.connect()
    waiting = asyncio.create_task(puller.pull("orders", timeout_ms=10_000))

    async def is_held() -> bool:
        return bool(json.loads((await raw.ask(Status(), StatusReport)).report)["pulls_waiting"])

    await eventually(is_held)
    leader.said.is_away = True
    leader.clock.advance(LEASE_MS)
    await follower.sync()  # it is confirmed, and who waits for it is woken up

    with pytest.raises(NotLeaderError):
        await waiting
    assert await outcome(raw, sending) is ErrorCode.NONE


async def test_meta_servers_are_asked_in_turn_for_one_may_be_cut_off_from_the_database() -> None:
    asked: list[str] = []
    row = Leadership("g1", Epoch(EPOCH), 7, ME, "token", (ME,), 2)
    newer = row._replace(version=8, epoch=Epoch(EPOCH + 1))
    answers = {"old": row, "new": newer}

    class Line:
        is_open = True

        def __init__(self, name: str) -> None:
            self.name = name

        async def request(self, *_: object) -> Led:
            asked.append(self.name)
            await asyncio.sleep(0)
            return Led(answers[self.name], "", "", 0, LEASE_MS)

    class Link:
        def __init__(self, name: str) -> None:
            self.connection = Line(name)

    links: Any = [Link("old"), Link("new")]
    question = Lead("g1", "b", ME, "token", 0, 0, 2, True, 0)
    authority = Authority(links, lambda *_: question, ManualClock(), lambda *_, **__: None)
    asking = asyncio.create_task(authority.run())
    try:
        await until(lambda: authority.led is not None and authority.led.leadership is newer)
        count = len(asked)
        await until(lambda: len(asked) > count + 4)
    finally:
        asking.cancel()

    assert authority.led is not None
    assert authority.led.leadership is newer  # the other one goes on telling what is over
    assert {"old", "new"} == set(asked[count:])
