"""Modes, filters and starts as applications see them: a broker in this process, both twins."""

import asyncio
import threading
import time
from datetime import UTC, datetime, timedelta
from itertools import combinations

import pytest

import pulque
import pulque.aio
from pulque.model.tags import bits_of_tag, bits_of_tags
from pulque.testing.broker import InProcessBroker
from tests.nothing import check_nothing_comes, check_nothing_comes_async

PATIENCE = 5.0


def colliding() -> tuple[str, str]:
    """Return two tags with the same bits."""
    seen: dict[int, str] = {}
    for number in range(1_000_000):
        tag = f"t{number}"
        other = seen.setdefault(bits_of_tag(tag), tag)
        if other != tag:
            return other, tag
    raise AssertionError("there must be some")


def covered() -> tuple[str, str, str]:
    """Return a tag whose bits are all set by two others together."""
    tags = [f"t{number}" for number in range(300)]
    for one, other in combinations(tags, 2):
        union = bits_of_tags([one, other])
        for tag in tags:
            bits = bits_of_tag(tag)
            if tag not in {one, other} and bits & union == bits:
                return tag, one, other
    raise AssertionError("there must be some")


def drain(client: pulque.Client, consumer: pulque.Consumer, count: int) -> list[bytes]:
    """Take and ack ``count`` messages, and see that there are no more."""
    found: list[bytes] = []
    while len(found) < count:
        messages = consumer.pull(timeout=PATIENCE)
        assert messages, f"{len(found)} of {count} came"
        found += [message.body for message in messages]
        consumer.ack_all(messages)
    check_nothing_comes(client, consumer)
    return found


def numbered(count: int, start: int = 0) -> list[bytes]:
    return [b"%d" % number for number in range(start, start + count)]


# -- broadcast ----------------------------------------------------------------------------------


@pytest.mark.accepts("003-55", "003-57", "004-01")
def test_each_broadcast_consumer_gets_everything_whatever_its_group(
    pulque_client: pulque.Client,
) -> None:
    pulque_client.send_many("news", numbered(50))

    for name in ("a", "b", "c"):
        with pulque_client.consumer("news", "same", broadcast=True, consumer_id=name) as consumer:
            assert drain(pulque_client, consumer, 50) == numbered(50)


@pytest.mark.accepts("003-56")
def test_a_consumer_without_a_group_is_a_broadcast_one(pulque_client: pulque.Client) -> None:
    pulque_client.send("news", b"hello")

    with (
        pulque_client.consumer("news", consumer_id="a") as one,
        pulque_client.consumer("news", consumer_id="b") as other,
    ):
        assert drain(pulque_client, one, 1) == drain(pulque_client, other, 1) == [b"hello"]


@pytest.mark.accepts("003-58")
@pytest.mark.parametrize(
    "wishes",
    [{"mode": "shared"}, {"mode": "once"}, {"broadcast": False}, {"group": ""}],
)
def test_without_a_group_nothing_but_a_broadcast_is_allowed(
    pulque_client: pulque.Client, wishes: dict[str, object]
) -> None:
    with pytest.raises(pulque.UsageError, match="group"):
        pulque_client.consumer("news", **wishes)  # type: ignore[arg-type]
    with pytest.raises(pulque.InvalidNameError):
        pulque_client.consumer("", "g")


@pytest.mark.accepts("003-59")
def test_a_broadcast_has_no_pull_log(
    pulque_client: pulque.Client, pulque_broker: InProcessBroker
) -> None:
    pulque_client.send_many("news", numbered(10))
    with pulque_client.consumer("news", consumer_id="late", start=4) as consumer:
        messages = consumer.pull(timeout=PATIENCE)
        assert [message.pull_sequence for message in messages] == [4, 5, 6, 7, 8, 9]
        assert [message.sequence for message in messages] == [4, 5, 6, 7, 8, 9]


def test_a_broadcast_consumer_goes_on_where_it_was_over_restarts_of_both_sides(
    pulque_broker: InProcessBroker,
) -> None:
    with pulque.connect(pulque_broker.url) as client:
        client.send_many("news", numbered(20))
        with client.consumer("news", consumer_id="reader") as consumer:
            messages = consumer.pull(8, timeout=PATIENCE)
            consumer.ack_all(messages[:5])
    pulque_broker.kill()
    pulque_broker.start()
    with (
        pulque.connect(pulque_broker.url) as client,
        client.consumer("news", consumer_id="reader") as consumer,
    ):
        assert drain(client, consumer, 15) == numbered(15, 5)
    pulque_broker.restart()
    with pulque.connect(pulque_broker.url) as client:
        client.send("news", b"20")
        with client.consumer("news", consumer_id="reader") as consumer:
            assert drain(client, consumer, 1) == [b"20"]


