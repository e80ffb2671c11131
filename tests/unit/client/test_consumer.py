"""The blocking consumer on a real socket: it keeps its lease, its word and its place."""

import threading
import time
from pathlib import Path

import pytest

import pulque
from pulque import aio
from pulque.errors import (
    CorruptionError,
    DisconnectedError,
    FencedError,
    InvalidNameError,
    NotAllowedError,
    OverloadedError,
    UsageError,
)
from pulque.testing.broker import InProcessBroker
from pulque.wire import requests
from tests.unit.client.fake_broker import LIMIT, Drop, FakeBroker, Silence
from tests.unit.client.faults import Times


def take(consumer: pulque.Consumer, count: int) -> list[pulque.ReceivedMessage]:
    """Iterate over so many messages, acking each."""
    found: list[pulque.ReceivedMessage] = []
    for message in consumer:
        message.ack()
        found.append(message)
        if len(found) == count:
            break
    return found


def sequences(messages: list[pulque.ReceivedMessage]) -> list[int]:
    return [message.sequence for message in messages]


def test_every_message_comes_in_order_and_is_settled(
    broker: FakeBroker, client: pulque.Client
) -> None:
    bodies = [b"%d" % number for number in range(3000)]
    client.send_many("orders", bodies)

    with client.consumer("orders", "kitchen") as consumer:
        messages = take(consumer, 3000)

    assert [message.body for message in messages] == bodies
    assert broker.acked == [("orders", number) for number in range(3000)]
    assert broker.left == [consumer.consumer_id]


def test_messages_that_come_later_are_waited_for(
    broker: FakeBroker, client: pulque.Client
) -> None:
    with client.consumer("orders", "kitchen") as consumer:
        threading.Timer(0.1, client.send, args=("orders", b"late")).start()

        assert take(consumer, 1)[0].body == b"late"


def test_pull_returns_what_is_there_and_asks_for_no_more(
    broker: FakeBroker, client: pulque.Client
) -> None:
    client.send_many("orders", [b"x"] * 10)

    with client.consumer("orders", "kitchen") as consumer:
        first = consumer.pull(4)
        consumer.ack_all(first)
        second = consumer.pull(20)
        held = consumer.held
        nothing = consumer.pull(1, timeout=0.05)

    assert sequences(first) == [0, 1, 2, 3]
    assert sequences(second) == [4, 5, 6, 7, 8, 9]
    assert held in {6, 10}
    assert nothing == []
    assert broker.acked == [("orders", number) for number in range(4)]


def test_nacks_reach_the_broker(broker: FakeBroker, client: pulque.Client) -> None:
    client.send_many("orders", [b"x"] * 3)

    with client.consumer("orders", "kitchen") as consumer:
        messages = consumer.pull()
        messages[0].ack()
        messages[1].nack("no milk", delay=2)
        messages[2].nack()

    assert broker.acked == [("orders", 0)]
    assert broker.nacked == [("orders", 1, "no milk", 2000), ("orders", 2, "", -1)]


@pytest.mark.accepts("000-28")
def test_acks_reach_the_broker_while_the_caller_is_busy(
    broker: FakeBroker, client: pulque.Client
) -> None:
    client.send_many("orders", [b"x"] * 3)

    with client.consumer("orders", "kitchen") as consumer:
        for count, message in enumerate(consumer, 1):
            message.ack()
            # This thread stays away from the consumer until the broker knows.
            broker.wait_until(lambda count=count: len(broker.acked) == count)  # type: ignore[misc]
            if count == 3:
                break

    assert len(broker.acked) == 3


def test_other_threads_may_ack_while_one_iterates(
    broker: FakeBroker, client: pulque.Client
) -> None:
    client.send_many("orders", [b"x"] * 50)
    threads: list[threading.Thread] = []

    with client.consumer("orders", "kitchen", max_held=8) as consumer:
        for message in consumer:
            threads.append(threading.Timer(0.01, message.ack))
            threads[-1].start()
            if len(threads) == 50:
                break
        for thread in threads:
            thread.join()

    assert len(broker.acked) == 50


def test_no_more_is_held_than_allowed(broker: FakeBroker, client: pulque.Client) -> None:
    client.send_many("orders", [b"x"] * 100)

    with client.consumer("orders", "kitchen", max_held=7) as consumer:
        messages = consumer.pull(100, timeout=LIMIT)
        assert consumer.pull(100, timeout=0.1) == []
        consumer.ack_all(messages)
        more = consumer.pull(100, timeout=LIMIT)

    # The second pull asked for nothing: there was no room.
    assert [len(messages), len(more)] == [7, 7]
    asked = [each for each in broker.requests if isinstance(each, requests.Pull)]
    assert [each.max_messages for each in asked] == [7, 7]


