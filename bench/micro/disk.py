"""What this machine's disk and page cache do, on a small file: ``python -m bench.micro.disk``.

The facts that the storage design leans on, measured in passing; ``docs/guide/disks.md`` says what
follows from each. The figures are of a file that fits in memory, so "cold" means: dropped from
the page cache before.
"""

from __future__ import annotations

import argparse
import os
import random
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

__all__ = ["measure"]

_BLOCK = 4096


def measure(directory: Path, *, megabytes: int) -> dict[str, float]:
    """Return figures by name: megabytes or calls per second, or seconds."""
    path = directory / "disk.bench"
    size = megabytes * 2**20
    data = os.urandom(2**20)
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        write_s = _timed(lambda: [os.pwrite(descriptor, data, i << 20) for i in range(megabytes)])
        sync_s = _timed(lambda: os.fdatasync(descriptor))
        _drop(descriptor)
        cold_s = _timed(lambda: _read_blocks(descriptor, range(0, size, 2**20), 2**20))
        warm_s = _timed(lambda: _read_blocks(descriptor, range(0, size, 2**20), 2**20))
        _drop(descriptor)
        offsets = random.Random(1).sample(range(0, size, _BLOCK), min(2000, size // _BLOCK))
        random_s = _timed(lambda: _read_blocks(descriptor, offsets, _BLOCK))
        _drop(descriptor)
        skip_s = _timed(lambda: _read_blocks(descriptor, sorted(offsets), _BLOCK))
        scattered_s = _timed(lambda: _write_blocks(descriptor, offsets, data))
        sorted_s = _timed(lambda: _write_blocks(descriptor, sorted(offsets), data))
    finally:
        os.close(descriptor)
        path.unlink()
    return {
        "page cache write MB/s": megabytes / write_s,
        "write back MB/s": megabytes / sync_s,
        "sequential cold read MB/s": megabytes / cold_s,
        "page cache read MB/s": megabytes / warm_s,
        "random cold reads/s": len(offsets) / random_s,
        "skip-sequential cold reads/s": len(offsets) / skip_s,
        "scattered writes and sync/s": len(offsets) / scattered_s,
        "sorted writes and sync/s": len(offsets) / sorted_s,
    }


def _timed(work: Callable[[], object]) -> float:
    began = time.perf_counter()
    work()
    return max(time.perf_counter() - began, 1e-9)


def _drop(descriptor: int) -> None:
    os.fdatasync(descriptor)
    os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)


def _read_blocks(descriptor: int, offsets: range | list[int], size: int) -> None:
    for offset in offsets:
        os.pread(descriptor, size, offset)


def _write_blocks(descriptor: int, offsets: list[int], data: bytes) -> None:
    for offset in offsets:
        os.pwrite(descriptor, data[:_BLOCK], offset)
    os.fdatasync(descriptor)


def main() -> None:
    """Print the figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--megabytes", type=int, default=256)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=".") as directory:
        for name, value in measure(Path(directory), megabytes=arguments.megabytes).items():
            print(f"{name:32} {value:12,.0f}")


if __name__ == "__main__":
    main()
