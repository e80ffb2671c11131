"""Finding stored messages, on the wire: by key, by id, or by when they were stored."""

from typing import NamedTuple

from pulque.model.names import PartitionName
from pulque.model.positions import ConsumeSequence
from pulque.wire.kinds import I64, U32
from pulque.wire.opcodes import Opcode
from pulque.wire.packet import Packet, Response, packet

__all__ = ["ANY_TIME_MS", "FIND_LIMIT", "MAX_FOUND", "Find", "FoundMessage", "FoundMessages"]

FIND_LIMIT = 32
"""How many messages are answered with, unless more are asked for."""
MAX_FOUND = 1000
"""No answer has more of them."""
ANY_TIME_MS = 2**63 - 1
"""As the end of a range of time: it has none."""


@packet(Opcode.FIND)
class Find(Packet):
    """Which messages have this key, or this id, or were stored at that time?"""

    subject: str
    """Of this subject; empty for all, if an id is looked for."""
    key: str = ""
    """With this key; empty for any. Messages with another key of the same hash may be among the
    answers: whoever asks compares."""
    id: bytes = b""
    """With this id, sixteen bytes; empty for any. The same holds for it."""
    since_ms: I64 = 0
    """Stored at or after this instant …"""
    until_ms: I64 = ANY_TIME_MS
    """… and before this one."""
    max_messages: U32 = FIND_LIMIT
    """At most so many, and never more than ``MAX_FOUND``."""
    max_bytes: U32 = 1024 * 1024
    """About so many bytes of them; one is answered with, however large."""
    timeout_ms: U32 = 1000
    """How long to look; what is found by then is answered with, and where to go on."""
    copies: bool = False
    """Whether retries and dead letters of the subject's groups count, too."""
    after: bytes = b""
    """Where the last answer ended, as it said; empty for the first."""


class FoundMessage(NamedTuple):
    """A message that was found."""

    partition: PartitionName
    sequence: ConsumeSequence
    stored_at_ms: I64
    batch: bytes
    """A batch of this message alone, not compressed."""


@packet(Opcode.FIND)
class FoundMessages(Response):
    """The answer to ``Find``."""

    messages: tuple[FoundMessage, ...]
    """From newer to older ones."""
    next: bytes
    """Where to go on: give it back as ``after``; empty if all was looked at."""
