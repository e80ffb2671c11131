"""A batch that nobody can decode becomes a dead letter with its bytes, and consumers go on."""

import asyncio
import logging
import secrets
from datetime import timedelta

import pytest

import pulque
from pulque import aio
from pulque.client.receiving.pull_options import PullOptions
from pulque.model.batch import Codec, count_of, seed_of
from pulque.model.groups import EVERYTHING, tag_filter
from pulque.model.message import Message, StoredBatch
from pulque.model.names import ConsumerId, PartitionName, parse_group
from pulque.model.pack import BatchPacker
from pulque.model.positions import ConsumeSequence
from pulque.rules.retry import parse_sequences
from pulque.testing.broker import InProcessBroker
from pulque.testing.raw import RawConnection
from pulque.wire.requests import EARLIEST, FROM_SETTLED, Heartbeat, Pull, Wanted
from pulque.wire.responses import Beaten, Pulled, Subscribed
from tests.malformed import lying, odd, send_batches, torn, with_part
from tests.nothing import check_nothing_comes
from tests.robustness.brokers import wait_until

PATIENCE = 10
READABLE = [b"before", b"good 1", b"good 4", b"after"]
ALL = (torn("orders"), torn("orders", Codec.LZ4), lying("orders"), odd("orders"))
UNREADABLE = 3 + 3 + 3 + 2


def send_all(client: pulque.Client, url: str) -> None:
    """Send good messages before, among and behind bad ones."""
    client.send("orders", b"before", order_key="k")
    assert send_batches(url, "orders", *ALL) == ["NONE"] * len(ALL)
    client.send("orders", b"after", order_key="k")


def stored_of(batch: bytes) -> StoredBatch:
    """Return a batch as its readers see it."""
    return StoredBatch(
        batch,
        partition=PartitionName("orders"),
        first_sequence=ConsumeSequence(0),
        stored_at_ms=0,
    )


def consume(consumer: pulque.Consumer, how: str) -> list[bytes]:
    found: list[bytes] = []

    def handle(message: pulque.ReceivedMessage) -> None:
        found.append(message.body)
        assert message.headers in ({}, {"a": "b"})
        message.ack()

    if how == "iterate":
        for message in consumer:
            handle(message)
            if message.body == b"after":
                break
    while b"after" not in found:
        for message in consumer.pull(timeout=PATIENCE):
            handle(message)
    consumer.settle()
    return found


def letters_of(client: pulque.Client, count: int, group: str = "kitchen") -> list[Message]:
    """Wait for dead letters that stand for so many messages."""
    dead = client.dead("orders", group=group)
    letters: list[Message] = []

    def are_there() -> bool:
        letters[:] = dead.list()
        return sum(map(standing_for, letters)) >= count

    wait_until(are_there, within=PATIENCE, what=f"letters for {count} messages")
    return letters


def standing_for(letter: Message) -> int:
    return int(letter.headers["pulque.unreadable.count"])


def check_letters(letters: list[Message]) -> None:
    """Check that each message is in a letter, and each batch has its bytes in exactly one."""
    assert sum(map(standing_for, letters)) == UNREADABLE
    bodies: dict[str, bytes] = {}
    sequences: dict[str, list[int]] = {}
    for letter in letters:
        headers = letter.headers
        assert headers["pulque.dead"].startswith("unreadable: ")
        assert headers["pulque.reason"].startswith("unreadable: ")
        batch = headers["pulque.unreadable.batch"]
        sequences.setdefault(batch, []).extend(parse_sequences(headers["pulque.unreadable"]))
        assert headers["pulque.first"] == f"orders/{sequences[batch][-standing_for(letter)]}"
        if letter.body:
            assert batch not in bodies
            assert headers["pulque.unreadable.size"] == str(len(letter.body))
            bodies[batch] = letter.body
        else:
            assert headers["pulque.unreadable.body"].startswith("%dead%orders%kitchen/")
    assert {batch: sorted(some) for batch, some in sequences.items()} == {
        "orders/1": [1, 2, 3],
        "orders/4": [4, 5, 6],
        "orders/7": [7, 8, 9],
        "orders/11": [11],
        "orders/12": [12],
    }
    assert [bodies[f"orders/{at}"] for at in (1, 4, 7)] == list(ALL[:3])
    assert b"name without a value" in bodies["orders/11"]
    assert b"odd 3" in bodies["orders/12"]
    assert count_of(bodies["orders/12"]) == 1


@pytest.mark.parametrize("is_ordered", [False, True])
@pytest.mark.parametrize("how", ["iterate", "pull"])
def test_bad_batches_become_dead_letters_and_the_consumer_goes_on(
    pulque_client: pulque.Client, pulque_url: str, how: str, *, is_ordered: bool
) -> None:
    send_all(pulque_client, pulque_url)
    with pulque_client.consumer("orders", group="kitchen", ordered=is_ordered) as consumer:
        assert consume(consumer, how) == READABLE

    check_letters(letters_of(pulque_client, UNREADABLE))


