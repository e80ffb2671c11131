"""Folders of older delay servers are served by today's: each message comes, once, at its time."""

import tarfile
from pathlib import Path

import pytest

from pulque.storage.files import OsFileSystem
from pulque.storage.inspection.data_files import data_files
from pulque.storage.inspection.verification import verify
from pulque.testing.clock import ManualClock
from tests.compat.delayed import HOUR, LEFT, NOW_MS, SECTIONS, data_file
from tests.unit.delay.running import FakeBrokers, RunningDelay, eventually


@pytest.mark.parametrize(
    "name",
    [
        pytest.param("v1-delay", id="schedule logs in the order of due times"),
        pytest.param("v1-delay-spares", id="segments that were written again"),
    ],
)
async def test_what_an_old_delay_server_left_is_delivered_once(
    tmp_path: Path, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with tarfile.open(data_file(name)) as archive:
        archive.extractall(tmp_path, filter="data")
    clock = ManualClock(NOW_MS + 10 * 60_000)
    brokers = FakeBrokers(clock)
    left = OsFileSystem(str(tmp_path / "delay"))
    assert verify(left, data_files(left)).findings == []
    running = RunningDelay(tmp_path / "delay", clock, brokers, None, SECTIONS)
    await running.start()
    try:
        for hour in (2, 6, 39, 41):
            clock.set_now_ms(NOW_MS + hour * HOUR)
            await eventually(lambda: running.server.is_idle)
        await eventually(lambda: len(brokers.accepted) >= len(LEFT))
    finally:
        await running.close()

    assert sorted(brokers.bodies) == LEFT
    assert brokers.bodies[-1] == b"hour 9", "it was moved to the end"
    assert not list((tmp_path / "delay").rglob("*.spare"))
    assert "corruption_found" not in capsys.readouterr().out
