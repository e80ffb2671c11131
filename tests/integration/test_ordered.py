"""Ordered consumers against a real broker: one owner per partition, each key in order."""

import asyncio
import itertools
import random
import threading
import time
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest

import pulque
from pulque import aio
from pulque.client.ordered.window import OrderedMessage
from pulque.testing.process import BrokerProcess

pytestmark = pytest.mark.server

WITHIN = 30.0
_numbers = itertools.count()


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[BrokerProcess]:
    # No lock runs out during a test: only a consumer that gives it up hands a partition over.
    told = ["--set", "consumption.strict=strict.*", "--set", "consumption.lock=1h"]
    with BrokerProcess.start(tmp_path_factory.mktemp("data"), arguments=told) as process:
        yield process


@pytest.fixture
def strict() -> str:
    """Return a subject of its own whose order is strict."""
    return f"strict.orders{next(_numbers)}"


@pytest.fixture
def loose() -> str:
    """Return a subject of its own whose order is kept as well as can be."""
    return f"orders{next(_numbers)}"


@pytest.fixture
def client(broker: BrokerProcess, tmp_path: Path) -> Iterator[pulque.Client]:
    with pulque.connect(broker.url, timeout=WITHIN, state_dir=tmp_path / "state") as found:
        yield found


def send(client: pulque.Client, subject: str, count: int, keys: int = 5) -> None:
    with client.producer() as producer:
        for number in range(count):
            producer.send(subject, str(number).encode(), order_key=f"key {number % keys}")


def take_all(consumer: pulque.Consumer, count: int) -> list[pulque.ReceivedMessage]:
    found: list[pulque.ReceivedMessage] = []
    deadline = time.monotonic() + WITHIN
    while len(found) < count and time.monotonic() < deadline:
        for message in consumer.pull(timeout=0.5):
            found.append(message)
            message.ack()
    return found


def by_key(messages: list[pulque.ReceivedMessage]) -> dict[str | None, list[int]]:
    found: dict[str | None, list[int]] = defaultdict(list)
    for message in messages:
        found[message.order_key].append(int(message.body))
    return found


@pytest.mark.accepts("002-23", "002-43", "000-57", "004-03")
def test_messages_of_a_key_come_in_the_order_of_sending(
    client: pulque.Client, strict: str
) -> None:
    send(client, strict, 500)
    with client.consumer(strict, "g", ordered=True) as consumer:
        found = by_key(take_all(consumer, 500))
    assert sum(map(len, found.values())) == 500
    assert all(order == sorted(order) for order in found.values())
    (state,) = [each for each in client.groups(strict) if each.mode == "ordered"]
    assert state.lag == 0


def test_the_next_of_a_key_comes_when_the_one_before_is_done(
    client: pulque.Client, strict: str
) -> None:
    send(client, strict, 6, keys=2)
    with client.consumer(strict, "g", ordered=True) as consumer:
        first = consumer.pull(timeout=WITHIN)
        while len(first) < 2:
            first += consumer.pull(timeout=WITHIN)
        assert sorted(int(each.body) for each in first) == [0, 1]
        # Both keys have one in hand: of all that is there only a third key's comes.
        client.send(strict, b"17", order_key="another")
        (other,) = consumer.pull(timeout=WITHIN)
        assert other.body == b"17"
        next(each for each in first if each.body == b"0").ack()
        (following,) = consumer.pull(timeout=WITHIN)
        assert following.body == b"2"


@pytest.mark.accepts("002-37", "002-38", "002-26")
def test_strict_a_failed_message_comes_again_in_its_place(
    client: pulque.Client, strict: str
) -> None:
    send(client, strict, 10, keys=2)
    handled: list[int] = []
    with client.consumer(strict, "g", ordered=True) as consumer:
        deadline = time.monotonic() + WITHIN
        while len(handled) < 10 and time.monotonic() < deadline:
            for message in consumer.pull(timeout=0.2):
                if message.body == b"2" and message.attempt < 3:
                    message.nack("not yet", delay=0.1)
                else:
                    handled.append(int(message.body))
                    message.ack()
    even, odd = [n for n in handled if not n % 2], [n for n in handled if n % 2]
    assert even == [0, 2, 4, 6, 8]
    assert odd == [1, 3, 5, 7, 9]
    assert not [each for each in client.groups(strict) if each.partition[0] == "%"]


def test_strict_a_failed_message_may_block_its_partition(
    client: pulque.Client, strict: str
) -> None:
    send(client, strict, 4, keys=4)
    with client.consumer(strict, "g", ordered=True, blocks="partition") as consumer:
        (first, *_) = consumer.pull(1, timeout=WITHIN)
        first.nack("not yet", delay=0.2)
        # The others are there, and would come first.
        (again,) = consumer.pull(1, timeout=WITHIN)
        assert (again.body, again.attempt) == (first.body, 2)


def test_strict_a_rejected_message_is_a_dead_letter_and_the_next_one_comes(
    client: pulque.Client, strict: str
) -> None:
    send(client, strict, 3, keys=1)
    with client.consumer(strict, "g", ordered=True) as consumer:
        (first,) = consumer.pull(timeout=WITHIN)
        first.reject("never")
        assert [int(each.body) for each in take_all(consumer, 2)] == [1, 2]
        consumer.settle()
    assert client.dead(strict, "g").count() == 1


