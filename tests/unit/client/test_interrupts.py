"""Ctrl-C at every point of send, flush, pull, iterate and close leaves no lock taken.

After it the producer or consumer goes on, and can be closed at once; what was confirmed is stored,
what was taken in has an outcome, and no message is lost or stored twice.
"""

import os
import random
import signal
import threading
from collections import Counter
from collections.abc import Callable, Generator, Iterator
from concurrent.futures import Future
from contextlib import closing
from pathlib import Path
from typing import TypeVar, cast

import pytest

import pulque
from pulque.client.blocking.broker_puller import Inlet
from pulque.errors import RequestTimeoutError
from pulque.testing.broker import InProcessBroker
from pulque.wire.requests import Pull
from tests.unit.client.fake_broker import FakeBroker
from tests.unit.client.fake_cluster import FakeCluster
from tests.unit.client.interrupts import Interrupter

# The system hands out a socket, and Ctrl-C comes before anybody has it: the interpreter closes it.
pytestmark = pytest.mark.filterwarnings("ignore:unclosed <socket:ResourceWarning")

T = TypeVar("T")
PATIENCE = 20.0


def in_time(act: Callable[[], T], where: str) -> T:
    """Return what something returns, or fail if it hangs."""
    found: Future[T] = Future()

    def run() -> None:
        try:
            found.set_result(act())
        except BaseException as error:  # noqa: BLE001  # raised below
            found.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    try:
        return found.result(PATIENCE)
    except TimeoutError:
        if found.done():
            raise
        pytest.fail(f"hangs after an interrupt at {where}")


class TimeLimitError(Exception):
    """As the handlers of ``signal.alarm`` raise it, or Celery's of its soft time limit."""


def is_ours(file: str) -> bool:
    return "/pulque/client/" in file


def is_ours_or_threading(file: str) -> bool:
    return is_ours(file) or file.endswith("/threading.py")


def is_of_the_inlet(file: str) -> bool:
    return file.endswith("/client/blocking/broker_puller.py")


def points(
    is_watched: Callable[[str], bool] = is_ours,
    *,
    step: int = 1,
    seed: int = 0,
    least: int = 10,
    error: type[BaseException] = KeyboardInterrupt,
) -> Iterator[Interrupter]:
    """Yield one that interrupts at the first point, the second, and so on until there is none.

    With a ``step`` some are left out, others with each seed: what takes long is not run at all of
    them.
    """
    point = random.Random(seed).randrange(step)
    while True:
        found = Interrupter(point, is_watched, error)
        yield found
        if not found.where:
            assert point > least, "hardly anything was interrupted"
            return
        point += step


def threads() -> list[str]:
    return [each.name for each in of_clients()]


def of_clients() -> list[threading.Thread]:
    """Return the threads of clients: servers have one that syncs."""
    found = threading.enumerate()
    return [t for t in found if t.name.startswith("pulque-") and t.name != "pulque-sync"]


def stored(broker: FakeBroker, subject: str) -> list[bytes]:
    return broker.messages(subject) if subject in broker.partitions else []


@pytest.fixture
def connect(broker: FakeBroker, tmp_path: Path) -> Callable[[], pulque.Client]:
    return lambda: pulque.connect(
        broker.url, name="test", timeout=PATIENCE / 2, state_dir=tmp_path
    )


def test_a_send_can_be_interrupted_anywhere(
    broker: FakeBroker, connect: Callable[[], pulque.Client]
) -> None:
    for number, interrupter in enumerate(points()):
        client, subject = connect(), f"orders.{number}"
        interrupter.run(lambda: client.send(subject, b"one"))  # noqa: B023
        in_time(lambda: client.send(subject, b"two"), interrupter.where)  # noqa: B023
        in_time(client.close, interrupter.where)
        assert stored(broker, subject) in ([b"one", b"two"], [b"two"]), interrupter.where


