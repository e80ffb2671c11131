"""Handlers are called with messages, and what becomes of a message follows from their end."""

import asyncio
import logging
import threading
from collections.abc import Callable
from datetime import timedelta

import pytest

import pulque
from pulque.errors import FencedError, UsageError
from pulque.wire import requests
from tests.unit.app.conftest import running, until
from tests.unit.client.fake_broker import FakeBroker
from tests.unit.client.faults import Times

Send = Callable[..., None]


@pytest.mark.accepts("004-96")
async def test_an_async_handler_gets_each_message_and_its_return_is_an_ack(
    broker: FakeBroker, app: pulque.App, send: Send
) -> None:
    got: list[bytes] = []

    @app.subscribe("orders", group="g")
    async def handle(message: pulque.ReceivedMessage) -> None:
        assert threading.current_thread() is threading.main_thread()
        await asyncio.sleep(0)
        got.append(message.body)

    send(b"one", b"two", b"three")
    async with running(app):
        await until(lambda: len(broker.acked) == 3)

    assert got == [b"one", b"two", b"three"]
    assert not broker.nacked


async def test_a_plain_handler_runs_in_threads_as_many_as_allowed(
    broker: FakeBroker, app: pulque.App, send: Send
) -> None:
    together = threading.Barrier(4)
    at_once: list[int] = []
    lock = threading.Lock()
    running_now = 0

    @app.subscribe("orders", group="g", concurrency=4)
    def handle(body: bytes) -> None:
        nonlocal running_now
        with lock:
            running_now += 1
            at_once.append(running_now)
        if int(body) < 4:
            together.wait(5)  # breaks, and fails the message, unless four run at once
        with lock:
            running_now -= 1

    send(*(b"%d" % number for number in range(40)))
    async with running(app):
        await until(lambda: len(broker.acked) == 40)

    assert max(at_once) == 4
    assert not broker.nacked


async def test_async_calls_run_side_by_side_up_to_the_concurrency(
    broker: FakeBroker, app: pulque.App, send: Send
) -> None:
    at_once = 0
    most = 0

    @app.subscribe("orders", group="g", concurrency=7)
    async def handle(_: pulque.ReceivedMessage) -> None:
        nonlocal at_once, most
        at_once += 1
        most = max(most, at_once)
        await asyncio.sleep(0.01)
        at_once -= 1

    send(*(b"%d" % number for number in range(50)))
    async with running(app):
        await until(lambda: len(broker.acked) == 50)

    assert most == 7


@pytest.mark.accepts("003-50", "004-81")
async def test_calls_end_in_any_order_and_only_a_completed_prefix_is_settled(
    broker: FakeBroker, app: pulque.App, send: Send
) -> None:
    ended: list[bytes] = []
    first_may_end = asyncio.Event()

    @app.subscribe("orders", group="g", concurrency=3)
    async def handle(body: bytes) -> None:
        if body == b"1":
            await first_may_end.wait()
        ended.append(body)

    send(b"1", b"2", b"3", b"4", b"5")
    async with running(app):
        await until(lambda: len(ended) == 4)
        await asyncio.sleep(0.3)  # three times as long as it takes to settle
        assert not broker.settled
        first_may_end.set()
        await until(lambda: len(broker.acked) == 5)

    assert ended == [b"2", b"3", b"4", b"5", b"1"]
    assert [pull for _, pull, _, _ in broker.settled] == [0, 1, 2, 3, 4]
    assert not broker.nacked


@pytest.mark.accepts("004-60")
async def test_nothing_is_acked_before_its_handler_has_returned(
    broker: FakeBroker, app: pulque.App, send: Send
) -> None:
    began, may_end = threading.Event(), threading.Event()

    @app.subscribe("orders", group="g")
    def handle(_: bytes) -> None:
        began.set()
        assert may_end.wait(5)

    send(b"one")
    async with running(app):
        await until(began.is_set)
        await asyncio.sleep(0.3)
        assert not broker.settled
        may_end.set()
        await until(lambda: broker.acked)


