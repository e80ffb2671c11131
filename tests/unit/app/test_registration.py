"""A handler that makes no sense is refused where it is written, with what would make sense."""

import asyncio
import functools
from collections.abc import AsyncIterator, Iterator, Sequence
from typing import Any

import pytest

import pulque
from pulque.app.signature import arguments_of
from pulque.errors import ConfigError, InvalidNameError, UsageError
from pulque.model.groups import Mode, StartKind
from pulque.testing.broker import InProcessBroker
from pulque.wire import requests
from tests.unit.app.conftest import running, until
from tests.unit.client.fake_broker import FakeBroker


def plain(message: pulque.ReceivedMessage) -> None: ...


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"concurrency": 0}, "concurrency is 0; a whole number from 1 to 10000"),
        ({"concurrency": "8"}, "concurrency is '8'"),
        ({"concurrency": True}, "concurrency is True"),
        ({"concurrency": 8, "max_held": 7}, "max_held is 7; a whole number from 8 to"),
        ({"start": "yesterday"}, "start is 'yesterday'"),
        ({"mode": "twice"}, "mode is 'twice'"),
        ({"mode": "once", "broadcast": True}, "which one"),
        ({"tags": [7]}, "tags to filter by must be text"),
        ({"timeout": 0}, "timeout is 0"),
        ({"timeout": float("nan")}, "timeout is nan"),
        ({"timeout": -1}, "timeout is -1"),
        ({"ack": "never"}, 'ack is \'never\'; "auto" and "manual" are allowed'),
        ({"on_abandon": "ignore"}, "on_abandon is 'ignore'"),
        ({"on_abandon": "cancel"}, "plain is not async"),
    ],
)
def test_options_out_of_range_are_refused(options: dict[str, Any], text: str) -> None:
    with pytest.raises(UsageError, match=text):
        pulque.App().subscribe("orders", group="g", **options)(plain)


@pytest.mark.parametrize("options", [{"max_messages": 0}, {"max_wait": -1}, {"max_wait": None}])
def test_options_of_batches_are_checked_too(options: dict[str, Any]) -> None:
    def handle(messages: list[bytes]) -> None: ...

    with pytest.raises(UsageError, match=next(iter(options))):
        pulque.App().subscribe_batch("orders", group="g", **options)(handle)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("order.*", "order.paid"),
        ("order.*", "order.paid.*"),
        ("order.*", "order.paid.late"),
        ("*", "orders"),
        ("*", "order.*"),
    ],
)
@pytest.mark.parametrize("order", [1, -1])
def test_two_handlers_of_a_group_for_one_subject_are_refused(
    one: str, other: str, order: int
) -> None:
    def late(body: bytes) -> None: ...

    first, second = (one, other)[::order]
    app = pulque.App()
    app.subscribe(first, group="g")(plain)

    with pytest.raises(UsageError) as refused:
        app.subscribe(second, group="g")(late)

    for part in ("plain", "late", f"handles {first} ", f"handles {second},", "group g"):
        assert part in str(refused.value)
    assert len(app.handlers) == 1
    app.subscribe(second, group="h")(late)
    assert len(app.handlers) == 2


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("order.*", "order"),
        ("order.*", "orders.paid"),
        ("order.*", "orders.*"),
        ("order.paid.*", "order.paid"),
        ("order.paid.*", "order.late.*"),
        ("a", "b"),
    ],
)
def test_handlers_of_a_group_for_subjects_apart_are_allowed(one: str, other: str) -> None:
    app = pulque.App()
    app.subscribe(one, group="g")(plain)
    app.subscribe(other, group="g")(plain)

    assert len(app.handlers) == 2


def test_handlers_that_each_get_everything_may_overlap() -> None:
    app = pulque.App()
    app.subscribe("order.*")(plain)
    app.subscribe("order.paid")(plain)
    app.subscribe("order.*", group="g", broadcast=True)(plain)
    app.subscribe("order.paid", group="g", broadcast=True)(plain)

    assert len(app.handlers) == 4