@pytest.mark.parametrize("has_spool", [False, True])
def test_a_producer_can_be_interrupted_anywhere(
    broker: FakeBroker,
    connect: Callable[[], pulque.Client],
    tmp_path: Path,
    seed: int,
    *,
    has_spool: bool,
) -> None:
    for number, interrupter in enumerate(
        points(is_ours, step=7, seed=seed) if has_spool else points(is_ours_or_threading)
    ):
        client, subject = connect(), f"orders.{number}"
        spool = tmp_path / f"spool-{number}" if has_spool else None
        producer = client.producer(linger=0.001, spool=spool, spool_sync=False)
        producer.send("warm", b"up").result()
        before = producer.send(subject, b"before")

        def act() -> None:
            producer.send(subject, b"body")  # noqa: B023
            producer.send(subject, b"keyed", order_key="k")  # noqa: B023
            producer.send(subject, b"keyed again", order_key="k")  # noqa: B023
            producer.send_many(subject, [b"many", b"more"])  # noqa: B023
            producer.send(subject, b"with a key", key="k")  # noqa: B023
            producer.flush()  # noqa: B023

        interrupter.run(act)
        where = interrupter.where
        in_time(lambda: before.result(PATIENCE / 2), where)  # noqa: B023
        after = in_time(lambda: producer.send(subject, b"after"), where)  # noqa: B023
        in_time(lambda: after.result(PATIENCE / 2), where)  # noqa: B023
        in_time(lambda: producer.flush(PATIENCE / 2), where)  # noqa: B023
        in_time(producer.close, where)
        in_time(client.close, where)
        found = Counter(stored(broker, subject))
        assert found[b"before"] == found[b"after"] == max(found.values()) == 1, where
        assert threads() == [], where


def test_the_parts_of_a_message_stay_together_when_a_send_is_interrupted(
    broker: FakeBroker, connect: Callable[[], pulque.Client]
) -> None:
    for number, interrupter in enumerate(points()):
        with connect() as client:
            subject = f"orders.{number}"
            producer = client.producer(linger=0.2)
            producer.send(subject, b"0", key="0", order_key="k", tags=["t0"])

            def act() -> None:
                producer.send(subject, b"1", key="1", order_key="k", tags=["t1"])  # noqa: B023
                producer.send(subject, b"2", order_key="k")  # noqa: B023

            interrupter.run(act)
            producer.send(subject, b"3", key="3", order_key="k", tags=["t3"])
            producer.close()
            with client.consumer(subject, group="kitchen") as consumer:
                for message in consumer.pull(10):
                    plain = message.body == b"2"
                    assert message.order_key == "k", interrupter.where
                    assert message.key == (None if plain else message.body.decode())
                    assert message.tags == (() if plain else (f"t{message.body.decode()}",))
        if number >= 120:
            return  # the rest is I/O, which the other tests interrupt


def test_the_close_of_a_producer_can_be_interrupted_anywhere(
    broker: FakeBroker, connect: Callable[[], pulque.Client]
) -> None:
    for number, interrupter in enumerate(points()):
        client, subject = connect(), f"orders.{number}"
        producer = client.producer(linger=0.001)
        pending = producer.send(subject, b"one")
        interrupter.run(producer.close)
        in_time(producer.close, interrupter.where)
        error = in_time(lambda: pending.exception(PATIENCE / 2), interrupter.where)  # noqa: B023
        assert not isinstance(error, RequestTimeoutError), interrupter.where
        if error is None:
            assert stored(broker, subject) == [b"one"], interrupter.where
        in_time(client.close, interrupter.where)
        assert threads() == [], interrupter.where


BODIES = {b"one", b"two", b"three"}


def pull_all(consumer: pulque.Consumer, got: set[bytes]) -> None:
    for _ in range(2):
        messages = consumer.pull(2)
        got.update(each.body for each in messages)
        for message in messages:
            message.ack()
        consumer.settle()


def pull_until_all(consumer: pulque.Consumer, got: set[bytes]) -> None:
    while got != BODIES:
        messages = consumer.pull(2)
        got.update(each.body for each in messages)
        consumer.ack_all(messages)


def iterate_all(consumer: pulque.Consumer, got: set[bytes]) -> None:
    with closing(cast(Generator[pulque.ReceivedMessage, None, None], iter(consumer))) as messages:
        for message in messages:
            got.add(message.body)
            message.ack()
            if got == BODIES:
                return


