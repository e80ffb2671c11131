"""One process of a peer: started by the bench, ended by the bench, known by its process id."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

__all__ = ["Server", "ServerFailedError", "free_port", "output_of"]

_LOG_TAIL_CHARACTERS = 2000


class ServerFailedError(Exception):
    """A server ended early or did not serve in time; the end of its log is in the text."""


def free_port() -> int:
    """A loopback port that is free just now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def output_of(command: Sequence[str]) -> str:
    """What a short command prints; raises when it fails."""
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
    return done.stdout.strip()


class Server:
    """A process with its output in a log file. It leads a process group of its own."""

    def __init__(
        self, command: Sequence[str], *, log: Path, environment: Mapping[str, str] | None = None
    ) -> None:
        self._log = log
        with log.open("ab") as output:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                cwd=log.parent,
                env={**os.environ, **(environment or {})},
                start_new_session=True,
            )

    @property
    def pid(self) -> int:
        """Id of the process, and of its group."""
        return self._process.pid

    def wait_for_port(self, port: int, limit_s: float = 60.0) -> None:
        """Return once something listens there.

        Raises:
            ServerFailedError: It ended, or the limit passed.
        """
        deadline = time.monotonic() + limit_s
        while not _listens(port):
            if self._process.poll() is not None:
                raise ServerFailedError(f"ended with {self._process.returncode}: {self._tail()}")
            if time.monotonic() > deadline:
                raise ServerFailedError(f"does not serve after {limit_s} s: {self._tail()}")
            time.sleep(0.05)

    def stop(self, limit_s: float = 20.0) -> None:
        """Ask it to end; kill its process group if it does not."""
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGTERM)
            try:
                self._process.wait(limit_s)
            except subprocess.TimeoutExpired:
                os.killpg(self._process.pid, signal.SIGKILL)
                self._process.wait(limit_s)

    def _tail(self) -> str:
        return self._log.read_text(errors="replace")[-_LOG_TAIL_CHARACTERS:]


def _listens(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0
