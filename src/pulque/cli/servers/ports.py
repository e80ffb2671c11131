"""Which ports other servers have that are started together with brokers."""

import socket

__all__ = ["port_above", "port_below"]

_APART = 10
"""So far below the broker's port is the meta server's, if that is free: 7440 for 7450.

The delay server's is as far above it: 7460.
"""
_PORTS = 65536


def port_below(host: str, port: int) -> int:
    """Return a port for the meta server that is easy to remember, or 0 for any free one."""
    return _free(host, port - _APART)


def port_above(host: str, port: int) -> int:
    """Return a port for the delay server that is easy to remember, or 0 for any free one."""
    return _free(host, port + _APART) if port else 0


def _free(host: str, wanted: int) -> int:
    if not 0 < wanted < _PORTS:
        return 0
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, wanted))
        except OSError:
            return 0
    return wanted
