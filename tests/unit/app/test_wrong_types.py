"""Wrong types get an error of ours that names the argument, before anything is sent."""

import asyncio
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest

import pulque
from pulque import aio
from pulque.dedup import MemoryChecker
from pulque.errors import InvalidNameError, PulqueError, UsageError
from pulque.testing.broker import InProcessBroker

WRONG_PARTS: list[tuple[dict[str, Any], str]] = [
    ({"key": 17}, "key is 17"),
    ({"key": 0}, "key is 0"),
    ({"order_key": 17}, "order_key is 17"),
    ({"order_key": ["a"]}, "order_key is"),
    ({"headers": {"n": 1}}, "headers has 'n': 1"),
    ({"headers": [("n", "1")]}, "headers is"),
    ({"headers": {"pulque.origin": "x"}}, "headers has 'pulque.origin'"),
    ({"tags": 5}, "tags is 5"),
    ({"tags": [5]}, "tags is"),
    ({"expires_at": "tomorrow"}, "'tomorrow'"),
    ({"reliable": "no"}, "reliable is 'no'"),
    ({"delay": "5s"}, "delay is '5s'"),
]


@pytest.mark.parametrize(
    ("parts", "text"), WRONG_PARTS, ids=[str(each) for each, _ in WRONG_PARTS]
)
def test_wrong_parts_of_a_message_are_named(
    pulque_client: pulque.Client, parts: dict[str, Any], text: str
) -> None:
    with pytest.raises(UsageError, match="(?i)" + text.replace("'", ".")):
        pulque_client.send("orders", b"tea", **parts)
    with (
        pulque_client.producer() as producer,
        pytest.raises(UsageError, match="(?i)" + text.replace("'", ".")),
    ):
        producer.send("orders", b"tea", **parts)


def test_wrong_parts_are_named_with_asyncio(pulque_broker: InProcessBroker) -> None:
    async def main() -> None:
        async with aio.connect(pulque_broker.url) as client:
            for parts, _ in WRONG_PARTS:
                with pytest.raises(UsageError):
                    await client.send("orders", b"tea", **parts)

    asyncio.run(main())


def test_a_list_of_subjects_is_no_subject(pulque_client: pulque.Client) -> None:
    with pytest.raises(InvalidNameError, match=r"subject is \['a', 'b'\]"):
        pulque_client.consumer(["a", "b"], group="g")  # type: ignore[arg-type]
    with pytest.raises(InvalidNameError, match="group is 5"):
        pulque_client.consumer("a", group=5)  # type: ignore[arg-type]
    with pytest.raises(PulqueError, match="subject is 5"):
        pulque_client.send(5, b"tea")  # type: ignore[arg-type]


policy: Any = pulque.RetryPolicy
retry: Any = pulque.Retry


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: policy([timedelta(seconds=5)]), "delays has .*5 s; seconds"),
        (lambda: policy("5s"), "delays is '5s'"),
        (lambda: policy(5), "delays is 5"),
        (lambda: policy(["5s"]), "delays has '5s'"),
        (lambda: policy([1], jitter="a"), "jitter is 'a'"),
        (lambda: policy([1], max_attempts="3"), "max_attempts is '3'"),
        (lambda: retry(delay="5s"), "delay is '5s'"),
    ],
)
def test_wrong_retries_are_named(make: Callable[[], object], text: str) -> None:
    with pytest.raises(UsageError, match=text):
        make()


def test_a_policy_that_is_none_is_named(pulque_client: pulque.Client) -> None:
    with pytest.raises(UsageError, match="retry is 3"):
        pulque_client.consumer("a", group="g", retry=3)  # type: ignore[arg-type]


def test_a_misspelled_option_names_the_handler_and_the_right_one() -> None:
    app = pulque.App()

    def brew(message: pulque.ReceivedMessage) -> None: ...

    with pytest.raises(UsageError, match="brew: there is no option retries; did you mean retry"):
        app.subscribe("orders", group="g", retries=3)(brew)  # type: ignore[call-arg]
    with pytest.raises(UsageError, match="brew: there is no option concurency; did you mean"):
        app.subscribe_batch("orders", group="g", concurency=3)(brew)  # type: ignore[call-arg]


def test_a_checker_that_is_none_is_named() -> None:
    app = pulque.App()

    def brew(message: pulque.ReceivedMessage) -> None: ...

    with pytest.raises(UsageError, match=r"dedup of .*brew is 5"):
        app.subscribe("orders", group="g", dedup=5)(brew)  # type: ignore[arg-type]


def test_middleware_of_a_wrong_shape_is_named() -> None:
    app = pulque.App()

    def alone(message: object) -> None: ...

    with pytest.raises(UsageError, match="alone must take two arguments"):
        app.middleware(alone)
    with pytest.raises(UsageError, match="5 is not a function"):
        app.middleware(5)  # type: ignore[type-var]
    app.middleware(lambda message, call_next: call_next())


