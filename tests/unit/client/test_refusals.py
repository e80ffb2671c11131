"""Every way to send ends with the broker's last reason, its code, and whether it is definite."""

import asyncio
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest

import pulque
from pulque import aio
from pulque.cli.app import run
from pulque.cli.common.options import Tools
from pulque.errors import (
    DisconnectedError,
    InvalidNameError,
    InvalidRequestError,
    MessageTooLargeError,
    NoDelayServerError,
    NotAllowedError,
    OverloadedError,
    PulqueError,
    ReadOnlyError,
    RequestTimeoutError,
    StaleRouteError,
    StorageFullError,
    UnavailableError,
    UnknownSubjectError,
    UnsupportedError,
)
from pulque.model.routes import Slots
from pulque.wire import requests
from tests.unit.client.fake_broker import Drop, FakeBroker, Silence
from tests.unit.client.fake_cluster import FakeCluster
from tests.unit.client.fake_delay import FakeDelay, delayed_routes

TIMEOUT = 0.6
PATIENCE = 20.0
Shell = Callable[..., None]
LATER = {"delay": 3600.0}


def many(parts: dict[str, Any]) -> list[object]:
    return [pulque.Outgoing(body, **parts) if parts else body for body in (b"tea", b"milk")]


def blocking_send(url: str, **parts: Any) -> None:
    with pulque.connect(url, timeout=TIMEOUT) as client:
        client.send("orders", b"tea", **parts)


def blocking_send_with_key(url: str, **parts: Any) -> None:
    with pulque.connect(url, timeout=TIMEOUT) as client:
        client.send("orders", b"tea", key="k", **parts)


def blocking_send_many(url: str, **parts: Any) -> None:
    with pulque.connect(url, timeout=TIMEOUT) as client:
        client.send_many("orders", many(parts))


def producer_send(url: str, **parts: Any) -> None:
    with pulque.connect(url, timeout=TIMEOUT) as client, client.producer() as producer:
        producer.send("orders", b"tea", **parts).result()


def producer_send_many(url: str, **parts: Any) -> None:
    with pulque.connect(url, timeout=TIMEOUT) as client, client.producer() as producer:
        producer.send_many("orders", many(parts)).result()


def asyncio_send(url: str, **parts: Any) -> None:
    async def main() -> None:
        async with aio.connect(url, timeout=TIMEOUT) as client:
            await client.send("orders", b"tea", **parts)

    asyncio.run(main())


def asyncio_send_many(url: str, **parts: Any) -> None:
    async def main() -> None:
        async with aio.connect(url, timeout=TIMEOUT) as client:
            await client.send_many("orders", many(parts))

    asyncio.run(main())


def asyncio_producer(url: str, **parts: Any) -> None:
    async def main() -> None:
        async with aio.connect(url, timeout=TIMEOUT) as client, client.producer() as producer:
            await (await producer.send("orders", b"tea", **parts))

    asyncio.run(main())


def asyncio_producer_many(url: str, **parts: Any) -> None:
    async def main() -> None:
        async with aio.connect(url, timeout=TIMEOUT) as client, client.producer() as producer:
            await (await producer.send_many("orders", many(parts))).result()

    asyncio.run(main())


def app_send(url: str, **parts: Any) -> None:
    app = pulque.App(url, timeout=TIMEOUT, grace=0)

    @app.subscribe("other", group="g")
    async def handle(message: pulque.ReceivedMessage) -> None: ...

    async def main() -> None:
        async with app:
            await app.send("orders", b"tea", **parts)

    asyncio.run(main())


def app_send_blocking(url: str, **parts: Any) -> None:
    app = pulque.App(url, timeout=TIMEOUT, grace=0)

    @app.subscribe("other", group="g")
    async def handle(message: pulque.ReceivedMessage) -> None: ...

    async def main() -> None:
        async with app:
            await asyncio.to_thread(app.send_blocking, "orders", b"tea", **parts)

    asyncio.run(main())


CLIENTS = [
    blocking_send,
    blocking_send_with_key,
    blocking_send_many,
    producer_send,
    producer_send_many,
    asyncio_send,
    asyncio_send_many,
    asyncio_producer,
    asyncio_producer_many,
]
SHELLS = [*CLIENTS, app_send, app_send_blocking]
REFUSALS = [
    ReadOnlyError("subject orders is read-only: it takes no sends"),
    ReadOnlyError("broker b is being drained: it takes no sends"),
    StorageFullError("12 bytes are free"),
    OverloadedError("1 byte waits for the disk"),
]