@pytest.mark.parametrize("error", [KeyboardInterrupt, TimeLimitError])
@pytest.mark.parametrize(("consume", "step"), [(pull_all, 7), (iterate_all, 4)])
def test_a_consumer_can_be_interrupted_anywhere(
    connect: Callable[[], pulque.Client],
    consume: Callable[[pulque.Consumer, set[bytes]], None],
    step: int,
    seed: int,
    error: type[BaseException],
) -> None:
    for number, interrupter in enumerate(points(step=step, seed=seed, error=error)):
        client, subject = connect(), f"orders.{number}"
        client.send_many(subject, sorted(BODIES))
        consumer = client.consumer(subject, group="kitchen")
        got: set[bytes] = set()
        interrupter.run(lambda: consume(consumer, got))  # noqa: B023
        pull_the_rest(consumer, got, interrupter.where)
        in_time(client.close, interrupter.where)
        assert threads() == [], interrupter.where


@pytest.mark.parametrize("error", [KeyboardInterrupt, TimeLimitError])
@pytest.mark.parametrize("consume", [pull_until_all, iterate_all])
def test_a_consumer_that_connects_again_can_be_interrupted_anywhere(
    broker: FakeBroker,
    connect: Callable[[], pulque.Client],
    consume: Callable[[pulque.Consumer, set[bytes]], None],
    error: type[BaseException],
) -> None:
    for number, interrupter in enumerate(points(is_of_the_inlet, error=error)):
        client, subject = connect(), f"orders.{number}"
        client.send_many(subject, sorted(BODIES))
        consumer = client.consumer(subject, group="kitchen")
        got: set[bytes] = set()
        for message in consumer.pull(1):
            got.add(message.body)
            message.ack()
        broker.drop_all()
        interrupter.run(lambda: consume(consumer, got))  # noqa: B023
        pull_the_rest(consumer, got, interrupter.where, most_tries=5)
        in_time(client.close, interrupter.where)
        assert threads() == [], interrupter.where


def pull_the_rest(
    consumer: pulque.Consumer, got: set[bytes], where: str, most_tries: int = 20
) -> None:
    """Pull what did not come yet, and close the consumer."""
    tries = 0
    while got != BODIES:
        assert tries < most_tries, f"only {got} after an interrupt at {where}"
        tries += 1
        got |= {each.body for each in in_time(lambda: consumer.pull(3), where)}
    in_time(consumer.close, where)


def test_the_close_of_a_consumer_can_be_interrupted_anywhere(
    connect: Callable[[], pulque.Client],
) -> None:
    for number, interrupter in enumerate(points()):
        client, subject = connect(), f"orders.{number}"
        client.send_many(subject, [b"one", b"two"])
        consumer = client.consumer(subject, group="kitchen")
        consumer.pull(1, timeout=PATIENCE)[0].ack()
        interrupter.run(consumer.close)
        in_time(consumer.close, interrupter.where)
        with client.consumer(subject, group="kitchen") as other:
            (message,) = in_time(lambda: other.pull(2, timeout=PATIENCE / 2), interrupter.where)
            assert message.body == b"two", interrupter.where
        in_time(client.close, interrupter.where)
        assert threads() == [], interrupter.where


@pytest.mark.parametrize("are_retries", [False, True])
def test_what_a_consumer_in_order_was_about_to_hand_out_comes_again(
    pulque_broker: InProcessBroker,
    pulque_client: pulque.Client,
    monkeypatch: pytest.MonkeyPatch,
    *,
    are_retries: bool,
) -> None:
    def interrupt(*_: object) -> None:
        monkeypatch.undo()
        raise KeyboardInterrupt

    pulque_client.send("orders", b"one", order_key="k")
    with pulque_client.consumer("orders", group="kitchen", ordered=True) as consumer:
        if are_retries:
            (message,) = consumer.pull(1, timeout=PATIENCE)
            message.nack(delay=0)
            consumer.settle()
        monkeypatch.setattr(Inlet, "ask_ahead", interrupt)  # behind what was taken
        with pytest.raises(KeyboardInterrupt):
            consumer.pull(1, timeout=PATIENCE)

        (message,) = in_time(lambda: consumer.pull(1, timeout=PATIENCE), "ask_ahead")
        assert (message.body, message.is_abandoned) == (b"one", False)
        message.ack()
        consumer.settle()


