"""Who a consumer is: the same over restarts, and never the same for two that run.

An id is ``host/application/subject/slot-token``. A slot is a file in the client's state folder
that the consumer keeps locked while it runs; a consumer that starts takes the first free one, so
that after a restart it finds what it held before. The file also remembers the last
incarnation, which only grows: of two consumers with one id, the broker listens to the newer.
Its random token keeps the ids of two state folders apart: containers may share a host's name.

A state folder may be copied, token and all: with a backup, or as part of a container image. So a
token counts only in the file for which it was drawn (its inode), and only for one running process
of a host (a socket whose name is the id). Otherwise the consumer draws another token.
Beside the slot lie the files in which the consumer keeps what its broker may not know.
"""

import contextlib
import errno
import fcntl
import hashlib
import logging
import os
import re
import secrets
import socket
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import google_crc32c

from pulque.client.connection.fork_safety import on_fork
from pulque.errors import ConfigError, UsageError
from pulque.model.names import ConsumerId, parse_consumer_id

__all__ = ["STATE_VARIABLE", "ConsumerIdentity", "application_name", "state_folder"]

log = logging.getLogger("pulque.client")

STATE_VARIABLE = "PULQUE_STATE_DIR"
MAX_SLOTS = 10_000
_MAX_PART = 60
_TOKEN_BYTES = 6
_TOKEN_AT = 32
"""Where it stands in the slot's file, behind the incarnation and before what it is bound to."""
_BOUND_SIZE = 64
_TOKEN = re.compile(r"[0-9a-f]{12}")
_MOUNTS = Path("/proc/self/mountinfo")
_NOT_ALLOWED = re.compile(r"[^A-Za-z0-9._-]+")


def state_folder(given: str | os.PathLike[str] | None, environ: Mapping[str, str]) -> Path:
    """Return where this user's clients keep their state."""
    if given is not None:
        return Path(given)
    if named := environ.get(STATE_VARIABLE):
        return Path(named)
    base = environ.get("XDG_STATE_HOME")
    return (Path(base) if base else Path.home() / ".local" / "state") / "pulque"


def application_name(name: str | None) -> str:
    """Return what this application is called: as it says, else after its script.

    Raises:
        UsageError: The name is no str.
    """
    if name is not None and not isinstance(name, str):
        raise UsageError(f"name is {name!r}; a str is allowed")
    if name:
        return name
    script = Path(sys.argv[0]).stem if sys.argv and sys.argv[0] else ""
    if script == "__main__":
        script = Path(sys.argv[0]).parent.name
    return script if script not in {"", "-c", "-"} else "python"


@dataclass(slots=True, eq=False, weakref_slot=True)
class ConsumerIdentity:
    """The id and incarnation of one running consumer; ``release`` it at the end."""

    consumer: ConsumerId
    incarnation: int
    _slot: int | None = None
    """The locked file's descriptor."""
    stem: Path | None = None
    """What the paths of the consumer's other files begin with."""
    _claim: socket.socket | None = None
    """Its name is taken in the whole host, or container, while the consumer runs."""

    def __post_init__(self) -> None:
        # A child of fork that kept the lock would keep the slot from its parent's successor.
        on_fork(self, ConsumerIdentity.release)

    @classmethod
    def given(cls, consumer_id: str, folder: Path, *, group: str, subject: str) -> Self:
        """Return the identity that the caller chose; keeping it unique is up to them.

        It has no files where another process has them, or where they cannot be written.
        """
        identity = cls(parse_consumer_id(consumer_id), _now_ms())
        scope = google_crc32c.value(f"{consumer_id}\0{group}\0{subject}".encode())
        try:
            stem = _make_folder(folder) / f"id-{_part(consumer_id)}-{scope:08x}"
            identity._slot = _lock(stem)
            if identity._slot is not None:
                identity.stem = stem
        except OSError as error:
            log.warning("no state folder: folder=%s error=%s", folder, error)
        return identity

    @classmethod
    def take(cls, folder: Path, *, application: str, group: str, subject: str) -> Self:
        """Take the first free slot.

        Where the folder cannot be written, the id is random and a restart gets another one.
        """
        stem = f"{_part(socket.gethostname())}/{_part(application)}/{_part(subject)}"
        scope = google_crc32c.value(f"{stem}\0{group}\0{subject}".encode())
        try:
            home = _make_folder(folder)
            for number in range(MAX_SLOTS):
                path = home / f"{_part(application)}-{scope:08x}-{number}"
                slot = _lock(path)
                if slot is not None:
                    try:
                        return cls._of_slot(slot, path, f"{stem}/{number}")
                    except BaseException:
                        os.close(slot)  # else nobody could take it while this process runs
                        raise
        except OSError as error:
            log.warning("no state folder: folder=%s error=%s", folder, error)
            return cls(parse_consumer_id(f"{stem}/{secrets.token_hex(8)}"), _now_ms())
        raise ConfigError(f"all {MAX_SLOTS} slots in {folder} are taken; is there a leak?")

    @classmethod
    def _of_slot(cls, slot: int, path: Path, name: str) -> Self:
        """Return the identity of a slot that is locked."""
        incarnation = _next_incarnation(slot)
        token, claim = _token(slot, path.parent, name)
        consumer = parse_consumer_id(f"{name}-{token}")
        return cls(consumer, incarnation, slot, path.with_name(f"{path.name}-{token}"), claim)

    def release(self) -> None:
        """Let others have the slot."""
        slot, self._slot = self._slot, None
        if slot is not None:
            os.close(slot)
        if self._claim is not None:
            self._claim.close()


