"""A broker that belongs to the bench: started by it, ended by it, known by its process id."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import psutil

__all__ = ["BrokerFailedError", "BrokerProcess", "running_broker"]

_LOG_TAIL_CHARACTERS = 2000


class BrokerFailedError(Exception):
    """The broker ended early or did not serve in time; the end of its log is in the text."""


class BrokerProcess:
    """``pulque up`` in a process of its own, with its data in one directory.

    Args:
        directory: Where its data goes; its log is beside it.
        port: Where to listen; 0 takes any free port.
        settings: Passed on as ``--set key=value``.
        profile: Run it under cProfile, and write the profile there when it stops.
        limit_s: How long it may take until it serves.

    Raises:
        BrokerFailedError: It does not serve in time.
    """

    def __init__(
        self,
        directory: Path,
        *,
        port: int = 0,
        settings: Mapping[str, str] | None = None,
        profile: Path | None = None,
        limit_s: float = 60.0,
    ) -> None:
        self._log = directory.with_suffix(".log")
        command = [sys.executable, "-m"]
        if profile is not None:
            command += ["cProfile", "-o", str(profile), "-m"]
        command += ["pulque", "broker", "--data", str(directory), "--port", str(port)]
        for key, value in (settings or {}).items():
            command += ["--set", f"{key}={value}"]
        kept = {k: v for k, v in os.environ.items() if not k.startswith("PULQUE_")}
        self.spawned_s = time.monotonic()
        """When the process was started, by the machine's monotonic clock."""
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=log,
                env=kept,
                text=True,
                start_new_session=True,
            )
        self.url = ""
        self._wait_until_ready(limit_s)
        self.ready_s = time.monotonic()
        """When it said that it serves."""
        self.port = int(self.url.rpartition(":")[2])
        self._usage = psutil.Process(self.pid)

    @property
    def pid(self) -> int:
        """Id of the process."""
        return self._process.pid

    def rss_bytes(self) -> int:
        """Its resident memory now."""
        rss: int = self._usage.memory_info().rss
        return rss

    def open_files(self) -> int:
        """How many files and sockets it has open."""
        return self._usage.num_fds()

    def cpu_s(self) -> tuple[float, float]:
        """CPU it used so far, in its own code and in the kernel."""
        times = self._usage.cpu_times()
        return times.user, times.system

    def events(self, name: str) -> list[dict[str, Any]]:
        """Return the lines of its log that tell of this event."""
        lines = self._log.read_text(errors="replace").splitlines()
        found = [json.loads(line) for line in lines if line.startswith("{")]
        return [line for line in found if line.get("event") == name]

    def kill(self) -> None:
        """End it as a crash does."""
        self._process.send_signal(signal.SIGKILL)
        self._process.wait(20)
        self._close()

    def stop(self) -> None:
        """Ask it to end; kill it if it does not."""
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGTERM)
            try:
                self._process.wait(20)
            except subprocess.TimeoutExpired:
                self.kill()
        self._close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.stop()

    def _wait_until_ready(self, limit_s: float) -> None:
        output = self._process.stdout
        assert output is not None
        if select.select([output], [], [], limit_s)[0]:
            word, _, url = output.readline().strip().partition(" ")
            if word == "ready":
                self.url = url
                return
        self._process.kill()
        self._process.wait(20)
        self._close()
        raise BrokerFailedError(
            f"it does not serve after {limit_s} s: "
            f"{self._log.read_text(errors='replace')[-_LOG_TAIL_CHARACTERS:]}"
        )

    def _close(self) -> None:
        if self._process.stdout is not None:
            self._process.stdout.close()


@contextmanager
def running_broker(parent: Path, name: str = "broker", **options: Any) -> Iterator[BrokerProcess]:
    """Run a broker with its data in ``parent/name``, and stop it at the end."""
    with BrokerProcess(parent / name, **options) as broker:
        yield broker
