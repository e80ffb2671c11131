"""A meta server and a few brokers, as real processes on loopback."""

import contextlib
import os
import signal
import subprocess
import sys
from pathlib import Path
from types import TracebackType
from typing import Self

from pulque.testing.process import BrokerProcess

_READY = "ready "


class MetaProcess:
    """One ``pulque meta`` on its own SQLite file."""

    def __init__(self, data: Path) -> None:
        self._data = data
        self._process: subprocess.Popen[str] | None = None
        self.url = ""
        self.start()

    @property
    def address(self) -> str:
        return self.url.removeprefix("pulque://")

    def start(self) -> None:
        """Start it, on the same port as before if it ran."""
        port = self.url.rpartition(":")[2] or "0"
        command = [sys.executable, "-m", "pulque", "meta", "--data", str(self._data)]
        with self._data.with_suffix(".stderr").open("ab") as log:
            self._process = subprocess.Popen(
                [*command, "--port", port],
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                start_new_session=True,
            )
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        assert line.startswith(_READY), self._data.with_suffix(".stderr").read_text()
        self.url = line.removeprefix(_READY).strip()

    def kill(self) -> None:
        if self._process is not None:
            self._process.send_signal(signal.SIGKILL)
            self._process.wait(20)
            assert self._process.stdout is not None
            self._process.stdout.close()
            self._process = None


class Cluster:
    """``with Cluster(tmp_path, 3) as cluster: connect(cluster.url)``."""

    def __init__(self, folder: Path, count: int, *settings: str) -> None:
        self._folder = folder
        self._settings = settings
        self._stack = contextlib.ExitStack()
        self.brokers: dict[str, BrokerProcess] = {}
        self.meta = MetaProcess(folder / "meta")
        self._stack.callback(self.meta.kill)
        try:
            for number in range(count):
                self.add(f"b{number}")
        except BaseException:
            self._stack.close()
            raise

    @property
    def url(self) -> str:
        return self.meta.url

    def add(self, name: str) -> BrokerProcess:
        """Start one more broker."""
        arguments = [
            f"--set=cluster.meta={self.meta.address}",
            f"--set=name={name}",
            f"--set=cluster.group={name}",
            *(f"--set={each}" for each in self._settings),
        ]
        broker = BrokerProcess.start(
            self._folder / name, arguments=arguments, environ=dict(os.environ)
        )
        self.brokers[name] = broker
        self._stack.callback(broker.close)
        return broker

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._stack.close()