def test_a_slow_consumer_asks_for_little_and_a_fast_one_for_much(
    broker: FakeBroker, client: pulque.Client
) -> None:
    client.send_many("orders", [b"x"] * 3000)

    with client.consumer("orders", "fast") as consumer:
        take(consumer, 3000)
    fast = [pull for pull in broker.requests if isinstance(pull, requests.Pull)]
    with client.consumer("orders", "slow") as consumer:
        for count, message in enumerate(consumer):
            message.ack()
            broker.wait_until(lambda count=count: len(broker.acked) > 3000 + count)  # type: ignore[misc]
            if count == 25:
                break
    slow = [pull for pull in broker.requests if isinstance(pull, requests.Pull)][len(fast) :]

    assert max(pull.max_messages for pull in fast) == 1000
    assert slow[-1].max_messages < 10


def test_what_is_not_settled_is_handed_back_on_leaving(
    broker: FakeBroker, client: pulque.Client
) -> None:
    client.send_many("orders", [b"x"] * 5)
    with client.consumer("orders", "kitchen") as first:
        first.pull(3)[0].ack()

    with client.consumer("orders", "kitchen") as second:
        messages = second.pull(10)

    assert sequences(messages) == [1, 2, 3, 4]


def test_a_loop_that_is_left_goes_on_where_it_was(
    broker: FakeBroker, client: pulque.Client
) -> None:
    client.send_many("orders", [b"x"] * 20)

    with client.consumer("orders", "kitchen") as consumer:
        parts = [sequences(take(consumer, 7)), sequences(consumer.pull(3))]
        parts.append(sequences(take(consumer, 10)))

    assert [number for part in parts for number in part] == list(range(20))


@pytest.mark.parametrize("kind", [requests.Pull, requests.Settle])
@pytest.mark.parametrize("handled", [False, True])
def test_a_lost_connection_loses_and_doubles_nothing(
    broker: FakeBroker,
    client: pulque.Client,
    kind: type[requests.Request],
    *,
    handled: bool,
) -> None:
    client.send_many("orders", [b"x"] * 100)
    broker.fault = Times(kind, Drop(handled=handled), times=3)

    with client.consumer("orders", "kitchen", max_messages=20) as consumer:
        messages = take(consumer, 100)

    assert sequences(messages) == list(range(100))
    assert broker.acked == [("orders", number) for number in range(100)]


def test_an_overloaded_broker_is_asked_again(broker: FakeBroker, client: pulque.Client) -> None:
    client.send("orders", b"x")
    broker.fault = Times(requests.Pull, OverloadedError("busy"), times=2)

    with client.consumer("orders", "kitchen") as consumer:
        assert sequences(take(consumer, 1)) == [0]


def test_a_broker_that_stays_away_is_reported_and_can_come_back(
    broker: FakeBroker, tmp_path: Path
) -> None:
    with pulque.connect(broker.url, timeout=0.5, state_dir=tmp_path) as client:
        client.send("orders", b"x")
        consumer = client.consumer("orders", "kitchen")
        broker.stop_listening()
        broker.drop_all()

        with pytest.raises(DisconnectedError, match=rf"127.0.0.1:{broker.port}"):
            take(consumer, 1)
        assert consumer.pull(timeout=0.1) == []
        broker.listen_again()

        assert sequences(take(consumer, 1)) == [0]


def test_a_pull_without_an_answer_is_asked_again(broker: FakeBroker, tmp_path: Path) -> None:
    broker.fault = Times(requests.Pull, Silence())
    with pulque.connect(broker.url, timeout=1, state_dir=tmp_path) as client:
        client.send("orders", b"x")
        consumer = client.consumer("orders", "kitchen")

        assert consumer.pull(timeout=0.2) == []  # long enough to ask, on a busy machine too
        assert sequences(consumer.pull(timeout=LIMIT)) == [0]


def test_deliveries_that_others_have_now_are_abandoned(
    broker: FakeBroker, client: pulque.Client
) -> None:
    client.send_many("orders", [b"x"] * 3)

    with client.consumer("orders", "kitchen") as consumer:
        messages = consumer.pull()
        broker.lose_consumers()
        client.send("orders", b"y")
        more = consumer.pull()

        assert all(message.is_abandoned for message in messages)
        assert consumer.abandoned == 3
        consumer.ack_all([*messages, *more])

    assert broker.acked == [("orders", 3)]


