"""Sends: each batch is checked, deduplicated, stored and answered on its own."""

from collections.abc import Callable
from pathlib import Path

import pytest

from pulque.errors import ErrorCode, InvalidRequestError, PulqueError
from pulque.model.batch import (
    HEADER,
    HEADER_SIZE,
    Codec,
    Flag,
    layout_of,
    read_header,
    seal,
    seed_of,
)
from pulque.model.pack import BatchPacker, ProducedBy
from pulque.testing.raw import RawConnection, pack_batch
from pulque.wire.requests import Acks, Send
from pulque.wire.responses import Outcome, Sent
from tests.unit.broker.running import Running, Start, numbered


async def send(raw: RawConnection, *batches: tuple[str, bytes], acks: Acks = Acks.MEMORY) -> Sent:
    return await raw.ask(Send(acks, 1000, batches), Sent)


def resealed(batch: bytes, partition: str, **changes: int) -> bytes:
    """Return a batch with other numbers in its header, and a crc that matches them."""
    names = (
        "crc",
        "flags",
        "codec",
        "priority",
        "count",
        "records_size",
        "producer_id",
        "incarnation",
        "producer_sequence",
        "created_at_ms",
        "tag_union",
    )
    fields = dict(zip(names, HEADER.unpack_from(batch), strict=True)) | changes
    head = HEADER.pack(*fields.values())
    return seal(head[4:] + batch[HEADER_SIZE:], seed_of(partition))


@pytest.mark.parametrize("acks", [Acks.MEMORY, Acks.DISK])
async def test_batches_are_appended_in_order_and_their_place_is_told(
    raw: RawConnection, acks: Acks
) -> None:
    outcomes = [await raw.send("orders", numbered(3, 3 * n), acks=acks) for n in range(3)]
    other = await raw.send("other", [b"x"], acks=acks)

    assert [outcome.first_sequence for outcome in outcomes] == [0, 3, 6]
    assert all(outcome.code is ErrorCode.NONE for outcome in outcomes)
    assert outcomes[0].stored_at_ms <= outcomes[2].stored_at_ms
    assert other.first_sequence == 0
    _, messages = await raw.read("orders")
    assert [message.body for message in messages] == numbered(9)


async def test_one_send_may_hold_batches_of_many_partitions_each_with_its_outcome(
    raw: RawConnection,
) -> None:
    answer = await send(
        raw,
        ("a", pack_batch("a", [b"1"])),
        ("b", pack_batch("strayed", [b"2"])),
        ("../x", pack_batch("../x", [b"3"])),
        ("%retry%a%g", pack_batch("%retry%a%g", [b"4"])),
        ("c", b"too short"),
        ("a", pack_batch("a", [b"5"])),
        acks=Acks.DISK,
    )

    assert [(o.code, o.first_sequence) for o in answer.outcomes] == [
        (ErrorCode.NONE, 0),
        (ErrorCode.INVALID_BATCH, 0),
        (ErrorCode.INVALID_NAME, 0),
        (ErrorCode.NOT_ALLOWED, 0),
        (ErrorCode.INVALID_BATCH, 0),
        (ErrorCode.NONE, 1),
    ]
    assert all(o.text for o in answer.outcomes if o.code)
    status = await raw.status()
    assert {p["name"]: p["end"] for p in status["partitions"]} == {"a": 2}
    assert status["sends_refused"] == 4


@pytest.mark.parametrize("count", [0, 1025])
async def test_a_send_of_no_batches_or_too_many_is_refused(raw: RawConnection, count: int) -> None:
    with pytest.raises(InvalidRequestError):
        await send(raw, *[("a", b"")] * count)

    assert (await raw.send("a", [b"x"])).code is ErrorCode.NONE


