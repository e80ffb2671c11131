"""Applications as processes: signals, crashes, pauses; nothing is lost, little is done twice."""

import contextlib
import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import pulque
from pulque.testing.process import BrokerProcess
from tests.robustness.brokers import flags, wait_until

pytestmark = pytest.mark.server

StartBroker = Callable[..., BrokerProcess]

SHORT_LEASE = {"consumption.lease": "2s", "consumption.lease_check": "100ms"}
WITHIN = 30

SHOP = """
import asyncio, os, sys, time
import pulque

app = pulque.App(grace={grace})
told = os.open(os.environ["TOLD"], os.O_WRONLY | os.O_APPEND | os.O_CREAT)


def tell(what, *about):
    os.write(told, (" ".join([what, os.environ["WHO"], *map(str, about)]) + "\\n").encode())

"""

SLOW = """
@app.subscribe("orders", group="g", concurrency=2)
async def handle(message: pulque.ReceivedMessage):
    tell("began", message.body.decode())
    await asyncio.sleep({work})
    tell("ended", message.body.decode())
"""

SLOW_IN_THREADS = """
@app.subscribe("orders", group="g", concurrency=2)
def handle(message: pulque.ReceivedMessage):
    tell("began", message.body.decode())
    time.sleep({work})
    tell("ended", message.body.decode())
"""


class Apps:
    """Runs ``pulque run shop:app`` in a folder, and reads what its handlers told."""

    def __init__(self, folder: Path, url: str) -> None:
        self.folder = folder
        self.url = url
        self.processes: dict[str, subprocess.Popen[bytes]] = {}

    def write(self, code: str, *, grace: float = 10, work: float = 0) -> None:
        (self.folder / "shop.py").write_text(SHOP.format(grace=grace) + code.format(work=work))

    def start(self, who: str) -> subprocess.Popen[bytes]:
        environ = {
            **os.environ,
            "TOLD": str(self.folder / "told"),
            "WHO": who,
            "PULQUE_STATE_DIR": str(self.folder / "state"),
        }
        with (self.folder / f"{who}.log").open("ab") as log:
            self.processes[who] = subprocess.Popen(
                [sys.executable, "-m", "pulque", "run", "shop:app", "--url", self.url],
                cwd=self.folder,
                env=environ,
                stdout=log,
                stderr=log,
            )
        return self.processes[who]

    def log(self, who: str) -> str:
        return (self.folder / f"{who}.log").read_text()

    def told(self, what: str, who: str | None = None) -> list[list[str]]:
        """Return what was told about: all words after the first two."""
        path = self.folder / "told"
        lines = path.read_text().splitlines() if path.exists() else []
        words = [line.split() for line in lines]
        return [each[2:] for each in words if each[0] == what and who in {None, each[1]}]

    def wait_for(self, what: str, count: int, who: str | None = None) -> None:
        wait_until(
            lambda: len(self.told(what, who)) >= count, within=WITHIN, what=f"{count} {what}"
        )

    def close(self) -> None:
        for process in self.processes.values():
            with contextlib.suppress(ProcessLookupError):
                process.send_signal(signal.SIGCONT)
                process.kill()
            process.wait()


@pytest.fixture
def broker(start_broker: StartBroker, request: pytest.FixtureRequest) -> BrokerProcess:
    """A broker with the usual settings, or with those that a test gives it."""
    return start_broker(arguments=flags(getattr(request, "param", {})))


@pytest.fixture
def apps(broker: BrokerProcess, tmp_path: Path) -> Iterator[Apps]:
    folder = tmp_path / "apps"
    folder.mkdir()
    apps = Apps(folder, broker.url)
    yield apps
    apps.close()
    for who in apps.processes:
        print(f"── {who}\n{apps.log(who)}")


def send(broker: BrokerProcess, count: int, start: int = 0) -> None:
    with pulque.connect(broker.url, name="sends") as client:
        client.send_many("orders", [b"%d" % number for number in range(start, start + count)])