NAN = float("nan")
WRONG_TIMEOUTS: list[Any] = ["5", True, NAN, timedelta(seconds=5), b"5"]
WRONG_CONSUMERS: list[dict[str, Any]] = [
    {"group": ""},
    {"group": 5},
    {"max_messages": "x"},
    {"max_messages": 1.5},
    {"max_messages": True},
    {"max_bytes": "1MB"},
    {"max_held": "x"},
    {"tags": 5},
    {"tags": b"x"},
    {"all_tags": 5},
    {"mode": "sharde"},
    {"mode": []},
    {"blocks": []},
    {"start": 1.5},
    {"retry": [1, 2]},
    {"ordered": "yes"},
    {"broadcast": "no"},
    {"prefetch": "no"},
    {"consumer_id": 5},
]
WRONG_PRODUCERS: list[dict[str, Any]] = [
    {"linger": "5ms"},
    {"max_batch": "x"},
    {"max_batch": 1.5},
    {"max_batch_bytes": "1MB"},
    {"max_in_flight": None},
    {"max_buffered_bytes": NAN},
    {"timeout": "5"},
    {"timeout": 0},
    {"acks": "all"},
    {"acks": []},
    {"compression": []},
    {"spool": 5},
]
WRONG_CONNECTS: list[dict[str, Any]] = [
    {"url": 5},
    {"url": b"pulque://localhost"},
    {"url": ["pulque://localhost"]},
    {"name": 5},
    {"timeout": "5"},
    {"timeout": True},
    {"acks": []},
    {"state_dir": 5},
    {"latency": 5},
    {"latency": [5]},
    {"latency": [("a", 1)]},
]
WRONG_HANDLERS: list[dict[str, Any]] = [
    {"concurrency": "5"},
    {"concurrency": 1.5},
    {"timeout": "5"},
    {"timeout": NAN},
    {"ack": []},
    {"on_abandon": []},
    {"dedup": 5},
    {"tags": 5},
    {"max_held": "x"},
    {"max_held": 0},
    {"mode": []},
    {"ordered": "x"},
    {"broadcast": "x"},
    {"consumer_id": 5},
]


def named(options: dict[str, Any]) -> str:
    """Return what an error says that names what is wrong."""
    (name,) = options
    return rf"{name.replace('_', '.')}\b.* is|{name} of"


@pytest.mark.parametrize("options", WRONG_CONSUMERS, ids=str)
def test_wrong_options_of_a_consumer_are_named(
    pulque_client: pulque.Client, options: dict[str, Any]
) -> None:
    with pytest.raises(PulqueError, match=named(options)):
        pulque_client.consumer("orders", **{"group": "g", **options})


async def test_wrong_options_of_an_asyncio_consumer_are_named(
    pulque_aio_client: aio.Client,
) -> None:
    for options in WRONG_CONSUMERS:
        with pytest.raises(PulqueError, match=named(options)):
            pulque_aio_client.consumer("orders", **{"group": "g", **options})


@pytest.mark.parametrize("options", WRONG_PRODUCERS, ids=str)
def test_wrong_options_of_a_producer_are_named(
    pulque_client: pulque.Client, options: dict[str, Any]
) -> None:
    with pytest.raises(UsageError, match=named(options)):
        pulque_client.producer(**options)


async def test_wrong_options_of_an_asyncio_producer_are_named(
    pulque_aio_client: aio.Client,
) -> None:
    for options in WRONG_PRODUCERS:
        with pytest.raises(UsageError, match=named(options)):
            pulque_aio_client.producer(**options)


@pytest.mark.parametrize("options", WRONG_CONNECTS, ids=str)
def test_wrong_options_of_a_connection_are_named(pulque_url: str, options: dict[str, Any]) -> None:
    told = {"url": pulque_url, **options}
    with pytest.raises(PulqueError, match=f"{next(iter(options))}\\b.* is"):
        pulque.connect(**told)
    if "latency" not in options:
        with pytest.raises(PulqueError, match=f"{next(iter(options))}\\b.* is"):
            pulque.App(**told)