@pytest.mark.accepts("001-24", "003-01", "000-15")
async def test_all_subjects_share_one_log(running: Running, raw: RawConnection) -> None:
    await raw.send("subject0", [b"x"])
    before = sorted(path.name for path in running.directory.rglob("*"))

    for number in range(200):
        await raw.send(f"subject{number}", [b"%d" % number], acks=Acks.DISK)

    assert sorted(path.name for path in running.directory.rglob("*")) == before
    assert len(list(running.directory.glob("messages/*.log"))) == 1
    assert (await raw.status())["partition_count"] == 200


@pytest.mark.accepts("000-49", "000-14")
async def test_bodies_are_stored_byte_by_byte_as_received(
    running: Running, raw: RawConnection
) -> None:
    batch = pack_batch("orders", [b"\x00\xff" * 50, b""], headers={"a": "b"})
    await send(raw, ("orders", batch))

    (segment,) = running.directory.glob("messages/*.log")
    assert batch in segment.read_bytes()


# -- what may not be stored ---------------------------------------------------------------------


def damaged_batches() -> dict[str, tuple[bytes, ErrorCode]]:
    plain = pack_batch("orders", numbered(3))
    flipped = bytearray(plain)
    flipped[-1] ^= 1
    due = resealed(plain, "orders", flags=Flag.DUE)
    sizes = bytearray(plain)
    sizes[HEADER_SIZE] ^= 1
    lying_sizes = seal(bytes(sizes[4:]), seed_of("orders"))
    packed = pack_batch("orders", [b"x" * 1000] * 9, codec=Codec.ZSTD)
    invalid = ErrorCode.INVALID_BATCH
    return {
        "empty": (b"", invalid),
        "short": (plain[: HEADER_SIZE - 1], invalid),
        "cut": (plain[:-1], invalid),
        "longer": (plain + b"x", invalid),
        "flipped": (bytes(flipped), invalid),
        "of no messages": (resealed(plain, "orders", count=0), invalid),
        "of too many": (resealed(plain, "orders", count=10_001), invalid),
        "of other count": (resealed(plain, "orders", count=2), invalid),
        "unknown codec": (resealed(plain, "orders", codec=9), invalid),
        "unknown flag": (resealed(plain, "orders", flags=1 << 15), invalid),
        "priority 10": (resealed(plain, "orders", priority=10), invalid),
        "records too large": (resealed(packed, "orders", records_size=2**31), invalid),
        "records too small": (resealed(packed, "orders", records_size=1), invalid),
        "sizes lie": (lying_sizes, invalid),
        "due": (due, invalid),
    }


@pytest.mark.accepts("003-29")
@pytest.mark.parametrize("name", damaged_batches())
async def test_a_batch_that_cannot_be_is_refused_and_nothing_is_stored(
    raw: RawConnection, name: str
) -> None:
    batch, code = damaged_batches()[name]

    (outcome,) = (await send(raw, ("orders", batch))).outcomes

    assert outcome.code is code
    assert (await raw.status())["partition_count"] == 0


def keyed(count: int, **sizes: int) -> bytes:
    """Return a batch whose last message has parts of other sizes than it says."""
    packer = BatchPacker()
    for number in range(count):
        packer.add(b"%d" % number, key="k", order_key="o", tags=["t"], headers={"h": "v"})
    batch = packer.encode(seed=seed_of("a"), ids=bytes(16 * count), created_at_ms=1)
    layout = layout_of(read_header(batch).flags)
    for name, size in sizes.items():
        column = next(each for each in layout.columns if each.name == name)
        at = layout.column_start(name, count) + (count - 1) * column.width
        batch = batch[:at] + size.to_bytes(column.width, "little") + batch[at + column.width :]
    return seal(batch[4:], seed_of("a"))


def compressed(codec: Codec, records: Callable[[bytes], bytes]) -> bytes:
    batch = pack_batch("a", [b"x" * 500] * 3, codec=codec)
    start = layout_of(read_header(batch).flags).records_start(3)
    return seal(batch[4:start] + records(batch[start:]), seed_of("a"))


