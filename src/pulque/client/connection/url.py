"""Where the broker listens, as people write it: ``pulque://host:port``, or several with commas."""

from collections.abc import Mapping
from typing import NamedTuple

from pulque.errors import ConfigError

__all__ = [
    "DEFAULT_PORT",
    "DEFAULT_URL",
    "META_PORT",
    "URL_VARIABLE",
    "Address",
    "addresses_of",
    "parse_address",
    "parse_url",
]

DEFAULT_PORT = 7450
META_PORT = 7440
"""Where a meta server listens if nobody says otherwise."""
DEFAULT_URL = f"pulque://127.0.0.1:{DEFAULT_PORT}"
URL_VARIABLE = "PULQUE_URL"
_SCHEME = "pulque://"


class Address(NamedTuple):
    """Where one broker listens."""

    host: str
    port: int

    def __str__(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{host}:{self.port}"


def addresses_of(url: str | None, environ: Mapping[str, str]) -> tuple[Address, ...]:
    """Return where to connect to: what the caller says, else the environment, else the default."""
    if url is not None:
        return parse_url(url, setting="url")
    if named := environ.get(URL_VARIABLE):
        return parse_url(named, setting=URL_VARIABLE)
    return parse_url(DEFAULT_URL, setting="the default url")


def parse_url(text: object, *, setting: str = "url") -> tuple[Address, ...]:
    """Return the addresses of a URL; the first one is tried first.

    Raises:
        ConfigError: It is not such a URL.
    """
    if not isinstance(text, str) or not text.startswith(_SCHEME):
        raise ConfigError(f"{setting} is {text!r}; it must look like {DEFAULT_URL}")
    hosts = text.removeprefix(_SCHEME).rstrip("/")
    told = f"{setting} is {text!r}: "
    return tuple(
        parse_address(each, default_port=DEFAULT_PORT, told=told) for each in hosts.split(",")
    )


def parse_address(text: str, *, default_port: int, told: str = "") -> Address:
    """Return one address, written as ``host:port``, ``host`` or ``[::1]:port``.

    Args:
        text: The address.
        default_port: For one that names none.
        told: What the text of an error begins with.

    Raises:
        ConfigError: It is no address.
    """
    host, colon, port = text.strip().rpartition(":")
    if not colon or text.endswith("]"):
        host, port = text.strip(), str(default_port)
    bare = host[1:-1] if host.startswith("[") and host.endswith("]") else host
    if not bare or any(c in bare for c in "/@?# []") or (":" in bare and bare is host):
        raise ConfigError(f"{told}{text!r} is not host:port")
    if not (port.isascii() and port.isdigit() and 0 < int(port) <= 65535):
        raise ConfigError(f"{told}{port!r} is not a port (1 to 65535)")
    return Address(bare, int(port))
