"""Who is connected to a broker, since when, and what it holds."""

from dataclasses import dataclass
from struct import Struct
from typing import ClassVar, NamedTuple, Self

from pulque.model.names import ConsumerId, Group, Pattern
from pulque.wire.codec import Reader, Writer
from pulque.wire.opcodes import Opcode

__all__ = ["Clients", "ClientsListed", "ConnectedClient", "ConnectedConsumer"]


@dataclass(frozen=True, slots=True)
class Clients:
    """Who is connected? One page of it."""

    opcode: ClassVar[Opcode] = Opcode.CLIENTS
    _form: ClassVar[Struct] = Struct("<QI")

    after: int = 0
    """Only connections with a higher number than this."""
    max_clients: int = 1000
    """At most so many of them."""

    def write(self, to: Writer) -> None:
        """Append the fields."""
        to.pack(self._form, self.after, self.max_clients)

    @classmethod
    def read(cls, source: Reader) -> Self:
        """Take the fields."""
        return cls(*source.unpack(cls._form))


class ConnectedConsumer(NamedTuple):
    """A consumer that uses a connection, with one subscription."""

    consumer: ConsumerId
    group: Group
    subject: Pattern
    """A subject, or a pattern."""
    held: int
    """How many deliveries it has not settled."""


class ConnectedClient(NamedTuple):
    """One connection."""

    number: int
    """Counts from 1 as connections come."""
    client: str
    """What it called itself in its ``Hello``."""
    address: str
    """Where it comes from: host and port."""
    connected_at_ms: int
    """Since when."""
    silent_ms: int
    """For how long nothing was heard of it."""
    consumers: tuple[ConnectedConsumer, ...]


@dataclass(frozen=True, slots=True)
class ClientsListed:
    """The answer to ``Clients``."""

    opcode: ClassVar[Opcode] = Opcode.CLIENTS
    _number: ClassVar[Struct] = Struct("<Q")
    _times: ClassVar[Struct] = Struct("<qQ")
    _held: ClassVar[Struct] = Struct("<I")
    _count: ClassVar[Struct] = Struct("<I?")

    clients: tuple[ConnectedClient, ...]
    """In the order of their numbers."""
    total: int
    """How many there are in all."""
    has_more: bool
    """Whether another page follows: ask for those after the last number."""

    def write(self, to: Writer) -> None:
        """Append the fields."""
        to.count(len(self.clients))
        for each in self.clients:
            to.pack(self._number, each.number)
            to.text(each.client)
            to.text(each.address)
            to.pack(self._times, each.connected_at_ms, each.silent_ms)
            to.count(len(each.consumers))
            for consumer in each.consumers:
                to.text(consumer.consumer)
                to.text(consumer.group)
                to.text(consumer.subject)
                to.pack(self._held, consumer.held)
        to.pack(self._count, self.total, self.has_more)

    @classmethod
    def read(cls, source: Reader) -> Self:
        """Take the fields."""
        clients = tuple([cls._read_client(source) for _ in range(source.count())])
        return cls(clients, *source.unpack(cls._count))

    @classmethod
    def _read_client(cls, source: Reader) -> ConnectedClient:
        (number,) = source.unpack(cls._number)
        client, address = source.text(), source.text()
        connected_at_ms, silent_ms = source.unpack(cls._times)
        consumers = tuple([cls._read_consumer(source) for _ in range(source.count())])
        return ConnectedClient(number, client, address, connected_at_ms, silent_ms, consumers)

    @classmethod
    def _read_consumer(cls, source: Reader) -> ConnectedConsumer:
        consumer, group = ConsumerId(source.text()), Group(source.text())
        subject = Pattern(source.text())
        (held,) = source.unpack(cls._held)
        return ConnectedConsumer(consumer, group, subject, held)
