"""What a delay server of each version left behind: ``python -m tests.compat.delayed v1-delay``.

The folder is written once, by a server that is killed, and never again. Some of its messages were
delivered, cancelled and moved. ``v1-delay-spares`` is of a release that wrote segments of its
message log over the files of removed ones.
"""

import asyncio
import sys
import tarfile
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory

from pulque.testing.clock import ManualClock
from pulque.testing.files import Cut, MemoryFileSystem
from pulque.wire.delay import Fate
from tests.unit.delay.running import FakeBrokers, RunningDelay, eventually

__all__ = ["HOUR", "LEFT", "NOW_MS", "SECTIONS", "data_file"]

NOW_MS = 1_794_820_200_000
SECOND = 1000
HOUR = 3_600_000
SECTIONS = {"storage": {"segment_size": "64KiB"}}
COUNTS = (20, 20, 20, 20, 5)
"""So many messages fill a segment; the last one is not full."""


def _bodies(turn: int) -> list[bytes]:
    return [b"%d/%d " % (turn, i) + b"x" * 4000 for i in range(COUNTS[turn])]


LEFT = sorted(
    [
        *[body for turn in range(len(COUNTS)) for body in _bodies(turn)],
        *[b"hour %d" % i for i in range(1, 30) if i != 7],
    ]
)
"""The bodies of what is to be delivered from the folder."""


def data_file(name: str) -> Path:
    return Path(__file__).parent / f"{name}.tar.gz"


async def _written() -> dict[str, bytes]:
    """Return the files of a delay server that was killed."""
    clock, files = ManualClock(NOW_MS), MemoryFileSystem()
    brokers = FakeBrokers(clock)
    running = RunningDelay(None, clock, brokers, files, SECTIONS)
    await running.start()
    ids = await running.send([(b"hour %d" % i, NOW_MS + i * HOUR) for i in range(1, 30)])
    assert await running.cancel((ids[6], NOW_MS + 7 * HOUR)) == [Fate.CANCELLED]
    assert await running.move((ids[8], NOW_MS + 9 * HOUR, NOW_MS + 40 * HOUR)) == [Fate.MOVED]
    await running.send([(b"delivered %d" % i, NOW_MS + SECOND) for i in range(10)])
    clock.advance(2 * SECOND)
    await eventually(lambda: len(brokers.accepted) == 10)
    for turn in range(len(COUNTS)):
        await running.send(
            [(body, NOW_MS + HOUR + i % 7 * 600_000) for i, body in enumerate(_bodies(turn))]
        )
        await running.caught_up()
        if turn < len(COUNTS) - 1:
            await running.server.checkpoint()
    left = files.after_power_cut(files.operations, Cut.KEPT, Random(1))
    await running.close()
    found = left.contents()
    found.pop("ballast", None)  # it has no meaning, and does not compress
    return found


def main(arguments: list[str]) -> int:
    target = data_file(arguments[0])
    if target.exists():
        print(f"{target.name} is there, and stays as it is", file=sys.stderr)
        return 1
    with TemporaryDirectory() as directory, tarfile.open(target, "w:gz") as archive:
        for path, data in asyncio.run(_written()).items():
            file = Path(directory, "delay", path)
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_bytes(data)
        archive.add(Path(directory, "delay"), "delay")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