def test_deliveries_that_the_broker_forgot_come_again(
    broker: FakeBroker, client: pulque.Client
) -> None:
    client.send_many("orders", [b"x"] * 5)

    with client.consumer("orders", "kitchen") as consumer:
        messages = consumer.pull()
        broker.forget_deliveries(2)
        broker.drop_all()
        again = consumer.pull(timeout=LIMIT)
        consumer.ack_all([*messages, *again])

    assert sequences(again) == [3, 4]
    assert sorted(broker.acked) == [("orders", number) for number in range(5)]


def test_a_settle_that_is_stale_gives_the_messages_up(
    broker: FakeBroker, client: pulque.Client
) -> None:
    client.send_many("orders", [b"x"] * 2)

    with client.consumer("orders", "kitchen") as consumer:
        messages = consumer.pull()
        broker.lose_consumers()
        consumer.ack_all(messages)
        deadline = time.monotonic() + LIMIT
        while not consumer.abandoned:
            assert time.monotonic() < deadline
            consumer.pull(timeout=0.01)

        assert messages[0].is_abandoned
    assert broker.acked == []


@pytest.mark.parametrize("kind", [requests.Pull, requests.Settle, requests.Heartbeat])
def test_a_fenced_consumer_stops_with_an_error(
    broker: FakeBroker, tmp_path: Path, kind: type[requests.Request]
) -> None:
    broker.lease_ms = 300
    with pulque.connect(broker.url, timeout=5, state_dir=tmp_path) as client:
        client.send_many("orders", [b"x"] * 3)
        consumer = client.consumer("orders", "kitchen", max_messages=1)
        broker.fault = Times(kind, FencedError("a newer one is here"), times=1000)

        with pytest.raises(FencedError, match="a newer one"):
            take(consumer, 100)


def test_a_no_is_raised_at_once(broker: FakeBroker, client: pulque.Client) -> None:
    broker.fault = Times(requests.Pull, NotAllowedError("not you"))

    with (
        client.consumer("orders", "kitchen") as consumer,
        pytest.raises(NotAllowedError, match="not you"),
    ):
        consumer.pull()


def test_damage_on_the_way_is_asked_for_again(broker: FakeBroker, client: pulque.Client) -> None:
    client.send("orders", b"tea")
    damages = iter([True])
    broker.corrupt = lambda data: data[:-1] + b"?" if next(damages, False) else data

    with client.consumer("orders", "kitchen") as consumer:
        assert take(consumer, 1)[0].body == b"tea"


def test_damage_at_the_broker_is_raised(broker: FakeBroker, client: pulque.Client) -> None:
    client.send("orders", b"tea")
    broker.corrupt = lambda data: data[:-1] + b"?"

    with client.consumer("orders", "kitchen") as consumer, pytest.raises(CorruptionError):
        take(consumer, 1)


def test_a_busy_consumer_keeps_its_lease(broker: FakeBroker, tmp_path: Path) -> None:
    broker.lease_ms = 150
    with pulque.connect(broker.url, state_dir=tmp_path) as client:
        client.send("orders", b"x")
        with client.consumer("orders", "kitchen") as consumer:
            consumer.pull()

            broker.wait_until(lambda: len(broker.seen(requests.Heartbeat)) >= 3)


def test_another_thread_may_close_a_waiting_consumer(
    broker: FakeBroker, client: pulque.Client
) -> None:
    consumer = client.consumer("orders", "kitchen")
    found: list[list[pulque.ReceivedMessage]] = []
    thread = threading.Thread(target=lambda: found.append(list(consumer)))
    thread.start()
    broker.wait_until(lambda: bool(broker.seen(requests.Pull)))

    consumer.close()
    thread.join(LIMIT)

    assert found == [[]]
    assert list(consumer) == []
    consumer.close()


def test_a_group_that_starts_at_the_end_sees_only_what_comes(
    broker: FakeBroker, client: pulque.Client
) -> None:
    client.send("orders", b"before")

    with client.consumer("orders", "kitchen", start="latest") as consumer:
        while not broker.seen(requests.Pull):
            assert consumer.pull(timeout=0.05) == []
        client.send("orders", b"after")
        (message,) = consumer.pull(timeout=LIMIT)

    assert message.body == b"after"


def test_an_id_of_ones_own_is_used(client: pulque.Client) -> None:
    with client.consumer("orders", "kitchen", consumer_id="me@home:1") as consumer:
        assert consumer.consumer_id == "me@home:1"