@pytest.mark.parametrize("is_ordered", [False, True])
async def test_bad_batches_become_dead_letters_with_asyncio(
    pulque_client: pulque.Client, pulque_url: str, *, is_ordered: bool
) -> None:
    await asyncio.to_thread(send_all, pulque_client, pulque_url)
    found: list[bytes] = []
    async with (
        aio.connect(pulque_url) as client,
        client.consumer("orders", group="kitchen", ordered=is_ordered) as consumer,
        asyncio.timeout(PATIENCE),
    ):
        async for message in consumer:
            found.append(message.body)
            message.ack()
            if message.body == b"after":
                break
        await consumer.settle()

    assert found == READABLE
    check_letters(await asyncio.to_thread(letters_of, pulque_client, UNREADABLE))


@pytest.mark.parametrize("mode", ["once", "broadcast"])
def test_bad_batches_are_passed_over_where_there_are_no_dead_letters(
    pulque_client: pulque.Client,
    pulque_url: str,
    mode: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    send_all(pulque_client, pulque_url)
    group = "kitchen" if mode == "once" else None
    with (
        caplog.at_level(logging.WARNING),
        pulque_client.consumer("orders", group=group, mode=mode) as consumer,  # type: ignore[arg-type]
    ):
        assert consume(consumer, "pull") == READABLE

    told = [r.getMessage() for r in caplog.records if "unreadable" in r.getMessage()]
    assert len(told) == 5
    assert told[0].startswith("not handed out: orders/1 count=3 ")


async def test_an_application_goes_on_behind_bad_batches(
    pulque_client: pulque.Client, pulque_url: str
) -> None:
    await asyncio.to_thread(send_all, pulque_client, pulque_url)
    app = pulque.App(pulque_url, name="test")
    found: list[bytes] = []
    is_done = asyncio.Event()

    @app.subscribe("orders", group="kitchen")
    async def handle(message: pulque.ReceivedMessage) -> None:
        found.append(message.body)
        if message.body == b"after":
            is_done.set()

    serving = asyncio.create_task(app.serve())
    async with asyncio.timeout(PATIENCE):
        await is_done.wait()
        app.stop()
        await serving

    assert sorted(found) == sorted(READABLE)
    check_letters(await asyncio.to_thread(letters_of, pulque_client, UNREADABLE))


@pytest.mark.parametrize("wanted", ["red", None])
@pytest.mark.parametrize("is_silent", [False, True])
def test_a_bad_batch_of_a_consumer_that_is_gone_becomes_one_letter(
    pulque_broker: InProcessBroker, wanted: str | None, *, is_silent: bool
) -> None:
    """Whoever is lost with it, or hands it back, never said what is wrong with it."""
    batch = torn("orders", tag="red")
    send_batches(pulque_broker.url, "orders", batch)
    asyncio.run(hold(pulque_broker.url, wanted, leaves=not is_silent))
    if is_silent:
        pulque_broker.advance_time(timedelta(minutes=5), heartbeats=False)
    with pulque.connect(pulque_broker.url) as client:
        (letter,) = letters_of(client, 3)

    assert letter.body == batch
    assert letter.headers["pulque.unreadable"] == "0-2"


async def hold(url: str, wanted: str | None, *, leaves: bool) -> None:
    """Pull for a consumer that does not look at what it gets."""
    async with await RawConnection.open(url) as raw:
        options = PullOptions(
            *("orders", parse_group("kitchen"), ConsumerId("c"), 1, 1000, 2**20, 1000),
            filter=EVERYTHING if wanted is None else tag_filter([wanted], []),
        )
        await raw.ask(options.subscribe_request(), Subscribed)
        pull = Pull("kitchen", "c", 1, 1000, 2**20, 0, EARLIEST, (Wanted("orders", FROM_SETTLED),))
        assert [each.count for each in (await raw.ask(pull, Pulled)).deliveries] == [3]
        if leaves:
            await raw.ask(Heartbeat("kitchen", "c", 1, is_leaving=True), Beaten)


@pytest.mark.parametrize("how", ["kill", "stop"])
def test_a_restart_neither_loses_nor_doubles_a_letter(
    pulque_broker: InProcessBroker, how: str
) -> None:
    with pulque.connect(pulque_broker.url) as client:
        send_all(client, pulque_broker.url)
        with client.consumer("orders", group="kitchen") as consumer:
            consume(consumer, "pull")
        before = letters_of(client, UNREADABLE)
        for _ in range(2):
            if how == "kill":
                pulque_broker.kill()
            pulque_broker.restart()
        after = letters_of(client, UNREADABLE)
        with client.consumer("orders", group="kitchen") as consumer:
            check_nothing_comes(client, consumer)
        assert [each.id for each in letters_of(client, UNREADABLE)] == [each.id for each in after]

    assert [each.id for each in after] == [each.id for each in before]
    check_letters(after)


def test_a_letter_holds_no_more_than_a_message_may_and_says_so() -> None:
    bodies = [secrets.token_hex(500).encode() for _ in range(9)]
    batch = torn("orders", bodies=bodies)
    with (
        InProcessBroker(limits={"max_message": "1KiB"}) as broker,
        pulque.connect(broker.url) as client,
    ):
        send_batches(broker.url, "orders", batch)
        with client.consumer("orders", group="kitchen") as consumer:
            check_nothing_comes(client, consumer)
            consumer.settle()
        (letter,) = letters_of(client, 9)

    assert letter.body == batch[:1024]
    assert letter.headers["pulque.unreadable.size"] == str(len(batch))


def test_a_letter_of_a_bad_batch_is_resent_with_another_body_only(
    pulque_client: pulque.Client, pulque_url: str
) -> None:
    send_batches(pulque_url, "orders", torn("orders"))
    with pulque_client.consumer("orders", group="kitchen") as consumer:
        check_nothing_comes(pulque_client, consumer)
        consumer.settle()
        (letter,) = letters_of(pulque_client, 3)
        dead = pulque_client.dead("orders", group="kitchen")

        assert dead.resend(letter.sequence).missing == (letter.sequence,)
        assert dead.resend_all() == 0
        assert dead.resend(letter.sequence, body=b"mended").resent == (letter.sequence,)

        (message,) = consumer.pull(timeout=PATIENCE)
    assert (message.body, dead.count()) == (b"mended", 0)
    assert "pulque.unreadable" not in message.headers


def test_a_filter_gets_what_can_be_read_and_the_rest_as_letters(
    pulque_client: pulque.Client, pulque_url: str
) -> None:
    """A broker gathers what a filter wants out of many batches, with gaps in between."""
    batches = []
    for number in range(40):
        packer = BatchPacker()
        packer.add(b"blue", tags=("blue",))
        odd_headers = b"odd" if number % 4 == 1 else b""
        packer.add_encoded(b"%d" % number, tags=b"red", headers=odd_headers)
        packer.add(b"blue", tags=("blue",))
        ids = secrets.token_bytes(48)
        batches.append(packer.encode(seed=seed_of("orders"), ids=ids, created_at_ms=1))
    send_batches(pulque_url, "orders", *batches)
    wanted = [b"%d" % number for number in range(40) if number % 4 != 1]
    with pulque_client.consumer("orders", group="kitchen", tags=["red"]) as consumer:
        found: list[bytes] = []
        while len(found) < len(wanted):
            for message in consumer.pull(timeout=PATIENCE):
                found.append(message.body)
                message.ack()
        consumer.settle()
        letters = letters_of(pulque_client, 10)
        assert consumer.held == 0

    assert found == wanted
    sequences = [int(each.headers["pulque.unreadable"]) for each in letters]
    assert sorted(sequences) == [3 * number + 1 for number in range(40) if number % 4 == 1]


def test_reads_leave_out_what_nobody_can_decode(
    pulque_client: pulque.Client, pulque_url: str
) -> None:
    send_all(pulque_client, pulque_url)

    assert [each.body for each in pulque_client.read("orders")] == READABLE
    assert [each.body for each in pulque_client.read("orders", 1, max_messages=1)] == [b"good 1"]
    tail = pulque_client.tail("orders", start="earliest")
    assert [next(tail).body for _ in READABLE] == READABLE
    with pytest.raises(pulque.UnknownMessageError, match="nobody can decode"):
        pulque_client.messages.get(pulque.Position("", "orders", ConsumeSequence(2)))


async def test_reads_with_asyncio_leave_out_what_nobody_can_decode(
    pulque_client: pulque.Client, pulque_url: str
) -> None:
    await asyncio.to_thread(send_all, pulque_client, pulque_url)
    async with aio.connect(pulque_url) as client, asyncio.timeout(PATIENCE):
        assert [each.body for each in await client.read("orders")] == READABLE
        found = []
        async for message in client.tail("orders", start="earliest"):
            found.append(message.body)
            if len(found) == len(READABLE):
                break

    assert found == READABLE


def test_what_is_found_leaves_out_what_nobody_can_decode(
    pulque_client: pulque.Client, pulque_url: str, caplog: pytest.LogCaptureFixture
) -> None:
    send_all(pulque_client, pulque_url)
    bad = with_part("orders", key=b"\xff")
    send_batches(pulque_url, "orders", bad)
    bad_id = stored_of(bad).id_of(0)

    with caplog.at_level(logging.WARNING):
        found = pulque_client.messages.find("orders")

    assert [each.body for each in reversed(found)] == READABLE
    assert all(each.key in {None, "ünïcode"} for each in found)
    assert [f"orders/{at}" in caplog.text for at in (10, 11, 12, 15)] == [False, True, True, True]
    assert [each.body for each in pulque_client.messages.find("orders", key="ünïcode")] == [
        b"good 4"
    ]
    with pytest.raises(pulque.UnknownMessageError, match="or nobody can decode it"):
        pulque_client.messages.get(bad_id)


async def test_what_is_found_with_asyncio_leaves_out_what_nobody_can_decode(
    pulque_client: pulque.Client, pulque_url: str
) -> None:
    await asyncio.to_thread(send_all, pulque_client, pulque_url)
    async with aio.connect(pulque_url) as client:
        found = await client.messages.find("orders")

    assert [(each.body, each.headers) for each in reversed(found)] == [
        (body, {"a": "b"} if body == b"good 1" else {}) for body in READABLE
    ]