@pytest.mark.parametrize("count", [1, 2, 100])
@pytest.mark.parametrize("column", ["key_size", "order_key_size", "tags_size", "headers_size"])
async def test_parts_that_are_longer_than_their_message_are_refused(
    raw: RawConnection, count: int, column: str
) -> None:
    bad, good = keyed(count, **{column: 60_000}), keyed(count)

    answer = await send(raw, ("a", bad), ("a", good))

    assert [each.code for each in answer.outcomes] == [ErrorCode.INVALID_BATCH, ErrorCode.NONE]
    assert "longer than the message" in answer.outcomes[0].text


@pytest.mark.parametrize(
    ("codec", "records"),
    [
        (Codec.ZSTD, lambda good: b"garbage" * 20),
        (Codec.ZSTD, lambda good: b""),
        (Codec.ZSTD, lambda good: good[:5]),
        (Codec.ZSTD, lambda good: good[:5] + b"\xff\xff" + good[7:]),
        (Codec.LZ4, lambda good: b""),
        (Codec.LZ4, lambda good: good[:3]),
    ],
    ids=["garbage", "nothing", "cut", "another size", "no lz4", "too little lz4"],
)
async def test_records_that_cannot_decompress_are_refused(
    raw: RawConnection, codec: Codec, records: Callable[[bytes], bytes]
) -> None:
    bad, good = compressed(codec, records), compressed(codec, bytes)

    answer = await send(raw, ("a", bad), ("a", good))

    assert [each.code for each in answer.outcomes] == [ErrorCode.INVALID_BATCH, ErrorCode.NONE]


@pytest.mark.parametrize("opens", [False, True])
async def test_every_message_is_decoded_on_arrival_by_setting(start: Start, opens: bool) -> None:  # noqa: FBT001
    running = await start(limits={"open_records": opens})
    raw = await running.connect()
    packer = BatchPacker()
    packer.add_encoded(b"x", headers=b"name without a value")
    odd = packer.encode(seed=seed_of("a"), ids=bytes(16), created_at_ms=1)
    torn = compressed(Codec.ZSTD, lambda good: good[:-3])

    answer = await send(raw, ("a", odd), ("a", torn), ("a", keyed(2)))

    expected = ErrorCode.INVALID_BATCH if opens else ErrorCode.NONE
    assert [each.code for each in answer.outcomes] == [expected, expected, ErrorCode.NONE]


async def test_a_due_time_is_refused_as_not_supported(raw: RawConnection) -> None:
    body = BatchPacker()
    body.add(b"x")
    plain = body.encode(seed=0, ids=bytes(16), created_at_ms=0)
    with_due = plain[4:HEADER_SIZE] + plain[HEADER_SIZE : HEADER_SIZE + 4] + bytes(8)
    whole = with_due + plain[HEADER_SIZE + 4 :]
    batch = resealed(seal(whole, seed_of("orders")), "orders", flags=Flag.DUE)

    (outcome,) = (await send(raw, ("orders", batch))).outcomes

    assert outcome.code is ErrorCode.UNSUPPORTED


@pytest.mark.parametrize(
    ("bodies", "code"),
    [
        ([b"x" * 2000], ErrorCode.MESSAGE_TOO_LARGE),
        ([b"x" * 900] * 5, ErrorCode.MESSAGE_TOO_LARGE),
        ([b"x" * 1024], ErrorCode.NONE),
        ([b"x" * 1025], ErrorCode.MESSAGE_TOO_LARGE),
    ],
)
async def test_messages_and_batches_over_their_limits_are_refused(
    start: Start, bodies: list[bytes], code: ErrorCode
) -> None:
    running = await start(limits={"max_message": "1KiB", "max_batch": "4KiB"})
    raw = await running.connect()

    assert (await raw.send("orders", bodies)).code is code


# -- once ---------------------------------------------------------------------------------------


