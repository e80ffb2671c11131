"""What a report says, as figures; how they are shown is told elsewhere."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import date, datetime

__all__ = [
    "ConsumerFigures",
    "Day",
    "Failures",
    "Hour",
    "KeyFigures",
    "Latency",
    "Redeliveries",
    "Report",
    "SubjectFigures",
]


@dataclass(frozen=True, slots=True)
class SubjectFigures:
    """What was sent to one subject.

    Attributes:
        subject: Which.
        messages: How many were stored.
        size: Of their bodies, in bytes.
        hours: In how many hours there were any.
        busiest: The hour with most of them.
        busiest_messages: How many those were.
    """

    subject: str
    messages: int
    size: int
    hours: int
    busiest: datetime
    busiest_messages: int


@dataclass(frozen=True, slots=True)
class Hour:
    """What was stored in one hour of one subject; of all the small ones together if it is None."""

    subject: str | None
    hour: datetime
    messages: int
    size: int


@dataclass(frozen=True, slots=True)
class Day:
    """What was stored on one day, in UTC."""

    day: date
    messages: int
    size: int


@dataclass(frozen=True, slots=True)
class Latency:
    """How long the messages of one subject took in one group; milliseconds.

    Attributes:
        subject: Which.
        group: Which.
        messages: How many were measured.
        p50: Half of them took at most so long.
        p90: Nine of ten.
        p99: Ninety-nine of a hundred.
        longest: The slowest.
    """

    subject: str
    group: str
    messages: int
    p50: float
    p90: float
    p99: float
    longest: float


@dataclass(frozen=True, slots=True)
class ConsumerFigures:
    """How long one consumer took from being handed a message to settling it; milliseconds.

    Attributes:
        group: Its group.
        consumer: Who.
        settled: How many it settled, acked and nacked.
        unsettled: How many it was handed and did not settle, as far as is archived.
        p50: Half of them took at most so long; None if nothing was settled.
        p99: Ninety-nine of a hundred.
        longest: The slowest.
    """

    group: str
    consumer: str
    settled: int
    unsettled: int
    p50: float | None
    p99: float | None
    longest: float | None


@dataclass(frozen=True, slots=True)
class Failures:
    """How often something failed for one reason.

    Attributes:
        subject: Which.
        group: Which.
        what: ``nacked`` counts messages, ``lost`` counts consumers.
        reason: As the consumer or the broker said.
        times: How often.
    """

    subject: str
    group: str
    what: str
    reason: str
    times: int


@dataclass(frozen=True, slots=True)
class Redeliveries:
    """What was put back for another attempt, and what became a dead letter."""

    subject: str
    group: str
    redelivered: int
    dead: int


@dataclass(frozen=True, slots=True)
class KeyFigures:
    """How many messages of a subject have one key."""

    subject: str
    key: str
    messages: int
    share: float


@dataclass(frozen=True, slots=True)
class Report:
    """Everything a report says; lists have the first of what there is, most first.

    Attributes:
        lake: Of which archive.
        about: Of which part of it, in words.
        messages: How many were stored.
        size: Of their bodies, in bytes.
        settled: How many deliveries were settled.
        notes: What one should know of the figures.
    """

    lake: str
    about: str
    messages: int = 0
    size: int = 0
    settled: int = 0
    subjects: Sequence[SubjectFigures] = ()
    hours: Sequence[Hour] = ()
    days: Sequence[Day] = ()
    end_to_end: Sequence[Latency] = ()
    handling: Sequence[Latency] = ()
    consumers: Sequence[ConsumerFigures] = ()
    redeliveries: Sequence[Redeliveries] = ()
    failures: Sequence[Failures] = ()
    keys: Sequence[KeyFigures] = ()
    notes: Sequence[str] = field(default_factory=list)

    @property
    def is_empty(self) -> bool:
        """Whether there was nothing to tell of."""
        return not (self.messages or self.settled or self.consumers or self.failures)
