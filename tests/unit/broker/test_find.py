"""Requests to find messages: what is refused, what is bounded, and what goes on meanwhile."""

import dataclasses

import pytest

from pulque.errors import InvalidNameError, InvalidRequestError, PulqueError, UnknownSubjectError
from pulque.model.batch import Codec, read_header, seed_of
from pulque.model.ids import IdSource
from pulque.model.message import Message, StoredBatch
from pulque.model.names import PartitionName, level_of
from pulque.model.pack import BatchPacker
from pulque.testing.raw import RawConnection
from pulque.wire.find import Find, FoundMessage, FoundMessages
from pulque.wire.requests import Acks, Send
from pulque.wire.responses import Sent
from tests.unit.broker.running import Running, Start, eventually

IDS = IdSource(7)
# Two keys with the same CRC-32C.
TWINS = ("6352603e", "33f2a4a7")


async def send(
    raw: RawConnection, partition: str, keys: list[str], codec: Codec = Codec.NONE, size: int = 4
) -> list[str]:
    """Store a batch of messages with keys; return their ids."""
    packer = BatchPacker()
    for number, key in enumerate(keys):
        packer.add(b"%04d" % number + b"x" * (size - 4), key=key or None)
    ids = IDS.many(1_700_000_000_000, len(keys))
    batch = packer.encode(
        seed=seed_of(partition),
        ids=ids,
        created_at_ms=1,
        priority=level_of(PartitionName(partition)),
        codec=codec,
    )
    answer = await raw.ask(Send(Acks.MEMORY, 1000, ((partition, batch),)), Sent)
    assert not answer.outcomes[0].code
    return [ids[at : at + 16].hex() for at in range(0, len(ids), 16)]


def message_of(found: FoundMessage) -> Message:
    batch = StoredBatch(
        found.batch,
        partition=found.partition,
        first_sequence=found.sequence,
        stored_at_ms=found.stored_at_ms,
    )
    return Message(batch, 0)


def facts_of(found: FoundMessage) -> tuple[str, int, int, str, bytes]:
    message = message_of(found)
    return (*found[:3], message.id, message.body)


async def find_all(raw: RawConnection, request: Find) -> list[FoundMessage]:
    """Ask until all was looked at."""
    found: list[FoundMessage] = []
    for _ in range(1000):
        answer = await raw.ask(request, FoundMessages)
        assert len(answer.messages) <= request.max_messages
        found += answer.messages
        if not answer.next:
            return found
        request = dataclasses.replace(request, after=answer.next)
    raise AssertionError("it never ends")


@pytest.mark.accepts("004-94")
async def test_equal_hashes_are_all_candidates(raw: RawConnection) -> None:
    await send(raw, "orders", [TWINS[0], "other", TWINS[1], ""])
    found = await find_all(raw, Find("orders", TWINS[0]))
    assert [(each.sequence, message_of(each).key) for each in found] == [
        (2, TWINS[1]),
        (0, TWINS[0]),
    ]


@pytest.mark.parametrize(
    ("request_", "error"),
    [
        (Find(""), InvalidNameError),
        (Find("orders.*"), InvalidNameError),
        (Find("orders", "a", bytes(16)), InvalidRequestError),
        (Find("orders", id=bytes(15)), InvalidRequestError),
        (Find("orders", id=bytes(17)), InvalidRequestError),
        (Find("orders", "a", max_messages=0), InvalidRequestError),
        (Find("orders", "a", max_messages=1001), InvalidRequestError),
        (Find("orders", "a", since_ms=5, until_ms=5), InvalidRequestError),
        (Find("orders", "a", since_ms=6, until_ms=5), InvalidRequestError),
        (Find("orders", "a", after=b"?"), InvalidRequestError),
        (Find("orders", after=b"h" + bytes(12)), InvalidRequestError),
        (Find("nothing", "a"), UnknownSubjectError),
        (Find("order", "a"), UnknownSubjectError),
    ],
)
async def test_what_makes_no_sense_is_refused(
    raw: RawConnection, request_: Find, error: type[PulqueError]
) -> None:
    await send(raw, "orders", ["a"])
    with pytest.raises(error):
        await raw.ask(request_, FoundMessages)
    assert len(await find_all(raw, Find("orders", "a"))) == 1