def left(broker: BrokerProcess, tmp_path: Path, group: str = "g") -> list[bytes]:
    """Return which messages a group has not settled."""
    with (
        pulque.connect(broker.url, name="looks", state_dir=tmp_path) as client,
        client.consumer("orders", group, consumer_id="looks") as consumer,
    ):
        return [message.body for message in consumer.pull(timeout=1.5)]


@pytest.mark.parametrize("code", [SLOW, SLOW_IN_THREADS], ids=["async", "threads"])
def test_a_stop_finishes_what_runs_and_hands_back_the_rest_at_once(
    broker: BrokerProcess, apps: Apps, tmp_path: Path, code: str
) -> None:
    apps.write(code, work=0.3)
    send(broker, 12)
    process = apps.start("first")
    apps.wait_for("began", 3)
    process.send_signal(signal.SIGTERM)

    assert process.wait(WITHIN) == 0
    assert sorted(apps.told("began")) == sorted(apps.told("ended"))
    apps.start("second")
    apps.wait_for("ended", 12)
    apps.processes["second"].send_signal(signal.SIGINT)
    assert apps.processes["second"].wait(WITHIN) == 0
    assert sorted(int(number) for (number,) in apps.told("began")) == list(range(12))
    assert left(broker, tmp_path) == []


@pytest.mark.parametrize("code", [SLOW, SLOW_IN_THREADS], ids=["async", "threads"])
def test_a_second_signal_does_not_wait(
    broker: BrokerProcess, apps: Apps, tmp_path: Path, code: str
) -> None:
    apps.write(code, work=600, grace=600)
    send(broker, 3)
    process = apps.start("first")
    apps.wait_for("began", 2)
    process.send_signal(signal.SIGTERM)
    wait_until(lambda: "stopping" in apps.log("first"), within=WITHIN, what="it stops")
    assert process.poll() is None
    process.send_signal(signal.SIGTERM)

    assert process.wait(WITHIN) == 0
    assert sorted(left(broker, tmp_path)) == [b"0", b"1", b"2"]


def test_a_handler_that_ends_the_process_loses_nothing(
    broker: BrokerProcess, apps: Apps, tmp_path: Path
) -> None:
    apps.write(
        """
@app.subscribe("orders", group="g", concurrency=2)
def handle(message: pulque.ReceivedMessage):
    tell("began", message.body.decode())
    if message.body == b"5" and len(open(os.environ["TOLD"]).read().split(" 5\\n")) < 3:
        os._exit(9)
    tell("ended", message.body.decode())
"""
    )
    send(broker, 10)
    assert apps.start("first").wait(WITHIN) == 9
    apps.start("first")
    apps.wait_for("ended", 10)

    wait_until(
        lambda: {number for (number,) in apps.told("ended")} == {str(n) for n in range(10)},
        within=WITHIN,
        what="all are handled",
    )
    apps.processes["first"].send_signal(signal.SIGTERM)
    assert apps.processes["first"].wait(WITHIN) == 0
    assert left(broker, tmp_path) == []


def test_sys_exit_in_a_handler_ends_the_process_with_its_code(
    broker: BrokerProcess, apps: Apps
) -> None:
    apps.write(
        """
@app.subscribe("orders", group="g")
def handle(message: pulque.ReceivedMessage):
    tell("began", message.attempt)
    sys.exit(7)
"""
    )
    send(broker, 1)
    assert apps.start("first").wait(WITHIN) == 7
    assert apps.told("began") == [["1"]]
    assert apps.start("first").wait(WITHIN) == 7
    assert apps.told("began") == [["1"], ["2"]]