def by(number: int, producer: int = 5, incarnation: int = 1) -> ProducedBy:
    return ProducedBy(producer, incarnation, number)


@pytest.mark.accepts("004-09")
async def test_a_batch_that_is_sent_again_is_stored_once(
    running: Running, raw: RawConnection
) -> None:
    first = await raw.send("orders", [b"a"], produced_by=by(0))
    await raw.send("orders", [b"b"], produced_by=by(1))
    raw.close()
    raw = await running.connect()

    again = await raw.send("orders", [b"a"], produced_by=by(0))

    assert (again.first_sequence, again.is_duplicate) == (first.first_sequence, True)
    assert again.stored_at_ms == first.stored_at_ms
    _, messages = await raw.read("orders")
    assert [message.body for message in messages] == [b"a", b"b"]


@pytest.mark.accepts("004-09")
@pytest.mark.parametrize("how", ["stop", "kill"])
async def test_a_batch_that_is_sent_again_after_a_restart_is_stored_once(
    running: Running, raw: RawConnection, start: Start, how: str
) -> None:
    for number in range(3):
        await raw.send("orders", [str(number).encode()], produced_by=by(number), acks=Acks.DISK)
    if how == "stop":
        await running.close()
        directory: Path = running.directory
    else:
        directory = running.as_if_killed("killed")

    raw = await (await start(directory)).connect()
    outcomes = [
        await raw.send("orders", [str(number).encode()], produced_by=by(number))
        for number in (2, 0, 3)
    ]

    assert [(o.first_sequence, o.is_duplicate) for o in outcomes] == [
        (2, True),
        (0, True),
        (3, False),
    ]
    _, messages = await raw.read("orders")
    assert [message.body for message in messages] == numbered(4)


async def test_the_same_batch_twice_in_one_turn_is_stored_once(raw: RawConnection) -> None:
    batch = pack_batch("orders", [b"x"], produced_by=by(0))

    one = await raw.put(Send(Acks.DISK, 1000, (("orders", batch), ("orders", batch))))
    two = await raw.put(Send(Acks.MEMORY, 1000, (("orders", batch),)))

    outcomes: list[Outcome] = []
    for request in (one, two):
        answer = await raw.answer_to(request)
        assert isinstance(answer, Sent)
        outcomes += answer.outcomes
    assert [(o.first_sequence, o.is_duplicate) for o in outcomes] == [
        (0, False),
        (0, True),
        (0, True),
    ]
    assert (await raw.read("orders"))[0].end == 1


async def test_batches_of_one_producer_may_come_out_of_order(raw: RawConnection) -> None:
    for number in (1, 0, 3, 2):
        outcome = await raw.send("orders", [b"x"], produced_by=by(number))
        assert not outcome.is_duplicate

    assert (await raw.read("orders"))[0].end == 4


async def test_a_batch_too_old_to_tell_is_refused(raw: RawConnection) -> None:
    await raw.send("orders", [b"x"], produced_by=by(100))

    outcome = await raw.send("orders", [b"x"], produced_by=by(36))

    assert outcome.code is ErrorCode.INVALID_REQUEST
    assert (await raw.read("orders"))[0].end == 1


async def test_an_older_incarnation_of_a_producer_is_fenced_off(raw: RawConnection) -> None:
    await raw.send("orders", [b"x"], produced_by=by(0, incarnation=2))

    outcome = await raw.send("orders", [b"x"], produced_by=by(0, incarnation=1))

    assert outcome.code is ErrorCode.FENCED


async def test_a_refused_batch_leaves_its_number_to_a_better_one(raw: RawConnection) -> None:
    bad = pack_batch("strayed", [b"x"], produced_by=by(0))
    (outcome,) = (await send(raw, ("orders", bad))).outcomes
    assert outcome.code is ErrorCode.INVALID_BATCH

    assert not (await raw.send("orders", [b"x"], produced_by=by(0))).is_duplicate


# -- too much -----------------------------------------------------------------------------------