def test_a_silent_broadcast_consumer_loses_nothing(
    pulque_broker: InProcessBroker, pulque_client: pulque.Client
) -> None:
    pulque_client.send_many("news", numbered(6))
    silent = pulque_client.consumer("news", consumer_id="silent")
    held = silent.pull(timeout=PATIENCE)
    pulque_broker.advance_time(timedelta(hours=1), heartbeats=False)

    with pulque_client.consumer("news", consumer_id="other") as other:
        assert drain(pulque_client, other, 6) == numbered(6)
    silent.ack_all(held[:2])
    silent.close()
    with pulque_client.consumer("news", consumer_id="silent") as again:
        assert drain(pulque_client, again, 4) == numbered(4, 2)
    assert silent.abandoned == 0


def test_a_broadcast_nack_comes_back_to_its_consumer_only(pulque_client: pulque.Client) -> None:
    pulque_client.send_many("news", numbered(3))
    with (
        pulque_client.consumer("news", consumer_id="a") as one,
        pulque_client.consumer("news", consumer_id="b") as other,
    ):
        for message in one.pull(timeout=PATIENCE):
            if message.body == b"1":
                message.nack("again", delay=0)
            else:
                message.ack()
        assert [(m.body, m.attempt) for m in one.pull(timeout=PATIENCE)] == [(b"1", 2)]
        assert drain(pulque_client, other, 3) == numbered(3)


# -- once ---------------------------------------------------------------------------------------


@pytest.mark.accepts("000-11", "000-13")
@pytest.mark.parametrize("ending", ["ack", "nack", "lost", "crash"])
def test_a_once_group_gets_each_message_one_time(
    pulque_broker: InProcessBroker, ending: str
) -> None:
    with pulque.connect(pulque_broker.url) as client:
        client.send_many("jobs", numbered(10))
        consumer = client.consumer("jobs", "g", mode="once", consumer_id="c")
        messages = consumer.pull(4, timeout=PATIENCE)
        assert [message.body for message in messages] == numbered(4)
        for message in messages:
            if ending == "ack":
                message.ack()
            elif ending == "nack":
                message.nack("no", delay=0)
        if ending == "crash":
            pulque_broker.kill()
            pulque_broker.start()
        if ending == "lost":
            pulque_broker.advance_time(timedelta(hours=1), heartbeats=False)
        consumer.close()
    found: list[bytes] = []
    with (
        pulque.connect(pulque_broker.url) as client,
        client.consumer("jobs", "g", mode="once", consumer_id="d") as other,
    ):
        while messages := other.pull(timeout=0.5):
            found += [message.body for message in messages]

    assert found == numbered(6, 4)


def test_a_once_group_is_shared(pulque_client: pulque.Client) -> None:
    pulque_client.send_many("jobs", numbered(20))
    with (
        pulque_client.consumer("jobs", "g", mode="once", consumer_id="c") as one,
        pulque_client.consumer("jobs", "g", mode="once", consumer_id="d") as other,
    ):
        first = [message.body for message in one.pull(7, timeout=PATIENCE)]
        second = [message.body for message in other.pull(timeout=PATIENCE)]

    assert sorted(first + second, key=int) == numbered(20)


# -- filters ------------------------------------------------------------------------------------


def send_tagged(client: pulque.Client, count: int, subject: str = "orders") -> None:
    """Send messages of which every third is red, every fifth big; some are both, some neither."""
    client.send_many(
        subject,
        [
            pulque.Outgoing(b"%d" % n, tags=["red"] * (n % 3 == 0) + ["big"] * (n % 5 == 0))
            for n in range(count)
        ],
    )


FILTERS = [
    ({"tags": ["red"]}, lambda n: n % 3 == 0),
    ({"tags": ["red", "big"]}, lambda n: n % 3 == 0 or n % 5 == 0),
    ({"all_tags": ["red", "big"]}, lambda n: n % 15 == 0),
    ({"tags": ["red"], "all_tags": ["big"]}, lambda n: n % 15 == 0),
    ({"tags": ["blue"]}, lambda _: False),
]


