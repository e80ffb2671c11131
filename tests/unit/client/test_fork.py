"""A child of fork shares no identity and no connection with its parent, and never hangs."""

import asyncio
import multiprocessing
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

import pulque
from pulque import aio
from pulque.client.connection.busy_poll import _one_looks
from pulque.errors import ForkedError
from pulque.testing.broker import InProcessBroker
from tests.forks import PATIENCE, in_child
from tests.unit.client.fake_broker import FakeBroker


def send_some(client: pulque.Client, name: str, count: int = 3) -> list[str]:
    return [client.send("orders", f"{name} {number}".encode()).id for number in range(count)]


def test_what_children_send_is_stored(broker: FakeBroker, client: pulque.Client) -> None:
    ids = send_some(client, "parent")
    for name in ("first", "second"):
        ids += in_child(lambda name=name: send_some(client, name))  # type: ignore[misc]
    ids += send_some(client, "parent again")

    assert sorted(broker.messages("orders")) == sorted(
        f"{name} {number}".encode()
        for name in ("parent", "first", "second", "parent again")
        for number in range(3)
    )
    assert len(set(ids)) == 12


def test_a_batch_that_a_child_sends_is_stored(broker: FakeBroker, client: pulque.Client) -> None:
    client.send_many("orders", [b"one", b"two"])
    in_child(lambda: len(client.send_many("orders", [b"three", b"four"])))

    assert broker.messages("orders") == [b"one", b"two", b"three", b"four"]


def test_a_child_closes_no_connection_of_its_parent(
    broker: FakeBroker, client: pulque.Client
) -> None:
    send_some(client, "parent")
    before = broker.connections
    assert in_child(client.close) is None
    send_some(client, "parent again")

    assert broker.connections == before


def test_a_child_does_not_wait_for_locks_of_threads_that_it_lacks(
    broker: FakeBroker, client: pulque.Client
) -> None:
    client.send("orders", b"one")
    producer = client.producer()
    producer.send("orders", b"two").result()
    calls = client._calls  # noqa: SLF001  # a lock that a thread holds
    held, go_on = threading.Event(), threading.Event()

    def hold() -> None:
        with producer._core.lock, calls._has_moved, _one_looks:  # noqa: SLF001
            held.set()
            go_on.wait(PATIENCE)

    thread = threading.Thread(target=hold)
    thread.start()
    held.wait(PATIENCE)
    try:
        assert in_child(lambda: send_some(client, "child"))
        assert isinstance(in_child(lambda: producer.send("orders", b"three")), ForkedError)
        assert in_child(producer.close) is None
        assert in_child(client.close) is None
    finally:
        go_on.set()
        thread.join()


@pytest.mark.parametrize("has_spool", [False, True])
def test_a_producer_of_the_parent_refuses_and_the_parent_goes_on(
    broker: FakeBroker, client: pulque.Client, tmp_path: Path, *, has_spool: bool
) -> None:
    spool = tmp_path / "spool" if has_spool else None
    producer = client.producer(linger=60, spool=spool)
    pending = producer.send("orders", b"one")

    for use in (
        lambda: producer.send("orders", b"two"),
        lambda: producer.send_many("orders", [b"two"]),
        producer.flush,
        pending.result,
    ):
        error = in_child(use)
        assert isinstance(error, ForkedError)
        assert "client.producer()" in str(error)
    assert in_child(producer.close) is None
    assert in_child(lambda: client.producer().send("orders", b"child").result().sequence) == 0

    producer.flush()
    assert pending.result().sequence == 1
    producer.close()
    assert broker.messages("orders") == [b"child", b"one"]
    client.producer(spool=spool).close()  # nobody keeps it locked


def test_a_consumer_of_the_parent_refuses_and_the_parent_goes_on(
    broker: FakeBroker, client: pulque.Client
) -> None:
    client.send_many("orders", [b"one", b"two"])
    consumer = client.consumer("orders", group="kitchen")
    (message,) = consumer.pull(1)

    for use in (consumer.pull, lambda: next(iter(consumer)), consumer.settle):
        assert isinstance(in_child(use), ForkedError)
    assert in_child(consumer.close) is None

    def pull_as_another() -> str:
        with client.consumer("orders", group="kitchen") as other:
            return str(other.consumer_id)

    assert in_child(pull_as_another) not in {str(consumer.consumer_id), ""}
    message.ack()
    (second,) = consumer.pull(1)
    second.ack()
    consumer.settle()
    assert second.body == b"two"