@pytest.mark.parametrize("timeout", WRONG_TIMEOUTS, ids=str)
def test_wrong_timeouts_are_named(pulque_client: pulque.Client, timeout: Any) -> None:
    def refused(call: Callable[[], object]) -> None:
        with pytest.raises(UsageError, match="timeout is"):
            call()

    refused(lambda: pulque_client.send("orders", b"tea", timeout=timeout))
    refused(lambda: pulque_client.send("orders", b"tea", key="k", timeout=timeout))
    refused(lambda: pulque_client.send_many("orders", [b"tea"], timeout=timeout))
    refused(lambda: pulque_client.read("orders", timeout=timeout))
    with pulque_client.producer(linger=5) as producer:
        pending = producer.send("orders", b"tea")
        refused(lambda: pending.result(timeout))
        refused(lambda: pending.exception(timeout))
        refused(lambda: producer.flush(timeout))
        refused(lambda: producer.close(timeout))
    for is_ordered in (False, True):
        group = f"g{is_ordered}"
        with pulque_client.consumer("orders", group=group, ordered=is_ordered) as consumer:
            refused(lambda: consumer.pull(timeout=timeout))
            refused(lambda: consumer.settle(timeout=timeout))
    assert [each.body for each in pulque_client.read("orders")] == [b"tea"]


async def test_wrong_timeouts_are_named_with_asyncio(pulque_aio_client: aio.Client) -> None:
    client = pulque_aio_client
    for timeout in WRONG_TIMEOUTS:
        with pytest.raises(UsageError, match="timeout is"):
            await client.send("orders", b"tea", timeout=timeout)
        with pytest.raises(UsageError, match="timeout is"):
            await client.send_many("orders", [b"tea"], timeout=timeout)
        with pytest.raises(UsageError, match="timeout is"):
            await client.read("orders", timeout=timeout)
        async with client.producer(linger=5) as producer:
            pending = await producer.send("other", b"tea")
            for wait in (pending.result, pending.exception, producer.flush, producer.close):
                with pytest.raises(UsageError, match="timeout is"):
                    await wait(timeout)
        for is_ordered in (False, True):
            group = f"g{is_ordered}"
            async with client.consumer("orders", group=group, ordered=is_ordered) as consumer:
                with pytest.raises(UsageError, match="timeout is"):
                    await consumer.pull(timeout=timeout)
                with pytest.raises(UsageError, match="timeout is"):
                    await consumer.settle(timeout=timeout)
    assert await client.read("orders") == []


@pytest.mark.parametrize("limit", ["x", 0, -1, 1.5, True], ids=str)
def test_wrong_numbers_of_messages_are_named(pulque_client: pulque.Client, limit: Any) -> None:
    for is_ordered in (False, True):
        group = f"g{is_ordered}"
        with (
            pulque_client.consumer("orders", group=group, ordered=is_ordered) as consumer,
            pytest.raises(UsageError, match="max_messages is"),
        ):
            consumer.pull(limit, timeout=0)
    with pytest.raises(UsageError, match="max_messages is"):
        pulque_client.read("orders", max_messages=limit)
    with pytest.raises(UsageError, match="limit is"):
        pulque_client.dead("orders", group="g").list(limit=limit)


@pytest.mark.parametrize("subject", [5, None, ["a"], b"a"], ids=str)
def test_a_subject_that_is_no_text_is_named(pulque_client: pulque.Client, subject: Any) -> None:
    with pulque_client.producer() as producer:
        for call in (pulque_client.send, producer.send):
            with pytest.raises(InvalidNameError, match="subject is"):
                call(subject, b"tea")
            with pytest.raises(InvalidNameError, match="subject is"):
                call(subject, b"tea", key="k")
        for call_many in (pulque_client.send_many, producer.send_many):
            with pytest.raises(InvalidNameError, match="subject is"):
                call_many(subject, [b"tea"])


async def test_a_subject_that_is_no_text_is_named_with_asyncio(
    pulque_aio_client: aio.Client,
) -> None:
    wrong: list[Any] = [5, None, ["a"], b"a"]
    for subject in wrong:
        async with pulque_aio_client.producer() as producer:
            for call in (pulque_aio_client.send, producer.send):
                with pytest.raises(InvalidNameError, match="subject is"):
                    await call(subject, b"tea")
            for call_many in (pulque_aio_client.send_many, producer.send_many):
                with pytest.raises(InvalidNameError, match="subject is"):
                    await call_many(subject, [b"tea"])


@pytest.mark.parametrize("messages", [5, None], ids=str)
def test_what_is_no_list_of_messages_is_named(pulque_client: pulque.Client, messages: Any) -> None:
    with pulque_client.producer() as producer:
        for call in (pulque_client.send_many, producer.send_many, pulque_client.cancel_many):
            arguments = (messages,) if call == pulque_client.cancel_many else ("a", messages)
            with pytest.raises(UsageError, match="messages is"):
                call(*arguments)


@pytest.mark.parametrize("reason", [5, None, ValueError("x")], ids=str)
def test_a_reason_that_is_no_text_is_named(pulque_client: pulque.Client, reason: Any) -> None:
    pulque_client.send("orders", b"tea")
    with pulque_client.consumer("orders", group="g") as consumer:
        (message,) = consumer.pull(timeout=10)
        for call in (message.nack, message.reject, pulque.Retry, pulque.Reject):
            with pytest.raises(UsageError, match="reason is"):
                call(reason)


