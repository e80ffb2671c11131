"""Group options: mode, filter, start, retry policy.

They belong to the group, not to its consumers. The first ``Subscribe`` of a group records them in
the action log, so that a misconfigured consumer cannot take messages that others wait for.
"""

from collections.abc import Iterable
from enum import IntEnum
from struct import Struct, error
from typing import NamedTuple

from pulque.errors import UsageError
from pulque.model.pack import MAX_TAGS, encode_tags
from pulque.model.tags import bits_of_tag, bits_of_tags

__all__ = [
    "BROKERS_CHOICE",
    "EVERYTHING",
    "FROM_EARLIEST",
    "Filter",
    "FilterKind",
    "GroupSettings",
    "Mode",
    "RetrySettings",
    "Start",
    "StartKind",
    "decode_settings",
    "encode_settings",
    "tag_filter",
]

MAX_DELAYS = 255
MAX_DELAY_MS = 2**32 - 1
NO_JITTER_NAMED = 255
_HEAD = Struct("<BBBHBBB")
_SIZE = Struct("<H")
_DELAY = Struct("<I")


class Mode(IntEnum):
    """How the consumers of a group share its messages."""

    SHARED = 0
    """Each message goes to one of them, and is retried until one has acked it."""
    BROADCAST = 1
    """Each message goes to each of them; each is a group of its own."""
    ONCE = 2
    """Each message goes to one of them, one time, whether it is handled or not."""
    ORDERED = 3
    """Each partition belongs to one of them at a time, which gets its messages in order."""


class FilterKind(IntEnum):
    """The language of a filter."""

    NONE = 0
    TAGS = 1


class Filter(NamedTuple):
    """Which messages a group wants."""

    kind: FilterKind = FilterKind.NONE
    any_of: tuple[str, ...] = ()
    """A message must have one of these tags, if there are any …"""
    all_of: tuple[str, ...] = ()
    """… and all of these."""

    def matches(self, tags: Iterable[str]) -> bool:
        """Return whether a message's real tags match."""
        if not self.kind:
            return True
        found = frozenset(tags)
        return found.issuperset(self.all_of) and (
            not self.any_of or not found.isdisjoint(self.any_of)
        )

    @property
    def any_bits(self) -> list[int]:
        """One of these must be set in a message's tag bits, if there are any."""
        return [bits_of_tag(tag) for tag in self.any_of]

    @property
    def all_bits(self) -> int:
        """These must be set in a message's tag bits."""
        return bits_of_tags(self.all_of)

    def __str__(self) -> str:
        parts = [" && ".join(self.all_of)] if self.all_of else []
        if self.any_of:
            parts.insert(0, " || ".join(self.any_of))
        return "no filter" if not parts else "tags " + ", and ".join(map(repr, parts))


EVERYTHING = Filter()


def tag_filter(any_of: Iterable[str] = (), all_of: Iterable[str] = ()) -> Filter:
    """Return the filter for these tags; their order does not matter.

    Raises:
        UsageError: A tag is invalid, or there are too many.
    """
    wanted = [_tags(any_of), _tags(all_of)]
    if not any(wanted):
        return EVERYTHING
    return Filter(FilterKind.TAGS, *wanted)


def _tags(tags: Iterable[str]) -> tuple[str, ...]:
    found = (tags,) if isinstance(tags, str) else tuple(tags)
    if not all(isinstance(tag, str) for tag in found):
        raise UsageError(f"tags to filter by must be text, not {found!r}")
    if len(found) > MAX_TAGS:
        raise UsageError(f"a filter of {len(found)} tags; at most {MAX_TAGS} are allowed")
    encode_tags(found)
    return tuple(sorted(set(found)))


class StartKind(IntEnum):
    """The kinds of start positions."""

    EARLIEST = 0
    """The oldest message that is stored."""
    LATEST = 1
    """The next message to be stored."""
    TIME = 2
    """The first message stored at or after an instant."""
    SEQUENCE = 3
    """A consume sequence."""


class Start(NamedTuple):
    """Where a new group starts in existing partitions; later ones it reads from the beginning."""

    kind: StartKind = StartKind.EARLIEST
    value: int = 0
    """The sequence, or the instant in milliseconds since 1970."""


FROM_EARLIEST = Start()


class RetrySettings(NamedTuple):
    """The retry settings of a group; the broker's settings apply to fields that are not set."""

    delays_ms: tuple[int, ...] = ()
    """The back-off before each further attempt; the last one counts for all that follow."""
    jitter_percent: int = NO_JITTER_NAMED
    """By how much a delay varies at random; 255 for the broker's setting."""
    max_attempts: int = 0
    """The number of attempts before a dead letter; 0 for the broker's setting."""

    def over(self, before: "RetrySettings") -> "RetrySettings":
        """Return these settings, with missing fields from the previous ones."""
        return RetrySettings(
            self.delays_ms or before.delays_ms,
            self.jitter_percent if self.names_jitter else before.jitter_percent,
            self.max_attempts or before.max_attempts,
        )

    @property
    def names_jitter(self) -> bool:
        """Whether the jitter is set."""
        return self.jitter_percent != NO_JITTER_NAMED


BROKERS_CHOICE = RetrySettings()


class GroupSettings(NamedTuple):
    """The settings of one group for one subject or pattern."""

    mode: Mode = Mode.SHARED
    filter: Filter = EVERYTHING
    retry: RetrySettings = BROKERS_CHOICE


def encode_settings(settings: GroupSettings) -> bytes:
    """Encode settings for facts and checkpoints."""
    mode, wanted, retry = settings
    parts = [
        _HEAD.pack(
            mode,
            wanted.kind,
            retry.jitter_percent,
            retry.max_attempts,
            len(wanted.any_of),
            len(wanted.all_of),
            len(retry.delays_ms),
        )
    ]
    for tag in (*wanted.any_of, *wanted.all_of):
        encoded = tag.encode()
        parts += (_SIZE.pack(len(encoded)), encoded)
    parts += map(_DELAY.pack, retry.delays_ms)
    return b"".join(parts)


def decode_settings(data: bytes) -> GroupSettings:
    """Decode the bytes of ``encode_settings``.

    Raises:
        ValueError: The bytes are invalid.
    """
    try:
        mode, kind, jitter, attempts, any_of, all_of, delays = _HEAD.unpack_from(data)
        at = _HEAD.size
        tags = []
        for _ in range(any_of + all_of):
            (size,) = _SIZE.unpack_from(data, at)
            at += _SIZE.size
            tags.append(data[at : at + size].decode())
            at += size
        found = [_DELAY.unpack_from(data, at + i * _DELAY.size)[0] for i in range(delays)]
    except error as problem:
        raise ValueError(f"settings of {len(data)} bytes are cut off") from problem
    wanted = Filter(FilterKind(kind), tuple(tags[:any_of]), tuple(tags[any_of:]))
    return GroupSettings(Mode(mode), wanted, RetrySettings(tuple(found), jitter, attempts))
