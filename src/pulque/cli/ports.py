"""Which port the meta server has that is started together with brokers."""

import socket

__all__ = ["port_below"]

_BELOW = 10
"""So far below the broker's port is the meta server's, if that is free: 7440 for 7450."""


def port_below(host: str, port: int) -> int:
    """Return a port that is easy to remember, or 0 for any free one."""
    wanted = port - _BELOW
    if wanted <= 0:
        return 0
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, wanted))
        except OSError:
            return 0
    return wanted
