"""Calls that end otherwise: hanging, exiting, abandoned, and the end of the application."""

import asyncio
import functools
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

import pulque
from pulque.errors import UsageError
from pulque.testing.broker import InProcessBroker
from tests.unit.app.conftest import running, until
from tests.unit.client.fake_broker import FakeBroker

Send = Callable[..., None]


def holding(broker: FakeBroker) -> int:
    return sum(len(log.held) for log in broker.pull_logs.values())


# ── too long ───────────────────────────────────────────────────────────────────────────────────


async def test_an_async_call_that_takes_too_long_is_cancelled_and_nacked(
    broker: FakeBroker, app: pulque.App, send: Send
) -> None:
    cancelled: list[bytes] = []

    @app.subscribe("orders", group="g", timeout=0.05)
    async def handle(body: bytes) -> None:
        if body != b"quick":
            try:
                await asyncio.sleep(60)
            except asyncio.CancelledError:
                cancelled.append(body)
                if body == b"slow":
                    raise

    send(b"slow", b"swallows it", b"quick")
    async with running(app):
        await until(lambda: len(broker.settled) == 3)

    assert cancelled == [b"slow", b"swallows it"]
    assert [(s, reason) for _, s, reason, _ in broker.nacked] == [
        (0, "TimeoutError: no end after 0.05 s"),
        (1, "TimeoutError: no end after 0.05 s"),
    ]
    assert broker.acked == [("orders", 2)]


async def test_a_thread_that_hangs_is_nacked_told_and_replaced(
    broker: FakeBroker, app: pulque.App, send: Send, caplog: pytest.LogCaptureFixture
) -> None:
    may_end = threading.Event()

    @app.subscribe("orders", group="g", timeout=0.05)
    def handle(body: bytes) -> None:
        if body == b"hangs":
            may_end.wait(10)

    send(b"hangs", b"quick", b"hangs", b"quick")
    async with running(app):
        await until(lambda: len(broker.settled) == 4)
        assert "threads that hang: handler=" in caplog.text
        assert "count=2" in caplog.text
        may_end.set()
        await until(lambda: caplog.text.count("ended after it was given up") == 2)

    assert broker.acked == [("orders", 1), ("orders", 3)]
    assert {reason for _, _, reason, _ in broker.nacked} == {"TimeoutError: no end after 0.05 s"}


async def test_an_application_all_of_whose_threads_hang_ends_and_says_so(
    broker: FakeBroker, app: pulque.App, send: Send
) -> None:
    may_end = threading.Event()

    @app.subscribe("orders", group="g", timeout=0.02)
    def handle(_: bytes) -> None:
        may_end.wait(10)

    send(*(b"%d" % number for number in range(20)))
    with pytest.raises(UsageError, match="hangs in 5 threads"):
        async with asyncio.timeout(5):
            await app.serve()  # in this task: an exit ends whatever task it is raised in
    may_end.set()
    assert len(broker.nacked) == 5


# ── the process is to end ──────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("kind", ["async", "plain"])
@pytest.mark.parametrize("exit_with", [SystemExit, KeyboardInterrupt])
async def test_a_handler_that_exits_nacks_and_stops_the_application(
    broker: FakeBroker, app: pulque.App, send: Send, kind: str, exit_with: type[BaseException]
) -> None:
    others: list[bytes] = []

    async def on_loop(body: bytes) -> None:
        if body == b"exit":
            await asyncio.sleep(0.1)
            raise exit_with(3)
        await asyncio.sleep(0.3)
        others.append(body)

    def in_thread(body: bytes) -> None:
        if body == b"exit":
            time.sleep(0.1)
            raise exit_with(3)
        time.sleep(0.3)
        others.append(body)

    app.subscribe("orders", group="g", concurrency=2)(on_loop if kind == "async" else in_thread)
    send(b"exit", b"runs", b"never", b"never")
    with pytest.raises(exit_with):
        async with asyncio.timeout(5):
            await app.serve()  # in this task: an exit ends whatever task it is raised in

    assert others == [b"runs"]
    assert broker.nacked == [("orders", 0, f"{exit_with.__name__}: 3", -1)]
    assert broker.acked == [("orders", 1)]
    assert broker.left


