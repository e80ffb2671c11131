"""A small cluster of real processes on this machine: what ``pulque up --brokers 3`` runs.

One meta server, several brokers and a delay server, each started as by hand. Any of them may be
killed to see what happens; the others go on. None outlives the process that started them.
"""

import asyncio
import contextlib
import ctypes
import os
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from pulque.cli.servers.ports import port_above, port_below
from pulque.errors import UnavailableError
from pulque.net.process import stop_on_signals

__all__ = ["run_local_cluster"]

_READY = b"ready "
_START_S = 60.0
_STOP_S = 20.0
_PR_SET_PDEATHSIG = 1


def run_local_cluster(
    directory: Path,
    *,
    brokers: int,
    port: int,
    arguments: Sequence[str],
    on_ready: Callable[[str], None],
) -> None:
    """Run a cluster until SIGTERM or SIGINT, or until nothing of it is left.

    Args:
        directory: Holds a folder for each server.
        brokers: How many of them.
        port: The first broker's port, the next ones have the next; 0 for any free ones.
        arguments: More options for all brokers.
        on_ready: Called with the URL of all brokers, any of which is a home, once all serve.

    Raises:
        UnavailableError: One of them does not start.
    """
    asyncio.run(_LocalCluster(directory, arguments).run(brokers, port, on_ready))


class _LocalCluster:
    """The processes, by their names."""

    def __init__(self, directory: Path, arguments: Sequence[str]) -> None:
        self._directory = directory
        self._arguments = list(arguments)
        self._stop = asyncio.Event()
        self._processes: dict[str, asyncio.subprocess.Process] = {}

    async def run(self, brokers: int, port: int, on_ready: Callable[[str], None]) -> None:
        stop_on_signals(self._stop.set)
        try:
            url = await self._start_all(brokers, port)
            if url is not None:
                on_ready(url)
                await self._watch()
        finally:
            await self._end()

    async def _start_all(self, brokers: int, port: int) -> str | None:
        """Start everything; return the URL of all brokers, or None if it was asked to stop."""
        starting = asyncio.ensure_future(self._start_servers(brokers, port))
        stopping = asyncio.ensure_future(self._stop.wait())
        await asyncio.wait([starting, stopping], return_when=asyncio.FIRST_COMPLETED)
        stopping.cancel()
        if starting.done():
            return starting.result()
        starting.cancel()
        await asyncio.gather(starting, return_exceptions=True)
        return None

    async def _start_servers(self, brokers: int, port: int) -> str:
        meta = await self._start(
            "meta", {"--data": self._directory / "meta", "--port": port_below("127.0.0.1", port)}
        )
        address = meta.removeprefix("pulque://")
        started = [
            self._start(
                f"broker-{number}",
                {
                    "--data": self._directory / f"broker-{number}",
                    "--port": port + number - 1 if port else 0,
                    "--set": f"cluster.meta={address}",
                },
                [*self._arguments, "--set", f"name=broker-{number}"],
            )
            for number in range(1, brokers + 1)
        ]
        urls = await asyncio.gather(*started)
        await self._start(
            "delay-1",
            {
                "--data": self._directory / "delay-1",
                "--meta": address,
                "--port": port_above("127.0.0.1", port),
                "--set": "name=delay-1",
            },
        )
        return f"pulque://{','.join(url.removeprefix('pulque://') for url in urls)}"

    async def _start(
        self, name: str, options: Mapping[str, object], more: Sequence[str] = ()
    ) -> str:
        """Start one server; return its URL when it serves."""
        told = [str(each) for option in options.items() for each in option]
        command = [sys.executable, "-m", "pulque", name.partition("-")[0], *told, *more]
        parent = os.getpid()
        process = await asyncio.create_subprocess_exec(
            *command,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            # So that ctrl-C in a terminal reaches only this process, which stops them in order.
            start_new_session=True,
            preexec_fn=lambda: _end_with(parent),
        )
        self._processes[name] = process
        assert process.stdout is not None  # noqa: S101  # it was opened with a pipe
        line = b""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_START_S):
                line = await process.stdout.readline()
        if not line.startswith(_READY):
            raise UnavailableError(f"{name} did not start; what it said is above")
        url = line.removeprefix(_READY).decode().strip()
        print(f"{name} serves at {url}, process {process.pid}", file=sys.stderr)
        return url

    async def _watch(self) -> None:
        """Wait until asked to stop, or until nothing is left; tell who ended."""
        waiting = {
            asyncio.ensure_future(process.wait()): name
            for name, process in self._processes.items()
        }
        stopping = asyncio.ensure_future(self._stop.wait())
        while waiting and not self._stop.is_set():
            done, _ = await asyncio.wait([*waiting, stopping], return_when=asyncio.FIRST_COMPLETED)
            for each in done - {stopping}:
                name = waiting.pop(each)
                print(f"{name} ended with {each.result()}", file=sys.stderr)
        for each in (stopping, *waiting):
            each.cancel()

    async def _end(self) -> None:
        """Stop the brokers, so that each can say that it leaves; then the meta server."""
        meta = self._processes.pop("meta", None)
        await asyncio.gather(*map(_terminate, self._processes.values()))
        if meta is not None:
            await _terminate(meta)


async def _terminate(process: asyncio.subprocess.Process) -> None:
    """End a process, cleanly if it can be."""
    for number in (signal.SIGCONT, signal.SIGTERM):
        with contextlib.suppress(ProcessLookupError):
            process.send_signal(number)
    try:
        async with asyncio.timeout(_STOP_S):
            await process.wait()
    except TimeoutError:
        process.kill()
        await process.wait()


def _end_with(parent: int) -> None:
    """In a new process: see to it that it ends when the one that started it does."""
    libc = ctypes.CDLL(None)
    libc.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != parent:
        os._exit(1)  # it had ended already