def test_what_makes_no_sense_is_refused(client: pulque.Client) -> None:
    with pytest.raises(InvalidNameError):
        client.consumer("orders", "no group")
    with pytest.raises(InvalidNameError):
        client.consumer("orders", "kitchen", consumer_id="")
    with pytest.raises(UsageError, match="start"):
        client.consumer("orders", "kitchen", start="now")  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="max_messages"):
        client.consumer("orders", "kitchen", max_messages=0)
    with client.consumer("orders", "kitchen") as consumer, pytest.raises(UsageError):
        consumer.pull(-1)


def test_an_answer_that_the_keeper_takes_in_first_is_not_waited_for_again(
    broker: FakeBroker, client: pulque.Client
) -> None:
    """The race that stopped a consumer for as long as its time-out, with messages in its hands."""
    with client.consumer("orders", "kitchen") as consumer:
        client.send("orders", b"one")
        (first,) = take(consumer, 1)  # the next pull is on its way now
        inlet = consumer._inlets._only  # noqa: SLF001
        assert inlet is not None
        with inlet._reading:  # noqa: SLF001  # as the keeper holds it while it drains
            found: list[pulque.ReceivedMessage] = []
            caller = threading.Thread(target=lambda: found.extend(take(consumer, 1)))
            caller.start()
            client.send("orders", b"two")
            connection = inlet.connection
            assert connection is not None
            while inlet.core.is_pulling:
                inlet._take_in(connection.read_answer())  # noqa: SLF001
        caller.join(LIMIT / 2)

        assert first.body == b"one"
        assert [message.body for message in found] == [b"two"]


@pytest.mark.accepts("000-39")
def test_what_was_lost_meanwhile_is_not_handed_out(tmp_path: Path) -> None:
    lost = threading.Event()
    with (
        FakeBroker(lease_ms=1500) as broker,
        pulque.connect(broker.url, name="test", timeout=5, state_dir=tmp_path) as client,
        client.consumer("orders", group="g") as consumer,
    ):
        client.send_many("orders", [b"%d" % number for number in range(5)])
        consumer.on_abandoned(lost.set)
        messages = iter(consumer)
        first = next(messages)
        broker.stop_listening()
        broker.drop_all()
        assert lost.wait(LIMIT)
        broker.lose_consumers()
        broker.listen_again()
        client.send("orders", b"next")
        second = next(messages)

        assert (first.body, first.is_abandoned) == (b"0", True)
        assert (second.body, second.is_abandoned) == (b"next", False)


@pytest.mark.accepts("000-39")
def test_without_a_broker_for_the_lease_what_is_not_finished_is_abandoned(tmp_path: Path) -> None:
    told = threading.Event()
    with (
        FakeBroker(lease_ms=1500) as broker,
        pulque.connect(broker.url, name="test", timeout=5, state_dir=tmp_path) as client,
        client.consumer("orders", group="g") as consumer,
    ):
        client.send_many("orders", [b"%d" % number for number in range(5)])
        messages = consumer.pull(5)
        broker.stop_listening()
        broker.drop_all()
        messages[0].ack()
        messages[1].nack("not today")
        messages[3].ack()
        consumer.on_abandoned(told.set)

        assert told.wait(LIMIT)
        assert [message.is_abandoned for message in messages] == [False, False, True, True, True]
        assert consumer.abandoned == 3
        messages[2].ack()  # too late
        broker.listen_again()
        again = consumer.pull(5)
        assert [message.sequence for message in again] == [2, 3, 4]
        broker.wait_until(lambda: len(broker.settled) == 2)
        assert broker.acked == [("orders", 0)]
        assert broker.nacked == [("orders", 1, "not today", -1)]
        consumer.ack_all(again)
    assert [sequence for _, sequence in broker.acked] == [0, 2, 3, 4]


@pytest.mark.parametrize("is_ordered", [False, True])
def test_pull_raises_after_the_client_was_closed(
    pulque_broker: InProcessBroker, *, is_ordered: bool
) -> None:
    client = pulque.connect(pulque_broker.url, name="test")
    consumer = client.consumer("orders", group="kitchen", ordered=is_ordered)
    client.close()

    with pytest.raises(pulque.UsageError, match="closed"):
        consumer.pull(timeout=0)
    assert list(consumer) == []


@pytest.mark.parametrize("is_ordered", [False, True])
async def test_an_asyncio_pull_raises_after_the_client_was_closed(
    pulque_broker: InProcessBroker, *, is_ordered: bool
) -> None:
    async with aio.connect(pulque_broker.url, name="test") as client:
        consumer = client.consumer("orders", group="kitchen", ordered=is_ordered)

    with pytest.raises(pulque.UsageError, match="closed"):
        await consumer.pull(timeout=0)