@pytest.mark.accepts("000-39")
@pytest.mark.parametrize("broker", [SHORT_LEASE], indirect=True, ids=["short lease"])
def test_an_application_that_slept_too_long_abandons_what_others_do(
    broker: BrokerProcess, apps: Apps, tmp_path: Path
) -> None:
    apps.write(
        """
@app.subscribe("orders", group="g", on_abandon="cancel")
async def handle(message: pulque.ReceivedMessage):
    tell("began", message.body.decode())
    if os.environ["WHO"] == "sleeper":
        try:
            await asyncio.sleep(600)
        except asyncio.CancelledError:
            tell("cancelled", message.is_abandoned)
            raise
    tell("ended", message.body.decode())
"""
    )
    send(broker, 3)
    sleeper = apps.start("sleeper")
    apps.wait_for("began", 1)
    sleeper.send_signal(signal.SIGSTOP)
    wait_until(lambda: "consumer_lost" in broker.stderr, within=WITHIN, what="the loss is seen")
    apps.start("other")
    apps.wait_for("ended", 3)
    apps.processes["other"].send_signal(signal.SIGTERM)
    assert apps.processes["other"].wait(WITHIN) == 0
    sleeper.send_signal(signal.SIGCONT)
    apps.wait_for("cancelled", 1)

    assert apps.told("cancelled") == [["True"]]
    assert sorted(apps.told("ended", "other")) == [["0"], ["1"], ["2"]]
    assert "abandoned: handler=handle not begun=0 running=1" in apps.log("sleeper")
    sleeper.send_signal(signal.SIGTERM)
    assert sleeper.wait(WITHIN) == 0
    assert left(broker, tmp_path) == []


@pytest.mark.accepts("004-60", "004-61")
def test_while_all_goes_well_nothing_is_handled_twice_and_a_killed_broker_loses_nothing(
    broker: BrokerProcess, apps: Apps, tmp_path: Path
) -> None:
    apps.write(
        """
@app.subscribe("orders", group="g", concurrency=8)
async def handle(message: pulque.ReceivedMessage):
    await asyncio.sleep(0.001)
    tell("ended", message.body.decode())
"""
    )
    for who in ("a", "b"):
        apps.start(who)
    send(broker, 2000)
    apps.wait_for("ended", 2000)
    assert set(Counter(number for (number,) in apps.told("ended")).values()) == {1}

    (apps.folder / "told").write_text("")
    send(broker, 2000)
    apps.wait_for("ended", 200)
    broker.kill()
    time.sleep(0.2)
    broker.restart()
    wait_until(
        lambda: len({number for (number,) in apps.told("ended")}) == 2000,
        within=WITHIN,
        what="all are handled",
    )
    for process in apps.processes.values():
        process.send_signal(signal.SIGTERM)
    assert [process.wait(WITHIN) for process in apps.processes.values()] == [0, 0]
    assert left(broker, tmp_path) == []


def test_a_poison_message_takes_no_others_along(
    broker: BrokerProcess, apps: Apps, tmp_path: Path
) -> None:
    apps.write(
        """
@app.subscribe_batch("orders", group="g", max_messages=10, max_wait=0.2,
                     retry=pulque.RetryPolicy([0]))
def handle(messages: list[pulque.ReceivedMessage]):
    failed = {{}}
    for message in messages:
        if message.body == b"4" and message.attempt < 4:
            failed[message] = f"poison at attempt {{message.attempt}}"
        else:
            tell("ended", message.body.decode(), message.attempt)
    if failed:
        raise pulque.BatchFailed(failed)


@app.subscribe_batch("orders", group="h", max_messages=10, max_wait=0.2,
                     retry=pulque.RetryPolicy([0]))
def handle_or_break(bodies: list[bytes]):
    tell("batch", *(body.decode() for body in bodies))
    if b"4" in bodies:
        raise ValueError("nobody knows which one")
    tell("passed", *(body.decode() for body in bodies))
"""
    )
    send(broker, 10)
    apps.start("first")
    apps.wait_for("ended", 10)
    wait_until(
        lambda: (
            {each for batch in apps.told("passed") for each in batch}
            == {str(number) for number in range(10) if number != 4}
        ),
        within=WITHIN,
        what="all others pass",
    )
    apps.processes["first"].send_signal(signal.SIGTERM)
    assert apps.processes["first"].wait(WITHIN) == 0

    assert sorted(apps.told("ended")) == sorted(
        [str(number), "4" if number == 4 else "1"] for number in range(10)
    )
    assert len(apps.told("batch")[0]) == 10
    assert ["4"] in apps.told("batch")