async def test_a_handler_may_call_sys_exit_within_middleware(
    broker: FakeBroker, app: pulque.App, send: Send
) -> None:
    @app.middleware
    def around(_: object, call_next: Callable[[], object]) -> object:
        return call_next()

    @app.subscribe("orders", group="g")
    async def handle(_: bytes) -> None:
        sys.exit(4)

    send(b"exit")
    with pytest.raises(SystemExit, match="4"):
        async with asyncio.timeout(5):
            await app.serve()  # in this task: an exit ends whatever task it is raised in
    assert broker.nacked[0][2] == "SystemExit: 4"


# ── stopping ───────────────────────────────────────────────────────────────────────────────────


async def test_a_stop_lets_running_calls_end_and_hands_back_the_rest(
    broker: FakeBroker, app: pulque.App, send: Send
) -> None:
    handled: list[bytes] = []
    began = asyncio.Event()

    @app.subscribe("orders", group="g", concurrency=2)
    async def handle(body: bytes) -> None:
        began.set()
        await asyncio.sleep(0.2)
        handled.append(body)

    send(*(b"%d" % number for number in range(10)))
    async with running(app):
        await began.wait()

    assert handled == [b"0", b"1"]
    assert broker.acked == [("orders", 0), ("orders", 1)]
    assert not broker.nacked
    assert broker.left
    assert holding(broker) == 0


@pytest.mark.parametrize("kind", ["async", "plain"])
async def test_what_does_not_end_within_the_grace_is_handed_back(
    broker: FakeBroker, app: pulque.App, send: Send, kind: str
) -> None:
    app.grace = 0.1
    began, may_end = threading.Event(), threading.Event()

    async def on_loop(body: bytes) -> None:
        if body != b"0":
            began.set()
            await asyncio.sleep(60)

    def in_thread(body: bytes) -> None:
        if body != b"0":
            began.set()
            may_end.wait(10)

    app.subscribe("orders", group="g")(on_loop if kind == "async" else in_thread)
    send(b"0", b"1", b"2")
    async with running(app):
        await until(began.is_set)
    may_end.set()

    assert broker.acked == [("orders", 0)]
    assert not broker.nacked
    assert holding(broker) == 0
    assert broker.left


async def test_a_second_stop_waits_no_longer(
    broker: FakeBroker, app: pulque.App, send: Send
) -> None:
    app.grace = 60
    began = asyncio.Event()

    @app.subscribe("orders", group="g")
    async def handle(_: bytes) -> None:
        began.set()
        await asyncio.sleep(60)

    send(b"0")
    async with running(app) as task:
        await began.wait()
        app.stop()
        await asyncio.sleep(0.2)
        assert not task.done()
        app.stop()
    assert holding(broker) == 0
    assert not broker.settled


async def test_a_cancelled_serve_ends_politely_too(
    broker: FakeBroker, app: pulque.App, send: Send
) -> None:
    began = asyncio.Event()

    @app.subscribe("orders", group="g")
    async def handle(_: bytes) -> None:
        began.set()
        await asyncio.sleep(0.2)

    send(b"0")
    task = asyncio.create_task(app.serve())
    await began.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert broker.acked == [("orders", 0)]
    assert broker.left


async def test_hooks_run_before_the_first_and_after_the_last_call(
    broker: FakeBroker, app: pulque.App, send: Send
) -> None:
    told: list[str] = []
    app.on_startup(lambda: told.append("start 1"))

    @app.on_startup
    async def open_database() -> None:
        told.append("start 2")
        await app.send("orders", "sent by a hook")

    @app.on_shutdown
    async def close_database() -> None:
        told.append("end 1")

    @app.on_shutdown
    def fail() -> None:
        raise ValueError("a hook that fails keeps no other from running")

    app.on_shutdown(lambda: told.append("end 2"))

    @app.subscribe("orders", group="g")
    async def handle(body: bytes) -> None:
        await asyncio.sleep(0.1)
        told.append(body.decode())

    async with running(app):
        await until(lambda: broker.pull_logs and holding(broker))

    assert told == ["start 1", "start 2", "sent by a hook", "end 2", "end 1"]


async def test_a_startup_hook_that_fails_ends_it_before_anything_is_pulled(
    broker: FakeBroker, app: pulque.App, send: Send
) -> None:
    @app.on_startup
    def fail() -> None:
        raise OSError("no database")

    @app.subscribe("orders", group="g")
    async def handle(_: bytes) -> None: ...

    send(b"one")
    with pytest.raises(OSError, match="no database"):
        await app.serve()
    assert not broker.pull_logs


