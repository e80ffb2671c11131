"""Signals that servers and workers get as real processes."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from pulque.testing.process import BrokerProcess

pytestmark = pytest.mark.server

LIMIT = 60
APP = """
import pulque

app = pulque.App()


@app.on_startup
def started():
    print("ready", flush=True)


@app.subscribe("orders", group="g")
def handle(body: bytes):
    pass
"""


@contextmanager
def running(folder: Path, *arguments: str) -> Iterator[subprocess.Popen[bytes]]:
    """Run a command until it says that it is ready."""
    process = subprocess.Popen(
        [sys.executable, "-m", "pulque", *arguments],
        cwd=folder,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env={**os.environ, "PULQUE_STATE_DIR": str(folder / "state")},
    )
    try:
        assert process.stdout is not None
        assert process.stdout.readline().startswith(b"ready")
        yield process
    finally:
        process.kill()
        process.communicate(timeout=LIMIT)


def outlives_sighup(process: subprocess.Popen[bytes]) -> bool:
    """Return whether SIGHUP leaves a process to end by SIGTERM, cleanly."""
    process.send_signal(signal.SIGHUP)
    # Of two signals that wait the lower number is delivered first: SIGHUP is 1.
    process.send_signal(signal.SIGTERM)
    return process.wait(LIMIT) == 0


@pytest.mark.parametrize(
    "command",
    ["broker", "meta", "delay --meta 127.0.0.1:9", "up", "up --brokers 1"],
    ids=["broker", "meta", "delay", "up", "up of several"],
)
def test_sighup_ends_no_server(tmp_path: Path, command: str) -> None:
    where = ["--data", str(tmp_path / "data"), "--port", "0"]
    with running(tmp_path, *command.split(), *where) as process:
        assert outlives_sighup(process)


def test_sighup_ends_no_worker(tmp_path: Path, broker_process: BrokerProcess) -> None:
    (tmp_path / "shop.py").write_text(APP)
    with running(tmp_path, "run", "shop:app", "--url", broker_process.url) as process:
        assert outlives_sighup(process)