FINAL = [
    MessageTooLargeError("a message of 5 bytes; at most 4 are allowed"),
    InvalidNameError("subject 'orders' is not allowed here"),
    UnknownSubjectError("there is no subject orders, and a first send does not create one"),
    NotAllowedError("acks=replica wants a broker with followers, and this one stands alone"),
]


@contextmanager
def lone() -> Iterator[tuple[str, list[FakeBroker]]]:
    with FakeBroker() as broker:
        yield broker.url, [broker]


@contextmanager
def two_of_a_cluster() -> Iterator[tuple[str, list[FakeBroker]]]:
    with FakeCluster(2) as cluster:
        yield cluster.url, cluster.brokers


@pytest.fixture(params=[lone, two_of_a_cluster])
def brokers(request: pytest.FixtureRequest) -> Iterator[tuple[str, list[FakeBroker]]]:
    with ExitStack() as stack:
        yield stack.enter_context(request.param())


def fail_sends(brokers: Sequence[FakeBroker], *faults: BaseException) -> None:
    """Have each broker's sends fail with these in turn, and with the last one from then on."""
    for broker in brokers:
        broker.fault = _Failing(faults)


class _Failing:
    def __init__(self, faults: tuple[BaseException, ...]) -> None:
        self._left = list(faults)

    def __call__(self, request: requests.Request) -> None:
        if isinstance(request, requests.Send):
            raise self._left.pop(0) if len(self._left) > 1 else self._left[0]


@pytest.mark.parametrize("refusal", REFUSALS, ids=["read-only", "drained", "full", "overloaded"])
@pytest.mark.parametrize("shell", SHELLS, ids=lambda shell: shell.__name__)
def test_a_refusal_is_told_as_it_is(
    brokers: tuple[str, list[FakeBroker]], shell: Shell, refusal: PulqueError
) -> None:
    url, servers = brokers
    fail_sends(servers, refusal)

    with pytest.raises(type(refusal)) as caught:
        shell(url)

    assert caught.value.code == refusal.code
    assert caught.value.outcome_known
    assert str(refusal) in str(caught.value)
    assert "it had no effect" in str(caught.value)


@pytest.mark.parametrize("refusal", FINAL, ids=lambda error: type(error).__name__)
@pytest.mark.parametrize("shell", SHELLS, ids=lambda shell: shell.__name__)
def test_what_can_never_be_is_told_at_once(
    brokers: tuple[str, list[FakeBroker]], shell: Shell, refusal: PulqueError
) -> None:
    url, servers = brokers
    fail_sends(servers, refusal)

    with pytest.raises(type(refusal)) as caught:
        shell(url)

    assert caught.value.code == refusal.code
    assert caught.value.outcome_known
    assert str(refusal) in str(caught.value)
    asked = [each for broker in servers for each in broker.seen(requests.Send)]
    assert len(asked) <= len(servers), "it was repeated, although it can never be"


@pytest.mark.parametrize("shell", SHELLS, ids=lambda shell: shell.__name__)
def test_a_refusal_after_a_lost_answer_leaves_the_outcome_open(
    brokers: tuple[str, list[FakeBroker]], shell: Shell
) -> None:
    url, servers = brokers
    fail_sends(servers, Drop(handled=True), REFUSALS[0])

    with pytest.raises(RequestTimeoutError) as caught:
        shell(url)

    assert not caught.value.outcome_known
    assert "the outcome is unknown" in str(caught.value)
    assert "ReadOnlyError (code 36): subject orders is read-only" in str(caught.value)


@pytest.mark.parametrize("shell", SHELLS, ids=lambda shell: shell.__name__)
def test_a_broker_that_lost_its_followers_is_quoted_and_leaves_the_outcome_open(
    brokers: tuple[str, list[FakeBroker]], shell: Shell
) -> None:
    url, servers = brokers
    short = "1 brokers of group b are in sync, and 2 have to be (replication.min_in_sync)"
    fail_sends(
        servers,
        UnavailableError(f"whether it will be kept is not known: {short}"),
        ReadOnlyError(short),
    )

    with pytest.raises(UnavailableError) as caught:
        shell(url)

    assert not caught.value.outcome_known
    assert "the outcome is unknown" in str(caught.value)
    assert f"ReadOnlyError (code 36): {short}" in str(caught.value)