@pytest.mark.accepts("002-37", "002-40")
def test_best_effort_a_failed_message_comes_again_later_and_the_next_goes_on(
    client: pulque.Client, loose: str
) -> None:
    send(client, loose, 5, keys=1)
    handled: list[int] = []
    retry = pulque.RetryPolicy(delays=[0.3])
    with client.consumer(loose, "g", ordered=True, retry=retry) as consumer:
        deadline = time.monotonic() + WITHIN
        while len(handled) < 5 and time.monotonic() < deadline:
            for message in consumer.pull(timeout=0.2):
                if message.body == b"1" and message.attempt == 1:
                    message.nack("not yet")
                else:
                    handled.append(int(message.body))
                    message.ack()
    assert handled == [0, 2, 3, 4, 1]


@pytest.mark.accepts("002-39", "002-55")
def test_a_partition_is_handed_over_after_what_is_held_is_settled(
    client: pulque.Client, strict: str
) -> None:
    send(client, strict, 200)
    first = client.consumer(strict, "g", ordered=True, consumer_id="one")
    early = take_all(first, 100)
    assert {each.token for each in early if isinstance(each, OrderedMessage)} == {1}
    held = first.pull(timeout=WITHIN)
    assert held, "these are neither acked nor nacked"
    second = client.consumer(strict, "g", ordered=True, consumer_id="two")
    assert not second.pull(timeout=0.5), "there is one partition, and it has an owner"
    first.close()
    rest = take_all(second, 100)
    second.close()
    found = by_key([*early, *rest])
    assert all(order == sorted(set(order)) for order in found.values())
    assert sum(map(len, found.values())) == 200
    assert {each.token for each in rest if isinstance(each, OrderedMessage)} == {2}


def test_what_a_consumer_has_in_hand_when_it_closes_is_the_next_ones(
    client: pulque.Client, strict: str
) -> None:
    send(client, strict, 3, keys=1)
    first = client.consumer(strict, "g", ordered=True, consumer_id="one")
    (held,) = first.pull(timeout=WITHIN)
    second = client.consumer(strict, "g", ordered=True, consumer_id="two")
    ender = threading.Timer(0.3, held.ack)
    ender.start()
    (following,) = first.pull(timeout=WITHIN)
    assert following.body == b"1"
    first.close()
    assert following.is_abandoned
    following.ack()  # too late: it is not the first one's any more
    assert [int(each.body) for each in take_all(second, 2)] == [1, 2]
    second.close()


def test_a_shared_group_is_refused_with_the_way_out(client: pulque.Client, loose: str) -> None:
    send(client, loose, 1)
    with client.consumer(loose, "g") as shared:
        assert take_all(shared, 1)
    with (
        client.consumer(loose, "g", ordered=True) as consumer,
        pytest.raises(pulque.PulqueError, match="share"),
    ):
        consumer.pull(timeout=WITHIN)


@pytest.mark.parametrize(
    ("wishes", "words"),
    [
        ({"subject": "orders.*"}, "is a pattern"),
        ({"broadcast": True}, "neither shared nor"),
        ({"mode": "shared"}, "neither shared nor"),
        ({"blocks": "all"}, '"key" and "partition"'),
    ],
)
def test_what_makes_no_sense_is_said_at_once(
    client: pulque.Client, wishes: dict[str, object], words: str
) -> None:
    with pytest.raises(pulque.UsageError, match=words):
        client.consumer(**{"subject": "orders", "group": "g", "ordered": True, **wishes})  # type: ignore[arg-type]


@pytest.mark.accepts("002-35")
def test_the_twin_does_the_same(broker: BrokerProcess, tmp_path: Path, strict: str) -> None:
    async def run() -> dict[str, list[int]]:
        found: dict[str, list[int]] = defaultdict(list)
        async with await aio.connect(broker.url, state_dir=tmp_path / "state") as client:
            async with client.producer() as producer:
                for number in range(300):
                    key = f"key {number % 5}"
                    body = str(number).encode()
                    _ = await producer.send(strict, body, order_key=key)
            async with client.consumer(strict, "g", ordered=True) as consumer:
                async for message in consumer:
                    if message.body == b"7" and message.attempt == 1:
                        message.nack("not yet", delay=0.1)
                        continue
                    found[message.order_key or ""].append(int(message.body))
                    message.ack()
                    if sum(map(len, found.values())) == 300:
                        break
        return found

    found = asyncio.run(asyncio.wait_for(run(), WITHIN))
    assert all(order == sorted(order) for order in found.values())


@pytest.mark.accepts("002-01", "002-16")
def test_handlers_run_side_by_side_and_each_key_one_after_the_other(
    broker: BrokerProcess, client: pulque.Client, tmp_path: Path, strict: str, seed: int
) -> None:
    send(client, strict, 200, keys=4)  # fewer than handlers: most of them have to wait
    app = pulque.App(broker.url, state_dir=tmp_path / "state")
    draw = random.Random(seed)
    running: dict[str | None, int] = defaultdict(int)
    found: dict[str | None, list[int]] = defaultdict(list)
    together: set[str | None] = set()
    most = 0

    @app.subscribe(strict, group="g", ordered=True, concurrency=8)
    async def handle(message: pulque.ReceivedMessage) -> None:
        nonlocal most
        running[message.order_key] += 1
        most = max(most, sum(running.values()))
        if running[message.order_key] > 1:
            together.add(message.order_key)
        await asyncio.sleep(draw.uniform(0, 0.004))
        running[message.order_key] -= 1
        if message.body == b"33" and message.attempt == 1:
            raise pulque.Retry(delay=0.1)
        found[message.order_key].append(int(message.body))
        if sum(map(len, found.values())) == 200:
            app.stop()

    asyncio.run(asyncio.wait_for(app.serve(), WITHIN))
    assert all(order == sorted(order) for order in found.values())
    assert sum(map(len, found.values())) == 200
    assert not together
    assert most > 1
