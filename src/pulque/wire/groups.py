"""How a client says what its group wants, and what the broker says is in force."""

from typing import Annotated, NamedTuple

from pulque.model.groups import (
    BROKERS_CHOICE,
    EVERYTHING,
    FROM_EARLIEST,
    MAX_DELAYS,
    Filter,
    FilterKind,
    GroupSettings,
    Mode,
    RetrySettings,
    Start,
    StartKind,
)
from pulque.model.names import Group, Pattern
from pulque.model.pack import MAX_TAGS
from pulque.wire.kinds import I64, U8, U16, U32, U64, choice, describe, many
from pulque.wire.opcodes import Opcode
from pulque.wire.packet import Packet, Response, packet

__all__ = [
    "ChangeGroup",
    "GroupChanged",
    "Subscribe",
    "Subscribed",
    "Subscription",
    "Subscriptions",
    "SubscriptionsListed",
]

Tags = Annotated[tuple[str, ...], many("tags", most=MAX_TAGS, each="tag")]
Delays = Annotated[tuple[U32, ...], many("delays of retries", most=MAX_DELAYS, each="delay_ms")]
describe(Filter, kind=FilterKind, any_of=Tags, all_of=Tags)
describe(RetrySettings, delays_ms=Delays, jitter_percent=U8, max_attempts=U16)
describe(GroupSettings, mode=Mode, filter=Filter, retry=RetrySettings)
describe(Start, kind=Annotated[StartKind, choice(StartKind, "start")], value=I64)


@packet(Opcode.SUBSCRIBE, first="group consumer incarnation mode")
class Subscribe(Packet):
    """This is how my group wants a subject: said once on a connection, before the first pull."""

    group: str
    """Empty, or anything at all, where each consumer gets everything."""
    consumer: str
    incarnation: U64
    subject: str
    """A subject, or a pattern."""
    mode: Mode = Mode.SHARED
    filter: Filter = EVERYTHING
    start: Start = FROM_EARLIEST
    """Counts if the group was never here."""
    retry: RetrySettings = BROKERS_CHOICE
    """The last word of any consumer of the group counts."""


@packet(Opcode.SUBSCRIBE)
class Subscribed(Response):
    """The answer to ``Subscribe``: what is in force."""

    group: str
    """The group to pull, settle and beat for: of a broadcast consumer, its own."""
    mode: Mode
    filter: Filter
    retry: RetrySettings


@packet(Opcode.CHANGE_GROUP)
class ChangeGroup(Packet):
    """Change on purpose what a group said, for all its consumers."""

    group: str
    subject: str
    """The subject or the pattern that it was said about."""
    has_mode: bool = False
    """Whether the mode is to be changed …"""
    mode: Mode = Mode.SHARED
    has_filter: bool = False
    """… and whether the filter is."""
    filter: Filter = EVERYTHING
    retry: RetrySettings = BROKERS_CHOICE
    """What it does not say stays as it is."""


@packet(Opcode.CHANGE_GROUP)
class GroupChanged(Response):
    """The answer to ``ChangeGroup``: what is in force now."""

    mode: Mode
    filter: Filter
    retry: RetrySettings


@packet(Opcode.SUBSCRIPTIONS)
class Subscriptions(Packet):
    """What did groups say about subjects and patterns?"""

    group: str = ""
    """Only what this one said; empty for all."""
    after_group: str = ""
    """Only what comes after this group …"""
    after_subject: str = ""
    """… and subject, in the order of their names."""
    most: U32 = 1_000


class Subscription(NamedTuple):
    """What a group said about a subject or a pattern."""

    group: Group
    subject: Pattern
    settings: GroupSettings


@packet(Opcode.SUBSCRIPTIONS)
class SubscriptionsListed(Response):
    """The answer to ``Subscriptions``: there may be more behind the last one."""

    subscriptions: tuple[Subscription, ...]