@pytest.mark.accepts("003-33", "004-04")
@pytest.mark.parametrize(("wishes", "is_wanted"), FILTERS)
@pytest.mark.parametrize("mode", ["shared", "once", "broadcast"])
def test_a_filter_lets_through_what_it_says(
    pulque_client: pulque.Client, wishes: dict[str, list[str]], is_wanted: object, mode: str
) -> None:
    send_tagged(pulque_client, 2000)
    expected = [n for n in range(2000) if is_wanted(n)]  # type: ignore[operator]

    with pulque_client.consumer("orders", "g", mode=mode, **wishes) as consumer:  # type: ignore[arg-type]
        assert [int(body) for body in drain(pulque_client, consumer, len(expected))] == expected


async def test_the_asyncio_twin_filters_too(pulque_aio_client: pulque.aio.Client) -> None:
    messages = [pulque.Outgoing(b"%d" % n, tags=["red"] * (n % 3 == 0)) for n in range(300)]
    await pulque_aio_client.send_many("orders", messages)

    found: list[int] = []
    async with pulque_aio_client.consumer("orders", "g", tags=["red"]) as consumer:
        async with asyncio.timeout(PATIENCE):
            async for message in consumer:
                found.append(int(message.body))
                message.ack()
                if len(found) == 100:
                    break

    assert found == list(range(0, 300, 3))


@pytest.mark.accepts("004-04", "004-83", "004-84")
def test_tags_that_share_all_bits_are_told_apart(pulque_client: pulque.Client) -> None:
    wanted, other = colliding()
    covered_tag, one, two = covered()
    pulque_client.send_many(
        "orders",
        [
            pulque.Outgoing(b"no", tags=[other]),
            pulque.Outgoing(b"yes", tags=[wanted]),
            pulque.Outgoing(b"no", tags=[one, two]),
            pulque.Outgoing(b"yes", tags=[covered_tag]),
            pulque.Outgoing(b"no", tags=[other]),
        ],
    )

    with pulque_client.consumer("orders", "g", tags=[wanted, covered_tag]) as consumer:
        assert drain(pulque_client, consumer, 2) == [b"yes", b"yes"]
        pulque_client.send("orders", b"no", tags=[other])
        pulque_client.send("orders", b"last", tags=[wanted])
        assert drain(pulque_client, consumer, 1) == [b"last"]
    with pulque_client.consumer("orders", "g", tags=[wanted, covered_tag]) as consumer:
        assert drain(pulque_client, consumer, 0) == []


def test_a_nacked_message_of_a_filtered_group_comes_back(pulque_client: pulque.Client) -> None:
    send_tagged(pulque_client, 30)
    with pulque_client.consumer("orders", "g", tags=["red"]) as consumer:
        for message in consumer.pull(timeout=PATIENCE):
            if message.body == b"9":
                message.nack("again", delay=0)
            else:
                message.ack()
        assert [(m.body, m.attempt) for m in consumer.pull(timeout=PATIENCE)] == [(b"9", 2)]


def test_what_a_restarted_consumer_holds_is_filtered_again(
    pulque_broker: InProcessBroker, pulque_client: pulque.Client
) -> None:
    send_tagged(pulque_client, 300)
    first = pulque_client.consumer("orders", "g", tags=["red"], consumer_id="c")
    held = first.pull(40, timeout=PATIENCE)
    first.ack_all(held[:10])
    pulque_broker.kill()  # before it is told: or after, that is all the same
    pulque_broker.start()

    found: list[int] = []
    with (
        pulque.connect(pulque_broker.url) as client,
        client.consumer("orders", "g", tags=["red"], consumer_id="c") as consumer,
    ):
        while messages := consumer.pull(timeout=1.0):
            found += [int(message.body) for message in messages]
            consumer.ack_all(messages)

    assert found in (list(range(0, 300, 3)), list(range(30, 300, 3)))


@pytest.mark.accepts("004-85")
def test_a_stretch_without_a_match_is_passed_once(
    pulque_broker: InProcessBroker, pulque_client: pulque.Client
) -> None:
    with pulque_client.producer(linger=0.001, max_batch=200) as producer:
        for number in range(30_000):
            producer.send("orders", b"%d" % number, tags=["grey"])
        producer.send("orders", b"found", tags=["red"])
    with pulque_client.consumer("orders", "g", tags=["red"]) as consumer:
        assert drain(pulque_client, consumer, 1) == [b"found"]
    assert pulque_client.status()["messages_delivered"] == 1


