"""A nack whose broker is away is taken over with the message, by the rules of any nack, once."""

from collections.abc import Mapping
from random import Random

import pytest

from pulque.errors import (
    InvalidBatchError,
    InvalidNameError,
    InvalidRequestError,
    NotAllowedError,
    ReadOnlyError,
)
from pulque.model.batch import Codec, seed_of
from pulque.model.names import PartitionName
from pulque.model.pack import BatchPacker, encode_headers, encode_tags
from pulque.model.positions import ConsumeSequence
from pulque.testing.clock import ManualClock
from pulque.testing.files import Cut
from pulque.testing.raw import RawConnection, expect
from pulque.wire.adopt import Origin
from pulque.wire.requests import Adopt
from pulque.wire.responses import Adopted
from tests.unit.broker.disks import GatedDisk
from tests.unit.broker.fake_meta import FakeMeta, registered
from tests.unit.broker.running import Running, Start, eventually

MESSAGE_ID = bytes(range(16))
CREATED_MS = 1_700_000_000_123
RETRY, WAIT, DEAD = (f"%{kind}%orders%g" for kind in ("retry", "wait", "dead"))


def batch_of(
    partition: str = "orders",
    *,
    attempt: int = 1,
    headers: Mapping[str, str] | None = None,
    count: int = 1,
    codec: Codec = Codec.NONE,
) -> bytes:
    packer = BatchPacker()
    for _ in range(count):
        packer.add_encoded(
            b"body",
            key=b"k",
            order_key=b"o",
            tags=encode_tags(("red",)),
            headers=encode_headers(headers or {"who": "me"}, is_system=True),
            message_id=MESSAGE_ID,
            attempt=attempt,
        )
    return packer.encode(
        seed=seed_of(partition), ids=bytes(16 * count), created_at_ms=CREATED_MS, codec=codec
    )


def adoption(  # one for each field that a test sets
    partition: str = "orders",
    *,
    sequence: int = 41,
    attempt: int = 1,
    delay_ms: int = 0,
    reason: str = "no stock",
    group: str = "g",
    broker_group: str = "east",
    batch: bytes | None = None,
) -> Adopt:
    origin = Origin(broker_group, PartitionName(partition), ConsumeSequence(sequence))
    content = batch_of(partition, attempt=attempt) if batch is None else batch
    return Adopt(group, "c", reason, delay_ms, attempt, origin, content)


@pytest.mark.accepts("000-32")
async def test_an_adopted_message_comes_to_its_group_as_the_next_attempt(
    raw: RawConnection,
) -> None:
    adopted = await raw.ask(adoption(), Adopted)
    got = await raw.pull(RETRY, timeout_ms=5000)

    (message,) = got.runs[0].messages
    assert adopted == Adopted(PartitionName(RETRY), ConsumeSequence(0), is_duplicate=False)
    assert (bytes.fromhex(message.id), message.body) == (MESSAGE_ID, b"body")
    assert (message.key, message.order_key, message.tags) == ("k", "o", ("red",))
    assert message.created_at_ms == CREATED_MS
    assert message.attempt == 2
    assert message.headers["who"] == "me"
    assert message.headers["pulque.reason"] == "no stock"
    assert message.headers["pulque.origin"] == "@east/orders/41/1"
    assert "no stock" in message.headers["pulque.failed.1"]


@pytest.mark.accepts("000-32")
async def test_it_waits_as_any_nack_does(start: Start) -> None:
    clock = ManualClock()
    running = await start(clock=clock, retry={"delays": "10s 60s", "jitter_percent": 0})
    raw = await running.connect()

    later = await raw.ask(adoption(sequence=1, delay_ms=-1), Adopted)
    own = await raw.ask(adoption(sequence=2, delay_ms=3000), Adopted)
    _, waiting = await raw.read(WAIT)

    assert (later.partition, own.partition) == (WAIT, WAIT)
    assert [m.due_at_ms - clock.now_ms() for m in waiting] == [10_000, 3000]
    clock.advance(3100)
    first = await raw.pull(RETRY, timeout_ms=5000)
    assert [m.headers["pulque.first"] for m in first.runs[0].messages] == ["orders/2"]


