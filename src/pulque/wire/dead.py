"""Dead letters on the wire: which there are, forgetting them, and delivering them again."""

from typing import Annotated

from pulque.model.pack import MAX_HEADERS
from pulque.model.positions import ConsumeSequence
from pulque.wire.kinds import U32, U64, many
from pulque.wire.opcodes import Opcode
from pulque.wire.packet import Packet, Response, packet

__all__ = ["MAX_RESENT", "Dead", "DeadListed", "Resend", "Resent"]

MAX_RESENT = 1000
"""How many dead letters one request may resend."""


@packet(Opcode.DEAD)
class Dead(Packet):
    """Which dead letters does a group have, or: forget them."""

    subject: str
    group: str
    first: U64
    """From this sequence on …"""
    last: U64
    """… up to and including this one."""
    max_letters: U32
    """Name at most so many of them. Not used by a purge."""
    is_purge: bool = False
    """Whether they are to be forgotten, instead of named."""


@packet(Opcode.RESEND)
class Resend(Packet):
    """Deliver dead letters to their group again, as first attempts."""

    subject: str
    group: str
    sequences: Annotated[
        tuple[U64, ...], many("dead letters to resend", most=MAX_RESENT, each="sequence")
    ]
    """Which ones."""
    replaces_body: bool = False
    """Whether the body is a new one; for a single one only."""
    body: bytes = b""
    """In the place of its own."""
    replaces_headers: bool = False
    """Whether the headers are new ones; for a single one only."""
    headers: Annotated[
        tuple[tuple[str, str], ...], many("headers", most=MAX_HEADERS, each="name value")
    ] = ()
    """In the place of its own."""


@packet(Opcode.DEAD)
class DeadListed(Response):
    """The answer to ``Dead``."""

    start: ConsumeSequence
    """The oldest dead letter that is stored."""
    end: ConsumeSequence
    """The next dead letter to come."""
    count: U64
    """How many of those asked for nobody had dealt with; after a purge, how many are gone."""
    ranges: Annotated[tuple[tuple[ConsumeSequence, U32], ...], many(each="first length")]
    """The first of them, and how many follow each other from there; empty after a purge."""


@packet(Opcode.RESEND)
class Resent(Response):
    """The answer to ``Resend``: what became of each of them."""

    resent: Annotated[tuple[U64, ...], many(each="sequence")]
    """They are in the group's retry partition, on disk."""
    done: Annotated[tuple[U64, ...], many(each="sequence")]
    """They had been resent or purged before."""
    missing: Annotated[tuple[U64, ...], many(each="sequence")]
    """They are not stored any more, or never were."""
