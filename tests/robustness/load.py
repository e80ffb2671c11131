"""A load on a broker: producer and consumer processes, a drain, and the verdict."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import pulque
from pulque.errors import UnknownSubjectError
from tests.repo.tree import ROOT
from tests.robustness.brokers import wait_until
from tests.robustness.checkers import TotalQueue, check_all, check_drained, total_queue
from tests.robustness.history import Event, HistoryWriter, read_history
from tests.robustness.workers import id_in

__all__ = ["Load"]

_END = 60.0


class Load:
    """Producers and consumers of one subject. Everything that it starts ends with it."""

    def __init__(self, url: str, folder: Path, *, subject: str = "load", group: str = "g") -> None:
        self._url = url
        self._folder = folder
        self._subject = subject
        self._group = group
        self._producers: list[subprocess.Popen[bytes]] = []
        self._consumers: dict[str, subprocess.Popen[bytes]] = {}
        self._counted: dict[tuple[Path, str], tuple[int, int]] = {}
        folder.mkdir(exist_ok=True)

    def add_producers(self, count: int, *options: str) -> None:
        """Start producers; every second one has many sends underway."""
        for _ in range(count):
            number = len(self._producers)
            more = ["--pipelined"] if number % 2 else []
            self._producers.append(self._start("producer", f"p{number}", *more, *options))

    def add_consumers(self, count: int, *options: str) -> None:
        """Start consumers of one group."""
        for _ in range(count):
            self.start_consumer(f"c{len(self._consumers)}", *options)

    def signal_consumer(self, name: str, number: int) -> None:
        """Send a signal to one consumer."""
        self._consumers[name].send_signal(number)

    def kill_consumer(self, name: str) -> None:
        """End a consumer at once."""
        process = self._consumers.pop(name)
        process.kill()
        process.wait()

    def start_consumer(self, name: str, *options: str) -> None:
        """Start a consumer under a name, which may have been here before."""
        self._consumers[name] = self._start("consumer", name, *options)

    def count(self, f: str, process: str = "*") -> int:
        """Return how often something succeeded so far."""
        return sum(self._count(path, f) for path in self._folder.glob(f"{process}.jsonl"))

    def _count(self, path: Path, f: str) -> int:
        wanted = f'"type": "ok", "f": "{f}"'.encode()
        at, found = self._counted.get((path, f), (0, 0))
        with path.open("rb") as file:
            file.seek(at)
            lines = file.read()
        whole = lines[: lines.rfind(b"\n") + 1]
        self._counted[path, f] = at + len(whole), found + whole.count(wanted)
        return self._counted[path, f][1]

    def go_on(self, sends: int = 300) -> None:
        """Wait until so many more messages are confirmed: the load is really on."""
        goal = self.count("send") + sends
        wait_until(lambda: self.count("send") >= goal, within=60, what=f"{sends} more sends")

    def stop_producers(self) -> None:
        """Let producers find an outcome for each message, and end."""
        self._stop(self._producers)
        self._producers.clear()

    def drain(self, within: float = _END) -> dict[str, Any]:
        """Wait until consumers have nothing left to do; return what the broker then reports."""
        deadline = time.monotonic() + within
        with pulque.connect(self._url, timeout=_END) as client:
            while problems := check_drained(status := client.status()):
                assert time.monotonic() < deadline, problems[:10]
                time.sleep(0.05)
        return status

    def stop_consumers(self) -> None:
        """End the consumers, which hand back what they hold."""
        self._stop(list(self._consumers.values()))
        self._consumers.clear()

    def verdict(self) -> tuple[TotalQueue, list[str]]:
        """Stop sending, drain, read everything back, and judge the whole history."""
        self.stop_producers()
        status = self.drain()
        self.stop_consumers()
        with HistoryWriter(self._folder / "reader.jsonl", "reader") as history:
            history.write_all(self._read_back())
        events = read_history(self._folder.glob("*.jsonl"))
        return total_queue(events), check_all(events, status, groups=[self._group])

    def _read_back(self) -> Iterator[Event]:
        """Yield what is stored. Retries are read by their consumers only."""
        with pulque.connect(self._url, timeout=_END) as client:
            at = 0
            while True:
                try:
                    messages = client.read(self._subject, at)
                except UnknownSubjectError:
                    return
                for message in messages:
                    yield Event(
                        "reader",
                        "ok",
                        "read",
                        id_in(message.body),
                        partition=message.partition,
                        sequence=message.sequence,
                    )
                if not messages:
                    return
                at = messages[-1].sequence + 1

    def _start(self, role: str, process: str, *options: str) -> subprocess.Popen[bytes]:
        self._ready_file(process).unlink(missing_ok=True)
        command = [
            *(sys.executable, "-m", "tests.robustness.workers", role),
            *("--url", self._url, "--process", process),
            *("--history", str(self._folder / f"{process}.jsonl")),
            *("--subject", self._subject, "--group", self._group),
            *("--state", str(self._folder / "state")),
            *options,
        ]
        with (self._folder / f"{process}.stderr").open("ab") as log:
            return subprocess.Popen(
                command, cwd=ROOT, stderr=log, env=os.environ, start_new_session=True
            )

    def _stop(self, processes: list[subprocess.Popen[bytes]]) -> None:
        for process in processes:
            arguments = process.args
            assert isinstance(arguments, list)
            ready = self._ready_file(str(arguments[arguments.index("--process") + 1]))
            wait_until(ready.exists, within=_END, what=f"{ready.stem} has started")
            process.send_signal(signal.SIGTERM)
        for process in processes:
            process.wait(_END)
        codes = [process.returncode for process in processes]
        assert not any(codes), f"{codes}\n{self._said()}"

    def _ready_file(self, process: str) -> Path:
        """Return what a worker makes once it ends cleanly when it is told to."""
        return self._folder / f"{process}.ready"

    def _said(self) -> str:
        return "\n".join(
            f"{path.name}: {path.read_text(errors='replace')[-2000:]}"
            for path in sorted(self._folder.glob("*.stderr"))
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for process in [*self._producers, *self._consumers.values()]:
            if process.poll() is None:
                process.kill()
                process.wait()