async def test_an_application_may_run_again(
    broker: FakeBroker, app: pulque.App, send: Send
) -> None:
    @app.subscribe("orders", group="g")
    async def handle(_: bytes) -> None: ...

    for expected in ([("orders", 0)], [("orders", 0), ("orders", 1)]):
        send(b"one")
        async with running(app):
            await until(functools.partial(expected.__eq__, broker.acked))
            with pytest.raises(UsageError, match="runs already"):
                await app.serve()


async def test_a_block_is_served_and_raises_what_ended_it(
    broker: FakeBroker, app: pulque.App, send: Send
) -> None:
    @app.subscribe("orders", group="g")
    async def handle(body: bytes) -> None:
        if body == b"exit":
            sys.exit(5)

    async with app:
        await app.send("orders", b"one")
        await until(lambda: broker.acked)
    with pytest.raises(SystemExit, match="5"):  # noqa: PT012  # at the end of the block
        async with app:
            await app.send("orders", b"exit")
            await until(lambda: broker.nacked)
    app.on_startup(lambda: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        await app.__aenter__()  # it does not come to a block


# ── abandoned ──────────────────────────────────────────────────────────────────────────────────


@pytest.mark.accepts("000-39")
async def test_without_a_broker_for_the_lease_what_is_not_done_is_abandoned(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    began: list[tuple[bytes, pulque.ReceivedMessage]] = []
    cancelled: list[bytes] = []
    with FakeBroker(lease_ms=1500) as broker:
        app = pulque.App(broker.url, name="test", timeout=5, grace=5, state_dir=tmp_path)

        @app.subscribe_batch("orders", group="g", max_messages=1, on_abandon="cancel")
        async def handle(messages: list[pulque.ReceivedMessage]) -> None:
            began.append((messages[0].body, messages[0]))
            try:
                await asyncio.sleep(0.05 if len(began) != 6 else 60)
            except asyncio.CancelledError:
                cancelled.append(messages[0].body)
                raise

        with pulque.connect(broker.url, name="sends", state_dir=tmp_path) as client:
            client.send_many("orders", [b"%d" % number for number in range(12)])
        async with running(app):
            await until(lambda: len(began) == 6)
            await until(lambda: len(broker.acked) == 5)
            broker.stop_listening()
            broker.drop_all()
            await until(lambda: cancelled)
            assert cancelled == [b"5"]
            assert began[5][1].is_abandoned
            assert len(began) == 6  # nothing that waited was begun
            broker.listen_again()
            await until(lambda: len(broker.acked) == 12)
    assert "abandoned: handler=" in caplog.text
    assert "running=1" in caplog.text
    assert [body for body, _ in began[6:]] == [b"%d" % number for number in range(5, 12)]


async def test_a_running_call_can_see_that_its_message_went_to_others(
    broker: FakeBroker, app: pulque.App, send: Send
) -> None:
    seen: list[bool] = []
    began, given_away = threading.Event(), threading.Event()

    @app.subscribe("orders", group="g", concurrency=2)
    def handle(message: pulque.ReceivedMessage) -> None:
        if message.body == b"first":
            seen.append(message.is_abandoned)
            began.set()
            given_away.wait(5)
            deadline = time.monotonic() + 5
            while not message.is_abandoned and time.monotonic() < deadline:
                time.sleep(0.01)
            seen.append(message.is_abandoned)

    send(b"first")
    async with running(app):
        await until(began.is_set)
        broker.lose_consumers()
        given_away.set()
        send(b"second")
        await until(lambda: len(seen) == 2)
        await until(lambda: broker.acked == [("orders", 1)])

    assert seen == [False, True]
    assert not broker.nacked


async def test_a_reset_of_the_group_is_noticed_by_handlers(pulque_broker: InProcessBroker) -> None:
    app = pulque.App()
    began: list[bytes] = []
    cancelled: list[bool] = []

    @app.subscribe("orders", group="g", concurrency=2, on_abandon="cancel")
    async def handle(message: pulque.ReceivedMessage) -> None:
        began.append(message.body)
        if len(began) == 4:
            try:
                await asyncio.sleep(60)
            except asyncio.CancelledError:
                cancelled.append(message.is_abandoned)
                raise

    async with app:
        for number in range(4):
            await app.send("orders", b"%d" % number)
        await until(lambda: len(began) == 4)
        await app.client.reset("orders", "g", "earliest")
        await until(lambda: len(began) == 8)
        await until(lambda: cancelled)

    assert cancelled == [True]
    assert sorted(began[4:]) == [b"0", b"1", b"2", b"3"]
