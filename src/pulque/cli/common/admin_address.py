"""Find the administration API by way of ``--url``: its server says where the API is.

A meta server says where its own API listens. A broker or a delay server names its meta servers,
which are asked in turn. What a server says is used only if it is ``http://HOST:PORT`` of a
loopback address, and only if that server itself was reached at a loopback address. A loopback
address that a server of another machine names is on that machine, and is not asked here. A meta
server must be of the cluster of the server that names it: this machine may have one of its own.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from ipaddress import ip_address
from itertools import chain
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from pulque.client.connection.url import META_PORT, Address, parse_address
from pulque.errors import ConfigError, DisconnectedError, UnavailableError

__all__ = ["AskStatus", "FoundApi", "find_admin"]

AskStatus = Callable[[Address], Mapping[str, Any]]
"""Returns what the server at an address says of itself, as ``Client.status`` does."""
_OVERRIDE = "give --admin URL or PULQUE_ADMIN if it listens elsewhere"
_MOST = 64
"""More meta servers than that of one broker are not asked."""


class FoundApi(NamedTuple):
    """Where the administration API of a cluster is."""

    url: str
    cluster: str
    """The id of the cluster; empty if its servers do not say it."""


class _FoundAddress(NamedTuple):
    """What one server says that matters here."""

    cluster: str
    """The id of its cluster; empty if it has none."""
    admin: str
    """Where its API listens; empty if it has none, or none that may be used."""
    metas: tuple[Address, ...]
    """The meta servers that it names."""
    text: str
    """What was found, for the error if nothing else is."""


def find_admin(addresses: Sequence[Address], ask: AskStatus) -> FoundApi:
    """Return the API of the cluster that the first server to answer belongs to.

    Raises:
        DisconnectedError: No server answers.
        UnavailableError: The servers that answer know of no API, or of none that may be used.
    """
    search = _Search(ask)
    for server in search.ask_each(addresses):
        for each in chain([server], search.ask_each(server.metas)):
            if each.admin and search.is_of_one_cluster(server, each):
                return FoundApi(each.admin, each.cluster)
    what = "; ".join(search.texts)
    if not search.has_answer:
        raise DisconnectedError(f"{what}; --url or PULQUE_URL says where a server listens")
    raise UnavailableError(f"no administration API is known: {what}; {_OVERRIDE}")


class _Search:
    """Asks servers, each once, and remembers what they said."""

    def __init__(self, ask: AskStatus) -> None:
        self._ask = ask
        self._asked: set[Address] = set()
        self.texts: list[str] = []
        self.has_answer = False

    def ask_each(self, addresses: Sequence[Address]) -> Iterator[_FoundAddress]:
        for address in addresses:
            if address in self._asked:
                continue
            self._asked.add(address)
            try:
                found = _read(address, self._ask(address))
            except UnavailableError as error:
                self.texts.append(str(error))
                continue
            self.has_answer = True
            self.texts.append(found.text)
            yield found

    def is_of_one_cluster(self, server: _FoundAddress, meta: _FoundAddress) -> bool:
        """Return whether a meta server is of the cluster of the server that names it."""
        if not server.cluster or server.cluster == meta.cluster:
            return True
        self.texts.append(
            f"the API at {meta.admin} is of cluster {meta.cluster!r}, and the server that names "
            f"its meta server is of cluster {server.cluster!r}"
        )
        return False


def _read(address: Address, report: Mapping[str, Any]) -> _FoundAddress:
    """Understand what the server at an address says."""
    if report.get("role") == "meta":
        admin = report.get("admin")
        problem = _problem_of(admin, address)
        cluster = _text(report.get("cluster"))
        return _FoundAddress(cluster, "" if problem else str(admin), (), problem)
    kind = "delay server" if "delay" in report else "broker"
    name = report.get(kind.partition(" ")[0])
    who = f"the {kind} at {address} ({name})"
    cluster = _text(_cluster_of(report).get("id"))
    metas = _metas_of(report)
    if metas:
        text = f"{who} names meta servers at {', '.join(map(str, metas))}"
        if not _is_loopback(address.host):
            far = tuple(each for each in metas if not _is_loopback(each.host))
            text += "" if far else ", on its own machine: run the command there"
            metas = far
        return _FoundAddress(cluster, "", metas, text)
    text = (
        f"{who} stands alone, and the API is part of meta servers: start one with "
        "`pulque meta` and name it in the broker's cluster.meta, or start `pulque up`"
    )
    return _FoundAddress(cluster, "", (), text)


def _text(found: object) -> str:
    return found if isinstance(found, str) else ""


def _cluster_of(report: Mapping[str, Any]) -> Mapping[str, Any]:
    found = report.get("cluster")
    return found if isinstance(found, Mapping) else {}


def _metas_of(report: Mapping[str, Any]) -> tuple[Address, ...]:
    """Return the meta servers that a server names, those that it can reach first."""
    found: dict[Address, None] = {}
    for key in ("registered_at", "meta", "meta_servers"):
        named = _cluster_of(report).get(key)
        for each in named if isinstance(named, list) else ():
            if isinstance(each, str) and len(found) < _MOST:
                try:
                    found[parse_address(each, default_port=META_PORT)] = None
                except ConfigError:
                    continue
    return tuple(found)


def _problem_of(admin: object, address: Address) -> str:
    """Return why what a meta server says of its API may not be used; empty if it may."""
    if not admin:
        return f"the meta server at {address} has no API (admin.enabled is false)"
    told = f"the meta server at {address} says that its API is at {admin!r}"
    host = _host_of(admin) if isinstance(admin, str) else None
    if host is None:
        return f"{told}, and only a URL such as http://127.0.0.1:7480 is used"
    if not (_is_loopback(host) and _is_loopback(address.host)):
        return f"{told}, which is of its own machine: run the command there, or forward the port"
    return ""


def _host_of(url: str) -> str | None:
    """Return the host of a URL that is ``http://HOST:PORT`` and nothing else."""
    try:
        parts = urlsplit(url)
        host, port = parts.hostname, parts.port
    except ValueError:
        return None
    if parts.scheme != "http" or not host or not port:
        return None
    shown = f"[{host}]" if ":" in host else host
    return host if url == f"http://{shown}:{port}" else None


def _is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return False