async def test_reasons_and_attempts_of_before_are_kept_to_the_dead_letter(start: Start) -> None:
    running = await start(retry={"attempts": 3, "delays": "0s"})
    raw = await running.connect()
    partition = "%retry%orders%g"
    headers = {
        "who": "me",
        "pulque.failed.1": "once",
        "pulque.failed.2": "twice",
        "pulque.origin": "orders/7",
        "pulque.first": "orders/7",
    }
    batch = batch_of(partition, attempt=3, headers=headers)

    adopted = await raw.ask(adoption(partition, attempt=3, batch=batch), Adopted)
    _, dead = await raw.read(DEAD)

    assert adopted.partition == DEAD
    assert dead[0].attempt == 3
    assert dead[0].headers["pulque.dead"] == "3 attempts failed"
    assert [dead[0].headers[f"pulque.failed.{n}"][:5] for n in (1, 2)] == ["once", "twice"]
    assert dead[0].headers["pulque.first"] == "orders/7"
    assert dead[0].headers["pulque.origin"] == "@east/%retry%orders%g/41/3"


async def test_an_adopted_message_cannot_claim_to_stand_for_others(start: Start) -> None:
    """A broker that recovers would take those for dealt with."""
    raw = await (await start(retry={"attempts": 9, "delays": "0s"})).connect()
    headers = {"who": "me", "pulque.unreadable": "0-99", "pulque.unreadable.count": "100"}
    batch = batch_of(RETRY, attempt=3, headers=headers)

    await raw.ask(adoption(RETRY, attempt=3, batch=batch), Adopted)
    _, (again,) = await raw.read(RETRY)

    assert again.headers["who"] == "me"
    assert not [name for name in again.headers if name.startswith("pulque.unreadable")]


async def test_one_that_is_not_to_be_tried_again_is_dead_at_once(raw: RawConnection) -> None:
    adopted = await raw.ask(adoption(delay_ms=-2), Adopted)

    assert adopted.partition == DEAD


async def test_what_was_to_be_delivered_once_does_not_come_again(raw: RawConnection) -> None:
    batch = batch_of(headers={"pulque.once": "1"})

    await raw.ask(adoption(batch=batch), Adopted)

    assert (await raw.status())["partition_count"] == 0


@pytest.mark.accepts("000-32")
async def test_the_same_adoption_is_stored_once(raw: RawConnection) -> None:
    ids = [await raw.put(adoption()) for _ in range(5)]
    answers = [await raw.answer_to(each) for each in ids]
    again = await raw.ask(adoption(), Adopted)
    others = [
        await raw.ask(other, Adopted)
        for other in (
            adoption(sequence=42),
            adoption(attempt=2),
            adoption(broker_group="west"),
            adoption(group="h"),
        )
    ]

    places = {(a.partition, a.sequence) for a in answers if isinstance(a, Adopted)}
    assert places == {(RETRY, 0)}
    assert again == Adopted(PartitionName(RETRY), ConsumeSequence(0), is_duplicate=True)
    assert not any(other.is_duplicate for other in others)
    assert (await raw.read(RETRY))[0].end == 4


@pytest.mark.parametrize("delay_ms", [0, 60_000])
async def test_it_is_answered_once_it_would_survive_a_power_cut(
    start: Start, delay_ms: int
) -> None:
    disk = GatedDisk()
    running = await start(files=disk, storage={"sync_interval": "1m"})
    raw, other = await running.connect(), await running.connect()
    target = WAIT if delay_ms else RETRY
    disk.close_gate()
    ids = [await raw.put(adoption(delay_ms=delay_ms)) for _ in range(2)]

    async def is_written() -> bool:
        return (await other.status())["partition_count"] == 1 and disk.syncs_waiting > 0

    await eventually(is_written)
    assert not await raw.is_answered(ids[0])
    ids.append(await raw.put(adoption(delay_ms=delay_ms)))  # asked again: it waits as well
    assert not await raw.is_answered(ids[2])
    disk.open_gate()
    answers = [expect(await raw.answer_to(each), Adopted) for each in ids]
    left = disk.after_power_cut(disk.operations, Cut.LOST, Random(1))

    assert {(each.partition, each.sequence) for each in answers} == {(target, 0)}
    cut = await (await start(files=left)).connect()
    _, messages = await cut.read(target)
    assert [message.body for message in messages] == [b"body"]


