"""The batching producer on a real socket: outcomes for all, bounded memory, an end in time."""

import threading
import time
from collections.abc import Iterator

import pytest

import pulque
from pulque.client.options.client_options import CompressionName
from pulque.errors import (
    DisconnectedError,
    MessageTooLargeError,
    NotAllowedError,
    RequestTimeoutError,
    StorageFullError,
    UsageError,
)
from pulque.wire import requests
from tests.unit.client.fake_broker import LIMIT, Drop, FakeBroker, Silence
from tests.unit.client.faults import Times


@pytest.fixture
def producer(client: pulque.Client) -> Iterator[pulque.Producer]:
    with client.producer() as producer:
        yield producer


def test_messages_are_batched_and_arrive_in_order(
    broker: FakeBroker, producer: pulque.Producer
) -> None:
    bodies = [b"%d" % number for number in range(5000)]

    promises = [producer.send("orders", body) for body in bodies]
    producer.flush(LIMIT)

    assert broker.messages("orders") == bodies
    assert [pending.result(0).sequence for pending in promises] == list(range(5000))
    assert len(broker.seen(requests.Send)) < 100


def test_a_lone_message_goes_after_its_linger(producer: pulque.Producer) -> None:
    pending = producer.send("orders", b"one")

    assert pending.result(LIMIT).sequence == 0


def test_all_parts_of_a_message_travel(client: pulque.Client, producer: pulque.Producer) -> None:
    receipt = producer.send("orders", b"tea", key="k", tags=["hot"], headers={"a": "b"})
    producer.send("orders", b"plain")
    producer.flush(LIMIT)

    first, second = client.read("orders")
    assert first.id == receipt.result(0).id
    assert (first.key, first.tags, first.headers) == ("k", ("hot",), {"a": "b"})
    assert (second.body, second.key) == (b"plain", None)


def test_many_are_taken_in_at_once(broker: FakeBroker, producer: pulque.Producer) -> None:
    bodies = [b"%d" % number for number in range(3500)]

    many = producer.send_many("orders", bodies)
    mixed = producer.send_many("orders", (b"x", pulque.Outgoing(b"y", key="k"), b"z"))

    assert [receipt.sequence for receipt in many.result(LIMIT)] == list(range(3500))
    assert [receipt.sequence for receipt in mixed.result(LIMIT)] == [3500, 3501, 3502]
    assert broker.messages("orders") == [*bodies, b"x", b"y", b"z"]
    assert producer.send_many("orders", []).result(0) == []


def test_an_oversized_message_among_many_keeps_all_back(
    broker: FakeBroker, producer: pulque.Producer
) -> None:
    producer.send("orders", b"first").result(LIMIT)

    with pytest.raises(MessageTooLargeError):
        producer.send_many("orders", [b"x", bytes(broker.max_message + 1)])
    producer.flush(LIMIT)

    assert broker.messages("orders") == [b"first"]


@pytest.mark.parametrize("handled", [False, True])
def test_what_had_no_answer_is_sent_again_and_stored_once(
    broker: FakeBroker, client: pulque.Client, *, handled: bool
) -> None:
    broker.fault = Times(requests.Send, Drop(handled=handled), times=3)

    with client.producer(max_batch=10) as producer:
        promises = [producer.send("orders", b"%d" % number) for number in range(200)]

    assert sorted(broker.messages("orders")) == sorted(b"%d" % n for n in range(200))
    assert all(pending.exception(0) is None for pending in promises)


def test_a_full_broker_is_tried_again_until_there_is_room(
    broker: FakeBroker, producer: pulque.Producer
) -> None:
    broker.fault = Times(requests.Send, StorageFullError("no room"), times=3)

    pending = producer.send("orders", b"one")

    assert pending.result(LIMIT).sequence == 0
    assert len(broker.seen(requests.Send)) == 4


def test_a_no_is_the_outcome(broker: FakeBroker, producer: pulque.Producer) -> None:
    broker.fault = Times(requests.Send, NotAllowedError("not you"))

    pending = producer.send("orders", b"one")

    with pytest.raises(NotAllowedError, match="not you"):
        pending.result(LIMIT)
    assert isinstance(pending.exception(0), NotAllowedError)
    assert producer.send("orders", b"two").result(LIMIT).sequence == 0


def test_without_an_answer_a_message_fails_in_time_and_the_next_goes_on(
    broker: FakeBroker, client: pulque.Client
) -> None:
    broker.fault = Times(requests.Send, Silence())

    with client.producer(timeout=0.3) as producer:
        pending = producer.send("orders", b"one")
        with pytest.raises(RequestTimeoutError, match="unknown"):
            pending.result(LIMIT)

        assert producer.send("orders", b"two").result(LIMIT).sequence == 0


