"""Leaderships on the wire: what brokers of one group ask the meta servers."""

from typing import Annotated

from pulque.model.leadership import Leadership
from pulque.model.positions import Epoch
from pulque.wire.kinds import U16, U32, U64, describe, many
from pulque.wire.opcodes import Opcode
from pulque.wire.packet import Packet, Response, packet

__all__ = ["ChangeInSync", "HandOver", "HandedOver", "InSyncChanged", "Lead", "Led"]

InSync = Annotated[tuple[str, ...], many("brokers in sync", most=1000, each="directory")]
describe(
    Leadership,
    broker_group=str,
    epoch=Epoch,
    version=U64,
    min_in_sync=U16,
    leader=str,
    token=str,
    in_sync=InSync,
)


@packet(Opcode.LEAD)
class Lead(Packet):
    """Who leads my broker group? Tell me when that differs from what I know.

    Said by every broker of a group that has followers, again and again: who is silent is not
    elected, and a leader that is silent is replaced.
    """

    broker_group: str
    name: str
    """The broker's own."""
    directory: str
    """The id of its data directory."""
    token: str
    """Drawn when its process was started: a leadership is granted to a process."""
    version: U64
    """Of the leadership that it knows; 0 if none."""
    message_end: U64
    """How far its logs are on disk, messages and facts together: who comes back with less is not
    elected."""
    min_in_sync: U16
    """What it was told about the group, for the first one to write down."""
    is_fit: bool
    """Whether its logs are whole: one that lost what it had confirmed must not be elected."""
    wait_ms: U32
    """Answer after this time at the latest, though nothing changed."""


@packet(Opcode.LEAD)
class Led(Response):
    """The answer to ``Lead``."""

    leadership: Leadership
    name: str
    """Of the broker that leads."""
    host: str
    """Where it can be reached …"""
    port: U16
    """… and on which port."""
    lease_ms: U32
    """How long a leader that asked may go on as one without asking again."""


@packet(Opcode.CHANGE_IN_SYNC)
class ChangeInSync(Packet):
    """These brokers have all that was confirmed: said by the leader.

    Without itself among them, the leader asks for another one to be elected from them: the first
    one, if that can be.
    """

    broker_group: str
    token: str
    """Of the process that leads."""
    epoch: U32
    """The one that it leads in."""
    version: U64
    """Of the leadership that it saw: any other is not changed."""
    in_sync: InSync


@packet(Opcode.CHANGE_IN_SYNC)
class InSyncChanged(Response):
    """The answer to ``ChangeInSync``."""

    is_done: bool
    """Whether it was changed as asked."""
    leadership: Leadership
    """As it is now."""


@packet(Opcode.HAND_OVER)
class HandOver(Packet):
    """Have another broker of the group lead: said to the leader, by command."""

    to: str = ""
    """The id of the data directory that is to lead; empty for any that has all."""


@packet(Opcode.HAND_OVER)
class HandedOver(Response):
    """The answer to ``HandOver``: another broker leads."""

    leadership: Leadership
    """As it is now."""
