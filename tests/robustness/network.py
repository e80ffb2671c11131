"""A network of machines that can be cut in two, one way too: namespaces, joined by a bridge.

Each machine is a network namespace with one address. Servers listen on loopback addresses only, so
the network is ``127.77.0.0/24``: inside a namespace such an address can lie on a cable like any
other. What is cut is lost without a word, as when somebody pulls a plug: the sender's table of
neighbours gets a hardware address that nobody has.
"""

import contextlib
import ctypes
import os
import secrets
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

__all__ = ["Network", "why_not"]

_HUB = "hub"
_NOBODY = "02:00:00:00:00:ff"
_NAMESPACES = Path("/run/netns")
_NEW_NETWORK = 0x40000000
_PATIENCE_S = 20.0


def why_not() -> str | None:
    """Return why there can be no such network here; None if there can."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    if shutil.which("ip") is None:
        return "the command ip is not installed (Debian: apt install iproute2)"
    try:
        with Network(["probe"]) as network:
            network.cut("probe", "probe")
    except (OSError, subprocess.SubprocessError) as error:
        return f"network namespaces do not work here: {error}"
    return None


class Network:
    """Machines by name, each reached by all others until it is cut off. Used by one thread."""

    def __init__(self, machines: Sequence[str]) -> None:
        self._prefix = f"pulque-{secrets.token_hex(3)}"
        self.addresses = {name: f"127.77.0.{n}" for n, name in enumerate(machines, 1)}
        """Where each can be reached."""
        self._lost: set[tuple[str, str]] = set()
        try:
            self._make()
        except BaseException:
            self.close()
            raise

    @contextlib.contextmanager
    def inside(self, machine: str) -> Iterator[None]:
        """Have this thread, and what it starts meanwhile, belong to a machine."""
        with Path("/proc/thread-self/ns/net").open("rb") as before:
            with (_NAMESPACES / self._namespace(machine)).open("rb") as there:
                _enter(there.fileno())
            try:
                yield
            finally:
                _enter(before.fileno())

    def cut(self, one: str, other: str, *, one_way: bool = False) -> None:
        """Lose what two machines say to each other; or only what the first says."""
        for sender, receiver in ((one, other), (other, one))[: 1 if one_way else 2]:
            self._neighbour("replace", sender, receiver, "lladdr", _NOBODY, "nud", "permanent")
            self._lost.add((sender, receiver))

    def isolate(self, machine: str) -> None:
        """Cut a machine off from all others."""
        for other in self.addresses.keys() - {machine}:
            self.cut(machine, other)

    def heal(self) -> None:
        """Let all reach each other again."""
        for sender, receiver in self._lost:
            self._neighbour("del", sender, receiver)
        self._lost.clear()

    def close(self) -> None:
        """Remove it; what still runs inside has no network then."""
        for machine in [*self.addresses, _HUB]:
            if (_NAMESPACES / self._namespace(machine)).exists():
                _ip("netns", "del", self._namespace(machine))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _make(self) -> None:
        _ip("netns", "add", self._namespace(_HUB))
        self._at(_HUB, "link add bridge type bridge")
        self._at(_HUB, "link set bridge up")
        for number, (machine, address) in enumerate(self.addresses.items()):
            _ip("netns", "add", self._namespace(machine))
            hub = self._namespace(_HUB)
            self._at(machine, f"link add cable type veth peer name port{number} netns {hub}")
            self._at(_HUB, f"link set port{number} master bridge up")
            with self.inside(machine):
                for which in ("all", "cable"):
                    Path(f"/proc/sys/net/ipv4/conf/{which}/route_localnet").write_text("1")
            # For a machine that talks to itself; it would take all of 127.0.0.0/8.
            self._at(machine, "link set lo up")
            self._at(machine, "addr flush dev lo")
            self._at(machine, f"addr add {address}/24 dev cable")
            self._at(machine, "link set cable up")

    def _neighbour(self, verb: str, sender: str, receiver: str, *more: str) -> None:
        to = self.addresses[receiver]
        self._at(sender, " ".join(["neigh", verb, to, "dev", "cable", *more]))

    def _at(self, machine: str, command: str) -> None:
        _ip("-n", self._namespace(machine), *command.split())

    def _namespace(self, machine: str) -> str:
        return f"{self._prefix}-{machine}"


def _ip(*arguments: str) -> None:
    done = subprocess.run(
        ["ip", *arguments], check=False, capture_output=True, text=True, timeout=_PATIENCE_S
    )
    if done.returncode:
        raise OSError(f"ip {' '.join(arguments)}: {done.stderr.strip()}")


def _enter(namespace: int) -> None:
    if ctypes.CDLL(None, use_errno=True).setns(namespace, _NEW_NETWORK):
        number = ctypes.get_errno()
        raise OSError(number, f"setns: {os.strerror(number)}")
