"""The disk fails at one call: nothing is confirmed that is not there, and a restart recovers.

``PULQUE_POINTS`` sets at how many calls a broker is killed (8 by default; 0 for all of them).
"""

import contextlib
import os
import random
import subprocess
import sys
import time
from pathlib import Path

import pytest

from pulque.errors import ErrorCode, PulqueError
from pulque.testing.process import BrokerProcess
from pulque.wire.requests import Acks, Read, Send
from pulque.wire.responses import Sent
from tests.robustness.brokers import StartBroker, flags, wait_until
from tests.robustness.raw import Closed, RawClient, make_batch
from tests.robustness.tracer import WRITES, Tracer, why_not

pytestmark = [
    pytest.mark.server,
    pytest.mark.skipif(why_not() is not None, reason=why_not() or ""),
]

POINTS = int(os.environ.get("PULQUE_POINTS", "8"))
MOST_CALLS = 60


class Sender:
    """Sends numbers one by one, and remembers which were confirmed."""

    def __init__(self) -> None:
        self.tried = 0
        self.confirmed: list[int] = []
        self.codes: list[ErrorCode] = []

    def send(self, url: str, most: int = 1000) -> None:
        """Send until something goes wrong."""
        with contextlib.suppress(Closed, OSError), RawClient(url) as client:
            for _ in range(most):
                number, self.tried = self.tried, self.tried + 1
                batch = make_batch("a", [str(number).encode()])
                answer = client.ask(Send(Acks.DISK, 1000, (("a", batch),)))
                if not isinstance(answer, Sent):
                    return
                self.codes.append(answer.outcomes[0].code)
                if answer.outcomes[0].code is not ErrorCode.NONE:
                    return
                self.confirmed.append(number)

    def check(self, url: str) -> None:
        """Check that what is stored is what was confirmed, and maybe what nobody knows of."""
        with RawClient(url) as client:
            stored = [int(message.body) for message in client.stored("a")]
        assert stored == sorted(set(stored))
        assert set(self.confirmed) <= set(stored), "confirmed and lost"
        assert set(stored) <= set(range(self.tried)), "never sent"


@pytest.mark.parametrize("when", [1, 4])
def test_a_failed_sync_stops_the_broker_before_it_confirms(
    broker: BrokerProcess, tmp_path: Path, when: int
) -> None:
    sender = Sender()
    sender.send(broker.url, most=3)
    with Tracer(broker.pid, f"fdatasync:error=EIO:when={when}", tmp_path / "trace") as tracer:
        began = time.monotonic()
        sender.send(broker.url)
        code = broker.wait()

        assert tracer.injected == 1
    assert code == 1
    assert time.monotonic() - began < 5
    assert sender.codes[-1] in {ErrorCode.NONE, ErrorCode.UNAVAILABLE}
    assert "sync" in broker.stderr
    assert "Traceback" not in broker.stderr
    broker.restart()
    sender.check(broker.url)
    sender.send(broker.url, most=3)
    sender.check(broker.url)


def test_a_failed_write_is_not_confirmed_and_a_restart_recovers(
    broker: BrokerProcess, tmp_path: Path
) -> None:
    sender = Sender()
    sender.send(broker.url, most=3)
    with Tracer(broker.pid, f"{WRITES}:error=EIO:when=2", tmp_path / "trace") as tracer:
        sender.send(broker.url)
        tracer.wait_for_fault()
        broker.wait()
    broker.restart()
    sender.check(broker.url)
    sender.send(broker.url, most=3)
    sender.check(broker.url)


def test_one_write_without_room_is_refused_and_the_next_one_goes_on(
    broker: BrokerProcess, tmp_path: Path
) -> None:
    sender = Sender()
    sender.send(broker.url, most=3)
    with Tracer(broker.pid, f"{WRITES}:error=ENOSPC:when=2", tmp_path / "trace") as tracer:
        sender.send(broker.url, most=10)
        tracer.wait_for_fault()
    sender.send(broker.url, most=10)

    assert sender.codes.count(ErrorCode.STORAGE_FULL) == 1
    assert len(sender.confirmed) == sender.tried - 1
    sender.check(broker.url)
    broker.kill()
    broker.restart()
    sender.check(broker.url)


