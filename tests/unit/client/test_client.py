"""The blocking client: a message is confirmed once or the caller is told, and calls end."""

import socket
import threading
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

import pulque
from pulque.errors import (
    ConfigError,
    DisconnectedError,
    InvalidNameError,
    MessageTooLargeError,
    NotAllowedError,
    OverloadedError,
    RequestTimeoutError,
    UsageError,
)
from pulque.wire import requests
from tests.unit.client.fake_broker import Drop, FakeBroker, Silence
from tests.unit.client.faults import Times


def test_a_sent_message_is_stored_and_its_receipt_says_where(
    broker: FakeBroker, client: pulque.Client
) -> None:
    first = client.send("orders", b"one")
    second = client.send("orders", b"two")

    assert broker.messages("orders") == [b"one", b"two"]
    assert (first.sequence, second.sequence) == (0, 1)
    assert first.partition == "orders"
    assert first.broker_group == "fake"
    assert first.position == ("fake", "orders", 0)
    assert not first.is_duplicate
    assert first.id < second.id


def test_everything_a_message_has_arrives(client: pulque.Client) -> None:
    expires_at = datetime.now(UTC) + timedelta(hours=1)
    receipt = client.send(
        "orders",
        b"tea",
        key="k1",
        order_key="table 4",
        tags=["hot", "milk"],
        headers={"from": "bar"},
        expires_at=expires_at,
    )

    (message,) = client.read("orders")
    assert message.id == receipt.id
    assert message.body == b"tea"
    assert message.key == "k1"
    assert message.order_key == "table 4"
    assert message.tags == ("hot", "milk")
    assert message.headers == {"from": "bar"}
    assert message.expires_at_ms == int(expires_at.timestamp() * 1000)
    assert message.stored_at_ms == receipt.stored_at_ms


@pytest.mark.parametrize("body", [bytearray(b"tea"), memoryview(b"tea")])
def test_a_body_may_be_any_bytes(broker: FakeBroker, client: pulque.Client, body: bytes) -> None:
    client.send("orders", body)

    assert broker.messages("orders") == [b"tea"]


def test_what_is_no_message_is_refused_before_it_travels(
    broker: FakeBroker, client: pulque.Client
) -> None:
    with pytest.raises(UsageError, match="cannot be sent"):
        client.send("orders", object())
    with pytest.raises(UsageError, match="no time zone"):
        client.send("orders", b"tea", expires_at=datetime(2030, 1, 1))  # noqa: DTZ001
    with pytest.raises(MessageTooLargeError):
        client.send("orders", bytes(broker.max_message + 1))
    with pytest.raises(InvalidNameError):
        client.send("../orders", b"tea")

    assert not broker.seen(requests.Send)


def test_many_messages_come_back_as_receipts_in_order(
    broker: FakeBroker, client: pulque.Client
) -> None:
    bodies = [str(number).encode() for number in range(2500)]

    receipts = client.send_many("orders", bodies)

    assert broker.messages("orders") == bodies
    assert [receipt.sequence for receipt in receipts] == list(range(2500))
    assert len(broker.seen(requests.Send)) == 3
    assert client.send_many("orders", []) == []


def test_many_messages_may_be_of_both_kinds(client: pulque.Client) -> None:
    client.send_many("orders", [b"plain", pulque.Outgoing(b"rich", key="k")])

    assert [(m.body, m.key) for m in client.read("orders")] == [(b"plain", None), (b"rich", "k")]


@pytest.mark.parametrize("handled", [False, True])
def test_a_send_whose_connection_is_lost_is_repeated_and_stored_once(
    broker: FakeBroker, client: pulque.Client, *, handled: bool
) -> None:
    client.send("orders", b"zero")
    broker.fault = Times(requests.Send, Drop(handled=handled), times=3)

    receipt = client.send("orders", b"one")

    assert broker.messages("orders") == [b"zero", b"one"]
    assert receipt.sequence == 1
    assert receipt.is_duplicate is handled


def test_a_send_is_repeated_while_the_broker_is_overloaded(
    broker: FakeBroker, client: pulque.Client
) -> None:
    broker.fault = Times(requests.Send, OverloadedError("busy"), times=2)

    client.send("orders", b"one")

    assert broker.messages("orders") == [b"one"]


def test_a_send_fails_at_once_when_the_broker_says_no(
    broker: FakeBroker, client: pulque.Client
) -> None:
    broker.fault = Times(requests.Send, NotAllowedError("not you"), times=1000)

    with pytest.raises(NotAllowedError, match="not you"):
        client.send("orders", b"one")

    assert len(broker.seen(requests.Send)) == 1


def test_the_error_of_many_says_how_many_are_confirmed(
    broker: FakeBroker, client: pulque.Client
) -> None:
    def refuse_the_second(request: requests.Request) -> None:
        if isinstance(request, requests.Send) and len(broker.seen(requests.Send)) == 2:
            raise NotAllowedError("enough")

    broker.fault = refuse_the_second

    with pytest.raises(NotAllowedError) as caught:
        client.send_many("orders", [b"x"] * 1500)

    assert caught.value.__notes__ == ["1000 of 1500 messages are confirmed"]


def test_a_call_without_an_answer_ends_in_time_and_says_where_and_how_long(
    broker: FakeBroker, client: pulque.Client
) -> None:
    client.send("orders", b"one")
    broker.fault = Times(requests.Send, Silence(), times=1000)

    with pytest.raises(RequestTimeoutError, match=rf"127.0.0.1:{broker.port} within 0.2 s"):
        client.send("orders", b"two", timeout=0.2)


