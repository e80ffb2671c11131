"""Replication on the wire: how followers copy the logs of their leader, byte for byte."""

from typing import Annotated

from pulque.model.leadership import EpochStart
from pulque.wire.kinds import U8, U32, U64, View, many
from pulque.wire.opcodes import Opcode
from pulque.wire.packet import Packet, Response, packet

__all__ = [
    "NO_ROOM",
    "CheckpointPart",
    "CopyCheckpoint",
    "Follow",
    "Followed",
    "Replicate",
    "Replicated",
]

NO_ROOM = 3
"""Not 2: a leader that knows only of yes and no sees one that is ready."""
Epochs = Annotated[tuple[EpochStart, ...], many("epochs")]


@packet(Opcode.FOLLOW)
class Follow(Packet):
    """I want to copy your logs; this is what I have."""

    broker_group: str
    name: str
    """The follower's own."""
    directory: str
    """The id of its data directory."""
    epoch: U32
    """The epoch that it takes the leader to lead in."""
    message_end: U64
    """How far its message log reaches; 0 if it has nothing."""
    action_end: U64
    """The same of its action log."""
    epochs: Epochs
    """Where its logs were when each leadership began; the oldest first."""


@packet(Opcode.FOLLOW)
class Followed(Response):
    """The answer to ``Follow``: where to go on from."""

    epoch: U32
    """The epoch that the leader leads in."""
    is_anew: bool
    """Whether the follower has nothing to build on: it empties its logs first."""
    message_end: U64
    """Up to here the message logs are the same: what the follower has behind it must go."""
    action_end: U64
    """The same of the action logs."""
    checkpoint: U64
    """The number of the leader's newest checkpoint; 0 if it has none."""
    epochs: Epochs
    """The leader's; the follower writes them down before it copies anything."""


@packet(Opcode.REPLICATE)
class Replicate(Packet):
    """This is what I have by now; what comes next?"""

    directory: str
    """The id of the follower's data directory."""
    epoch: U32
    """The epoch that it follows in."""
    message_offset: U64
    """The next byte of the message log that it wants."""
    action_offset: U64
    """The next byte of the action log that it wants."""
    message_synced: U64
    """How much of the message log survives a power cut."""
    action_synced: U64
    """How much of the action log does."""
    ready: U8
    """Whether it could lead, once it has all: 0 for no; 1 for yes, it has a checkpoint to begin
    from; ``NO_ROOM`` for yes, but its disk is full: it would take no messages."""
    max_bytes: U32
    """How much to answer with, of each log; one whole record in any case. With 0, nothing."""
    wait_ms: U32
    """Answer after this time at the latest, though there is nothing new."""

    @property
    def is_ready(self) -> bool:
        """Whether it could lead, once it has all."""
        return self.ready > 0

    @property
    def has_room(self) -> bool:
        """Whether it would take messages then."""
        return self.ready != NO_ROOM


@packet(Opcode.REPLICATE)
class Replicated(Response):
    """The answer to ``Replicate``: bytes of both logs, none if there is nothing new.

    Bytes lie within one segment. They may end in the middle of a record; the follower keeps whole
    records and asks for the rest again.
    """

    epoch: U32
    """The epoch that the leader leads in."""
    message_base: U64
    """The segment of the message log that the bytes are of …"""
    message_offset: U64
    """… and where they begin. At the base, a new segment begins with them."""
    action_base: U64
    """The same for the action log …"""
    action_offset: U64
    """… which may begin later than asked for, if the leader's has a hole there."""
    message_end: U64
    """How far the leader's message log reaches."""
    confirmed: U64
    """Up to here all that are in sync have the message log."""
    message_oldest: U64
    """Where the leader's message log begins: segments before it can go."""
    checkpoint: U64
    """The number of the leader's newest checkpoint; 0 if it has none."""
    action_end: U64
    """How far the leader's action log reaches."""
    messages: View
    actions: View


@packet(Opcode.COPY_CHECKPOINT)
class CopyCheckpoint(Packet):
    """Give me a part of your checkpoint, so that I need not replay all from the beginning."""

    number: U64
    offset: U64
    """Where in it the part begins."""
    max_bytes: U32


@packet(Opcode.COPY_CHECKPOINT)
class CheckpointPart(Response):
    """The answer to ``CopyCheckpoint``."""

    number: U64
    """The checkpoint that it is of; 0 if the one asked for is gone."""
    size: U64
    """Of the whole checkpoint."""
    data: View