def test_what_would_have_no_effect_is_refused() -> None:
    with pytest.raises(UsageError, match="nobody acks it"):

        @pulque.App().subscribe("orders", group="g", ack="manual")
        def handle(body: bytes) -> None: ...

    with pytest.raises(UsageError, match="no parameter of plain takes what decode= gives"):
        pulque.App().subscribe("orders", group="g", decode=lambda message: message.key)(plain)


def test_names_are_checked() -> None:
    with pytest.raises(InvalidNameError):
        pulque.App().subscribe("../orders", group="g")(plain)
    with pytest.raises(InvalidNameError):
        pulque.App().subscribe("orders", group="a b")(plain)
    with pytest.raises(ConfigError, match="http"):
        pulque.App("http://127.0.0.1")
    with pytest.raises(UsageError, match="grace is -1"):
        pulque.App(grace=-1)


def test_a_group_has_one_handler_of_a_subject() -> None:
    app = pulque.App()
    app.subscribe("orders", group="g")(plain)
    app.subscribe("orders", group="h")(plain)
    with pytest.raises(UsageError, match="plain handles orders for group g here"):
        app.subscribe("orders", group="g")(lambda message: None)
    assert [(each.subject, each.group) for each in app.handlers] == [
        ("orders", "g"),
        ("orders", "h"),
    ]


async def test_without_handlers_there_is_nothing_to_run() -> None:
    with pytest.raises(UsageError, match="no handler is registered"):
        await pulque.App().serve()


def yields(message: object) -> Iterator[int]:
    yield 1


async def yields_async(message: object) -> AsyncIterator[int]:
    yield 1


class Yields:
    def __call__(self, message: object) -> Iterator[int]:
        yield 1


@pytest.mark.parametrize("function", [yields, yields_async, Yields()])
def test_a_generator_would_do_nothing_and_is_refused(function: Any) -> None:
    with pytest.raises(UsageError, match="yields"):
        pulque.App().subscribe("orders", group="g")(function)


def two_messages(a: pulque.ReceivedMessage, b: pulque.ReceivedMessage) -> None: ...


def two_payloads(a: bytes, b: dict[str, Any]) -> None: ...


def unresolved(a: "Nowhere") -> None: ...  # type: ignore[name-defined]  # noqa: F821


def positional(a: bytes, b: pulque.ReceivedMessage, /) -> None: ...


@pytest.mark.parametrize(
    ("function", "text"),
    [
        (lambda: None, "takes no parameter"),
        (lambda *args: None, "takes no parameter"),
        (lambda a, b: None, "two parameters for the message: a and b"),
        (two_messages, "two parameters for the message"),
        (two_payloads, "two parameters for the payload: a and b"),
        (unresolved, "a type hint of unresolved cannot be resolved: name 'Nowhere'"),
        (positional, "positional-only"),
        (17, "17 is not a function"),
    ],
)
def test_parameters_that_cannot_be_filled_are_refused(function: Any, text: str) -> None:
    with pytest.raises(UsageError, match=text):
        pulque.App().subscribe("orders", group="g")(function)


@pytest.mark.parametrize("hint", [bytes, dict[str, int], pulque.ReceivedMessage])
def test_a_batch_handler_takes_lists(hint: Any) -> None:
    def handle(messages: Any) -> None: ...

    handle.__annotations__["messages"] = hint
    with pytest.raises(UsageError, match="a batch handler takes a list"):
        pulque.App().subscribe_batch("orders", group="g")(handle)


class CallableObject:
    def __call__(self, payload: bytes, message: pulque.ReceivedMessage) -> tuple[object, object]:
        return payload, message


def both(payload: bytes, message: pulque.ReceivedMessage, verbose: int = 0) -> Any:
    return payload, message, verbose


def by_place(message: pulque.Message, payload: bytes, /) -> Any:
    return payload, message


def only_named(*, message: pulque.ReceivedMessage, payload: bytes) -> Any:
    return payload, message


