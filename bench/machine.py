"""Describe the machine, so that a result says where it was measured."""

from __future__ import annotations

import os
import platform
import tempfile
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from functools import partial
from pathlib import Path

from bench.measure import Gate, run

__all__ = ["Machine", "describe", "touch_memory", "touch_page_cache"]

_CHUNK_MEBIBYTES = 64


@dataclass(frozen=True, slots=True)
class Machine:
    """What a reader needs to judge a figure."""

    date: str
    cpu: str
    cores: int
    memory_gib: float
    kernel: str
    python: str
    file_system: str
    load_1_minute: float

    def as_dict(self) -> dict[str, str | int | float]:
        """For a result file."""
        return asdict(self)

    def __str__(self) -> str:
        """One line for the top of a table."""
        return (
            f"{self.date}: {self.cpu}, {self.cores} cores, {self.memory_gib:g} GiB, "
            f"{self.file_system}, Linux {self.kernel}, Python {self.python}, "
            f"load {self.load_1_minute:.1f} at the start"
        )


def describe(directory: Path) -> Machine:
    """Describe this machine and the file system that holds ``directory``."""
    memory_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return Machine(
        date=datetime.now(UTC).strftime("%Y-%m-%d"),
        cpu=_cpu_model(),
        cores=len(os.sched_getaffinity(0)),
        memory_gib=round(memory_bytes / 2**30, 1),
        kernel=platform.release(),
        python=platform.python_version(),
        file_system=_file_system(directory),
        load_1_minute=os.getloadavg()[0],
    )


def touch_memory(mebibytes: int) -> float:
    """Write to so much memory (or half of what is free) and give it back; return the seconds.

    A virtual machine gets its memory from its host when it first writes to it, page by page; here
    that took ten times as long as the writing itself. Whoever is measured first would pay for it.
    """
    free = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_AVPHYS_PAGES") // 2**20
    touch = partial(_touch, min(mebibytes, free // 2) // _CHUNK_MEBIBYTES)
    return run(touch, limit_s=300).wall_s


def touch_page_cache(directory: Path, mebibytes: int) -> None:
    """Write a file of this size under ``directory`` and remove it before it reaches the disk.

    The page cache of a virtual machine is its host's memory, too, and what is free for some
    seconds goes back to the host: writing 1,500 MB took 3.4 ms of CPU for each MB, 1.3 right
    afterwards, and 3.5 again 20 seconds later. Who writes a log that large right after this
    pays for the writing only.
    """
    block = b"\1" * 2**20
    with tempfile.TemporaryFile(dir=directory, buffering=0) as file:
        for _ in range(mebibytes):
            file.write(block)


def _touch(chunks: int, gate: Gate) -> None:
    gate()
    kept = [b"\1" * (_CHUNK_MEBIBYTES * 2**20) for _ in range(chunks)]
    kept.clear()


def _cpu_model() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()


def _file_system(directory: Path) -> str:
    """The type of the file system at ``directory``: that of the longest mount above it."""
    path = directory.resolve()
    best, kind = 0, "unknown"
    for line in Path("/proc/mounts").read_text().splitlines():
        _device, mount, mount_kind, *_rest = line.split()
        if path.is_relative_to(mount) and len(mount) >= best:
            best, kind = len(mount), mount_kind
    return kind
