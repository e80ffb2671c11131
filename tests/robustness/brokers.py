"""Starting brokers for attacks, and looking at what they cost."""

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Protocol

import psutil

from pulque.testing.process import BrokerProcess

__all__ = ["Footprint", "StartBroker", "flags", "starter", "wait_until"]

_MIB = 1024 * 1024


class StartBroker(Protocol):
    """Starts a broker with settings such as ``storage__segment_size="64KiB"``."""

    def __call__(self, name: str = "data", **settings: object) -> BrokerProcess: ...


def flags(settings: dict[str, Any]) -> list[str]:
    """Return settings as options of ``pulque up``."""
    options = []
    for key, value in settings.items():
        options += ["--set", f"{key.replace('__', '.')}={value}"]
    return options


def starter(folder: Path) -> Iterator[StartBroker]:
    """Yield a function that starts brokers below a folder, and end them all afterwards."""
    started: list[BrokerProcess] = []

    def start(name: str = "data", **settings: object) -> BrokerProcess:
        process = BrokerProcess.start(folder / name, arguments=flags(settings))
        started.append(process)
        return process

    yield start
    for process in started:
        process.close()


def wait_until(condition: Callable[[], bool], *, within: float, what: str) -> None:
    """Wait for a condition, and fail if it does not come true in time."""
    deadline = time.monotonic() + within
    while not condition():
        assert time.monotonic() < deadline, f"not within {within:g} s: {what}"
        time.sleep(0.01)


class Footprint:
    """What a process costs, compared with when this was made."""

    def __init__(self, pid: int) -> None:
        self._process = psutil.Process(pid)
        self.base_mib = self.mib
        self.base_descriptors = self.descriptors

    @property
    def mib(self) -> float:
        return float(self._process.memory_info().rss) / _MIB

    @property
    def descriptors(self) -> int:
        return int(self._process.num_fds())

    @property
    def grown_mib(self) -> float:
        return self.mib - self.base_mib

    def check(self, *, mib: float = 32.0, within: float = 5.0) -> None:
        """Check that memory is about the same, and that descriptors come back to the same."""
        wait_until(
            lambda: self.descriptors <= self.base_descriptors,
            within=within,
            what=f"{self.descriptors} descriptors, {self.base_descriptors} at first",
        )
        assert self.grown_mib <= mib, f"{self.grown_mib:.1f} MiB more than at first"
