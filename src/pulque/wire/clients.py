"""Who is connected to a broker, since when, and what it holds."""

from typing import NamedTuple

from pulque.model.names import ConsumerId, Group, Pattern
from pulque.wire.kinds import I64, U32, U64
from pulque.wire.opcodes import Opcode
from pulque.wire.packet import Packet, Response, packet

__all__ = ["Clients", "ClientsListed", "ConnectedClient", "ConnectedConsumer"]


@packet(Opcode.CLIENTS)
class Clients(Packet):
    """Who is connected? One page of it."""

    after: U64 = 0
    """Only connections with a higher number than this."""
    max_clients: U32 = 1000
    """At most so many of them."""


class ConnectedConsumer(NamedTuple):
    """A consumer that uses a connection, with one subscription."""

    consumer: ConsumerId
    group: Group
    subject: Pattern
    """A subject, or a pattern."""
    held: U32
    """How many deliveries it has not settled."""


class ConnectedClient(NamedTuple):
    """One connection."""

    number: U64
    """Counts from 1 as connections come."""
    client: str
    """What it called itself in its ``Hello``."""
    address: str
    """Where it comes from: host and port."""
    connected_at_ms: I64
    """Since when."""
    silent_ms: U64
    """For how long nothing was heard of it."""
    consumers: tuple[ConnectedConsumer, ...]


@packet(Opcode.CLIENTS)
class ClientsListed(Response):
    """The answer to ``Clients``."""

    clients: tuple[ConnectedClient, ...]
    """In the order of their numbers."""
    total: U32
    """How many there are in all."""
    has_more: bool
    """Whether another page follows: ask for those after the last number."""
