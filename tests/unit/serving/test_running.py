"""Servers that run as processes end when a callback of their own failed."""

import subprocess
import sys
from pathlib import Path

import pytest

_PROGRAM = """
import asyncio, sys
from pulque.errors import StorageError

def fail():
    raise KeyError("a bug")

def on_ready(url):
    loop = asyncio.get_running_loop()
    loop.call_soon(fail)
    loop.call_later(60, sys.exit, "it goes on")

if sys.argv[1] == "broker":
    from pulque.broker.config import BrokerSettings as Settings
    from pulque.broker.process import run_broker as run
else:
    from pulque.delay.config import DelaySettings as Settings
    from pulque.delay.server import run_delay as run
settings = Settings.model_validate(
    {
        "listen": {"port": 0},
        "storage": {"directory": sys.argv[2]},
        "cluster": {"meta": ["127.0.0.1:1"] if sys.argv[1] == "delay" else []},
    }
)
try:
    run(settings, on_ready=on_ready)
except StorageError as error:
    print(error)
"""


@pytest.mark.parametrize("kind", ["broker", "delay"])
def test_a_server_ends_when_a_callback_of_its_own_failed(kind: str, tmp_path: Path) -> None:
    ended = subprocess.run(
        [sys.executable, "-c", _PROGRAM, kind, str(tmp_path / "data")],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )

    assert "an inner callback failed" in ended.stdout, ended.stderr
    assert "a bug" in ended.stdout
