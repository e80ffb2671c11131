"""What every connection asks of its socket, on both sides."""

import contextlib
import socket

__all__ = ["prepare_socket"]

_CONGESTION: int | None = getattr(socket, "TCP_CONGESTION", None)
"""Only Linux has it."""
_WITHOUT_PACING = b"reno"
"""Every Linux has it, and allows it to everybody."""
_LOOPBACK = ("127.", "::ffff:127.")


def prepare_socket(sock: socket.socket) -> None:
    """Have small frames leave at once, and large ones without being paced on the same machine.

    Systems that pace what they send (BBR, common on servers) do so on loopback, too, where
    nothing can be congested. On a busy machine that cost a third of the bandwidth, on an idle
    one nothing that could be told from chance.
    """
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    if _CONGESTION is not None and _is_loopback(sock):
        # A system that refuses has its reasons, and everything works without.
        with contextlib.suppress(OSError):
            sock.setsockopt(socket.IPPROTO_TCP, _CONGESTION, _WITHOUT_PACING)


def _is_loopback(sock: socket.socket) -> bool:
    try:
        host: str = sock.getpeername()[0]
    except OSError:
        return False  # it is gone already
    return host == "::1" or host.startswith(_LOOPBACK)