@pytest.mark.parametrize(
    "function",
    [CallableObject(), both, by_place, only_named, functools.partial(both, verbose=1)],
)
def test_parameters_are_filled_by_their_types(function: Any) -> None:
    arguments = arguments_of(function, None, is_batch=False)

    assert arguments.caller(function)("the message", b"the payload")[:2] == (
        b"the payload",
        "the message",
    )


def test_lists_may_be_sequences() -> None:
    def handle(payloads: Sequence[bytes], messages: list[pulque.ReceivedMessage]) -> Any:
        return payloads, messages

    arguments = arguments_of(handle, None, is_batch=True)
    assert arguments.caller(handle)(["m"], [b"p"]) == ([b"p"], ["m"])


async def test_what_is_wished_of_the_group_reaches_the_broker(
    broker: FakeBroker, app: pulque.App
) -> None:
    @app.subscribe(
        "orders",
        group="g",
        tags=(tag for tag in ("vip", "new")),
        start="latest",
        retry=pulque.RetryPolicy([1, 5], max_attempts=3),
        consumer_id="me",
    )
    async def handle(_: bytes) -> None: ...

    @app.subscribe("orders", broadcast=True)
    async def handle_all(_: bytes) -> None: ...

    async with running(app):
        await until(lambda: len(broker.seen(requests.Subscribe)) == 2)
    mine, all_of_them = sorted(
        (each for each in broker.requests if isinstance(each, requests.Subscribe)),
        key=lambda each: each.group != "g",
    )
    assert mine.consumer == "me"
    assert mine.filter.any_of == ("new", "vip")
    assert mine.start.kind is StartKind.LATEST
    assert (mine.retry.delays_ms, mine.retry.max_attempts) == ((1000, 5000), 3)
    assert all_of_them.mode is Mode.BROADCAST


async def test_a_pattern_covers_subjects_that_come_later(
    pulque_broker: InProcessBroker, pulque_client: pulque.Client
) -> None:
    got: list[tuple[str, bytes]] = []
    app = pulque.App()

    @app.subscribe("order.*", group="g")
    async def handle(message: pulque.ReceivedMessage) -> None:
        got.append((message.subject, message.body))

    await asyncio.to_thread(pulque_client.send, "order.paid", b"one")
    async with running(app):
        await until(lambda: len(got) == 1)
        await asyncio.to_thread(pulque_client.send, "order.lost", b"two")
        await until(lambda: len(got) == 2)

    assert got == [("order.paid", b"one"), ("order.lost", b"two")]


async def test_tags_broadcast_and_once_work_for_handlers(
    pulque_broker: InProcessBroker, pulque_client: pulque.Client
) -> None:
    got: dict[str, list[bytes]] = {"tags": [], "all": [], "once": []}

    def application() -> pulque.App:
        app = pulque.App()

        @app.subscribe("orders", group="vips", tags=["vip"])
        async def tagged(body: bytes) -> None:
            got["tags"].append(body)

        @app.subscribe("orders", broadcast=True)
        async def everything(body: bytes) -> None:
            got["all"].append(body)

        @app.subscribe("orders", group="once", mode="once")
        async def once(body: bytes) -> None:
            got["once"].append(body)
            raise ValueError("that is the end of it")

        return app

    await asyncio.to_thread(pulque_client.send, "orders", b"plain")
    await asyncio.to_thread(pulque_client.send, "orders", b"vip", tags=["vip"])
    async with running(application()), running(application()):
        await until(lambda: len(got["all"]) == 4)
        await until(lambda: len(got["once"]) == 2)
        await until(lambda: got["tags"])
    await asyncio.to_thread(pulque_client.send, "orders", b"last", tags=["vip"])
    async with running(application()):
        await until(lambda: all(b"last" in bodies for bodies in got.values()))

    assert sorted(got["all"]) == [b"last", b"plain", b"plain", b"vip", b"vip"]
    assert sorted(got["once"]) == [b"last", b"plain", b"vip"]
    assert got["tags"] == [b"vip", b"last"]