def test_run_says_what_is_wrong_with_the_application(apps: Apps) -> None:
    apps.write("")
    assert apps.start("first").wait(WITHIN) == 2
    assert "error: UsageError: shop:app has no handlers" in apps.log("first")


@pytest.mark.slow
@pytest.mark.accepts("004-60")
@pytest.mark.parametrize("broker", [SHORT_LEASE], indirect=True, ids=["short lease"])
def test_whatever_is_done_to_applications_every_group_handles_everything(
    broker: BrokerProcess, apps: Apps, tmp_path: Path, seed: int
) -> None:
    apps.write(
        """
import random

retry = pulque.RetryPolicy([0.05], max_attempts=1000)


@app.subscribe("orders", group="a", concurrency=8, timeout=2, retry=retry, on_abandon="cancel")
async def on_loop(message: pulque.ReceivedMessage):
    await asyncio.sleep(random.random() * 0.01)
    if random.random() < 0.05:
        raise ValueError("by chance")
    tell("ended", "a", message.body.decode())


@app.subscribe("orders", group="b", concurrency=4, timeout=2, retry=retry)
def in_thread(message: pulque.ReceivedMessage):
    time.sleep(random.random() * 0.01)
    if random.random() < 0.05:
        raise ValueError("by chance")
    tell("ended", "b", message.body.decode())


@app.subscribe_batch("orders", group="c", max_messages=50, max_wait=0.05, retry=retry)
def in_batches(messages: list[pulque.ReceivedMessage]):
    failed = {{message: "by chance" for message in messages if random.random() < 0.05}}
    for message in messages:
        if message not in failed:
            tell("ended", "c", message.body.decode())
    if failed:
        raise pulque.BatchFailed(failed)
""",
        grace=2,
    )
    draw = random.Random(seed)
    names = ["x", "y"]
    for who in names:
        apps.start(who)
    for round_ in range(8):
        send(broker, 250, start=250 * round_)
        time.sleep(draw.random())
        trouble(draw, broker, apps, draw.choice(names))
    expected = {(group, str(number)) for group in "abc" for number in range(2000)}
    wait_until(
        lambda: {(group, number) for group, number in apps.told("ended")} == expected,
        within=60,
        what="every group has handled everything",
    )
    for who in names:
        apps.processes[who].send_signal(signal.SIGTERM)
    # One that was started again last may be at its imports yet: a signal ends it there.
    codes = [apps.processes[who].wait(WITHIN) for who in names]
    assert set(codes) <= {0, -signal.SIGTERM}
    assert [left(broker, tmp_path, group) for group in "abc"] == [[], [], []]


def trouble(draw: random.Random, broker: BrokerProcess, apps: Apps, who: str) -> None:
    """Do something bad to one application, or to the broker, and have it run again."""
    process = apps.processes[who]
    match draw.choice(["kill", "stop", "pause", "broker"]):
        case "kill":
            process.kill()
            process.wait()
            apps.start(who)
        case "stop":
            process.send_signal(signal.SIGTERM)
            process.wait(WITHIN)
            apps.start(who)
        case "pause":
            process.send_signal(signal.SIGSTOP)
            time.sleep(draw.choice([0.2, 3.0]))
            process.send_signal(signal.SIGCONT)
        case _:
            broker.kill()
            time.sleep(draw.random() * 0.5)
            broker.restart()