def test_a_group_that_is_no_text_is_named(pulque_client: pulque.Client) -> None:
    with pytest.raises(InvalidNameError, match="group is 5"):
        pulque_client.dead("orders", group=5)  # type: ignore[arg-type]


@pytest.mark.parametrize("options", WRONG_HANDLERS, ids=str)
def test_wrong_options_of_a_handler_are_named(options: dict[str, Any]) -> None:
    app = pulque.App()
    with pytest.raises(PulqueError, match=named(options)):

        @app.subscribe("orders", group="g", **options)
        async def handle(message: pulque.ReceivedMessage) -> None: ...


@pytest.mark.parametrize("options", [{"max_messages": 1.5}, {"max_wait": "x"}], ids=str)
def test_wrong_options_of_a_batch_handler_are_named(options: dict[str, Any]) -> None:
    app = pulque.App()
    with pytest.raises(UsageError, match=named(options)):

        @app.subscribe_batch("orders", group="g", **options)
        async def handle(messages: list[pulque.ReceivedMessage]) -> None: ...


@pytest.mark.parametrize("hook", [5, None, lambda x: x], ids=["5", "None", "one argument"])
def test_hooks_of_a_wrong_shape_are_named(hook: Any) -> None:
    app = pulque.App()
    with pytest.raises(UsageError, match="on_startup"):
        app.on_startup(hook)
    with pytest.raises(UsageError, match="on_shutdown"):
        app.on_shutdown(hook)


@pytest.mark.parametrize(
    "make",
    [lambda: policy([-1]), lambda: policy([1], jitter=5), lambda: policy(max_attempts=0)],
)
def test_a_policy_that_cannot_be_is_refused_where_it_is_made(make: Callable[[], object]) -> None:
    with pytest.raises(UsageError, match=r"delay|jitter is 5|max_attempts is 0"):
        make()


def test_a_batch_handler_is_told_its_own_options() -> None:
    app = pulque.App()

    def brew(orders: list[bytes]) -> None:
        """Never called."""

    with pytest.raises(UsageError, match=r"brew: there is no option dedup\. Allowed .*max_wait"):
        app.subscribe_batch("orders", group="g", dedup=MemoryChecker())(brew)  # type: ignore[call-arg]
    with pytest.raises(UsageError, match="did you mean max_messages"):
        app.subscribe_batch("orders", group="g", max_message=5)(brew)  # type: ignore[call-arg]


WRONG_ASKED: list[tuple[Callable[[Any], Any], str]] = [
    (lambda client: client.reset(1, "g", "latest"), "subject is 1"),
    (lambda client: client.reset("orders", 2, "latest"), "group is 2"),
    (lambda client: client.reset("orders", "g", 3.5), "to is 3.5"),
    (lambda client: client.reset("orders", "g", "latest", partition=4), "partition is 4"),
    (lambda client: client.reset("orders", "g", "latest", partition=""), "partition is empty"),
    (lambda client: client.reset("orders", "g", "latest", dry_run="no"), "dry_run is 'no'"),
    (lambda client: client.groups(""), "subject is empty"),
    (lambda client: client.groups("orders", group=""), "group is empty"),
    (lambda client: client.delayed(""), "subject is empty"),
    (lambda client: client.groups(17), "subject is 17"),
    (lambda client: client.groups("orders", group=17), "group is 17"),
    (lambda client: client.groups(0), "subject is 0"),
    (lambda client: client.change_group(5, "g"), "subject is 5"),
    (lambda client: client.change_group("orders", 5), "group is 5"),
    (lambda client: client.change_group("orders", "g", tags=5), "tags is 5"),
    (lambda client: client.change_group("orders", "g", all_tags=5), "all_tags is 5"),
    (lambda client: client.delayed(17), "subject is 17"),
    (lambda client: client.consumer("orders", group="g").on_abandoned(5), "callback is 5"),
]


@pytest.mark.parametrize(("ask", "text"), WRONG_ASKED, ids=[text for _, text in WRONG_ASKED])
def test_what_administrators_say_wrong_is_named(
    pulque_client: pulque.Client, ask: Callable[[Any], Any], text: str
) -> None:
    with pytest.raises(UsageError, match=f"^{text}"):
        ask(pulque_client)


async def test_what_administrators_say_wrong_is_named_with_asyncio(
    pulque_aio_client: aio.Client,
) -> None:
    for ask, text in WRONG_ASKED:
        with pytest.raises(UsageError, match=f"^{text}"):
            await ask(pulque_aio_client)
