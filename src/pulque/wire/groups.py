"""How a client says what its group wants, and what the broker says is in force."""

from dataclasses import dataclass
from enum import IntEnum
from struct import Struct
from typing import ClassVar, NamedTuple, Self, TypeVar

from pulque.errors import UnsupportedError
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
from pulque.wire.codec import Reader, Writer
from pulque.wire.opcodes import Opcode

__all__ = [
    "ChangeGroup",
    "GroupChanged",
    "Subscribe",
    "Subscribed",
    "Subscription",
    "Subscriptions",
    "SubscriptionsListed",
    "known",
]


@dataclass(frozen=True, slots=True)
class Subscribe:
    """This is how my group wants a subject: said once on a connection, before the first pull."""

    opcode: ClassVar[Opcode] = Opcode.SUBSCRIBE
    _form: ClassVar[Struct] = Struct("<QB")
    _start: ClassVar[Struct] = Struct("<Bq")

    group: str
    """Empty, or anything at all, where each consumer gets everything."""
    consumer: str
    incarnation: int
    subject: str
    """A subject, or a pattern."""
    mode: Mode = Mode.SHARED
    filter: Filter = EVERYTHING
    start: Start = FROM_EARLIEST
    """Counts if the group was never here."""
    retry: RetrySettings = BROKERS_CHOICE
    """The last word of any consumer of the group counts."""

    def write(self, to: Writer) -> None:
        """Append the fields."""
        to.text(self.group)
        to.text(self.consumer)
        to.pack(self._form, self.incarnation, self.mode)
        to.text(self.subject)
        _write_filter(self.filter, to)
        to.pack(self._start, *self.start)
        _write_retry(self.retry, to)

    @classmethod
    def read(cls, source: Reader) -> Self:
        """Take the fields."""
        group, consumer = source.text(), source.text()
        incarnation, mode = source.unpack(cls._form)
        subject = source.text()
        wanted = _read_filter(source)
        kind, value = source.unpack(cls._start)
        start = Start(known(StartKind, kind, "start"), value)
        retry = _read_retry(source)
        found = known(Mode, mode, "mode")
        return cls(group, consumer, incarnation, subject, found, wanted, start, retry)


@dataclass(frozen=True, slots=True)
class Subscribed:
    """The answer to ``Subscribe``: what is in force."""

    opcode: ClassVar[Opcode] = Opcode.SUBSCRIBE
    _form: ClassVar[Struct] = Struct("<B")

    group: str
    """The group to pull, settle and beat for: of a broadcast consumer, its own."""
    mode: Mode
    filter: Filter
    retry: RetrySettings

    def write(self, to: Writer) -> None:
        """Append the fields."""
        to.text(self.group)
        to.pack(self._form, self.mode)
        _write_filter(self.filter, to)
        _write_retry(self.retry, to)

    @classmethod
    def read(cls, source: Reader) -> Self:
        """Take the fields."""
        group = source.text()
        (mode,) = source.unpack(cls._form)
        return cls(group, known(Mode, mode, "mode"), _read_filter(source), _read_retry(source))


@dataclass(frozen=True, slots=True)
class ChangeGroup:
    """Change on purpose what a group said, for all its consumers."""

    opcode: ClassVar[Opcode] = Opcode.CHANGE_GROUP
    _form: ClassVar[Struct] = Struct("<?B?")

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

    def write(self, to: Writer) -> None:
        """Append the fields."""
        to.text(self.group)
        to.text(self.subject)
        to.pack(self._form, self.has_mode, self.mode, self.has_filter)
        _write_filter(self.filter, to)
        _write_retry(self.retry, to)

    @classmethod
    def read(cls, source: Reader) -> Self:
        """Take the fields."""
        group, subject = source.text(), source.text()
        has_mode, mode, has_filter = source.unpack(cls._form)
        found = known(Mode, mode, "mode")
        wanted, retry = _read_filter(source), _read_retry(source)
        return cls(group, subject, has_mode, found, has_filter, wanted, retry)


@dataclass(frozen=True, slots=True)
class GroupChanged:
    """The answer to ``ChangeGroup``: what is in force now."""

    opcode: ClassVar[Opcode] = Opcode.CHANGE_GROUP
    _form: ClassVar[Struct] = Struct("<B")

    mode: Mode
    filter: Filter
    retry: RetrySettings

    def write(self, to: Writer) -> None:
        """Append the fields."""
        to.pack(self._form, self.mode)
        _write_filter(self.filter, to)
        _write_retry(self.retry, to)

    @classmethod
    def read(cls, source: Reader) -> Self:
        """Take the fields."""
        (mode,) = source.unpack(cls._form)
        return cls(known(Mode, mode, "mode"), _read_filter(source), _read_retry(source))