@pytest.mark.parametrize("shell", SHELLS, ids=lambda shell: shell.__name__)
def test_no_answer_at_all_leaves_the_outcome_open(
    brokers: tuple[str, list[FakeBroker]], shell: Shell
) -> None:
    url, servers = brokers
    fail_sends(servers, Silence())

    with pytest.raises(RequestTimeoutError) as caught:
        shell(url)

    assert not caught.value.outcome_known


@pytest.mark.parametrize("shell", SHELLS, ids=lambda shell: shell.__name__)
def test_what_reached_nobody_was_never_sent(shell: Shell) -> None:
    with FakeCluster(1) as cluster:
        cluster.kill(0)

        with pytest.raises(DisconnectedError, match="never sent") as caught:
            shell(cluster.url)

    assert caught.value.outcome_known
    assert type(caught.value) is DisconnectedError


@pytest.mark.parametrize("parts", [{}, LATER], ids=["now", "later"])
@pytest.mark.parametrize("shell", SHELLS, ids=lambda shell: shell.__name__)
def test_what_has_nowhere_to_go_was_never_sent(shell: Shell, parts: dict[str, Any]) -> None:
    def refuse(request: requests.Request) -> None:
        if isinstance(request, requests.Route):
            raise UnavailableError("no broker takes messages now")

    with FakeCluster(1) as cluster:
        cluster.meta.fault = refuse

        with pytest.raises(UnavailableError, match="no broker takes messages now") as caught:
            shell(cluster.url, **parts)

    assert caught.value.outcome_known
    assert "it was never sent" in str(caught.value)


class _LastConnection:
    """Leave a broker's first send without an answer, and refuse every connection after it."""

    def __init__(self) -> None:
        self._was_sent_to = False

    def __call__(self, request: requests.Request) -> None:
        if self._was_sent_to and isinstance(request, requests.Hello):
            raise UnsupportedError("version 9 is not known here")
        if isinstance(request, requests.Send):
            self._was_sent_to = True
            raise Drop(handled=True)


# An App ends with what its consumers are refused for, which may come first.
@pytest.mark.parametrize("shell", CLIENTS, ids=lambda shell: shell.__name__)
def test_a_refused_connection_after_a_lost_answer_leaves_the_outcome_open(
    brokers: tuple[str, list[FakeBroker]], shell: Shell
) -> None:
    url, servers = brokers
    for each in servers:
        each.fault = _LastConnection()

    with pytest.raises(PulqueError, match="version 9 is not known here") as caught:
        shell(url)

    assert not caught.value.outcome_known


def test_a_refused_connection_tells_of_each_message_what_is_known() -> None:
    with FakeBroker() as broker, pulque.connect(broker.url) as client:
        broker.fault = _LastConnection()
        with client.producer(max_in_flight=1, max_batch=1) as producer:
            written, never_sent = producer.send_many("orders", [b"tea", b"milk"])

            with pytest.raises(UnsupportedError, match="the outcome is unknown") as caught:
                written.result(PATIENCE)
            assert not caught.value.outcome_known

            with pytest.raises(UnsupportedError, match="it was never sent") as caught:
                never_sent.result(PATIENCE)
            assert caught.value.outcome_known


def test_a_closed_producer_says_what_was_never_sent_and_what_may_be_stored() -> None:
    with FakeBroker() as broker, pulque.connect(broker.url) as client:
        fail_sends([broker], Silence())
        producer = client.producer(max_in_flight=1, max_batch=1)
        written, never_sent = producer.send_many("orders", [b"tea", b"milk"])
        broker.wait_until(lambda: bool(broker.seen(requests.Send)))
        producer.close(timeout=0)

    with pytest.raises(DisconnectedError, match="closed; the outcome is unknown") as caught:
        written.result()
    assert not caught.value.outcome_known
    with pytest.raises(DisconnectedError, match="closed; it was never sent") as caught:
        never_sent.result()
    assert caught.value.outcome_known