@pytest.mark.parametrize("with_checkpoint", [False, True])
async def test_it_is_known_after_a_crash(start: Start, with_checkpoint: bool) -> None:  # noqa: FBT001
    running = await start(storage={"checkpoint_interval": "1s"})
    raw = await running.connect()
    await raw.send("orders", [b"local"])
    await raw.ask(adoption(sequence=0, delay_ms=60_000), Adopted)
    if with_checkpoint:
        before = running.checkpoints()

        async def is_checkpointed() -> bool:
            return running.checkpoints() != before

        await eventually(is_checkpointed)
    crashed = await start(running.as_if_killed("crashed"))
    again = await crashed.connect()

    answer = await again.ask(adoption(sequence=0, delay_ms=60_000), Adopted)
    status = await again.status()
    local = await again.pull("orders")
    await again.settle(local.runs[0], nacked={0: "its own"}, delay_ms=60_000)

    assert answer == Adopted(PartitionName(WAIT), ConsumeSequence(0), is_duplicate=True)
    assert status["messages_waiting"] == 1
    # A local message of the same name and number is another one, and not taken for redelivered.
    assert local.bodies == [b"local"]

    async def both_wait() -> bool:
        return bool((await again.status())["messages_waiting"] == 2)

    await eventually(both_wait)


async def test_a_compressed_message_is_adopted(raw: RawConnection) -> None:
    batch = batch_of(codec=Codec.ZSTD)

    await raw.ask(adoption(batch=batch), Adopted)

    assert (await raw.pull(RETRY, timeout_ms=5000)).bodies == [b"body"]


@pytest.mark.parametrize(
    ("asked", "kind"),
    [
        (adoption(batch=batch_of("other")), InvalidBatchError),
        (adoption(batch=b"nonsense"), InvalidBatchError),
        (adoption(batch=batch_of(count=2)), InvalidRequestError),
        (adoption(batch=batch_of(attempt=2)), InvalidRequestError),
        (adoption(delay_ms=-3), InvalidRequestError),
        (adoption(delay_ms=2**40), InvalidRequestError),
        (adoption("%retry%orders%h"), NotAllowedError),
        (adoption("%dead%orders%g"), NotAllowedError),
        (adoption("%%"), InvalidNameError),
        (adoption(broker_group="a/b"), InvalidNameError),
        (adoption(group="#other"), InvalidNameError),
    ],
    ids=lambda each: each.__name__ if isinstance(each, type) else "",
)
async def test_what_makes_no_sense_is_refused(
    raw: RawConnection, asked: Adopt, kind: type[Exception]
) -> None:
    with pytest.raises(kind):
        await raw.ask(asked, Adopted)

    assert (await raw.status())["partition_count"] == 0


async def test_a_broker_that_is_being_drained_adopts_nothing_new(start: Start) -> None:
    meta = FakeMeta()
    await meta.start()
    running: Running = await start(cluster={"meta": [meta.address]})
    raw = await running.connect()
    await raw.ask(adoption(), Adopted)
    meta.standing = registered(is_draining=True)

    async def is_draining() -> bool:
        return bool((await raw.status())["cluster"]["is_draining"])

    await eventually(is_draining)

    assert (await raw.ask(adoption(), Adopted)).is_duplicate
    with pytest.raises(ReadOnlyError, match="being drained"):
        await raw.ask(adoption(sequence=42), Adopted)
    await meta.stop()