def test_a_waiting_filtered_pull_is_woken_by_a_match_only(pulque_client: pulque.Client) -> None:
    def is_held() -> bool:
        return bool(pulque_client.status()["pulls_waiting"])

    found: list[bytes] = []
    with pulque_client.consumer("orders", "g", tags=["red"]) as consumer:
        puller = threading.Thread(
            target=lambda: found.extend(each.body for each in consumer.pull(timeout=60))
        )
        puller.start()
        deadline = time.monotonic() + 30
        while not is_held():
            assert time.monotonic() < deadline, "the broker never held the pull"
        pulque_client.send("orders", b"grey")
        assert is_held()
        pulque_client.send("orders", b"red", tags=["red"])
        puller.join(30)
    assert found == [b"red"]


def test_the_first_word_of_a_group_counts(pulque_client: pulque.Client) -> None:
    pulque_client.send("orders", b"x")
    with pulque_client.consumer("orders", "g", tags=["b", "a"]) as first:
        first.pull(timeout=0.1)
    for wishes, way_out in [
        ({"mode": "once"}, "pulque group change orders --group g --mode once"),
        ({"tags": ["a"]}, "pulque group change orders --group g --tags"),
        ({}, "not no filter"),
    ]:
        other = pulque_client.consumer("orders", "g", **wishes)  # type: ignore[arg-type]
        with other, pytest.raises(pulque.NotAllowedError, match=way_out):
            other.pull(timeout=0.1)
    with pulque_client.consumer("orders", "g", tags=["a", "b", "a"]) as same:
        same.pull(timeout=0.1)


# -- starts -------------------------------------------------------------------------------------


def test_a_group_starts_at_a_time(
    pulque_broker: InProcessBroker, pulque_client: pulque.Client
) -> None:
    pulque_client.send_many("orders", numbered(5))
    pulque_broker.advance_time(10)
    first = pulque_client.send("orders", b"5").stored_at_ms
    pulque_client.send_many("orders", numbered(5, 6))
    instant = datetime.fromtimestamp(first / 1000, UTC)

    with pulque_client.consumer("orders", "g", start=instant) as consumer:
        assert drain(pulque_client, consumer, 6) == numbered(6, 5)
    with pytest.raises(pulque.UsageError, match="time zone"):
        pulque_client.consumer("orders", "h", start=datetime(2026, 1, 1))  # noqa: DTZ001


@pytest.mark.accepts("000-07", "001-08")
def test_many_groups_on_one_subject_each_get_everything(pulque_client: pulque.Client) -> None:
    pulque_client.send_many("orders", numbered(200))

    for number in range(70):
        with pulque_client.consumer("orders", f"group-{number}") as consumer:
            assert drain_fast(consumer, 200) == numbered(200)


def drain_fast(consumer: pulque.Consumer, count: int) -> list[bytes]:
    found: list[bytes] = []
    while len(found) < count and (messages := consumer.pull(timeout=PATIENCE)):
        found += [message.body for message in messages]
        consumer.ack_all(messages)
    return found


@pytest.mark.accepts("001-01", "000-07")
def test_no_consumer_of_a_group_idles(pulque_client: pulque.Client) -> None:
    pulque_client.send_many("orders", numbered(190))
    consumers = [
        pulque_client.consumer("orders", "g", consumer_id=f"c{number}") for number in range(19)
    ]
    got = [consumer.pull(10, timeout=PATIENCE) for consumer in consumers]
    for consumer in consumers:
        consumer.close()

    assert [len(messages) for messages in got] == [10] * 19
    assert len({message.body for messages in got for message in messages}) == 190


# -- changing a group ---------------------------------------------------------------------------


def test_a_changed_filter_counts_for_what_nobody_was_handed(
    pulque_client: pulque.Client, pulque_broker: InProcessBroker
) -> None:
    send_tagged(pulque_client, 30)
    with pulque_client.consumer("orders", "g", tags=["red"], max_messages=4) as consumer:
        assert [int(m.body) for m in consumer.pull(4, timeout=PATIENCE)] == [0, 3, 6, 9]
        pulque_client.change_group("orders", "g", tags=["big"])
        with pytest.raises(pulque.NotAllowedError, match="changed"):
            consumer.pull(timeout=PATIENCE)
    with (
        pulque_client.consumer("orders", "g", tags=["red"]) as consumer,
        pytest.raises(pulque.NotAllowedError, match="big"),
    ):
        consumer.pull(timeout=PATIENCE)
    pulque_broker.kill()
    pulque_broker.start()
    with (
        pulque.connect(pulque_broker.url) as client,
        client.consumer("orders", "g", tags=["big"]) as consumer,
    ):
        found = {int(m.body) for m in consumer.pull(timeout=PATIENCE)}
    assert found >= {10, 15, 20, 25}
    assert not found & {12, 18, 21, 24, 27}


