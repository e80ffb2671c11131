"""Handlers are called with messages, and what becomes of a message follows from their end."""

import asyncio
import logging
import threading
from collections.abc import Callable
from datetime import timedelta

import pytest

import pulque
from pulque.errors import FencedError, UsageError
from pulque.testing.broker import InProcessBroker
from pulque.wire import requests
from tests.forks import in_child
from tests.unit.app.conftest import running, until
from tests.unit.client.fake_broker import LIMIT, FakeBroker
from tests.unit.client.faults import Times

Send = Callable[..., None]


def note_what_is_wanted(broker: FakeBroker) -> list[int]:
    """Return a list that gets, for each pull, how many messages the consumer would hold then."""
    wanted: list[int] = []

    def note(request: requests.Request) -> None:
        if isinstance(request, requests.Pull):
            held = sum(len(log.held) for log in broker.pull_logs.values())
            wanted.append(held + request.max_messages)

    broker.fault = note
    return wanted


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
    may_end = {b"1": asyncio.Event(), b"3": asyncio.Event()}

    @app.subscribe("orders", group="g", concurrency=3)
    async def handle(body: bytes) -> None:
        if body in may_end:
            await may_end[body].wait()
        ended.append(body)

    async def send_and_handle(body: bytes) -> None:
        send(body)
        await until(lambda: body in ended)

    send(b"1", b"2", b"3", b"4", b"5")
    async with running(app):
        await until(lambda: len(ended) == 3)
        # What may be settled goes with every pull, and 7 came with one that was sent after 6.
        await send_and_handle(b"6")
        await send_and_handle(b"7")
        assert not broker.settled, "all that is done waits for 1"
        may_end[b"1"].set()
        await until(lambda: len(broker.acked) == 2)
        await send_and_handle(b"8")
        await send_and_handle(b"9")
        assert [pull for _, pull, _, _ in broker.settled] == [0, 1], "the rest waits for 3"
        may_end[b"3"].set()
        await until(lambda: len(broker.acked) == 9)

    assert ended == [b"2", b"4", b"5", b"6", b"7", b"1", b"8", b"9", b"3"]
    assert [pull for _, pull, _, _ in broker.settled] == list(range(9))
    assert not broker.nacked


@pytest.mark.accepts("004-60")
async def test_nothing_is_acked_before_its_handler_has_returned(
    broker: FakeBroker, app: pulque.App, send: Send
) -> None:
    may_end = threading.Event()
    ended: list[bytes] = []

    @app.subscribe("orders", group="g", concurrency=2)
    def handle(body: bytes) -> None:
        assert body != b"one" or may_end.wait(LIMIT)
        ended.append(body)

    send(b"one")
    async with running(app):
        # What may be settled goes with every pull, and each of these came with another.
        for number in range(3):
            send(b"%d" % number)
            await until(lambda count=number + 1: len(ended) == count)  # type: ignore[misc]
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
        for count in (3, 4):  # what may be settled goes with every pull
            send(b"more")
            await until(lambda count=count: len(kept) == count)  # type: ignore[misc]
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
    others: list[bytes] = []

    @app.subscribe("orders", group="g", concurrency=3)
    async def handle(_: bytes) -> None:
        nonlocal began
        began += 1
        await may_end.wait()

    @app.subscribe("others", group="g")
    async def handle_others(body: bytes) -> None:
        others.append(body)

    send(*(b"%d" % number for number in range(1000)))
    async with running(app):
        await until(lambda: began == 3)
        for number in range(3):  # meanwhile the application could ask for more
            send(b"%d" % number, subject="others")
            await until(lambda count=number + 1: len(others) == count)  # type: ignore[misc]
        held = [log for (name, *_), log in broker.pull_logs.items() if name == "orders"]
        assert [len(log.held) for log in held] == [3]
        may_end.set()
        await until(lambda: len(broker.acked) == 1000 + len(others))


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
    wanted = note_what_is_wanted(broker)
    async with running(app):
        await until(lambda: ended == 19)
        may_end.set()
        await until(lambda: len(broker.acked) == 100)

    assert max(wanted) == 20


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


async def test_the_log_counts_attempts_and_names_the_last_one(
    pulque_broker: InProcessBroker, caplog: pytest.LogCaptureFixture
) -> None:
    app = pulque.App(pulque_broker.url)

    @app.subscribe("orders", group="g", retry=pulque.RetryPolicy(delays=[0.0], max_attempts=2))
    async def handle(_: bytes) -> None:
        raise ValueError("no tea")

    @app.subscribe("rejected", group="g")
    async def reject(_: bytes) -> None:
        raise pulque.Reject("no milk")

    with pulque.connect(pulque_broker.url) as client:
        client.send("orders", b"tea")
        client.send("rejected", b"milk")
        async with running(app):
            await until(lambda: caplog.text.count("now a dead letter") == 2)
            await until(lambda: caplog.text.count("dead_letters") == 2)

    texts = [each.getMessage() for each in caplog.records if each.name == "pulque.app"]
    failed = [text.partition(" attempt=")[2] for text in texts if text.startswith("failed: ")]
    assert sorted(failed) == [
        "1 messages=1: no milk; now a dead letter",
        "1 of 2 messages=1: ValueError: no tea",
        "2 of 2 messages=1: ValueError: no tea; now a dead letter",
    ]


async def test_a_handler_that_forks_can_send_with_a_client_of_the_child_alone(
    broker: FakeBroker, app: pulque.App, send: Send
) -> None:
    found: list[object] = []

    def try_all() -> list[str]:
        errors = []
        for use in (lambda: app.send_blocking("bills", b"no"), lambda: app.client):
            with pytest.raises(pulque.ForkedError) as raised:
                use()
            errors.append(str(raised.value))
        with pulque.connect(broker.url, timeout=5) as client:
            client.send("bills", b"of the child")
        return errors

    @app.subscribe("orders", group="g")
    def handle(body: bytes) -> None:
        found.append(in_child(try_all))
        app.send_blocking("bills", body)

    send(b"one")
    async with running(app):
        await until(lambda: len(broker.acked) == 1)

    assert found == [[str(found[0][0])] * 2]  # type: ignore[index]
    assert "pulque.connect()" in str(found)
    assert broker.messages("bills") == [b"of the child", b"one"]
