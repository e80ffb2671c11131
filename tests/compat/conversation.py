"""Keep a broker's folder and what a client said to it: ``python -m tests.compat.conversation v1``.

As the files of ``generate``, both are written once, by the first release of a version, and never
again. The folder has a sealed segment and an open one, a group that is in the middle, and what it
failed to handle. The client sends, pulls, settles and leaves.
"""

import asyncio
import sys
import tarfile
import tempfile
from pathlib import Path

from pulque.testing.raw import RawConnection
from pulque.wire.requests import Seal
from pulque.wire.responses import Sealed
from tests.unit.broker.running import Running, numbered

__all__ = ["LAST", "SECTIONS", "data_file", "main", "talk_file"]

SECTIONS = {
    "storage": {
        "retention": "36500d",
        "segment_size": "64KiB",
        "action_segment_size": "64KiB",
    }
}
"""The folder is small, and read years after it was written."""
_INDEXED_AFTER = 2.0
LAST = b"from an old client"


def data_file(version: str) -> Path:
    """Return where a broker's folder is kept."""
    return Path(__file__).parent / f"{version}-broker.tar.gz"


def talk_file(version: str) -> Path:
    """Return where the frames of a client are kept."""
    return Path(__file__).parent / f"{version}-client.bin"


class _Recorded(RawConnection):
    """Keeps what it says."""

    said = b""

    async def put_bytes(self, data: bytes) -> None:
        """Send anything."""
        self.said += data
        await super().put_bytes(data)


async def _fill(folder: Path) -> None:
    running = Running(folder, SECTIONS, None, None)
    await running.start()
    raw = await running.connect()
    await raw.send("orders", numbered(5))
    await raw.send("orders", numbered(5, 5))
    await raw.ask(Seal(), Sealed)
    await raw.send("orders", numbered(5, 10))
    (run,) = (await raw.pull("orders", max_messages=6)).runs
    await raw.settle(run, last=run.first_pull + 3, nacked={run.first_pull: "no tea"})
    await asyncio.sleep(_INDEXED_AFTER)
    await running.close()


async def _talk(folder: Path) -> bytes:
    running = Running(folder, SECTIONS, None, None)
    await running.start()
    raw = await _Recorded.open(running.broker.url)
    assert isinstance(raw, _Recorded)
    await raw.send("orders", [LAST])
    handed = await raw.pull("orders", "%retry%orders%g")
    for run in handed.runs:
        await raw.settle(run)
    await raw.heartbeat(is_leaving=True)
    raw.close()
    await running.close()
    return raw.said


def main(arguments: list[str]) -> int:
    """Write both files, unless they are there."""
    if len(arguments) != 1:
        print("usage: python -m tests.compat.conversation v1", file=sys.stderr)
        return 2
    data, talk = data_file(arguments[0]), talk_file(arguments[0])
    if data.exists() or talk.exists():
        print(f"{data.name} or {talk.name} is there, and stays as it is", file=sys.stderr)
        return 1
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary) / "broker"
        asyncio.run(_fill(folder))
        with tarfile.open(data, "w:gz") as archive:
            archive.add(folder, "broker", filter=_anonymous)
        talk.write_bytes(asyncio.run(_talk(folder)))
    return 0


def _anonymous(member: tarfile.TarInfo) -> tarfile.TarInfo | None:
    """Leave out who wrote it, and what a broker makes anew."""
    member.uid = member.gid = 0
    member.uname = member.gname = ""
    return None if member.name.endswith(("/lock", "/ballast")) else member


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