def test_a_broker_that_comes_back_gets_everything(
    broker: FakeBroker, client: pulque.Client
) -> None:
    with client.producer() as producer:
        producer.send("orders", b"0").result(LIMIT)
        broker.stop_listening()
        broker.drop_all()
        promises = [producer.send("orders", b"%d" % number) for number in range(1, 1500)]
        broker.listen_again()

        producer.flush(LIMIT)

    assert broker.messages("orders") == [b"%d" % number for number in range(1500)]
    assert [pending.result(0).sequence for pending in promises] == list(range(1, 1500))


def test_a_broker_that_stays_away_gives_every_message_its_error(
    broker: FakeBroker, client: pulque.Client
) -> None:
    with client.producer(timeout=0.5) as producer:
        producer.send("orders", b"0").result(LIMIT)
        broker.stop_listening()
        broker.drop_all()

        promises = [producer.send("orders", b"x") for _ in range(10)]
        errors = [pending.exception(LIMIT) for pending in promises]

    assert all(isinstance(error, DisconnectedError) for error in errors)
    assert f"127.0.0.1:{broker.port}" in str(errors[0])


def test_closing_gives_what_is_left_an_outcome(broker: FakeBroker, client: pulque.Client) -> None:
    broker.fault = Times(requests.Send, Silence(), times=1000)
    producer = client.producer()
    promises = [producer.send("orders", b"x") for _ in range(10)]

    producer.close(0.1)

    assert all(pending.done() for pending in promises)
    assert isinstance(promises[0].exception(0), DisconnectedError)
    with pytest.raises(UsageError, match="closed"):
        producer.send("orders", b"y")
    producer.close()


def test_a_flush_ends_in_time(broker: FakeBroker, client: pulque.Client) -> None:
    broker.fault = Times(requests.Send, Silence(), times=1000)
    producer = client.producer()
    producer.send("orders", b"x")

    with pytest.raises(RequestTimeoutError, match="1 batches have no outcome"):
        producer.flush(0.05)
    producer.close(0)


def test_a_producer_that_may_buffer_little_waits_for_the_broker(
    broker: FakeBroker, client: pulque.Client
) -> None:
    gate = threading.Event()

    def wait(request: requests.Request) -> None:
        if isinstance(request, requests.Send):
            assert gate.wait(LIMIT)

    broker.fault = wait
    with client.producer(max_buffered_bytes=50_000, max_batch=10, linger=0) as producer:
        sent: list[int] = []

        def send_all() -> None:
            for number in range(1000):
                producer.send("orders", bytes(1000))
                sent.append(number)

        thread = threading.Thread(target=send_all)
        thread.start()
        deadline = time.monotonic() + LIMIT
        while len(sent) < 40:
            assert time.monotonic() < deadline
            thread.join(0.001)
        thread.join(0.1)
        before = len(sent)
        gate.set()
        thread.join()

    assert before < 60
    assert len(broker.messages("orders")) == 1000


def test_threads_share_a_producer(broker: FakeBroker, producer: pulque.Producer) -> None:
    def work(name: int) -> None:
        for number in range(500):
            producer.send("orders", b"%d-%d" % (name, number))

    threads = [threading.Thread(target=work, args=(name,)) for name in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    producer.flush(LIMIT)

    stored = broker.messages("orders")
    assert len(stored) == 2000
    for name in range(4):
        own = [body for body in stored if body.startswith(b"%d-" % name)]
        assert own == [b"%d-%d" % (name, number) for number in range(500)]


def test_a_callback_is_called_with_its_promise(producer: pulque.Producer) -> None:
    called: list[pulque.PendingSend] = []
    done = threading.Event()
    pending = producer.send("orders", b"one")
    pending.add_done_callback(called.append)
    pending.add_done_callback(lambda _: done.set())

    assert done.wait(LIMIT)
    assert called == [pending]


@pytest.mark.parametrize("compression", ["lz4", "zstd"])
def test_compressed_batches_are_read_back(
    client: pulque.Client, compression: CompressionName
) -> None:
    with client.producer(compression=compression) as producer:
        producer.send_many("orders", [b"tea " * 100] * 50)

    assert {message.body for message in client.read("orders")} == {b"tea " * 100}


@pytest.mark.parametrize(
    "choice",
    [
        {"acks": "none"},
        {"linger": -1},
        {"max_batch": 0},
        {"max_batch": 10_001},
        {"max_batch_bytes": 0},
        {"max_in_flight": 33},
        {"max_buffered_bytes": 0},
        {"compression": "gzip"},
    ],
)
def test_a_choice_that_makes_no_sense_is_refused(
    client: pulque.Client, choice: dict[str, object]
) -> None:
    with pytest.raises(UsageError, match=next(iter(choice))):
        client.producer(**choice)  # type: ignore[arg-type]
