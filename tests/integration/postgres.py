"""A PostgreSQL of the tests' own, on a loopback port, if its binaries are installed."""

import os
import pwd
import secrets
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from pathlib import Path

from sqlalchemy import URL, create_engine, text

__all__ = ["Postgres", "why_not"]

_USER = "pulque"
_PATIENCE_S = 60.0


def binaries() -> Path | None:
    """Return the folder with ``initdb`` and ``postgres``; Debian keeps it out of the path."""
    found = shutil.which("initdb")
    folders = [Path(found).parent] if found else []
    folders += sorted(Path("/usr/lib/postgresql").glob("*/bin"), reverse=True)
    return next((each for each in folders if (each / "postgres").exists()), None)


def why_not() -> str | None:
    """Return why no PostgreSQL can be started here; None if it can."""
    if binaries() is None:
        return "PostgreSQL is not installed (Debian: apt install postgresql)"
    if os.geteuid() == 0 and _unprivileged() is None:
        return "PostgreSQL does not run as root, and there is no user postgres or nobody"
    return None


def _unprivileged() -> str | None:
    names = {each.pw_name for each in pwd.getpwall()}
    return next((name for name in ("postgres", "nobody") if name in names), None)


class Postgres:
    """One server with a password; ``stop`` and ``start`` take it away and bring it back."""

    def __init__(self) -> None:
        folder = binaries()
        assert folder is not None
        self._binaries = folder
        self._user = _unprivileged() if os.geteuid() == 0 else None
        self._folder = Path(tempfile.mkdtemp(prefix="pulque-postgres-"))
        self._data = self._folder / "data"
        self._process: subprocess.Popen[bytes] | None = None
        self.password = secrets.token_hex(8)
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port: int = probe.getsockname()[1]
        self._make()
        self.start()

    def start(self) -> None:
        """Start it and wait until it takes connections."""
        with (self._folder / "log").open("ab") as log:
            self._process = subprocess.Popen(
                [
                    str(self._binaries / "postgres"),
                    *("-D", str(self._data), "-p", str(self.port)),
                    *("-c", "listen_addresses=127.0.0.1", "-c", "fsync=off"),
                    *("-c", f"unix_socket_directories={self._folder}"),
                    *("-c", "max_connections=40"),
                ],
                stdout=log,
                stderr=log,
                user=self._user,
                cwd=self._folder,
            )
        deadline = time.monotonic() + _PATIENCE_S
        while not self._answers():
            log_text = (self._folder / "log").read_text(errors="replace")
            assert self._process.poll() is None, log_text
            assert time.monotonic() < deadline, log_text
            time.sleep(0.05)

    def stop(self) -> None:
        """Take it away at once, as if its machine were gone."""
        if self._process is not None:
            # SIGQUIT: all its connections are cut, and it recovers from its log at the start.
            self._process.send_signal(signal.SIGQUIT)
            self._process.wait(_PATIENCE_S)
            self._process = None

    def close(self) -> None:
        """End it, and remove all of it."""
        self.stop()
        shutil.rmtree(self._folder, ignore_errors=True)

    def new_database(self) -> str:
        """Make an empty database and return its URL, without the password."""
        name = f"t{secrets.token_hex(6)}"
        engine = create_engine(self._url("postgres"), isolation_level="AUTOCOMMIT")
        with engine.connect() as connection:
            connection.execute(text(f"CREATE DATABASE {name}"))
        engine.dispose()
        return f"postgresql://{_USER}@127.0.0.1:{self.port}/{name}"

    def _url(self, database: str) -> URL:
        return URL.create(
            "postgresql+psycopg", _USER, self.password, "127.0.0.1", self.port, database
        )

    def _make(self) -> None:
        secret = self._folder / "password"
        secret.write_text(self.password)
        if self._user is not None:
            for path in (self._folder, secret):
                shutil.chown(path, self._user)
        subprocess.run(
            [
                str(self._binaries / "initdb"),
                *("-D", str(self._data), "-U", _USER, f"--pwfile={secret}"),
                *("--auth=scram-sha-256", "--no-sync", "--encoding=UTF8", "--locale=C"),
            ],
            check=True,
            capture_output=True,
            user=self._user,
            cwd=self._folder,
            timeout=_PATIENCE_S,
        )

    def _answers(self) -> bool:
        engine = create_engine(self._url("postgres"), connect_args={"connect_timeout": 5})
        try:
            with engine.connect():
                return True
        except Exception:  # noqa: BLE001  # whatever it is, it is not ready
            return False
        finally:
            engine.dispose()
