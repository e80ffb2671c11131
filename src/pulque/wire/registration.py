"""How a broker or a delay server makes itself known to the meta servers, and goes on doing so."""

from typing import Annotated

from pulque.model.cluster import ServerState
from pulque.model.routes import Role
from pulque.wire.kinds import I64, U16, U32, U64, many
from pulque.wire.opcodes import Opcode
from pulque.wire.packet import Packet, Response, packet

__all__ = ["Register", "Registered", "ServerState"]


@packet(Opcode.REGISTER, first="cluster name broker_group host directory")
class Register(Packet):
    """Here I am: said to every meta server at the start, and then again and again."""

    cluster: str
    """The cluster that it belongs to; empty to take the meta server's."""
    name: str
    """Its own name; no two servers of a cluster have the same."""
    broker_group: str
    """Whose partitions it holds; of a delay server, its own name."""
    role: Role
    host: str
    """Where clients reach it …"""
    port: U16
    """… and on which port."""
    directory: str
    """The id of its data directory: tells a restart from another broker of the same name."""
    incarnation: U64
    """Grows with every start on the same directory."""
    now_ms: I64
    """What its clock says."""
    state: ServerState
    partitions: U64
    """How many it has."""
    log_bytes: U64
    """How much its message log holds."""


@packet(Opcode.REGISTER)
class Registered(Response):
    """The answer to ``Register``: what holds for this server now."""

    cluster: str
    """The cluster that it belongs to."""
    heartbeat_ms: U32
    """When to say it again; who is silent for three times as long leaves the routes."""
    is_read_only: bool
    """It takes no sends, by command; consumption goes on."""
    is_draining: bool
    """It takes no sends, and is to be removed when everything is consumed."""
    may_create: bool
    """Whether a first send creates its subject."""
    marks_version: U64
    """Differs when the list of read-only subjects does."""
    read_only: Annotated[tuple[str, ...], many(each="subject")]
    """Subjects and patterns that take no sends."""
    warning: str = ""
    """What somebody should look at, such as a clock that is far off; for the server's log."""