@dataclass(frozen=True, slots=True)
class Subscriptions:
    """What did groups say about subjects and patterns?"""

    opcode: ClassVar[Opcode] = Opcode.SUBSCRIPTIONS
    _form: ClassVar[Struct] = Struct("<I")

    group: str = ""
    """Only what this one said; empty for all."""
    after_group: str = ""
    """Only what comes after this group …"""
    after_subject: str = ""
    """… and subject, in the order of their names."""
    most: int = 1_000

    def write(self, to: Writer) -> None:
        """Append the fields."""
        to.text(self.group)
        to.text(self.after_group)
        to.text(self.after_subject)
        to.pack(self._form, self.most)

    @classmethod
    def read(cls, source: Reader) -> Self:
        """Take the fields."""
        texts = source.text(), source.text(), source.text()
        return cls(*texts, *source.unpack(cls._form))


class Subscription(NamedTuple):
    """What a group said about a subject or a pattern."""

    group: Group
    subject: Pattern
    settings: GroupSettings


@dataclass(frozen=True, slots=True)
class SubscriptionsListed:
    """The answer to ``Subscriptions``: there may be more behind the last one."""

    opcode: ClassVar[Opcode] = Opcode.SUBSCRIPTIONS
    _form: ClassVar[Struct] = Struct("<B")

    subscriptions: tuple[Subscription, ...]

    def write(self, to: Writer) -> None:
        """Append the fields."""
        to.count(len(self.subscriptions))
        for group, subject, settings in self.subscriptions:
            to.text(group)
            to.text(subject)
            to.pack(self._form, settings.mode)
            _write_filter(settings.filter, to)
            _write_retry(settings.retry, to)

    @classmethod
    def read(cls, source: Reader) -> Self:
        """Take the fields."""
        return cls(tuple([cls._read_one(source) for _ in range(source.count())]))

    @classmethod
    def _read_one(cls, source: Reader) -> Subscription:
        group, subject = Group(source.text()), Pattern(source.text())
        (mode,) = source.unpack(cls._form)
        settings = GroupSettings(
            known(Mode, mode, "mode"), _read_filter(source), _read_retry(source)
        )
        return Subscription(group, subject, settings)


KnownT = TypeVar("KnownT", bound=IntEnum)
_KIND = Struct("<B")
_DELAY = Struct("<I")
_ATTEMPTS = Struct("<BH")


def known(kinds: type[KnownT], value: int, what: str) -> KnownT:
    """Return one of several kinds.

    Raises:
        UnsupportedError: There is none of this number.
    """
    try:
        return kinds(value)
    except ValueError:
        names = ", ".join(f"{each.value} ({each.name.lower()})" for each in kinds)
        raise UnsupportedError(f"{what} {value} is unknown; known are {names}") from None


def _write_filter(wanted: Filter, to: Writer) -> None:
    """Append a filter."""
    to.pack(_KIND, wanted.kind)
    for tags in (wanted.any_of, wanted.all_of):
        to.count(len(tags))
        for tag in tags:
            to.text(tag)


def _read_filter(source: Reader) -> Filter:
    """Take a filter."""
    (kind,) = source.unpack(_KIND)
    tags = [
        tuple([source.text() for _ in range(source.count("tags", most=MAX_TAGS, least_size=2))])
        for _ in range(2)
    ]
    return Filter(known(FilterKind, kind, "a filter of kind"), *tags)


def _write_retry(retry: RetrySettings, to: Writer) -> None:
    """Append what a group says about its retries."""
    to.count(len(retry.delays_ms))
    for delay_ms in retry.delays_ms:
        to.pack(_DELAY, delay_ms)
    to.pack(_ATTEMPTS, retry.jitter_percent, retry.max_attempts)


def _read_retry(source: Reader) -> RetrySettings:
    """Take what a group says about its retries."""
    count = source.count("delays of retries", most=MAX_DELAYS, least_size=4)
    delays = tuple([source.unpack(_DELAY)[0] for _ in range(count)])
    return RetrySettings(delays, *source.unpack(_ATTEMPTS))