def _make_folder(folder: Path) -> Path:
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    home = folder / "consumers"
    home.mkdir(mode=0o700, exist_ok=True)
    return home


def _lock(path: Path) -> int | None:
    """Return the descriptor of the locked file, or None if another has it."""
    slot = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(slot, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(slot)
        return None
    except BaseException:
        os.close(slot)
        raise
    return slot


def _next_incarnation(slot: int) -> int:
    """Return an incarnation higher than any before, though the clock may have been set back."""
    last = 0
    with contextlib.suppress(ValueError):
        last = int(os.pread(slot, 32, 0))
    incarnation = max(_now_ms(), last + 1)
    os.pwrite(slot, f"{incarnation:<32d}".encode(), 0)
    return incarnation


def _token(slot: int, home: Path, consumer: str) -> tuple[str, socket.socket | None]:
    """Return the random part of a slot's id, and what keeps others from running under the id.

    Draw and store a new one if there is none yet, if the file is a copy of the one that it was
    drawn for, or if a process of this host runs under it.
    """
    place = _place_of(slot)
    found = os.pread(slot, _BOUND_SIZE, _TOKEN_AT).decode(errors="replace").split()
    if len(found) == 2 and _TOKEN.fullmatch(found[0]) and found[1] == place:
        is_free, claim = _claim_name(f"{consumer}-{found[0]}")
        if is_free:
            return found[0], claim
    token = secrets.token_hex(_TOKEN_BYTES)
    os.pwrite(slot, f"{token} {place}".ljust(_BOUND_SIZE).encode(), _TOKEN_AT)
    os.fsync(slot)  # a broadcast consumer that comes back with another id starts anew
    folder = os.open(home, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)
    return token, _claim_name(f"{consumer}-{token}")[1]


def _place_of(slot: int) -> str:
    """Return what a slot's file has and no copy of it: its inode.

    Containers of one image see the image's files under the same inodes: there the device, which
    is another for each container, is part of it. Elsewhere the number of a device may change
    with a restart of the machine.
    """
    found = os.fstat(slot)
    device = f"{os.major(found.st_dev)}:{os.minor(found.st_dev)}"
    return f"{found.st_ino}@{device}" if _is_overlay(device) else str(found.st_ino)


def _is_overlay(device: str) -> bool:
    try:
        mounts = _MOUNTS.read_text(errors="replace").splitlines()
    except OSError:
        return False
    fields = (line.split() for line in mounts)
    return any(each[2] == device and "overlay" in each[each.index("-") :][:2] for each in fields)


def _claim_name(consumer: str) -> tuple[bool, socket.socket | None]:
    """Return whether no other process of this host has the name, and what keeps it.

    Where there are no such names, only the file's lock keeps others away.
    """
    claim = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    try:
        claim.bind(f"\0pulque/{hashlib.sha256(consumer.encode()).hexdigest()}")
    except OSError as error:
        claim.close()
        return error.errno != errno.EADDRINUSE, None
    return True, claim


def _part(text: str) -> str:
    """Make a text fit to stand in an id; of a long one or a pattern, its beginning and a hash."""
    part = _NOT_ALLOWED.sub("_", text).strip("._-").replace("..", "_") or "x"
    if len(part) > _MAX_PART or text.endswith("*"):
        part = f"{part[: _MAX_PART - 9]}-{google_crc32c.value(text.encode()):08x}"
    return part


def _now_ms() -> int:
    return time.time_ns() // 1_000_000
