"""The administration API as commands use it: plain HTTP of the standard library.

``http.client`` follows no redirects and no proxies of the environment, which a server on this
machine needs none of; and commands that never ask for it pay nothing for it.
"""

import json
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, NamedTuple
from urllib.parse import quote, urlencode, urlsplit

import typer

from pulque.cli.common.admin_address import find_admin
from pulque.cli.common.options import Tools
from pulque.cli.common.output import print_warning
from pulque.client.connection.url import DEFAULT_URL, Address, addresses_of
from pulque.errors import (
    ConfigError,
    DisconnectedError,
    InvalidNameError,
    PulqueError,
    RemoteProtocolError,
    RequestTimeoutError,
    UnavailableError,
    UsageError,
    error_from_wire,
)
from pulque.settings.foreign import quoted

__all__ = ["Admin", "AdminClient", "open_admin", "path_of"]

DEFAULT_ADMIN = "http://127.0.0.1:7480"
_PREFIX = "/api/v1"
_MAX_ANSWER = 256 * 1024 * 1024
_AT_ONCE = 1000
_FAILED = 400
_REPEATABLE = {"GET", "PUT"}
"""What has the same effect however often it is done."""

_HINT = "--admin or PULQUE_ADMIN says where meta servers listen"
_HINT_WITHOUT_URL = (
    f"nor does a server at {DEFAULT_URL}: --url or PULQUE_URL says where one of the cluster "
    "listens, --admin or PULQUE_ADMIN where its API does"
)

Admin = Annotated[
    str | None,
    typer.Option(
        "--admin",
        envvar="PULQUE_ADMIN",
        metavar="URL",
        show_default=False,
        help="Where the administration API listens, if the server of --url is not to say it; "
        "several, with commas between them, are tried in turn.",
    ),
]


def open_admin(
    context: typer.Context, url: str | None, admin: str | None, timeout: float
) -> "AdminClient":
    """Return a client of the API that is given, or of the one that the server of a URL names.

    A flag counts more than a variable of the environment; of two flags or two variables,
    ``--admin`` and ``PULQUE_ADMIN``. Without any of them, the API on its usual port is asked if no
    server listens at the usual URL.

    Raises:
        ConfigError: A URL is not one.
        UsageError: The time is no time.
        UnavailableError: No server answers, or those that do know of no API.
    """
    if timeout <= 0:
        raise UsageError("--timeout must be above 0")
    is_flag = {name: _is_flag(context, name) for name in ("url", "admin")}
    if admin is not None and (is_flag["admin"] or not is_flag["url"]):
        return AdminClient(admin, timeout)
    tools: Tools = context.obj

    def ask(address: Address) -> dict[str, Any]:
        with tools.connect(f"pulque://{address}", timeout=timeout) as client:
            report: dict[str, Any] = client.status()
            return report

    try:
        found = find_admin(addresses_of(url, {}), ask)
        return AdminClient(found.url, timeout, cluster=found.cluster)
    except DisconnectedError:
        if url is not None:
            raise
        return AdminClient(DEFAULT_ADMIN, timeout, hint=_HINT_WITHOUT_URL)


def _is_flag(context: typer.Context, name: str) -> bool:
    source = context.get_parameter_source(name)
    return source is not None and source.name == "COMMANDLINE"


def path_of(*parts: str | int) -> str:
    """Return a path of the API; what is in a name stays in it.

    Raises:
        InvalidNameError: A name is empty, or not UTF-8.
    """
    if "" in parts:
        raise InvalidNameError("a name is '' and must have at least one character")
    try:
        return "".join(f"/{quote(str(part), safe='')}" for part in parts)
    except UnicodeEncodeError as error:
        raise InvalidNameError(f"a name is {quoted(error.object)} and must be UTF-8") from None