def test_a_closed_asyncio_producer_says_what_was_never_sent_and_what_may_be_stored() -> None:
    async def main(url: str) -> None:
        async with aio.connect(url) as client:
            producer = client.producer(max_in_flight=1, max_batch=1)
            written, never_sent = await producer.send_many("orders", [b"tea", b"milk"])
            await asyncio.to_thread(broker.wait_until, lambda: bool(broker.seen(requests.Send)))
            await producer.close(timeout=0)

            with pytest.raises(DisconnectedError, match="closed; the outcome is unknown") as open_:
                await written
            assert not open_.value.outcome_known
            with pytest.raises(DisconnectedError, match="closed; it was never sent") as known:
                await never_sent
            assert known.value.outcome_known

    with FakeBroker() as broker:
        fail_sends([broker], Silence())
        asyncio.run(main(broker.url))


def spool_with_producer(url: str, spool: Path) -> tuple[PulqueError, PulqueError]:
    """Return the errors of a message under way, and of one that comes after the refusal."""
    with pulque.connect(url) as client, client.producer(spool=spool, timeout=5) as producer:
        pending = producer.send("orders", b"tea")
        with pytest.raises(PulqueError) as first:
            pending.result(PATIENCE)
        with pytest.raises(PulqueError) as second:
            producer.send("orders", b"milk")
    return first.value, second.value


def spool_with_asyncio_producer(url: str, spool: Path) -> tuple[PulqueError, PulqueError]:
    async def main() -> tuple[PulqueError, PulqueError]:
        async with (
            aio.connect(url) as client,
            client.producer(spool=spool, timeout=5) as producer,
        ):
            pending = await producer.send("orders", b"tea")
            with pytest.raises(PulqueError) as first:
                await pending.result(PATIENCE)
            with pytest.raises(PulqueError) as second:
                _ = await producer.send("orders", b"milk")
            return first.value, second.value

    return asyncio.run(main())


@pytest.mark.parametrize("sending", [spool_with_producer, spool_with_asyncio_producer])
def test_a_refused_connection_leaves_the_spool_as_it_is(
    sending: Callable[[str, Path], tuple[PulqueError, PulqueError]], tmp_path: Path
) -> None:
    with FakeBroker() as broker:
        broker.fault = _LastConnection()
        under_way, not_taken_in = sending(broker.url, tmp_path)
        assert isinstance(under_way, UnsupportedError)
        assert "the spool keeps it" in str(under_way)
        assert not under_way.outcome_known
        assert isinstance(not_taken_in, UnsupportedError)
        assert not_taken_in.outcome_known

        broker.fault = None
        with pulque.connect(broker.url) as client, client.producer(spool=tmp_path) as producer:
            assert broker.messages("orders") == [b"tea"]
            assert len(producer.left_over) == 0, "it was under way, and asked about"
            producer.send("orders", b"milk").result(PATIENCE)
        assert broker.messages("orders") == [b"tea", b"milk"]


Errors = dict[bytes, PulqueError]
KEYS = [f"k{n}" for n in range(16)]


def errors_of_sends(url: str) -> Errors:
    found: Errors = {}
    with pulque.connect(url, timeout=1) as client:
        for key in KEYS[:2]:
            with pytest.raises(PulqueError) as caught:
                client.send("orders", key.encode(), order_key=key)
            found[key.encode()] = caught.value
    return found


def errors_of_producer(url: str) -> Errors:
    messages = [pulque.Outgoing(key.encode(), order_key=key) for key in KEYS]
    with pulque.connect(url, timeout=1) as client, client.producer() as producer:
        pending = producer.send_many("orders", messages)
        found = [(key, each.exception()) for key, each in zip(KEYS, pending, strict=True)]
    return {key.encode(): error for key, error in found if error is not None}


def errors_of_asyncio_sends(url: str) -> Errors:
    async def main() -> list[object]:
        async with aio.connect(url, timeout=1) as client:
            sends = (client.send("orders", key.encode(), order_key=key) for key in KEYS)
            return await asyncio.gather(*sends, return_exceptions=True)

    found = zip(KEYS, asyncio.run(main()), strict=True)
    return {key.encode(): error for key, error in found if isinstance(error, PulqueError)}