def test_a_filter_can_be_taken_away(pulque_client: pulque.Client) -> None:
    send_tagged(pulque_client, 9)
    with pulque_client.consumer("orders", "g", tags=["red"]) as consumer:
        assert len(drain(pulque_client, consumer, 3)) == 3
    pulque_client.change_group("orders", "g", tags=[])
    send_tagged(pulque_client, 9)
    with pulque_client.consumer("orders", "g") as consumer:
        assert drain(pulque_client, consumer, 9) == numbered(9)  # what was passed over stays so


def test_a_mode_is_switched_only_while_nothing_is_held(pulque_client: pulque.Client) -> None:
    pulque_client.send_many("jobs", numbered(4))
    with pulque_client.consumer("jobs", "g") as consumer:
        consumer.pull(2, timeout=PATIENCE)
        with pytest.raises(pulque.NotAllowedError, match=r"holds 2 messages.*stop"):
            pulque_client.change_group("jobs", "g", mode="once")
    pulque_client.change_group("jobs", "g", mode="once")
    with pulque_client.consumer("jobs", "g", mode="once") as consumer:
        assert consumer.pull(timeout=PATIENCE)
    with pytest.raises(pulque.NotAllowedError, match="broadcast"):
        pulque_client.change_group("jobs", "g", mode="broadcast")


def test_an_unknown_group_cannot_be_changed(pulque_client: pulque.Client) -> None:
    with pytest.raises(pulque.UnknownGroupError, match="never"):
        pulque_client.change_group("jobs", "nobody", tags=["a"])


async def test_the_asyncio_twin_changes_groups_too(pulque_aio_client: pulque.aio.Client) -> None:
    await pulque_aio_client.send("orders", b"x", tags=["red"])
    async with pulque_aio_client.consumer("orders", "g", tags=["blue"]) as consumer:
        await check_nothing_comes_async(pulque_aio_client, consumer)
    await pulque_aio_client.change_group("orders", "g", tags=["red"])
    await pulque_aio_client.send("orders", b"y", tags=["red"])
    async with pulque_aio_client.consumer("orders", "g", tags=["red"]) as consumer:
        assert [m.body for m in await consumer.pull(timeout=PATIENCE)] == [b"y"]


# -- messages that are delivered once -----------------------------------------------------------


@pytest.mark.accepts("000-12")
@pytest.mark.parametrize("ending", ["nack", "lost"])
def test_an_unreliable_message_is_delivered_once(
    pulque_broker: InProcessBroker, pulque_client: pulque.Client, ending: str
) -> None:
    pulque_client.send("jobs", b"once", reliable=False)
    pulque_client.send_many("jobs", [pulque.Outgoing(b"once", reliable=False), b"reliable"])
    with pulque_client.producer() as producer:
        producer.send("jobs", b"once", reliable=False)
    consumer = pulque_client.consumer("jobs", "g", consumer_id="c")
    messages = consumer.pull(timeout=PATIENCE)
    assert [message.body for message in messages] == [b"once", b"once", b"reliable", b"once"]
    if ending == "nack":
        for message in messages:
            message.nack("no", delay=0)
    else:
        pulque_broker.advance_time(timedelta(hours=1), heartbeats=False)
    consumer.close()
    pulque_broker.advance_time(timedelta(hours=1))

    with pulque_client.consumer("jobs", "g", consumer_id="d") as other:
        assert drain(pulque_client, other, 1) == [b"reliable"]
    assert pulque_client.status()["groups"][0]["redeliveries_pending"] == 0


def test_what_a_lost_consumer_held_is_redelivered_if_the_filter_wants_it(
    pulque_broker: InProcessBroker, pulque_client: pulque.Client
) -> None:
    send_tagged(pulque_client, 100)
    lost = pulque_client.consumer("orders", "g", tags=["big"], consumer_id="lost")
    assert len(lost.pull(timeout=PATIENCE)) == 20
    pulque_broker.advance_time(timedelta(hours=1), heartbeats=False)
    pulque_broker.advance_time(timedelta(hours=1))

    with pulque_client.consumer("orders", "g", tags=["big"], consumer_id="other") as other:
        assert sorted(map(int, drain(pulque_client, other, 20))) == list(range(0, 100, 5))
    status = pulque_client.status()
    assert sum(group["redeliveries_pending"] for group in status["groups"]) == 0