@pytest.mark.parametrize("kind", ["async", "plain"])
async def test_an_error_is_a_nack_with_its_name_and_text_and_others_go_on(
    broker: FakeBroker, app: pulque.App, send: Send, kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    # One of the errors has a text that not even pytest can pass on.
    caplog.set_level(logging.CRITICAL, "pulque.app")
    if kind == "async":

        @app.subscribe("orders", group="g")
        async def handle_async(body: bytes) -> None:
            raise_for(body)
    else:

        @app.subscribe("orders", group="g")
        def handle(body: bytes) -> None:
            raise_for(body)

    send(b"good", b"bad", b"stop", b"long", b"later", b"worse", b"broken text", b"good")
    async with running(app):
        await until(lambda: len(broker.settled) == 8)

    assert [sequence for _, sequence in broker.acked] == [0, 7]
    reasons = {sequence: (reason, delay) for _, sequence, reason, delay in broker.nacked}
    assert reasons[1] == ("ValueError: no such table", -1)
    assert reasons[2][0].startswith("RuntimeError")
    assert reasons[3][0] == f"KeyError: {'x' * 5000!r}"[:1000]
    assert reasons[4] == ("the bank is closed", 90_500)
    assert reasons[5][0].startswith("UsageError: delay is nan")
    assert reasons[6][0] == "OSError: \\udc80"


def raise_for(body: bytes) -> None:
    match body:
        case b"bad":
            raise ValueError("no such table")
        case b"stop":
            raise StopIteration
        case b"long":
            raise KeyError("x" * 5000)
        case b"later":
            raise pulque.Retry("the bank is closed", delay=timedelta(seconds=90.5))
        case b"worse":
            raise pulque.Retry("the bank is closed", delay=float("nan"))
        case b"broken text":
            raise OSError("\udc80")
        case _:
            pass


async def test_what_the_handler_settled_itself_stays_so(
    broker: FakeBroker, app: pulque.App, send: Send
) -> None:
    @app.subscribe("orders", group="g")
    async def handle(message: pulque.ReceivedMessage) -> None:
        if message.body == b"nacked":
            message.nack("not today")
        else:
            message.ack()
            raise ValueError("too late")

    send(b"nacked", b"acked")
    async with running(app):
        await until(lambda: len(broker.settled) == 2)

    assert broker.nacked == [("orders", 0, "not today", -1)]
    assert broker.acked == [("orders", 1)]


async def test_a_result_is_ignored_with_one_warning(
    broker: FakeBroker, app: pulque.App, send: Send, caplog: pytest.LogCaptureFixture
) -> None:
    @app.subscribe("orders", group="g")
    async def handle(_: bytes) -> object:
        return {"garbage": object()}

    send(b"one", b"two", b"three")
    async with running(app):
        await until(lambda: len(broker.acked) == 3)

    warned = [each for each in caplog.messages if "which nobody gets" in each]
    assert len(warned) == 1
    assert "returned a dict" in warned[0]


async def test_a_plain_wrapper_around_an_async_handler_is_awaited(
    broker: FakeBroker, app: pulque.App, send: Send
) -> None:
    async def handle(message: pulque.ReceivedMessage) -> None:
        await asyncio.sleep(0)
        if message.body == b"bad":
            raise ValueError("from within")

    app.subscribe("orders", group="g")(lambda message: handle(message))  # noqa: PLW0108  # a plain one
    send(b"good", b"bad")
    async with running(app):
        await until(lambda: len(broker.settled) == 2)

    assert broker.nacked == [("orders", 1, "ValueError: from within", -1)]


async def test_other_formats_have_a_decoder_of_their_own(
    broker: FakeBroker, app: pulque.App, send: Send
) -> None:
    got: list[int] = []

    @app.subscribe("orders", group="g", decode=lambda message: int(message.body, 16))
    async def handle(number: int) -> None:
        got.append(number)

    send(b"ff", b"nothing hexadecimal")
    async with running(app):
        await until(lambda: len(broker.settled) == 2)
    assert got == [255]
    assert broker.nacked[0][2].startswith("ValueError: invalid literal for int() with base 16")


async def test_a_forgotten_await_is_made_good(
    broker: FakeBroker, app: pulque.App, send: Send
) -> None:
    done: list[bytes] = []

    async def work(body: bytes) -> None:
        done.append(body)

    @app.subscribe("orders", group="g")
    async def handle(body: bytes) -> object:
        return work(body)

    send(b"one")
    async with running(app):
        await until(lambda: broker.acked)
    assert done == [b"one"]


async def test_run_is_not_for_a_thread_with_a_loop(app: pulque.App) -> None:
    app.subscribe("orders", group="g")(lambda message: None)
    with pytest.raises(UsageError, match=r"await app\.serve"):
        app.run()


async def test_manual_acks_may_come_later_from_any_thread(
    broker: FakeBroker, app: pulque.App, send: Send
) -> None:
    kept: list[pulque.ReceivedMessage] = []

    @app.subscribe("orders", group="g", concurrency=2, ack="manual")
    def handle(message: pulque.ReceivedMessage) -> None:
        if message.body == b"2":
            raise ValueError("could not even begin")
        kept.append(message)

    def finish() -> None:
        kept[0].ack()
        kept[1].nack("refused elsewhere")

    send(b"0", b"1", b"2")
    async with running(app):
        await until(lambda: len(kept) == 2)
        await asyncio.sleep(0.3)
        assert not broker.settled
        kept.sort(key=lambda message: message.sequence)
        threading.Thread(target=finish).start()
        await until(lambda: len(broker.settled) == 3)

    assert broker.acked == [("orders", 0)]
    assert [(sequence, reason) for _, sequence, reason, _ in broker.nacked] == [
        (1, "refused elsewhere"),
        (2, "ValueError: could not even begin"),
    ]


async def test_a_stop_waits_for_manual_acks_within_the_grace(
    broker: FakeBroker, app: pulque.App, send: Send
) -> None:
    kept: list[pulque.ReceivedMessage] = []

    @app.subscribe("orders", group="g", ack="manual")
    async def handle(message: pulque.ReceivedMessage) -> None:
        kept.append(message)

    send(b"0")
    async with running(app) as task:
        await until(lambda: kept)
        app.stop()
        await asyncio.sleep(0.2)
        assert not task.done()
        kept[0].ack()

    assert broker.acked == [("orders", 0)]


async def test_handlers_send_while_they_handle(
    broker: FakeBroker, app: pulque.App, send: Send
) -> None:
    @app.subscribe("orders", group="a")
    async def on_loop(body: bytes) -> None:
        await app.send("tickets", {"for": body.decode()}, key="k")
        with pytest.raises(UsageError, match="await app"):
            app.send_blocking("tickets", b"never")

    @app.subscribe("orders", group="b")
    def in_thread(body: bytes) -> None:
        app.send_blocking("bills", body)

    send(b"one")
    async with running(app):
        await until(lambda: len(broker.acked) == 2)

    assert broker.messages("tickets") == [b'{"for": "one"}']
    assert broker.messages("bills") == [b"one"]
    with pytest.raises(UsageError, match="does not run"):
        app.send_blocking("bills", b"late")
    with pytest.raises(UsageError, match="does not run"):
        await app.send("bills", b"late")


async def test_a_slow_handler_holds_no_more_than_it_handles(
    broker: FakeBroker, app: pulque.App, send: Send
) -> None:
    may_end = asyncio.Event()
    began = 0

    @app.subscribe("orders", group="g", concurrency=3)
    async def handle(_: bytes) -> None:
        nonlocal began
        began += 1
        await may_end.wait()

    send(*(b"%d" % number for number in range(1000)))
    async with running(app):
        await until(lambda: began == 3)
        await asyncio.sleep(0.3)
        held = [log for log in broker.pull_logs.values() if log.held]
        assert [len(log.held) for log in held] == [3]
        may_end.set()
        await until(lambda: len(broker.acked) == 1000)


async def test_the_window_behind_one_that_hangs_has_an_end(
    broker: FakeBroker, app: pulque.App, send: Send
) -> None:
    may_end = asyncio.Event()
    ended = 0

    @app.subscribe("orders", group="g", concurrency=2, max_held=20)
    async def handle(body: bytes) -> None:
        nonlocal ended
        if body == b"0":
            await may_end.wait()
        ended += 1

    send(*(b"%d" % number for number in range(100)))
    async with running(app):
        await until(lambda: ended == 19)
        await asyncio.sleep(0.3)
        assert ended == 19
        may_end.set()
        await until(lambda: len(broker.acked) == 100)


async def test_another_with_the_same_id_ends_the_application(
    broker: FakeBroker, app: pulque.App, send: Send
) -> None:
    @app.subscribe("orders", group="g")
    async def handle(_: bytes) -> None: ...

    send(b"one")
    broker.fault = Times(requests.Pull, FencedError("another consumer has this id"))
    with pytest.raises(FencedError):
        await asyncio.wait_for(app.serve(), 5)


async def test_a_broker_that_comes_later_is_waited_for(
    broker: FakeBroker, app: pulque.App, send: Send, caplog: pytest.LogCaptureFixture
) -> None:
    @app.subscribe("orders", group="g")
    async def handle(_: bytes) -> None: ...

    send(b"one")
    broker.stop_listening()
    broker.drop_all()
    async with running(app):
        await until(lambda: "no connection to the broker; trying on" in caplog.text)
        broker.listen_again()
        await until(lambda: broker.acked)


async def test_a_lost_broker_is_told_and_found_again(
    broker: FakeBroker, app: pulque.App, send: Send, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING, "pulque.app")

    @app.subscribe("orders", group="g")
    async def handle(_: bytes) -> None: ...

    send(b"one")
    async with running(app):
        await until(lambda: len(broker.acked) == 1)
        broker.stop_listening()
        broker.drop_all()
        await until(lambda: "no connection to the broker" in caplog.text)
        broker.listen_again()
        send(b"two")
        await until(lambda: len(broker.acked) == 2)
        await until(lambda: "connected to the broker again" in caplog.text)