async def test_a_broker_with_too_much_on_its_way_to_the_disk_refuses(start: Start) -> None:
    running = await start(
        limits={"max_in_flight": "1MiB", "max_batch": "1MiB", "max_message": "1MiB"}
    )
    raw = await running.connect()
    batches = tuple(("orders", pack_batch("orders", [b"x" * 900_000])) for _ in range(4))

    answer = await raw.ask(Send(Acks.DISK, 1000, batches), Sent)

    codes = [outcome.code for outcome in answer.outcomes]
    assert codes == [ErrorCode.NONE, ErrorCode.NONE, ErrorCode.OVERLOADED, ErrorCode.OVERLOADED]
    assert (await raw.send("orders", [b"y"], acks=Acks.DISK)).first_sequence == 2


async def test_an_error_of_a_send_is_typed_and_the_connection_lives(raw: RawConnection) -> None:
    with pytest.raises(PulqueError):
        await send(raw)

    assert (await raw.send("orders", [b"x"])).code is ErrorCode.NONE


SYSTEM_HEADERS = [
    ({"pulque.origin": "orders/1"}, ErrorCode.NOT_ALLOWED),
    ({"mine": "1", "pulque.dead": "x"}, ErrorCode.NOT_ALLOWED),
    ({"pulque.once": "1", "pulque.dead": "x"}, ErrorCode.NOT_ALLOWED),
    ({"pulque.once": "1"}, ErrorCode.NONE),
    ({"mine": "pulque.dead"}, ErrorCode.NONE),
    ({"my.pulque.dead": "1"}, ErrorCode.NONE),
]


@pytest.mark.parametrize("how", ["single", "many batches"])
@pytest.mark.parametrize("count", [1, 2, 100])
@pytest.mark.parametrize(("headers", "code"), SYSTEM_HEADERS)
async def test_headers_of_the_system_are_refused(
    raw: RawConnection, headers: dict[str, str], code: ErrorCode, count: int, how: str
) -> None:
    packer = BatchPacker()
    for _ in range(count - 1):
        packer.add(b"a body about pulque.dead", headers={"pulque.once": "1"})
    packer.add(b"x", headers=headers)
    batch = packer.encode(seed=seed_of("orders"), ids=bytes(16 * count), created_at_ms=1)
    beside = [] if how == "single" else [("orders", pack_batch("orders", [b"beside"]))]

    answer = await send(raw, ("orders", batch), *beside)

    assert [each.code for each in answer.outcomes] == [code, *(ErrorCode.NONE for _ in beside)]
    if code is ErrorCode.NOT_ALLOWED:
        assert "begin with pulque. belong to the system" in answer.outcomes[0].text


@pytest.mark.parametrize("opens", [False, True])
async def test_headers_of_the_system_in_compressed_records_are_refused_by_setting(
    start: Start,
    opens: bool,  # noqa: FBT001
) -> None:
    raw = await (await start(limits={"open_records": opens})).connect()
    bad = pack_batch("a", [b"x"] * 3, headers={"pulque.dead": "x"}, codec=Codec.ZSTD)
    good = pack_batch("a", [b"x"] * 3, headers={"mine": "x"}, codec=Codec.ZSTD)

    answer = await send(raw, ("a", bad), ("a", good))

    expected = ErrorCode.NOT_ALLOWED if opens else ErrorCode.NONE
    assert [each.code for each in answer.outcomes] == [expected, ErrorCode.NONE]


async def test_a_named_producer_may_pass_on_headers_of_the_system(raw: RawConnection) -> None:
    """A delay server sends what it confirmed, and that must not be refused."""
    by_name = ProducedBy(7, 1, 0, named=True)
    batch = pack_batch("a", [b"x"] * 3, headers={"pulque.due": "1"}, produced_by=by_name)

    (outcome,) = (await send(raw, ("a", batch))).outcomes

    assert outcome.code is ErrorCode.NONE
