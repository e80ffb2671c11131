"""A real broker in a process of its own, on any free port, for tests and demonstrations.

::

    with BrokerProcess.start(tmp_path) as broker:
        client = pulque.connect(broker.url)
        broker.kill()       # as a power cut, but for what the kernel still holds
        broker.restart()
"""

import contextlib
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import IO, ClassVar, Self

from pulque.errors import PulqueError

__all__ = ["BrokerProcess", "BrokerProcessError", "ServerProcess", "UpProcess"]

_READY = "ready "
_TAIL = 4000


class BrokerProcessError(PulqueError):
    """The process did not do what it should; the text ends with what it wrote to stderr."""


class ServerProcess:
    """One command of ours that serves, in a process of its own. Used by one thread.

    After a restart it listens on the same port as before, so that clients find it again.

    Args:
        command: What to run, after ``pulque``; ``--port`` is added.
        log: The file that its stderr goes to.
        environ: More variables.
        timeout: How long starting and stopping may take, in seconds.
    """

    def __init__(
        self,
        command: Sequence[str],
        *,
        log: Path,
        environ: Mapping[str, str] | None = None,
        timeout: float = 20.0,
    ) -> None:
        self.url = ""
        """Where it listens."""
        self._command = list(command)
        self._environ = {**os.environ, **(environ or {})}
        self._timeout = timeout
        self._process: subprocess.Popen[bytes] | None = None
        self._log_path = log

    @property
    def pid(self) -> int:
        """The number of the process.

        Raises:
            BrokerProcessError: It does not run.
        """
        if self._process is None:
            raise BrokerProcessError("it does not run")
        return self._process.pid

    @property
    def is_running(self) -> bool:
        """Whether the process lives."""
        return self._process is not None and self._process.poll() is None

    @property
    def stderr(self) -> str:
        """All that it wrote to stderr since the first start."""
        try:
            return self._log_path.read_text(errors="replace")
        except FileNotFoundError:
            return ""

    def restart(self) -> None:
        """Start it again, after ``stop``, ``kill`` or a crash, and wait until it serves.

        Raises:
            BrokerProcessError: It still runs, or does not serve in time.
        """
        if self.is_running:
            raise BrokerProcessError("it still runs; stop or kill it first")
        self._forget()
        port = self.url.rpartition(":")[2] or "0"
        command = [sys.executable, "-m", "pulque", *self._command, "--port", port]
        self._log_path.parent.mkdir(parents=True, exist_ok=True)
        with self._log_path.open("ab") as log:
            self._process = subprocess.Popen(  # noqa: S603  # our own command
                command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=log,
                env=self._environ,
                # So that ctrl-C in a terminal reaches only whoever started this.
                start_new_session=True,
            )
        try:
            self.url = self._wait_until_ready(self._process)
        except BaseException:
            self.kill()
            self._forget()
            raise

    def kill(self) -> None:
        """End it at once (SIGKILL); what it did not write is lost."""
        self.send_signal(signal.SIGKILL)
        self.wait()

    def stop(self) -> int:
        """End it cleanly (SIGTERM) and return its exit code.

        Raises:
            BrokerProcessError: It does not end in time; it is killed then.
        """
        self.send_signal(signal.SIGTERM)
        return self.wait()

    def send_signal(self, number: int) -> None:
        """Send a signal, if it runs."""
        if self._process is not None:
            self._process.send_signal(number)

    def wait(self) -> int:
        """Wait until it ends, and return its exit code (negative for a signal).

        Raises:
            BrokerProcessError: It does not end in time; it is killed then.
        """
        if self._process is None:
            return 0
        try:
            return self._process.wait(self._timeout)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
            raise self._error(
                f"pulque {self._command[0]} did not end in {self._timeout:g} s"
            ) from None

    def close(self) -> None:
        """Stop it if it runs, and close what belongs to it."""
        try:
            if self.is_running:
                self.send_signal(signal.SIGCONT)  # a process that is paused does not end
                self.stop()
        finally:
            self._forget()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _forget(self) -> None:
        if self._process is not None and self._process.stdout is not None:
            self._process.stdout.close()
        self._process = None

    def _wait_until_ready(self, process: subprocess.Popen[bytes]) -> str:
        assert process.stdout is not None  # noqa: S101  # it was opened with a pipe
        line = _read_line(process.stdout, time.monotonic() + self._timeout)
        if line.startswith(_READY):
            return line.removeprefix(_READY).strip()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(1)
        code = process.poll()
        what = f"ended with code {code}" if code is not None else f"said {line!r}"
        raise self._error(
            f"pulque {self._command[0]} is not ready after {self._timeout:g} s; it {what}"
        )

    def _error(self, text: str) -> BrokerProcessError:
        return BrokerProcessError(f"{text}\n{self.stderr[-_TAIL:]}")


class _DirectoryProcess(ServerProcess):
    """A server on one data directory; the command is the subclass's."""

    _COMMAND: ClassVar[str]
    _TIMEOUT: ClassVar[float]

    def __init__(
        self,
        data: str | os.PathLike[str],
        *,
        arguments: Sequence[str] = (),
        environ: Mapping[str, str] | None = None,
        timeout: float | None = None,
    ) -> None:
        self.data = Path(data)
        """The data directory; it stays when the process is gone."""
        super().__init__(
            [self._COMMAND, "--data", str(self.data), *arguments],
            log=self.data.with_name(f"{self.data.name}.stderr"),
            environ=environ,
            timeout=self._TIMEOUT if timeout is None else timeout,
        )

    @classmethod
    def start(
        cls,
        data: str | os.PathLike[str],
        *,
        arguments: Sequence[str] = (),
        environ: Mapping[str, str] | None = None,
        timeout: float | None = None,
    ) -> Self:
        """Start it and wait until it serves.

        Args:
            data: The data directory. What it writes to stderr goes into a file beside it.
            arguments: More options for its command.
            environ: More variables.
            timeout: How long starting and stopping may take, in seconds; usually enough if not
                given.

        Raises:
            BrokerProcessError: It does not serve in time.
        """
        process = cls(data, arguments=arguments, environ=environ, timeout=timeout)
        process.restart()
        return process


class BrokerProcess(_DirectoryProcess):
    """One ``pulque broker`` that stands alone, on one data directory. Made by ``start``."""

    _COMMAND = "broker"
    _TIMEOUT = 20.0


class UpProcess(_DirectoryProcess):
    """One ``pulque up``: meta server, broker and delay server together. Made by ``start``."""

    _COMMAND = "up"
    _TIMEOUT = 30.0


def _read_line(stream: IO[bytes], deadline: float) -> str:
    """Return the first line, or what came of it when time is up or the stream ends."""
    line = b""
    while not line.endswith(b"\n"):
        left = deadline - time.monotonic()
        ready, _, _ = select.select([stream], [], [], max(left, 0.0))
        byte = os.read(stream.fileno(), 1) if ready else b""
        if not byte:
            break
        line += byte
    return line.decode(errors="replace")