def test_a_call_goes_on_after_one_that_timed_out(
    broker: FakeBroker, client: pulque.Client
) -> None:
    broker.fault = Times(requests.Send, Silence())
    with pytest.raises(RequestTimeoutError):
        client.send("orders", b"one", timeout=0.1)

    receipt = client.send("orders", b"two")

    assert broker.messages("orders")[receipt.sequence] == b"two"


def test_a_broker_that_comes_back_in_time_is_found(
    broker: FakeBroker, client: pulque.Client
) -> None:
    client.send("orders", b"one")
    broker.stop_listening()
    broker.drop_all()
    broker.wait_until(lambda: not broker.connections)
    threading.Timer(0.2, broker.listen_again).start()

    receipt = client.send("orders", b"two")

    assert receipt.sequence == 1


def test_a_broker_that_stays_away_is_reported_with_address_and_time(
    broker: FakeBroker, client: pulque.Client
) -> None:
    broker.stop_listening()
    broker.drop_all()
    broker.wait_until(lambda: not broker.connections)

    with pytest.raises(DisconnectedError, match=rf"127.0.0.1:{broker.port}.*tried \d+ times in"):
        client.send("orders", b"two", timeout=0.3)


def test_nobody_there_is_known_at_once() -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]

    with pytest.raises(DisconnectedError, match=f"127.0.0.1:{port}"):
        pulque.connect(f"pulque://127.0.0.1:{port}")


def test_a_peer_that_says_nothing_is_given_up() -> None:
    with (
        socket.create_server(("127.0.0.1", 0)) as silent,
        pytest.raises(RequestTimeoutError, match="no answer"),
    ):
        pulque.connect(f"pulque://127.0.0.1:{silent.getsockname()[1]}", timeout=0.2)


def test_the_next_address_is_tried(broker: FakeBroker) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]

    with pulque.connect(f"pulque://127.0.0.1:{port},127.0.0.1:{broker.port}") as client:
        assert client.status() == {"broker": "fake"}


def test_the_environment_names_the_broker(
    broker: FakeBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PULQUE_URL", broker.url)

    with pulque.connect() as client:
        assert client.seal() == {"": 17}


def test_a_wrong_setting_is_refused() -> None:
    with pytest.raises(ConfigError, match="url"):
        pulque.connect("http://127.0.0.1")
    with pytest.raises(UsageError, match="acks"):
        pulque.connect(acks="maybe")  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="timeout"):
        pulque.connect(timeout=0)


def test_threads_send_at_the_same_time_and_nothing_is_lost_or_doubled(
    broker: FakeBroker, client: pulque.Client
) -> None:
    def work(name: int) -> None:
        for number in range(20):
            client.send("orders", f"{name}-{number}".encode())

    drops = iter(range(1000))

    def drop_some(request: requests.Request) -> None:
        if isinstance(request, requests.Send) and next(drops) % 7 == 3:
            raise Drop(handled=True)

    broker.fault = drop_some
    threads = [threading.Thread(target=work, args=(name,)) for name in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    stored = broker.messages("orders")
    assert sorted(stored) == sorted(
        f"{name}-{number}".encode() for name in range(8) for number in range(20)
    )
    for name in range(8):
        own = [body for body in stored if body.startswith(b"%d-" % name)]
        assert own == [f"{name}-{number}".encode() for number in range(20)]


def test_read_waits_for_a_message(broker: FakeBroker, client: pulque.Client) -> None:
    threading.Timer(0.1, client.send, args=("orders", b"late")).start()

    messages = client.read("orders", timeout=5)

    assert [message.body for message in messages] == [b"late"]
    assert client.read("orders", 1) == []
    broker.wait_until(lambda: True)


def test_read_takes_part_of_a_batch(client: pulque.Client) -> None:
    client.send_many("orders", [b"0", b"1", b"2", b"3", b"4"])

    assert [m.body for m in client.read("orders", 1, max_messages=3)] == [b"1", b"2", b"3"]


def test_positions_say_where_a_subject_begins_and_ends(client: pulque.Client) -> None:
    client.send_many("orders", [b"0", b"1"])

    (found,) = client.positions("orders")
    (at,) = client.positions("orders", at=datetime.now(UTC))

    assert (found.partition, found.start, found.end, found.at) == ("orders", 0, 2, None)
    assert at.at == 2


def test_tail_yields_what_comes(client: pulque.Client) -> None:
    client.send("orders", b"before")
    tail = client.tail("orders")
    threading.Timer(0.1, client.send_many, args=("orders", [b"1", b"2"])).start()

    assert [next(tail).body, next(tail).body] == [b"1", b"2"]
    assert next(client.tail("orders", start="earliest")).body == b"before"


def test_a_closed_client_refuses(broker: FakeBroker, tmp_path: Path) -> None:
    client = pulque.connect(broker.url, state_dir=tmp_path)
    client.close()

    with pytest.raises(UsageError, match="closed"):
        client.status()
    with pytest.raises(UsageError, match="closed"):
        client.producer()


def test_closing_a_client_closes_what_came_from_it(broker: FakeBroker, tmp_path: Path) -> None:
    client = pulque.connect(broker.url, state_dir=tmp_path)
    producer = client.producer()
    consumer = client.consumer("orders", "kitchen")
    pending = producer.send("orders", b"one")

    client.close()

    assert pending.result(0).sequence == 0
    with pytest.raises(UsageError, match="closed"):
        producer.send("orders", b"two")
    assert list(consumer) == []
    broker.wait_until(lambda: not broker.connections)


@pytest.fixture(autouse=True)
def no_leaks() -> Iterator[None]:
    before = set(threading.enumerate())
    yield
    left = set(threading.enumerate()) - before
    assert not [t for t in left if t.name.startswith("pulque-")]
