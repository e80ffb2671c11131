"""How a broker or a delay server makes itself known to the meta servers, and goes on doing so."""

from dataclasses import dataclass
from struct import Struct
from typing import ClassVar, Self

from pulque.model.cluster import ServerState
from pulque.model.routes import Role
from pulque.wire.codec import Reader, Writer
from pulque.wire.groups import known
from pulque.wire.opcodes import Opcode

__all__ = ["Register", "Registered", "ServerState"]


@dataclass(frozen=True, slots=True)
class Register:
    """Here I am: said to every meta server at the start, and then again and again."""

    opcode: ClassVar[Opcode] = Opcode.REGISTER
    _form: ClassVar[Struct] = Struct("<BHQqBQQ")

    cluster: str
    """The cluster that it belongs to; empty to take the meta server's."""
    name: str
    """Its own name; no two servers of a cluster have the same."""
    broker_group: str
    """Whose partitions it holds; of a delay server, its own name."""
    role: Role
    host: str
    """Where clients reach it …"""
    port: int
    """… and on which port."""
    directory: str
    """The id of its data directory: tells a restart from another broker of the same name."""
    incarnation: int
    """Grows with every start on the same directory."""
    now_ms: int
    """What its clock says."""
    state: ServerState
    partitions: int
    """How many it has."""
    log_bytes: int
    """How much its message log holds."""

    def write(self, to: Writer) -> None:
        """Append the fields."""
        to.text(self.cluster)
        to.text(self.name)
        to.text(self.broker_group)
        to.text(self.host)
        to.text(self.directory)
        to.pack(
            self._form,
            self.role,
            self.port,
            self.incarnation,
            self.now_ms,
            self.state,
            self.partitions,
            self.log_bytes,
        )

    @classmethod
    def read(cls, source: Reader) -> Self:
        """Take the fields."""
        cluster, name, broker_group = source.text(), source.text(), source.text()
        host, directory = source.text(), source.text()
        role, port, incarnation, now_ms, state, partitions, size = source.unpack(cls._form)
        return cls(
            cluster,
            name,
            broker_group,
            known(Role, role, "role"),
            host,
            port,
            directory,
            incarnation,
            now_ms,
            known(ServerState, state, "state"),
            partitions,
            size,
        )


@dataclass(frozen=True, slots=True)
class Registered:
    """The answer to ``Register``: what holds for this server now."""

    opcode: ClassVar[Opcode] = Opcode.REGISTER
    _form: ClassVar[Struct] = Struct("<I???Q")

    cluster: str
    """The cluster that it belongs to."""
    heartbeat_ms: int
    """When to say it again; who is silent for three times as long leaves the routes."""
    is_read_only: bool
    """It takes no sends, by command; consumption goes on."""
    is_draining: bool
    """It takes no sends, and is to be removed when everything is consumed."""
    may_create: bool
    """Whether a first send creates its subject."""
    marks_version: int
    """Differs when the list of read-only subjects does."""
    read_only: tuple[str, ...]
    """Subjects and patterns that take no sends."""
    warning: str = ""
    """What somebody should look at, such as a clock that is far off; for the server's log."""

    def write(self, to: Writer) -> None:
        """Append the fields."""
        to.text(self.cluster)
        to.pack(
            self._form,
            self.heartbeat_ms,
            self.is_read_only,
            self.is_draining,
            self.may_create,
            self.marks_version,
        )
        to.count(len(self.read_only))
        for subject in self.read_only:
            to.text(subject)
        to.text(self.warning)

    @classmethod
    def read(cls, source: Reader) -> Self:
        """Take the fields."""
        cluster = source.text()
        beat_ms, is_read_only, is_draining, may_create, version = source.unpack(cls._form)
        marks = tuple([source.text() for _ in range(source.count())])
        warning = source.text()
        return cls(
            cluster, beat_ms, is_read_only, is_draining, may_create, version, marks, warning
        )
