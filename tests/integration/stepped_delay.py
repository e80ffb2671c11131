"""Runs a delay server whose wall clock somebody sets: it is ahead by what a file says, in ms.

::

    python -m tests.integration.stepped_delay FILE --data DIR --meta HOST:PORT
"""

import sys
import time
from pathlib import Path

from pulque.cli.app import run_process
from pulque.delay import server

__all__ = ["SteppedClock", "main"]


class SteppedClock:
    """The machine's clock, set forward or back."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def now_ms(self) -> int:
        return time.time_ns() // 1_000_000 + int(self._path.read_text() or 0)

    def monotonic_ms(self) -> int:
        return time.monotonic_ns() // 1_000_000


def main(arguments: list[str]) -> int:
    path = Path(arguments[0])
    vars(server)["SystemClock"] = lambda: SteppedClock(path)
    return run_process(["delay", *arguments[1:]])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