@pytest.mark.parametrize("sending", [errors_of_sends, errors_of_producer, errors_of_asyncio_sends])
def test_a_split_does_not_make_known_what_another_broker_has(
    sending: Callable[[str], Errors],
) -> None:
    asked: list[FakeBroker] = []

    def fault(broker: FakeBroker, request: requests.Request) -> None:
        if not isinstance(request, requests.Send):
            return
        asked.append(broker)
        if broker is not asked[0]:
            raise StaleRouteError("partition orders was split")
        broker.stop_listening()
        raise Drop(handled=True)

    with FakeCluster(2) as cluster:
        for each in cluster.brokers:
            each.fault = partial(fault, each)
        errors = sending(cluster.url)

    assert len(set(asked)) == 2, "the other broker was not tried"
    stored = asked[0].messages("orders")
    assert stored
    for body in stored:
        assert not errors[body].outcome_known
        assert "the outcome is unknown" in str(errors[body])
        assert "partition orders was split" in str(errors[body])


@pytest.mark.parametrize("shell", SHELLS, ids=lambda shell: shell.__name__)
def test_an_order_key_whose_broker_is_not_in_the_route_was_never_sent(shell: Shell) -> None:
    with FakeCluster(1) as cluster:
        cluster.serve_strictly(0, Slots(0, 1))

        with pytest.raises(UnavailableError, match="order key 'k' is away") as caught:
            shell(cluster.url, order_key="k")

        assert not cluster.brokers[0].seen(requests.Send)
    assert "it was never sent" in str(caught.value)
    assert caught.value.outcome_known


@pytest.mark.parametrize("shell", SHELLS, ids=lambda shell: shell.__name__)
def test_an_order_key_whose_broker_leaves_the_route_after_a_lost_answer_may_be_stored(
    shell: Shell,
) -> None:
    def fault(request: requests.Request) -> None:
        if isinstance(request, requests.Send):
            if cluster.version == version:
                cluster.serve_strictly(0, Slots(0, 1))
            raise Drop(handled=True)

    with FakeCluster(1) as cluster:
        cluster.serve_strictly(0, Slots(0, 1024))
        version = cluster.version
        cluster.brokers[0].fault = fault

        with pytest.raises(UnavailableError, match="the outcome is unknown") as caught:
            shell(cluster.url, order_key="k")

    assert not caught.value.outcome_known


def test_a_wait_that_ends_early_names_the_refusal() -> None:
    with FakeBroker() as broker, pulque.connect(broker.url) as client:
        fail_sends([broker], REFUSALS[0])
        with client.producer(timeout=TIMEOUT) as producer:
            pending = producer.send("orders", b"tea")
            broker.wait_until(lambda: len(broker.seen(requests.Send)) > 1)

            with pytest.raises(RequestTimeoutError, match=r"ReadOnlyError \(code 36\)") as caught:
                pending.result(timeout=0.01)

    assert not caught.value.outcome_known


DELAY_REFUSALS = [
    ReadOnlyError("delay server d is being drained: it takes no sends"),
    StorageFullError("12 bytes are free"),
]


@pytest.fixture
def delays() -> Iterator[tuple[str, list[FakeDelay]]]:
    with FakeCluster(1) as cluster, FakeDelay("d0") as one, FakeDelay("d1") as other:
        cluster.meta.delayed_routes = delayed_routes([one, other])
        yield cluster.url, [one, other]


@pytest.mark.parametrize("refusal", DELAY_REFUSALS, ids=lambda error: type(error).__name__)
@pytest.mark.parametrize("shell", SHELLS, ids=lambda shell: shell.__name__)
def test_a_refusal_of_what_is_due_later_is_told_as_it_is(
    delays: tuple[str, list[FakeDelay]], shell: Shell, refusal: PulqueError
) -> None:
    url, servers = delays
    fail_sends(servers, refusal)

    with pytest.raises(type(refusal)) as caught:
        shell(url, **LATER)

    assert caught.value.code == refusal.code
    assert caught.value.outcome_known
    assert str(refusal) in str(caught.value)
    assert "it had no effect" in str(caught.value)


@pytest.mark.parametrize("shell", SHELLS, ids=lambda shell: shell.__name__)
def test_what_can_never_be_due_later_is_told_at_once(
    delays: tuple[str, list[FakeDelay]], shell: Shell
) -> None:
    url, servers = delays
    fail_sends(servers, InvalidRequestError("due 3,600,000 ms ahead; at most 1 is allowed"))

    with pytest.raises(InvalidRequestError, match="at most 1 is allowed") as caught:
        shell(url, **LATER)

    assert caught.value.outcome_known
    assert sum(len(each.seen(requests.Send)) for each in servers) <= len(servers)


