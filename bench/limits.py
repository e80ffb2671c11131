"""What the machine itself can do: the ceilings the other figures are compared with.

Run it alone with ``python -m bench.limits``.
"""

from __future__ import annotations

import argparse
import os
import socket
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

from bench.measure import Gate, percentile, run

__all__ = [
    "Limits",
    "fdatasync_times_us",
    "loopback_bytes_per_s",
    "measure",
    "memcpy_bytes_per_s",
    "ping_pong_times_us",
]

_MIB = 2**20
_BLOCK_BYTES = 4096
_MESSAGE_BYTES = 100
Prepare = Callable[[socket.socket], None]


def _as_it_is(sock: socket.socket) -> None:
    del sock


@dataclass(frozen=True, slots=True)
class Limits:
    """The ceilings, in bytes per second, microseconds and calls per second."""

    loopback_bytes_per_s: float
    memcpy_bytes_per_s: float
    fdatasync_p50_us: float
    fdatasync_p99_us: float
    one_sync_per_message_per_s: float
    ping_pong_p50_us: float

    def as_dict(self) -> dict[str, float]:
        """For a result file."""
        return asdict(self)


def measure(directory: Path, *, quick: bool = False) -> Limits:
    """Measure all of them; files go under ``directory``."""
    syncs = 200 if quick else 1000
    blocks = fdatasync_times_us(directory, count=syncs, size=_BLOCK_BYTES)
    messages = fdatasync_times_us(directory, count=syncs, size=_MESSAGE_BYTES)
    return Limits(
        loopback_bytes_per_s=loopback_bytes_per_s(512 if quick else 4096),
        memcpy_bytes_per_s=memcpy_bytes_per_s(),
        fdatasync_p50_us=percentile(blocks, 50),
        fdatasync_p99_us=percentile(blocks, 99),
        one_sync_per_message_per_s=len(messages) / (sum(messages) / 1e6),
        ping_pong_p50_us=percentile(ping_pong_times_us(count=1000, size=_MESSAGE_BYTES), 50),
    )


def loopback_bytes_per_s(mebibytes: int, prepare: Prepare = _as_it_is) -> float:
    """Loopback TCP between two processes, sending 1 MiB at a time.

    Args:
        mebibytes: How much.
        prepare: What is done to the sockets first; without it they are as the system makes them.
    """
    with _port() as port:
        receive = partial(_receive, port, mebibytes, prepare)
        done = run(receive, partial(_send, port, mebibytes, prepare))
    return mebibytes * _MIB / done.wall_s


def ping_pong_times_us(*, count: int, size: int) -> list[float]:
    """There and back between two processes over loopback TCP; microseconds of each."""
    with _port() as port:
        done = run(partial(_echo, port, size), partial(_ping, port, size, count))
    times_us: list[float] = done.workers[1].result
    return times_us


def memcpy_bytes_per_s(mebibytes: int = 256, times: int = 5) -> float:
    """The best of some copies of one large buffer onto another."""
    source, target = bytearray(mebibytes * _MIB), bytearray(mebibytes * _MIB)
    view = memoryview(target)
    view[:] = source  # touches the pages, so that the kernel's work is not counted
    return (
        mebibytes
        * _MIB
        / min(_seconds(partial(view.__setitem__, slice(None), source)) for _ in range(times))
    )


def fdatasync_times_us(directory: Path, *, count: int, size: int) -> list[float]:
    """Append ``size`` bytes and fdatasync, so many times; microseconds of each pair."""
    block = os.urandom(size)
    with tempfile.TemporaryFile(dir=directory, buffering=0) as file:
        return [
            1e6 * _seconds(partial(_append_and_sync, file.fileno(), block)) for _ in range(count)
        ]


def _append_and_sync(descriptor: int, block: bytes) -> None:
    os.write(descriptor, block)
    os.fdatasync(descriptor)


def _seconds(call: Callable[[], object]) -> float:
    begin = time.perf_counter()
    call()
    return time.perf_counter() - begin


@contextmanager
def _port() -> Iterator[int]:
    """A loopback port that nobody else is given while this lasts."""
    with socket.socket() as holder:
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        holder.bind(("127.0.0.1", 0))
        yield holder.getsockname()[1]


@contextmanager
def _accepted(port: int, gate: Gate) -> Iterator[socket.socket]:
    """The one connection to this port."""
    with socket.socket() as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        listener.bind(("127.0.0.1", port))
        listener.listen()
        listener.settimeout(30)
        gate()
        connection, _ = listener.accept()
        with connection:
            yield connection


def _echo(port: int, size: int, gate: Gate) -> None:
    with _accepted(port, gate) as connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        while block := connection.recv(size, socket.MSG_WAITALL):
            connection.sendall(block)


def _ping(port: int, size: int, count: int, gate: Gate) -> list[float]:
    block = bytes(size)
    times_us = []
    gate()
    with socket.create_connection(("127.0.0.1", port), timeout=30) as connection:
        connection.settimeout(None)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for _ in range(count):
            begin = time.perf_counter()
            connection.sendall(block)
            connection.recv(size, socket.MSG_WAITALL)
            times_us.append(1e6 * (time.perf_counter() - begin))
    return times_us


def _receive(port: int, mebibytes: int, prepare: Prepare, gate: Gate) -> None:
    with _accepted(port, gate) as connection:
        prepare(connection)
        buffer = bytearray(_MIB)
        left = mebibytes * _MIB
        while left:
            received = connection.recv_into(buffer)
            if not received:
                raise ConnectionError(f"{left} bytes short")
            left -= received


def _send(port: int, mebibytes: int, prepare: Prepare, gate: Gate) -> None:
    block = bytes(_MIB)
    gate()
    with socket.create_connection(("127.0.0.1", port), timeout=30) as connection:
        prepare(connection)
        connection.settimeout(None)  # with a limit, each call polls first; the run has its own
        for _ in range(mebibytes):
            connection.sendall(block)


def _main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.limits", description=__doc__)
    parser.add_argument("--directory", type=Path, default=Path.cwd())
    parser.add_argument("--quick", action="store_true")
    options = parser.parse_args()
    for name, value in measure(options.directory, quick=options.quick).as_dict().items():
        print(f"{name:30} {value:,.1f}")


if __name__ == "__main__":
    _main()
