"""What can be made to go wrong with a broker in a test: its disk and its answers.

Both stand around the real thing and are put there when the broker is made, so that a broker
outside of tests knows nothing of them.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from pulque.errors import PulqueError, StorageFullError
from pulque.model.names import ConsumerId, Group
from pulque.net.server import AcceptedConnection, FrameHandler, Work
from pulque.storage.files import Buffer, DataDirectory, File
from pulque.wire.frame import Frame
from pulque.wire.requests import Heartbeat, Opcode, Pull, decode_request
from pulque.wire.responses import encode_error

__all__ = ["BreakableFiles", "BreakableHandler", "SendFaults"]


class BreakableFiles:
    """A data directory that fills up on command, and whose process can be taken away.

    Attributes:
        is_full: Whether there is no room for messages.
        is_cut_off: Whether the process that writes here is gone, as after ``kill -9``. What it
            still does meanwhile, in threads of its own, does not reach the files.
    """

    def __init__(self, inner: DataDirectory) -> None:
        self._inner = inner
        self.is_full = False
        self.is_cut_off = False

    def open(self, path: str, *, create: bool = False, writable: bool = True) -> File:
        if self.is_cut_off and create and not self._inner.exists(path):
            raise StorageFullError(f"{path}: the process is gone")
        return _BreakableFile(self, self._inner.open(path, create=create, writable=writable))

    def make_directory(self, path: str) -> None:
        if not self.is_cut_off:
            self._inner.make_directory(path)

    def list(self, path: str) -> list[str]:
        return self._inner.list(path)

    def exists(self, path: str) -> bool:
        return self._inner.exists(path)

    def rename(self, source: str, target: str) -> None:
        if not self.is_cut_off:
            self._inner.rename(source, target)

    def remove(self, path: str) -> None:
        if not self.is_cut_off:
            self._inner.remove(path)

    def sync_directory(self, path: str) -> None:
        if not self.is_cut_off:
            self._inner.sync_directory(path)

    def sync_files(self, paths: Sequence[str]) -> None:
        if not self.is_cut_off:
            self._inner.sync_files(paths)

    def free_bytes(self) -> int:
        return 0 if self.is_full else self._inner.free_bytes()

    def random_bytes(self, count: int) -> bytes:
        return self._inner.random_bytes(count)

    def lock(self) -> None:
        self._inner.lock()

    def unlock(self) -> None:
        self._inner.unlock()


class _BreakableFile:
    """One file of it."""

    def __init__(self, files: BreakableFiles, inner: File) -> None:
        self._files = files
        self._inner = inner

    def write(self, buffers: Sequence[Buffer], offset: int) -> int:
        if self._files.is_cut_off:
            return sum(map(len, buffers))
        return self._inner.write(buffers, offset)

    def read(self, size: int, offset: int, *, may_block: bool = True) -> bytes:
        return self._inner.read(size, offset, may_block=may_block)

    def read_into(self, buffer: memoryview, offset: int, *, is_cached: bool) -> int:
        return self._inner.read_into(buffer, offset, is_cached=is_cached)

    def sync(self) -> None:
        if not self._files.is_cut_off:
            self._inner.sync()

    def truncate(self, size: int) -> None:
        if not self._files.is_cut_off:
            self._inner.truncate(size)

    def size(self) -> int:
        return self._inner.size()

    def close(self) -> None:
        self._inner.close()


@dataclass(slots=True)
class SendFaults:
    """Sends that are to fail, at whichever server they arrive first."""

    left: int = 0
    error: PulqueError | None = None
    """What they are refused with; None if they are stored and only their answer is lost."""


class BreakableHandler:
    """Stands before a server's handler of requests. Lives in the server's event loop."""

    def __init__(self, inner: FrameHandler, faults: SendFaults) -> None:
        self._inner = inner
        self._faults = faults
        self._heard_of: dict[AcceptedConnection, set[tuple[Group, ConsumerId]]] = {}
        self.is_dead = False
        """Whether nobody is to hear anything any more."""

    @property
    def connected(self) -> set[tuple[Group, ConsumerId]]:
        """The consumers that have a connection."""
        return set().union(*self._heard_of.values())

    def handle(self, connection: AcceptedConnection, frame: Frame) -> Work | None:
        """Answer a frame, or not."""
        if self.is_dead:
            connection.abort()
            return None
        if frame.opcode == Opcode.SEND and self._faults.left:
            self._fail(connection, frame)
            return None
        if frame.opcode in (Opcode.PULL, Opcode.HEARTBEAT):
            self._listen(connection, frame)
        return self._inner.handle(connection, frame)

    def pause(self, connection: AcceptedConnection) -> None:
        """Pass on that all frames of a connection are handled."""
        self._inner.pause(connection)

    def closed(self, connection: AcceptedConnection) -> None:
        """Forget a connection."""
        self._heard_of.pop(connection, None)
        self._inner.closed(connection)

    def _fail(self, connection: AcceptedConnection, frame: Frame) -> None:
        self._faults.left -= 1
        error = self._faults.error
        if error is None:
            self._inner.handle(connection, frame)
            connection.abort()
        else:
            connection.send([encode_error(error, frame.request_id, frame.epoch)])

    def _listen(self, connection: AcceptedConnection, frame: Frame) -> None:
        """Remember which consumer speaks on a connection, until it says that it leaves."""
        try:
            request = decode_request(frame)
        except PulqueError:
            return  # the broker says what is wrong with it
        assert isinstance(request, Pull | Heartbeat)  # noqa: S101  # by the opcode
        who = Group(request.group), ConsumerId(request.consumer)
        if isinstance(request, Heartbeat) and request.is_leaving:
            for known in self._heard_of.values():
                known.discard(who)
        else:
            self._heard_of.setdefault(connection, set()).add(who)