@pytest.mark.parametrize("shell", SHELLS, ids=lambda shell: shell.__name__)
def test_a_lost_answer_to_what_is_due_later_leaves_the_outcome_open(
    delays: tuple[str, list[FakeDelay]], shell: Shell
) -> None:
    url, servers = delays
    fail_sends(servers, Drop(handled=True), DELAY_REFUSALS[1])

    with pytest.raises(RequestTimeoutError, match="the outcome is unknown") as caught:
        shell(url, **LATER)

    assert not caught.value.outcome_known
    assert "StorageFullError (code 52): 12 bytes are free" in str(caught.value)


@pytest.mark.parametrize("shell", SHELLS, ids=lambda shell: shell.__name__)
def test_what_is_due_later_and_reached_no_delay_server_was_never_sent(
    delays: tuple[str, list[FakeDelay]], shell: Shell
) -> None:
    url, servers = delays
    for each in servers:
        each.stop_listening()

    with pytest.raises(DisconnectedError, match="never sent") as caught:
        shell(url, **LATER)

    assert caught.value.outcome_known


@pytest.mark.parametrize("where", [lone, two_of_a_cluster])
@pytest.mark.parametrize("shell", SHELLS, ids=lambda shell: shell.__name__)
def test_a_delay_where_nobody_takes_delays_is_refused_at_once(
    where: Callable[[], AbstractContextManager[tuple[str, list[FakeBroker]]]], shell: Shell
) -> None:
    with where() as (url, servers):
        with pytest.raises(NoDelayServerError) as caught:
            shell(url, **LATER)

        assert caught.value.outcome_known
        assert not any(each.seen(requests.Send) for each in servers)


def command(url: str, *more: str) -> list[str]:
    return ["send", "orders", *more, "--timeout", str(TIMEOUT), "--url", url]


@pytest.mark.parametrize("more", [[], ["--count", "3"], ["--key", "k"]], ids=str)
@pytest.mark.parametrize("refusal", [*REFUSALS, *FINAL], ids=lambda error: type(error).__name__)
def test_the_command_tells_a_refusal_as_it_is(
    brokers: tuple[str, list[FakeBroker]],
    capsys: pytest.CaptureFixture[str],
    refusal: PulqueError,
    more: list[str],
) -> None:
    url, servers = brokers
    fail_sends(servers, refusal)

    code = run(command(url, "tea", *more), Tools(connect=pulque.connect))
    assert code == (2 if isinstance(refusal, InvalidNameError) else 1)
    found = capsys.readouterr().err
    assert found.startswith(f"error: {type(refusal).__name__}: ")
    assert str(refusal) in found
    assert ("it had no effect" in found) == (refusal in REFUSALS)


@pytest.mark.parametrize("count", ["1", "3"])
def test_the_command_tells_a_refusal_of_what_is_due_later(
    delays: tuple[str, list[FakeDelay]], capsys: pytest.CaptureFixture[str], count: str
) -> None:
    url, servers = delays
    fail_sends(servers, *DELAY_REFUSALS)

    found = run(
        command(url, "tea", "--delay", "1h", "--count", count), Tools(connect=pulque.connect)
    )
    assert found == 1
    text = capsys.readouterr().err
    assert text.startswith("error: StorageFullError: 12 bytes are free")
    assert "it had no effect" in text


def test_the_command_says_that_nobody_takes_delays(capsys: pytest.CaptureFixture[str]) -> None:
    with FakeBroker() as broker:
        found = run(command(broker.url, "tea", "--delay", "1h"), Tools(connect=pulque.connect))
    assert found == 1
    assert capsys.readouterr().err.startswith("error: NoDelayServerError: ")


def test_the_command_says_when_the_outcome_is_unknown(
    brokers: tuple[str, list[FakeBroker]], capsys: pytest.CaptureFixture[str]
) -> None:
    url, servers = brokers
    fail_sends(servers, Silence())

    assert run(command(url, "tea"), Tools(connect=pulque.connect)) == 3
    assert "the outcome is unknown" in capsys.readouterr().err


def test_the_command_says_when_nobody_is_there(capsys: pytest.CaptureFixture[str]) -> None:
    with FakeCluster(1) as cluster:
        cluster.kill(0)

        assert run(command(cluster.url, "tea"), Tools(connect=pulque.connect)) == 3
    assert capsys.readouterr().err.startswith("error: DisconnectedError: ")