def test_a_closed_consumer_of_the_parent_is_locked_by_no_child(client: pulque.Client) -> None:
    client.send("orders", b"one")
    consumer = client.consumer("orders", group="kitchen")
    reader, writer = os.pipe()
    started, start = os.pipe()
    child = os.fork()
    if not child:
        os.close(writer)
        os.write(start, b"1")
        os.read(reader, 1)  # until the parent is done
        os._exit(0)
    try:
        os.read(started, 1)
        consumer.close()
        with client.consumer("orders", group="kitchen") as again:
            assert again.consumer_id == consumer.consumer_id
    finally:
        for each in (writer, reader, started, start):
            os.close(each)
        os.waitpid(child, 0)


def test_the_end_of_a_connection_is_seen_although_a_child_lives(broker: FakeBroker) -> None:
    """A child that kept the socket would keep the broker waiting."""
    client = pulque.connect(broker.url, name="test", timeout=5)
    client.send("orders", b"one")
    (lane,) = client._calls._idle  # noqa: SLF001  # its socket
    assert lane.connection is not None
    number = lane.connection.fileno()

    def is_open() -> bool:
        try:
            with socket.socket(fileno=os.dup(number)) as same:
                return bool(same.getpeername())
        except OSError:
            return False

    assert in_child(is_open) is False
    assert is_open()
    client.close()


async def use_all(client: aio.Client, producer: aio.Producer, consumer: aio.Consumer) -> list[str]:
    found = []

    async def attempt(use: Callable[[], Awaitable[object]]) -> None:
        try:
            async with asyncio.timeout(PATIENCE / 4):
                found.append(repr(await use()))
        except Exception as error:  # noqa: BLE001  # it is what is asked for
            found.append(type(error).__name__)

    await attempt(lambda: client.send("orders", b"two"))
    await attempt(lambda: client.send_many("orders", [b"two"]))
    await attempt(lambda: client.read("orders"))
    await attempt(lambda: producer.send("orders", b"two"))
    await attempt(producer.flush)
    await attempt(lambda: consumer.pull(1))
    await attempt(consumer.settle)
    return found


@pytest.mark.parametrize("has_sent", [False, True])
async def test_a_client_for_asyncio_refuses_in_a_child(
    broker: FakeBroker, tmp_path: Path, *, has_sent: bool
) -> None:
    async with aio.connect(broker.url, name="test", timeout=5, state_dir=tmp_path) as client:
        producer = client.producer()
        consumer = client.consumer("orders", group="kitchen")
        if has_sent:
            await client.send("orders", b"one")
            assert len(await consumer.pull(1)) == 1

        def in_a_loop_of_its_own() -> list[str]:
            return asyncio.run(use_all(client, producer, consumer))

        assert in_child(in_a_loop_of_its_own) == ["ForkedError"] * 7
        await client.send("orders", b"three")
    assert broker.messages("orders")[-1] == b"three"


_shared: pulque.Client | None = None


def send_from_worker(url: str, number: int) -> str:
    client = _shared or pulque.connect(url, name="worker", timeout=5)
    return client.send("orders", f"worker {number}".encode()).id