class AdminClient:
    """Asks meta servers, one at a time; each request has a connection of its own.

    Args:
        urls: Where they listen, with commas between them. The next one is asked when one does not
            answer; the one that did is asked first from then on.
        timeout: How long each of them may take, in seconds.
        hint: What the error says if none of them answers.
        cluster: The id of the cluster that they must be of; it is checked before anything else is
            asked. Empty if it is not known.
    """

    def __init__(self, urls: str, timeout: float, *, hint: str = _HINT, cluster: str = "") -> None:
        self._timeout = timeout
        self._hint = hint
        self._cluster = cluster
        self._places = _places(urls)

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
            InvalidNameError: What is asked for is not UTF-8.
            UnavailableError: The API is of another cluster.
            PulqueError: The server said no, or nothing.
        """
        self._check_cluster()
        target = f"{_PREFIX}{path}{_query(query or {})}"
        data = None if body is None else json.dumps(body).encode()
        headers = {} if body is None else {"Content-Type": "application/json"}
        status, answer = self._talk(method, target, data, headers)
        if status >= _FAILED:
            raise self._error(status, answer)
        return _decoded(answer) if answer else None

    def _check_cluster(self) -> None:
        """Check once that the API is of the right cluster: ports may be forwarded."""
        expected, self._cluster = self._cluster, ""
        if not expected:
            return
        found = self.get("/cluster")["cluster"]
        if found != expected:
            raise UnavailableError(
                f"the API at {self._places[0].url} is of cluster {found!r}, and the server of "
                f"--url of cluster {expected!r}: give --admin URL or PULQUE_ADMIN"
            )

    def _talk(
        self, method: str, target: str, data: bytes | None, headers: Mapping[str, str]
    ) -> tuple[int, bytes]:
        """Ask each of them until one answers."""
        problems: list[PulqueError] = []
        for place in list(self._places):
            try:
                answer = self._ask_one(place, method, target, data, headers)
            except _NoAnswerError as error:
                problems.append(error.problem)
                if error.may_be_done and method not in _REPEATABLE:
                    # Another server would do it a second time, or refuse what is done.
                    raise type(error.problem)(
                        f"{error.problem}; whether it was done is not known: look before you "
                        "repeat it"
                    ) from None
            else:
                self._places.remove(place)
                self._places.insert(0, place)
                return answer
        found = "; ".join(map(str, problems))
        raise type(problems[-1])(f"{found}; {self._hint}")

    def _ask_one(
        self,
        place: "_Place",
        method: str,
        target: str,
        data: bytes | None,
        headers: Mapping[str, str],
    ) -> tuple[int, bytes]:
        # Slow to import, and most commands ask nobody by HTTP.
        from http.client import HTTPConnection, HTTPException

        url, host, port = place
        connection = HTTPConnection(host, port, timeout=self._timeout)
        is_sent = False
        try:
            connection.connect()
            is_sent = True
            connection.request(method, target, data, dict(headers))
            response = connection.getresponse()
            return response.status, response.read(_MAX_ANSWER)
        except TimeoutError:
            late = RequestTimeoutError(f"no answer from {url} within {self._timeout:.1f} s")
            raise _NoAnswerError(late, may_be_done=is_sent) from None
        except (OSError, HTTPException) as error:
            gone = DisconnectedError(f"no meta server answers at {url} ({error})")
            raise _NoAnswerError(gone, may_be_done=is_sent) from None
        finally:
            connection.close()

    def _error(self, status: int, answer: bytes) -> PulqueError:
        found = _decoded(answer)
        if not isinstance(found, dict) or not isinstance(found.get("code"), int):
            url = self._places[0].url
            return RemoteProtocolError(f"{url} answered {status}, and not as Pulque does")
        return error_from_wire(found["code"], str(found.get("message", "")))


def _query(query: Mapping[str, object]) -> str:
    given = {name: value for name, value in query.items() if value is not None}
    try:
        return f"{'?' if given else ''}{urlencode(given)}"
    except UnicodeEncodeError as error:
        raise InvalidNameError(f"{quoted(error.object)} was given and must be UTF-8") from None


def _decoded(answer: bytes) -> Any:
    try:
        return json.loads(answer)
    except ValueError:
        raise RemoteProtocolError("the answer is not JSON: is that a meta server?") from None


class _Place(NamedTuple):
    url: str
    host: str
    port: int


class _NoAnswerError(Exception):
    """A meta server did not answer."""

    def __init__(self, problem: PulqueError, *, may_be_done: bool) -> None:
        super().__init__(str(problem))
        self.problem = problem
        self.may_be_done = may_be_done
        """Whether it may have heard the request."""


def _places(urls: str) -> list[_Place]:
    """Return the addresses that ``--admin`` names; ``http://`` need only be before the first."""
    first, *rest = (each.strip() for each in urls.split(","))
    named = [first, *(each if "://" in each else f"http://{each}" for each in rest)]
    return [_Place(each, *_address(each)) for each in dict.fromkeys(named)]


def _address(url: str) -> tuple[str, int]:
    try:
        parts = urlsplit(url)
        host, port = parts.hostname, parts.port
    except ValueError:
        host = port = parts = None
    if parts is None or parts.scheme != "http" or not host or parts.path.strip("/"):
        raise ConfigError(
            f"--admin is {url!r}; it must look like {DEFAULT_ADMIN}, or like several of them with "
            "commas between them"
        )
    return host, 7480 if port is None else port
