"""Check directory and port before the server opens any data.

An error here names the setting and its source. The server would fail later, too, but with a
less helpful error.
"""

import errno
import os
import socket
from pathlib import Path
from typing import Any

from pulque.errors import ConfigError
from pulque.settings.foreign import quoted
from pulque.settings.sources import DEFAULT, LoadedSettings

__all__ = ["check_world"]


def check_world(loaded: LoadedSettings[Any]) -> None:
    """Check the directory and the port.

    Raises:
        ConfigError: One of them is unusable; every problem is a line of its text.
    """
    settings = loaded.settings
    directory, listen = settings.storage.directory, settings.listen
    told = []
    if directory is not None and (problem := _problem_of_directory(directory)):
        told.append(_told(loaded, "storage.directory", str(directory), problem))
    if problem := _problem_of_port(listen.host, listen.port):
        told.append(_told(loaded, "listen.port", listen.port, problem))
    if told:
        raise ConfigError("\n".join(told))


def _told(loaded: LoadedSettings[Any], key: str, value: object, problem: str) -> str:
    origin = loaded.origins[key]
    place = "" if origin == DEFAULT else f"{origin}: "
    return f"{place}{key} is {quoted(value)}: {problem}"


def _problem_of_directory(directory: Path) -> str | None:
    found = directory.absolute()
    while not os.path.lexists(found):
        found = found.parent
    if not found.is_dir():
        return f"{quoted(str(found))} is not a directory"
    if not os.access(found, os.R_OK | os.W_OK | os.X_OK):
        return f"this user may not write to {quoted(str(found))}"
    return None


def _problem_of_port(host: str, port: int) -> str | None:
    if port == 0:
        return None
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                return "another process listens there; choose another port, or 0 for any"
            return error.strerror or str(error)
    return None