@pytest.mark.parametrize("by", ["key", "time"])
async def test_answers_are_bounded_and_together_they_have_all(raw: RawConnection, by: str) -> None:
    for _ in range(3):
        await send(raw, "orders", ["a"] * 7)
        await send(raw, "orders#p7", ["a"] * 7)
        await send(raw, "orders", ["a"] * 7, Codec.LZ4)
    key = "a" if by == "key" else ""
    whole = await find_all(raw, Find("orders", key, max_messages=1000))
    assert len(whole) == 63
    assert {(each.partition, each.sequence) for each in whole} == {
        *(("orders", i) for i in range(42)),
        *(("orders#p7", i) for i in range(21)),
    }
    times = [each.stored_at_ms for each in whole]
    assert times == sorted(times, reverse=True)
    for limits in ({"max_messages": 4}, {"max_bytes": 1}, {"max_bytes": 500}):
        request = dataclasses.replace(Find("orders", key, max_messages=1000), **limits)  # type: ignore[arg-type]
        some = await raw.ask(request, FoundMessages)
        assert 0 < len(some.messages) < 8
        parts = await find_all(raw, request)
        assert sorted(map(facts_of, parts)) == sorted(map(facts_of, whole))


async def test_messages_are_as_they_were_sent_whatever_their_batch_was(raw: RawConnection) -> None:
    for codec in Codec:
        ids = await send(raw, "orders", ["a", "b", "a"], codec, 900)
        found = await raw.ask(Find("orders", "b", max_messages=1), FoundMessages)
        (message,) = map(message_of, found.messages)
        assert (message.id, message.key, message.body[:4]) == (ids[1], "b", b"0001")
        assert message.source()[0].header.codec == Codec.NONE
        by_id = await find_all(raw, Find("", id=bytes.fromhex(ids[2])))
        assert [message_of(each).body[:4] for each in by_id] == [b"0002"]


async def test_retries_and_dead_letters_are_found_where_asked(
    running: Running, raw: RawConnection
) -> None:
    await send(raw, "orders", ["a"])
    await send(raw, "orders2", ["a"])
    engine = running.broker._state.engine  # noqa: SLF001
    for name in ("%retry%orders%kitchen", "%dead%orders%kitchen", "%dead%orders2%kitchen"):
        packer = BatchPacker()
        packer.add(b"again", key="a")
        batch = packer.encode(seed=seed_of(name), ids=IDS.one(1), created_at_ms=1)
        partition = engine.create_partition(PartitionName(name), 1)
        engine.append(partition, batch, read_header(batch), now_ms=1, wants_disk=False)
        engine.write()
    plain = await find_all(raw, Find("orders", "a"))
    assert [each.partition for each in plain] == ["orders"]
    for key in ("a", ""):
        copies = await find_all(raw, Find("orders", key, copies=True))
        assert {each.partition for each in copies} == {
            "orders",
            "%retry%orders%kitchen",
            "%dead%orders%kitchen",
        }


@pytest.mark.accepts("004-48")
async def test_the_index_is_written_behind_the_log(start: Start) -> None:
    running = await start(storage={"segment_size": "64KiB"})
    raw = await running.connect()
    for number in range(60):
        await send(raw, "orders", [f"key {number}"] * 4, size=1000)
    assert len(running.broker._state.engine.segments) > 2  # noqa: SLF001
    await all_indexed(running)
    for number in (0, 31, 59):
        assert len(await find_all(raw, Find("orders", f"key {number}"))) == 4


async def all_indexed(running: Running) -> None:
    """Wait until every sealed segment has its file."""

    async def is_done() -> bool:
        logs = sorted(path.stem for path in running.directory.glob("messages/*.log"))
        files = {path.stem for path in running.directory.glob("messages/*.keys")}
        return set(logs[:-1]) <= files

    await eventually(is_done, 60)