@pytest.mark.parametrize("method", ["fork", "forkserver", "spawn"])
def test_workers_of_multiprocessing_send(
    broker: FakeBroker, client: pulque.Client, method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tests.unit.client.test_fork._shared", client)
    monkeypatch.setitem(globals(), "_shared", client)
    client.send("orders", b"parent")
    context = multiprocessing.get_context(method)
    with context.Pool(2) as pool:
        jobs = [pool.apply_async(send_from_worker, (broker.url, n)) for n in range(8)]
        ids = {job.get(PATIENCE) for job in jobs}

    assert len(ids) == 8
    assert sorted(broker.messages("orders")) == sorted(
        [b"parent", *(f"worker {n}".encode() for n in range(8))]
    )


@pytest.mark.parametrize("is_ordered", [False, True])
def test_a_child_cannot_settle_messages_that_its_parent_pulled(
    pulque_client: pulque.Client, *, is_ordered: bool
) -> None:
    pulque_client.send("orders", b"one", order_key="k")
    with pulque_client.consumer("orders", group="kitchen", ordered=is_ordered) as consumer:
        (message,) = consumer.pull(1, timeout=PATIENCE)
        for use in (
            message.ack,
            message.nack,
            lambda: message.nack(delay=5),
            message.reject,
            lambda: consumer.ack_all([message]),
        ):
            error = in_child(use)
            assert isinstance(error, ForkedError)
            assert "in the process that pulled it" in str(error)
        message.ack()
        consumer.settle()
        assert consumer.held == 0


async def test_a_child_cannot_settle_messages_of_an_asyncio_consumer(
    pulque_broker: InProcessBroker, pulque_client: pulque.Client
) -> None:
    pulque_client.send("orders", b"one")
    async with (
        aio.connect(pulque_broker.url, name="test", timeout=5) as client,
        client.consumer("orders", group="kitchen") as consumer,
    ):
        (message,) = await consumer.pull(1, timeout=PATIENCE)
        for use in (message.ack, message.nack, message.reject):
            assert isinstance(in_child(use), ForkedError)
        message.ack()
        await consumer.settle()
        assert consumer.held == 0


def test_children_of_children_send_under_identities_of_their_own(
    broker: FakeBroker, client: pulque.Client
) -> None:
    def send_and_fork() -> list[str]:
        own = send_some(client, "child")
        found: list[str] = in_child(lambda: send_some(client, "grandchild"))
        return own + found + send_some(client, "child again")

    ids = send_some(client, "parent") + in_child(send_and_fork) + send_some(client, "parent again")

    assert len(set(ids)) == 15
    assert len(broker.messages("orders")) == 15


def test_forks_amid_sends_of_other_threads_lose_and_repeat_nothing(
    broker: FakeBroker, client: pulque.Client
) -> None:
    """A child has their half written frames, taken connections and held locks in its memory."""
    producer = client.producer()
    ends = threading.Event()
    sent: list[bytes] = []

    def keep_sending(thread: int) -> None:
        number = 0
        while not ends.is_set():
            body = f"{thread} {number}".encode()
            if thread % 2:
                producer.send("orders", body).result(PATIENCE)
            else:
                client.send("orders", body)
            sent.append(body)
            number += 1

    threads = [threading.Thread(target=keep_sending, args=(n,)) for n in range(4)]
    for each in threads:
        each.start()
    try:
        for child in range(10):
            assert len(in_child(lambda child=child: send_some(client, f"child {child}"))) == 3  # type: ignore[misc]
            assert isinstance(in_child(lambda: producer.send("orders", b"no")), ForkedError)
    finally:
        ends.set()
        for each in threads:
            each.join(PATIENCE)
    producer.close()

    wanted = sent + [f"child {c} {n}".encode() for c in range(10) for n in range(3)]
    assert sorted(broker.messages("orders")) == sorted(wanted)


GROUPS: list[dict[str, object]] = [
    {"group": "kitchen"},
    {"group": "kitchen", "ordered": True},
    {"group": "kitchen", "mode": "once"},
    {"group": "kitchen", "mode": "once", "tags": ["red"]},
    {"broadcast": True},
]
"""What consumers of every kind are made with."""
each_kind = pytest.mark.parametrize("kind", GROUPS, ids=" ".join)


def number_of(number: int) -> pulque.Outgoing:
    return pulque.Outgoing(b"%d" % number, order_key="k", tags=["red"])


@each_kind
def test_an_iteration_that_goes_on_in_a_child_hands_out_nothing(
    pulque_client: pulque.Client, kind: dict[str, object]
) -> None:
    pulque_client.send_many("orders", [number_of(number) for number in range(5)])
    with pulque_client.consumer("orders", **kind) as consumer:  # type: ignore[arg-type]
        iteration = iter(consumer)
        first = next(iteration)

        error = in_child(lambda: next(iteration))

        assert isinstance(error, ForkedError)
        assert isinstance(in_child(first.ack), ForkedError)
        first.ack()
        rest = []
        for message in iteration:
            rest.append(message.body)
            message.ack()
            if len(rest) == 4:
                break
    assert rest == [b"1", b"2", b"3", b"4"]


def test_an_iteration_that_ends_in_a_child_waits_for_no_thread(
    broker: FakeBroker, client: pulque.Client
) -> None:
    client.send_many("orders", [b"one", b"two"])
    consumer = client.consumer("orders", group="kitchen")
    iteration = iter(consumer)
    next(iteration)
    (inlet,) = consumer._inlets._all()  # noqa: SLF001  # a lock that a thread holds
    held, go_on = threading.Event(), threading.Event()

    def hold() -> None:
        with inlet.lock:
            held.set()
            go_on.wait(PATIENCE)

    thread = threading.Thread(target=hold)
    thread.start()
    held.wait(PATIENCE)
    try:
        assert in_child(iteration.close) is None  # type: ignore[attr-defined]  # as at its end
    finally:
        go_on.set()
        thread.join()
    assert next(iteration).body == b"two"
    consumer.close()


@pytest.mark.parametrize("is_ordered", [False, True])
async def test_an_iteration_for_asyncio_in_a_child_is_refused(
    pulque_broker: InProcessBroker, pulque_client: pulque.Client, *, is_ordered: bool
) -> None:
    pulque_client.send("orders", b"one", order_key="k")
    async with (
        aio.connect(pulque_broker.url, name="test", timeout=5) as client,
        client.consumer("orders", group="kitchen", ordered=is_ordered) as consumer,
    ):

        async def iterate() -> bytes:
            return bytes((await anext(aiter(consumer))).body)

        assert isinstance(in_child(lambda: asyncio.run(iterate())), ForkedError)
        assert await iterate() == b"one"


@each_kind
async def test_an_iteration_for_asyncio_that_goes_on_in_a_child_hands_out_nothing(
    pulque_broker: InProcessBroker, pulque_client: pulque.Client, kind: dict[str, object]
) -> None:
    pulque_client.send_many("orders", [number_of(number) for number in range(5)])
    async with (
        aio.connect(pulque_broker.url, name="test", timeout=5) as client,
        client.consumer("orders", **kind) as consumer,  # type: ignore[arg-type]
    ):
        iteration = aiter(consumer)
        (await anext(iteration)).ack()

        def go_on() -> bytes:
            """Go on without the loop: it is the parent's, and there is nothing to wait for."""
            coroutine = anext(iteration)
            try:
                coroutine.__await__().send(None)
            except StopIteration as end:
                return bytes(end.value.body)
            return b"it waits"

        assert isinstance(in_child(go_on), ForkedError)
        rest = []
        async for message in iteration:
            rest.append(message.body)
            message.ack()
            if len(rest) == 4:
                break
    assert rest == [b"1", b"2", b"3", b"4"]


ENDS_AS_USUAL = """
import os, sys
import pulque

with pulque.connect(sys.argv[1], name="test", timeout=10, state_dir=sys.argv[2]) as client:
    client.send_many("orders", [b"one", b"two"])
    consumer = client.consumer("orders", group="kitchen")
    for first in consumer:
        break
    producer = client.producer(linger=60, spool=sys.argv[2] + "/spool")
    pending = producer.send("bills", b"three")
    child = os.fork()
    if not child:
        sys.exit(client.send("orders", b"of the child").sequence - 2)  # all is closed, and exits
    _, status = os.waitpid(child, 0)
    assert status == 0, status
    first.ack()
    (second, third) = consumer.pull(1, timeout=10) + consumer.pull(1, timeout=10)
    assert (second.body, second.attempt) == (b"two", 1)
    assert (third.body, third.attempt) == (b"of the child", 1)
    second.ack()
    third.ack()
    consumer.settle()
    producer.flush()
    print(pending.result().sequence, consumer.held)
"""


def test_a_child_that_exits_as_usual_leaves_its_parent_as_it_was(
    pulque_broker: InProcessBroker, tmp_path: Path
) -> None:
    """It runs the ends of ``with`` blocks and what was registered with atexit."""
    done = subprocess.run(
        [sys.executable, "-c", ENDS_AS_USUAL, pulque_broker.url, str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (done.returncode, done.stdout.split(), done.stderr) == (0, ["0", "0"], "")
