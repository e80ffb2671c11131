"""Faults of the disk, put into a running process with strace."""

import shutil
import subprocess
from functools import lru_cache
from pathlib import Path
from types import TracebackType
from typing import Self

from tests.robustness.brokers import wait_until

__all__ = ["WRITES", "Tracer", "why_not"]

WRITES = "pwritev,pwritev2,pwrite64"
"""How the broker writes files: sockets are written to with other calls."""


@lru_cache(maxsize=1)
def why_not() -> str | None:
    """Return why faults cannot be injected on this machine, or None if they can."""
    if shutil.which("strace") is None:
        return "strace is not installed"
    tried = subprocess.run(
        ["strace", "-f", "-o", "/dev/null", "-e", "inject=getppid:error=EIO", "true"],
        capture_output=True,
        text=True,
        check=False,
    )
    return f"strace does not work here: {tried.stderr.strip()}" if tried.returncode else None


class Tracer:
    """Injects one fault into a process and its threads, as long as it is open.

    Args:
        pid: The process.
        injection: As strace wants it: ``fdatasync:error=EIO:when=1``. Each thread is counted
            for itself.
        log: Where strace writes what it saw.
    """

    def __init__(self, pid: int, injection: str, log: Path) -> None:
        self._log = log
        calls = injection.partition(":")[0]
        command = ["strace", "-f", "-p", str(pid), "-o", str(log)]
        self._process = subprocess.Popen(
            [*command, "-e", f"trace={calls}", "-e", f"inject={injection}"],
            stderr=subprocess.PIPE,
        )
        assert self._process.stderr is not None
        # One line for all threads: "Process 1234 attached with 7 threads".
        line = self._process.stderr.readline().decode(errors="replace")
        if "attached" not in line:
            self.close()
            raise AssertionError(f"strace did not attach: {line}")

    @property
    def injected(self) -> int:
        """How many faults there were so far."""
        return self._log.read_text(errors="replace").count("(INJECTED")

    def wait_for_fault(self) -> None:
        """Wait until there was one."""
        wait_until(lambda: self.injected > 0, within=10, what="a fault is injected")

    def close(self) -> None:
        """Let the process go; it lives on, if it does."""
        if self._process.poll() is None:
            self._process.terminate()
        self._process.wait(10)
        if self._process.stderr is not None:
            self._process.stderr.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()
