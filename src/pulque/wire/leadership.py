"""Leaderships on the wire: what brokers of one group ask the meta servers."""

from dataclasses import dataclass
from struct import Struct
from typing import ClassVar, Self

from pulque.model.leadership import Leadership
from pulque.model.positions import Epoch
from pulque.wire.codec import Reader, Writer
from pulque.wire.opcodes import Opcode

__all__ = ["ChangeInSync", "HandOver", "HandedOver", "InSyncChanged", "Lead", "Led"]

_MOST_IN_SYNC = 1000
_ROW = Struct("<IQH")


@dataclass(frozen=True, slots=True)
class Lead:
    """Who leads my broker group? Tell me when that differs from what I know.

    Said by every broker of a group that has followers, again and again: who is silent is not
    elected, and a leader that is silent is replaced.
    """

    opcode: ClassVar[Opcode] = Opcode.LEAD
    _form: ClassVar[Struct] = Struct("<QQH?I")

    broker_group: str
    name: str
    """The broker's own."""
    directory: str
    """The id of its data directory."""
    token: str
    """Drawn when its process was started: a leadership is granted to a process."""
    version: int
    """Of the leadership that it knows; 0 if none."""
    message_end: int
    """How far its logs are on disk, messages and facts together: who comes back with less is not
    elected."""
    min_in_sync: int
    """What it was told about the group, for the first one to write down."""
    is_fit: bool
    """Whether its logs are whole: one that lost what it had confirmed must not be elected."""
    wait_ms: int
    """Answer after this time at the latest, though nothing changed."""

    def write(self, to: Writer) -> None:
        """Append the fields."""
        to.text(self.broker_group)
        to.text(self.name)
        to.text(self.directory)
        to.text(self.token)
        to.pack(
            self._form,
            self.version,
            self.message_end,
            self.min_in_sync,
            self.is_fit,
            self.wait_ms,
        )

    @classmethod
    def read(cls, source: Reader) -> Self:
        """Take the fields."""
        group, name = source.text(), source.text()
        directory, token = source.text(), source.text()
        return cls(group, name, directory, token, *source.unpack(cls._form))


@dataclass(frozen=True, slots=True)
class Led:
    """The answer to ``Lead``."""

    opcode: ClassVar[Opcode] = Opcode.LEAD
    _form: ClassVar[Struct] = Struct("<HI")

    leadership: Leadership
    name: str
    """Of the broker that leads."""
    host: str
    """Where it can be reached …"""
    port: int
    """… and on which port."""
    lease_ms: int
    """How long a leader that asked may go on as one without asking again."""

    def write(self, to: Writer) -> None:
        """Append the fields."""
        write_leadership(self.leadership, to)
        to.text(self.name)
        to.text(self.host)
        to.pack(self._form, self.port, self.lease_ms)

    @classmethod
    def read(cls, source: Reader) -> Self:
        """Take the fields."""
        leadership = read_leadership(source)
        name, host = source.text(), source.text()
        return cls(leadership, name, host, *source.unpack(cls._form))


@dataclass(frozen=True, slots=True)
class ChangeInSync:
    """These brokers have all that was confirmed: said by the leader.

    Without itself among them, the leader asks for another one to be elected from them: the first
    one, if that can be.
    """

    opcode: ClassVar[Opcode] = Opcode.CHANGE_IN_SYNC
    _form: ClassVar[Struct] = Struct("<IQ")

    broker_group: str
    token: str
    """Of the process that leads."""
    epoch: int
    """The one that it leads in."""
    version: int
    """Of the leadership that it saw: any other is not changed."""
    in_sync: tuple[str, ...]

    def write(self, to: Writer) -> None:
        """Append the fields."""
        to.text(self.broker_group)
        to.text(self.token)
        to.pack(self._form, self.epoch, self.version)
        _write_texts(self.in_sync, to)

    @classmethod
    def read(cls, source: Reader) -> Self:
        """Take the fields."""
        group, token = source.text(), source.text()
        epoch, version = source.unpack(cls._form)
        return cls(group, token, epoch, version, _read_texts(source))


@dataclass(frozen=True, slots=True)
class InSyncChanged:
    """The answer to ``ChangeInSync``."""

    opcode: ClassVar[Opcode] = Opcode.CHANGE_IN_SYNC
    _form: ClassVar[Struct] = Struct("<?")

    is_done: bool
    """Whether it was changed as asked."""
    leadership: Leadership
    """As it is now."""

    def write(self, to: Writer) -> None:
        """Append the fields."""
        to.pack(self._form, self.is_done)
        write_leadership(self.leadership, to)

    @classmethod
    def read(cls, source: Reader) -> Self:
        """Take the fields."""
        (is_done,) = source.unpack(cls._form)
        return cls(is_done, read_leadership(source))


@dataclass(frozen=True, slots=True)
class HandOver:
    """Have another broker of the group lead: said to the leader, by command."""

    opcode: ClassVar[Opcode] = Opcode.HAND_OVER

    to: str = ""
    """The id of the data directory that is to lead; empty for any that has all."""

    def write(self, to: Writer) -> None:
        """Append the fields."""
        to.text(self.to)

    @classmethod
    def read(cls, source: Reader) -> Self:
        """Take the fields."""
        return cls(source.text())


@dataclass(frozen=True, slots=True)
class HandedOver:
    """The answer to ``HandOver``: another broker leads."""

    opcode: ClassVar[Opcode] = Opcode.HAND_OVER

    leadership: Leadership
    """As it is now."""

    def write(self, to: Writer) -> None:
        """Append the fields."""
        write_leadership(self.leadership, to)

    @classmethod
    def read(cls, source: Reader) -> Self:
        """Take the fields."""
        return cls(read_leadership(source))


def write_leadership(leadership: Leadership, to: Writer) -> None:
    """Append a leadership."""
    to.text(leadership.broker_group)
    to.pack(_ROW, leadership.epoch, leadership.version, leadership.min_in_sync)
    to.text(leadership.leader)
    to.text(leadership.token)
    _write_texts(leadership.in_sync, to)


def read_leadership(source: Reader) -> Leadership:
    """Take a leadership."""
    group = source.text()
    epoch, version, min_in_sync = source.unpack(_ROW)
    leader, token = source.text(), source.text()
    in_sync = _read_texts(source)
    return Leadership(group, Epoch(epoch), version, leader, token, in_sync, min_in_sync)


def _write_texts(texts: tuple[str, ...], to: Writer) -> None:
    to.count(len(texts))
    for text in texts:
        to.text(text)


def _read_texts(source: Reader) -> tuple[str, ...]:
    count = source.count("brokers in sync", most=_MOST_IN_SYNC, least_size=2)
    return tuple([source.text() for _ in range(count)])