IN_ORDER = [(key, number) for number in range(4) for key in "ab"]


@pytest.fixture(params=[False, True], ids=["best_effort", "strict"])
def in_order(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[pulque.Client]:
    """A client of a broker whose subjects keep the order to this degree."""
    strict = ["*"] if request.param else []
    with (
        InProcessBroker(delays=False, consumption={"strict": strict}) as broker,
        pulque.connect(broker.url, name="test", timeout=PATIENCE, state_dir=tmp_path) as client,
    ):
        yield client


class Handler:
    """Acks all that it is handed, but nacks one message once; and knows what it was handed."""

    def __init__(self, consumer: pulque.Consumer) -> None:
        self.handed: list[pulque.ReceivedMessage] = []
        self.nacked: pulque.ReceivedMessage | None = None
        self._consumer = consumer

    def done(self) -> set[bytes]:
        return {each.body for each in self.handed if each.is_finished and each is not self.nacked}

    def is_done(self) -> bool:
        return len(self.done()) == len(IN_ORDER)

    def first_bodies(self, key: str) -> list[bytes]:
        bodies = (each.body for each in self.handed if each.order_key == key)
        return list(dict.fromkeys(bodies))

    def pull(self) -> None:
        while not self.is_done():
            self.take(2)
        self._consumer.settle()

    def iterate(self) -> None:
        with closing(
            cast(Generator[pulque.ReceivedMessage, None, None], iter(self._consumer))
        ) as m:
            for message in m:
                self.handed.append(message)
                self._handle(message)
                if self.is_done():
                    break
        self._consumer.settle()

    def take(self, most: int) -> None:
        messages = self._consumer.pull(most, timeout=0.5)
        self.handed += messages
        for message in messages:
            self._handle(message)

    def go_on(self) -> None:
        """Handle what was handed out and not finished when Ctrl-C came."""
        for message in self.handed:
            if not message.is_finished and not message.is_abandoned:
                if message is self.nacked:
                    self.nacked = None
                message.ack()

    def _handle(self, message: pulque.ReceivedMessage) -> None:
        if message.body == b"a1" and self.nacked is None:
            self.nacked = message
            message.nack(delay=0)
        else:
            message.ack()


@pytest.mark.parametrize("consume", [Handler.pull, Handler.iterate])
def test_a_consumer_in_order_can_be_interrupted_anywhere(
    in_order: pulque.Client, consume: Callable[[Handler], None], seed: int
) -> None:
    for number, interrupter in enumerate(points(step=31, seed=seed)):
        subject = f"orders.{number}"
        for key, place in IN_ORDER:
            in_order.send(subject, f"{key}{place}".encode(), order_key=key)
        consumer = in_order.consumer(subject, group="kitchen", ordered=True)
        handler = Handler(consumer)
        interrupter.run(lambda: consume(handler))  # noqa: B023
        where = interrupter.where
        handler.go_on()
        tries = 0
        while not handler.is_done():
            assert tries < PATIENCE, f"only {handler.done()} after an interrupt at {where}"
            tries += 1
            in_time(lambda: handler.take(2), where)  # noqa: B023
        for key in "ab":
            assert handler.first_bodies(key) == [b"%s%d" % (key.encode(), n) for n in range(4)]
        in_time(consumer.settle, where)
        in_time(consumer.close, where)


def test_the_close_of_a_consumer_in_order_can_be_interrupted_anywhere(
    in_order: pulque.Client, seed: int
) -> None:
    for number, interrupter in enumerate(points(step=7, seed=seed)):
        subject = f"orders.{number}"
        for body in (b"one", b"two"):
            in_order.send(subject, body, order_key="k")
        consumer = in_order.consumer(subject, group="kitchen", ordered=True)
        consumer.pull(1, timeout=PATIENCE)[0].ack()
        interrupter.run(consumer.close)
        in_time(consumer.close, interrupter.where)
        with in_order.consumer(subject, group="kitchen", ordered=True) as other:
            (message,) = in_time(lambda: other.pull(2, timeout=PATIENCE / 2), interrupter.where)
            assert message.body == b"two", interrupter.where
            message.ack()


@pytest.mark.parametrize(
    "end",
    [
        lambda message: message.ack(),
        lambda message: message.nack("no tea", delay=0),
        lambda message: message.reject("no tea"),
    ],
    ids=["ack", "nack", "reject"],
)
def test_an_outcome_in_order_counts_as_a_whole_or_not_at_all(
    in_order: pulque.Client, end: Callable[[pulque.ReceivedMessage], None]
) -> None:
    for number, interrupter in enumerate(points(least=0)):
        subject = f"orders.{number}"
        for body in (b"one", b"two"):
            in_order.send(subject, body, order_key="k")
        with in_order.consumer(subject, group="kitchen", ordered=True) as consumer:
            (message,) = consumer.pull(1, timeout=PATIENCE)
            interrupter.run(lambda: end(message))  # noqa: B023
            where = interrupter.where
            if not message.is_finished:
                message.ack()
            bodies: list[bytes] = []
            while b"two" not in bodies:
                found = in_time(lambda: consumer.pull(1, timeout=PATIENCE), where)
                assert found, f"nothing more came after an interrupt at {where}"
                bodies.append(found[0].body)
                found[0].ack()
            consumer.settle()


def no_threads() -> None:
    """Wait until all have ended: one that connects is not waited for by a close."""
    for each in of_clients():
        each.join(PATIENCE)


def pull_once(consumer: pulque.Consumer, got: set[bytes]) -> None:
    for message in consumer.pull(6, timeout=PATIENCE):
        got.add(message.body)


def test_a_consumer_of_a_cluster_can_be_interrupted_anywhere(tmp_path: Path, seed: int) -> None:
    with FakeCluster(2) as cluster:
        for number, interrupter in enumerate(points(step=7, seed=seed)):
            client = pulque.connect(cluster.url, name="test", timeout=10, state_dir=tmp_path)
            subject = f"orders.{number}"
            client.send_many(subject, [b"%d" % n for n in range(6)])
            consumer = client.consumer(subject, group="kitchen")
            got: set[bytes] = set()
            interrupter.run(lambda: pull_once(consumer, got))  # noqa: B023
            where = interrupter.where
            tries = 0
            while len(got) < 6:
                assert tries < 20, f"only {got} after an interrupt at {where}"
                tries += 1
                got |= {each.body for each in in_time(lambda: consumer.pull(6), where)}  # noqa: B023
            in_time(consumer.close, where)
            in_time(client.close, where)
            no_threads()
            assert threads() == [], where


@pytest.mark.parametrize("error", [TimeLimitError, TimeoutError])
def test_what_a_signal_handler_raises_comes_out_of_a_pull_that_waits(
    broker: FakeBroker, connect: Callable[[], pulque.Client], error: type[Exception]
) -> None:
    """``TimeoutError`` is an ``OSError``, and so are the errors of sockets."""

    def handle(*_: object) -> None:
        raise error

    def interrupt() -> None:
        broker.wait_until(lambda: bool(broker.seen(Pull)))
        os.kill(os.getpid(), signal.SIGUSR1)

    with connect() as client:
        client.send("orders", b"one")
        consumer = client.consumer("orders", group="kitchen", start="latest")
        before = signal.signal(signal.SIGUSR1, handle)
        thread = threading.Thread(target=interrupt)
        thread.start()
        try:
            with pytest.raises(error):
                consumer.pull(1, timeout=PATIENCE / 2)
        finally:
            thread.join()
            signal.signal(signal.SIGUSR1, before)
        client.send("orders", b"two")
        assert [each.body for each in in_time(lambda: consumer.pull(1), "pull")] == [b"two"]
