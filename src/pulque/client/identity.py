"""Who a consumer is: the same over restarts, and never the same for two that run.

An id is ``host/application/subject/slot``. A slot is a file in the client's state folder that
the consumer keeps locked while it runs; a consumer that starts takes the first free one, so
that after a restart it finds what it held before. The file also remembers the last
incarnation, which only grows: of two consumers with one id, the broker listens to the newer.
Beside it lie the files in which the consumer keeps what its broker may not know.
"""

import contextlib
import fcntl
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

from pulque.errors import ConfigError
from pulque.model.names import ConsumerId, parse_consumer_id

__all__ = ["STATE_VARIABLE", "Identity", "application_name", "state_folder"]

log = logging.getLogger("pulque.client")

STATE_VARIABLE = "PULQUE_STATE_DIR"
MAX_SLOTS = 10_000
_MAX_PART = 60
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
    """Return what this application is called: as it says, else after its script."""
    if name:
        return name
    script = Path(sys.argv[0]).stem if sys.argv and sys.argv[0] else ""
    if script == "__main__":
        script = Path(sys.argv[0]).parent.name
    return script if script not in {"", "-c", "-"} else "python"


@dataclass(slots=True)
class Identity:
    """The id and incarnation of one running consumer; ``release`` it at the end."""

    consumer: ConsumerId
    incarnation: int
    _slot: int | None = None
    """The locked file's descriptor."""
    stem: Path | None = None
    """The path of the locked file: the consumer's other files are named after it."""

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
                    consumer = parse_consumer_id(f"{stem}/{number}")
                    return cls(consumer, _next_incarnation(slot), slot, path)
        except OSError as error:
            log.warning("no state folder: folder=%s error=%s", folder, error)
            return cls(parse_consumer_id(f"{stem}/{secrets.token_hex(8)}"), _now_ms())
        raise ConfigError(f"all {MAX_SLOTS} slots in {folder} are taken; is there a leak?")

    def release(self) -> None:
        """Let others have the slot."""
        if self._slot is not None:
            os.close(self._slot)
            self._slot = None


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


def _part(text: str) -> str:
    """Make a text fit to stand in an id; of a long one or a pattern, its beginning and a hash."""
    part = _NOT_ALLOWED.sub("_", text).strip("._-").replace("..", "_") or "x"
    if len(part) > _MAX_PART or text.endswith("*"):
        part = f"{part[: _MAX_PART - 9]}-{google_crc32c.value(text.encode()):08x}"
    return part


def _now_ms() -> int:
    return time.time_ns() // 1_000_000