def test_a_read_that_fails_is_answered_with_an_error_and_the_next_one_goes_on(
    start_broker: StartBroker, tmp_path: Path
) -> None:
    broker = start_broker(storage__tail_cache="0")
    with RawClient(broker.url) as client:
        client.send("a", [b"x"])
        with Tracer(broker.pid, "pread64,preadv,preadv2:error=EIO:when=1", tmp_path / "trace"):
            answer = client.ask(Read("a", 0, 1, 1000, 0))

        assert isinstance(answer, PulqueError)
        assert "Input/output error" in str(answer)
        assert [message.body for message in client.stored("a")] == [b"x"]
    assert "Traceback" not in broker.stderr


def test_a_slow_disk_delays_only_those_who_wait_for_it(
    broker: BrokerProcess, tmp_path: Path
) -> None:
    with RawClient(broker.url) as writer, RawClient(broker.url) as other:
        writer.send("a", [b"x"])
        injection = "fdatasync:delay_enter=500000"
        with Tracer(broker.pid, injection, tmp_path / "trace"):
            began = time.monotonic()
            writer.put(Send(Acks.DISK, 1000, (("a", make_batch("a", [b"y"])),)))
            waits = []
            for _ in range(20):
                asked = time.monotonic()
                other.send("b", [b"z"], acks=Acks.MEMORY)
                other.status()
                waits.append(time.monotonic() - asked)
            writer.get()

        assert time.monotonic() - began > 0.4
        assert max(waits) < 0.3


CALLS = f"{WRITES},fdatasync,fsync,ftruncate,rename,unlink"


@pytest.mark.slow
@pytest.mark.timeout(60 + 10 * (POINTS or MOST_CALLS))
def test_a_broker_that_is_killed_at_any_call_comes_back_with_all_it_confirmed(
    tmp_path: Path, seed: int
) -> None:
    """From the start on, so that it is also hit while it recovers and while segments roll."""
    draw = random.Random(seed)
    points = range(1, MOST_CALLS + 1)
    chosen = sorted(draw.sample(points, POINTS)) if POINTS else points
    settings = {
        "storage.segment_size": "64KiB",
        "storage.segment_batches": 5,
        "storage.action_segment_size": "64KiB",
        "storage.checkpoint_records": 10,
        "storage.checkpoint_interval": "1s",
        "storage.reserve": "1MiB",
    }
    sender = Sender()
    data = tmp_path / "data"
    killed = [point for point in chosen if _run_until_killed(data, settings, point, sender)]
    print(f"killed at {killed} of {list(chosen)}; {len(sender.confirmed)} confirmed")
    with BrokerProcess.start(data, arguments=flags(settings)) as broker:
        sender.check(broker.url)
        sender.send(broker.url, most=20)
        sender.check(broker.url)

    assert len(killed) > len(chosen) // 2


def _run_until_killed(data: Path, settings: dict[str, object], point: int, sender: Sender) -> bool:
    """Run a broker that is killed at its n-th call in one of its threads; say whether it was."""
    log = data.with_name("trace")
    tracing = ["strace", "-f", "-o", str(log), "-e", f"trace={CALLS}"]
    tracing += ["-e", f"inject={CALLS}:signal=KILL:when={point}"]
    serving = [sys.executable, "-m", "pulque", "broker", "--data", str(data), "--port", "0"]
    with subprocess.Popen(
        [*tracing, *serving, *flags(settings)], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    ) as process:
        assert process.stdout is not None
        try:
            line = process.stdout.readline().decode()
            if line.startswith("ready "):
                sender.send(line.split()[1], most=100)
            if "SIGKILL" not in log.read_text(errors="replace"):
                return False
            wait_until(lambda: process.poll() is not None, within=10, what="it is dead")
            return True
        finally:
            # The broker is a child of strace, which ends it when it is ended itself.
            subprocess.run(["pkill", "-KILL", "-P", str(process.pid)], check=False)
            process.kill()
