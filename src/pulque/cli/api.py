"""The administration API as commands use it: plain HTTP of the standard library.

``http.client`` follows no redirects and no proxies of the environment, which a server on this
machine needs none of; and commands that never ask for it pay nothing for it.
"""

import json
from collections.abc import Iterator, Mapping
from typing import Annotated, Any
from urllib.parse import quote, urlencode, urlsplit

import typer

from pulque.cli.output import print_warning
from pulque.errors import (
    ConfigError,
    DisconnectedError,
    PulqueError,
    RemoteProtocolError,
    RequestTimeoutError,
    UsageError,
    error_from_wire,
)

__all__ = ["DEFAULT_ADMIN", "Admin", "AdminClient", "open_admin", "path_of"]

DEFAULT_ADMIN = "http://127.0.0.1:7480"
_PREFIX = "/api/v1"
_MAX_ANSWER = 256 * 1024 * 1024
_AT_ONCE = 1000
_FAILED = 400

Admin = Annotated[
    str,
    typer.Option(
        "--admin",
        envvar="PULQUE_ADMIN",
        metavar="URL",
        help="Where a meta server's administration API listens.",
    ),
]


def open_admin(url: str, timeout: float) -> "AdminClient":
    """Return a client of the API.

    Raises:
        ConfigError: The URL is not one.
        UsageError: The time is no time.
    """
    if timeout <= 0:
        raise UsageError("--timeout must be above 0")
    return AdminClient(url, timeout)


def path_of(*parts: str | int) -> str:
    """Return a path of the API; what is in a name stays in it."""
    return "".join(f"/{quote(str(part), safe='')}" for part in parts)


class AdminClient:
    """Asks one meta server; each request has a connection of its own."""

    def __init__(self, url: str, timeout: float) -> None:
        self._url = url
        self._timeout = timeout
        self._host, self._port = _address(url)

    def get(self, path: str, query: Mapping[str, object] | None = None) -> Any:
        """Return what stands at a path.

        Raises:
            PulqueError: The server said no, or nothing.
        """
        return self.ask("GET", path, query=query)

    def rows(
        self, path: str, query: Mapping[str, object] | None = None, number: int | None = None
    ) -> Iterator[dict[str, Any]]:
        """Yield the rows of a list, page by page; say which brokers did not answer."""
        left = number
        cursor: str | None = None
        while left is None or left > 0:
            limit = _AT_ONCE if left is None else min(left, _AT_ONCE)
            page = self.get(path, {**(query or {}), "limit": limit, "cursor": cursor})
            for each in page["unreachable"]:
                print_warning(f"{each['broker']} is missing: {each['message']}")
            yield from page["items"]
            cursor = page["next"]
            if cursor is None:
                return
            left = None if left is None else left - len(page["items"])

    def ask(
        self,
        method: str,
        path: str,
        body: object = None,
        query: Mapping[str, object] | None = None,
    ) -> Any:
        """Ask for something, and return the answer.

        Raises:
            PulqueError: The server said no, or nothing.
        """
        given = {name: value for name, value in (query or {}).items() if value is not None}
        target = f"{_PREFIX}{path}{'?' if given else ''}{urlencode(given)}"
        data = None if body is None else json.dumps(body).encode()
        headers = {} if body is None else {"Content-Type": "application/json"}
        status, answer = self._talk(method, target, data, headers)
        if status >= _FAILED:
            raise self._error(status, answer)
        return _decoded(answer) if answer else None

    def _talk(
        self, method: str, target: str, data: bytes | None, headers: Mapping[str, str]
    ) -> tuple[int, bytes]:
        # Slow to import, and most commands ask nobody by HTTP.
        from http.client import HTTPConnection, HTTPException

        connection = HTTPConnection(self._host, self._port, timeout=self._timeout)
        try:
            connection.request(method, target, data, dict(headers))
            response = connection.getresponse()
            return response.status, response.read(_MAX_ANSWER)
        except TimeoutError:
            raise RequestTimeoutError(
                f"no answer from {self._url} within {self._timeout:.1f} s"
            ) from None
        except (OSError, HTTPException) as error:
            raise DisconnectedError(
                f"no meta server answers at {self._url} ({error}); --admin or PULQUE_ADMIN says "
                "where it is"
            ) from None
        finally:
            connection.close()

    def _error(self, status: int, answer: bytes) -> PulqueError:
        found = _decoded(answer)
        if not isinstance(found, dict) or not isinstance(found.get("code"), int):
            return RemoteProtocolError(f"{self._url} answered {status}, and not as Pulque does")
        return error_from_wire(found["code"], str(found.get("message", "")))


def _decoded(answer: bytes) -> Any:
    try:
        return json.loads(answer)
    except ValueError:
        raise RemoteProtocolError("the answer is not JSON: is that a meta server?") from None


def _address(url: str) -> tuple[str, int]:
    try:
        parts = urlsplit(url)
        host, port = parts.hostname, parts.port
    except ValueError:
        host = port = parts = None
    if parts is None or parts.scheme != "http" or not host or parts.path.strip("/"):
        raise ConfigError(f"--admin is {url!r}; it must look like {DEFAULT_ADMIN}")
    return host, 7480 if port is None else port
