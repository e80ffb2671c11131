"""The settings of a broker: read once, never changed, every one explained.

The reference page is made from these models. Where a value came from (a file, the environment, a
flag) is the business of ``sources.py``. Storage and rules never see a model: they are told what
they need in plain values.
"""

from datetime import timedelta
from pathlib import Path
from typing import Annotated

from pydantic import ByteSize, Field, field_validator, model_validator

from pulque.errors import ConfigError
from pulque.rules.retry import DEFAULT_DELAYS_MS
from pulque.settings.joining import JoinSection
from pulque.settings.names import OwnName, Patterns, checked_name
from pulque.settings.sections import (
    BatchLimitsSection,
    ListenSection,
    LogSection,
    Section,
    ServerSettings,
)
from pulque.settings.units import (
    DAY,
    GIB,
    HOUR,
    KIB,
    MIB,
    MILLISECOND,
    MINUTE,
    SECOND,
    TIB,
    Duration,
    Listed,
    Number,
    Share,
    Size,
    parse_duration,
    show_duration,
    show_size,
)

__all__ = [
    "BrokerClusterSection",
    "BrokerReplicationSection",
    "BrokerSettings",
    "ConsumptionSection",
    "LimitsSection",
    "ListenSection",
    "LogSection",
    "RetrySection",
    "StorageSection",
]

_MOST_DELAYS = 100


class StorageSection(Section):
    """Where messages rest and for how long."""

    directory: Path = Field(
        description="Holds all logs; made if it is not there. One broker owns it."
    )
    segment_size: Annotated[Size, Field(ge=64 * KIB, le=16 * GIB)] = Field(
        default=ByteSize(GIB),
        description="A segment of the message log is sealed at this size …",
    )
    segment_batches: Annotated[Number, Field(ge=1, le=100_000_000)] = Field(
        default=1_000_000,
        description="… or at this many batches …",
    )
    segment_age: Annotated[Duration, Field(ge=SECOND, le=30 * DAY)] = Field(
        default=HOUR,
        description="… or this long after its first batch. Only sealed segments can be deleted.",
    )
    action_segment_size: Annotated[Size, Field(ge=64 * KIB, le=16 * GIB)] = Field(
        default=ByteSize(64 * MIB),
        description="The action log rolls to a new segment at this size.",
    )
    retention: Annotated[Duration, Field(ge=MINUTE)] = Field(
        default=3 * DAY,
        description="A sealed segment is deleted this long after its last batch, consumed or not.",
    )
    retention_size: Annotated[Size, Field(ge=MIB)] | None = Field(
        default=None,
        description="The oldest sealed segments are deleted when the message log is larger than "
        "this. Without it, only age counts.",
    )
    archive: bool = Field(
        default=False,
        description="Whether the directory is archived (`pulque pipeline archive`): what is not "
        "archived yet is then kept, whatever its age. A disk that is full refuses sends.",
    )
    reserve: Annotated[Size, Field(ge=MIB, le=TIB)] = Field(
        default=ByteSize(64 * MIB),
        description="Sends are refused while the disk has less room than this, so that pulling "
        "and settling can go on.",
    )
    tail_cache: Annotated[Size, Field(le=16 * GIB)] = Field(
        default=ByteSize(16 * MIB),
        description="Memory for the newest batches, so that consumers at the tail read no file.",
    )
    sync_interval: Annotated[Duration, Field(ge=MILLISECOND, le=MINUTE)] = Field(
        default=500 * MILLISECOND,
        description="What was confirmed from memory is synced to disk this often: the most that a "
        "power cut can take from a producer that asks for `acks=memory`.",
    )
    checkpoint_records: Annotated[Number, Field(ge=1, le=100_000_000)] = Field(
        default=10_000,
        description="A checkpoint is written after this many records of the action log …",
    )
    checkpoint_interval: Annotated[Duration, Field(ge=SECOND, le=DAY)] = Field(
        default=MINUTE,
        description="… or after this long, if anything happened. Recovery replays from there.",
    )


class LimitsSection(BatchLimitsSection):
    """How much one client, and all of them, may ask of the broker."""

    open_records: bool = Field(
        default=False,
        description="Whether batches are decompressed and every message is decoded before it is "
        "stored. It costs work for each message; else only headers and columns are checked.",
    )
    max_pull_messages: Annotated[Number, Field(ge=1, le=1_000_000)] = Field(
        default=10_000,
        description="The most messages in the answer to one pull, whatever the consumer asks for.",
    )
    max_pull_bytes: Annotated[Size, Field(ge=KIB, le=16 * MIB)] = Field(
        default=ByteSize(8 * MIB),
        description="The most bytes in the answer to one pull; one whole batch always fits.",
    )
    max_held: Annotated[Number, Field(ge=1, le=10_000_000)] = Field(
        default=100_000,
        description="The most deliveries that one consumer may hold unsettled; until it settles "
        "some, it gets no new ones.",
    )
    max_partitions: Annotated[Number, Field(ge=1, le=10_000_000)] = Field(
        default=100_000,
        description="The most partitions, about one for each subject (1 KiB of memory each); a "
        "send that would make one more is refused.",
    )
    max_subscriptions: Annotated[Number, Field(ge=1, le=100_000_000)] = Field(
        default=500_000,
        description="The most subscriptions: one for each consumer id that ever pulled from a "
        "partition (2 KiB of memory each). Another consumer's pull is refused.",
    )
    allowed_subjects: Patterns = Field(
        default=(),
        description="Only these subjects, and those that patterns like `order.*` cover, may be "
        "sent to; others are refused. Empty allows all.",
    )
    send_buffer: Annotated[Size, Field(ge=64 * KIB, le=GIB)] = Field(
        default=ByteSize(8 * MIB),
        description="A client that leaves this many bytes of answers unread, besides those to one "
        "full pull, is cut off.",
    )
    max_in_flight: Annotated[Size, Field(ge=MIB, le=64 * GIB)] = Field(
        default=ByteSize(64 * MIB),
        description="Bytes of batches that wait to be written or synced, over all clients; beyond "
        "it, sends are refused as overloaded until some are done.",
    )
    handshake_timeout: Annotated[Duration, Field(ge=10 * MILLISECOND, le=HOUR)] = Field(
        default=5 * SECOND,
        description="A new connection has to say who it is within this time.",
    )
    frame_timeout: Annotated[Duration, Field(ge=10 * MILLISECOND, le=HOUR)] = Field(
        default=10 * SECOND,
        description="A frame that has begun to arrive has to end within this time.",
    )
    idle_timeout: Annotated[Duration, Field(ge=10 * MILLISECOND, le=DAY)] = Field(
        default=2 * MINUTE,
        description="A connection without a request, and without one waiting for its answer, is "
        "closed after this time.",
    )

    @model_validator(mode="after")
    def _fits(self) -> "LimitsSection":
        if self.max_batch > self.max_in_flight:
            raise ValueError(
                f"max_batch ({show_size(self.max_batch)}) is over "
                f"max_in_flight ({show_size(self.max_in_flight)}): it could never be sent"
            )
        return self


class ConsumptionSection(Section):
    """How long a silent consumer keeps what it holds, and what comes first."""

    lease: Annotated[Duration, Field(ge=100 * MILLISECOND, le=DAY)] = Field(
        default=30 * SECOND,
        description="A consumer that is silent for this long is lost: what it holds goes to "
        "others.",
    )
    lease_check: Annotated[Duration, Field(ge=10 * MILLISECOND, le=HOUR)] = Field(
        default=5 * SECOND,
        description="Leases are looked at this often, so a loss is noticed at most this late.",
    )
    lock: Annotated[Duration, Field(ge=100 * MILLISECOND, le=HOUR)] = Field(
        default=10 * SECOND,
        description="A partition of an ordered group belongs to its consumer for this long after "
        "each pull and settle: then another one that it was allotted to may have it.",
    )
    strict: Patterns = Field(
        default=(),
        description="Subjects, and patterns like `order.*`, whose order is strict, at a broker "
        "that stands alone; in a cluster the meta servers say which (`pulque subject order`).",
    )
    low_priority_share: Annotated[Share, Field(ge=0, le=0.5)] = Field(
        default=0.1,
        description="The share of a group's pulls that begin with another priority than the "
        "highest that waits, each in its turn: so lower ones go on, however much waits above "
        "them. With 0 they wait until nothing else does.",
    )

    @model_validator(mode="after")
    def _checks_within_the_lease(self) -> "ConsumptionSection":
        if self.lease_check > self.lease:
            raise ValueError(
                f"lease_check ({show_duration(self.lease_check)}) is over "
                f"lease ({show_duration(self.lease)}): losses would be noticed too late"
            )
        return self


class RetrySection(Section):
    """What becomes of messages that a consumer could not process."""

    delays: str = Field(
        default=" ".join(show_duration(timedelta(milliseconds=ms)) for ms in DEFAULT_DELAYS_MS),
        description="How long a message waits after its first failed attempt, after the second, "
        "and so on; the last one counts for all that follow. 1 to 100 durations, parted by "
        "spaces. None is longer than half of `storage.retention`, whatever is said here.",
    )
    jitter_percent: Annotated[Number, Field(ge=0, le=100)] = Field(
        default=10,
        description="A message waits longer by up to so much, so that not all that failed "
        "together come back together.",
    )
    attempts: Annotated[Number, Field(ge=1, le=10_000)] = Field(
        default=16,
        description="After so many failed attempts a message becomes a dead letter.",
    )
    longest_delay: Annotated[Duration, Field(ge=SECOND, le=365 * DAY)] = Field(
        default=7 * DAY,
        description="The longest delay that a nack may ask for. Never more than half of "
        "`storage.retention`, as the message is not stored for longer.",
    )

    @field_validator("delays")
    @classmethod
    def _are_durations(cls, delays: str) -> str:
        found = parse_delays(delays)
        if not 1 <= len(found) <= _MOST_DELAYS:
            raise ValueError(f"{len(found)} delays; 1 to {_MOST_DELAYS} are allowed")
        return delays


def parse_delays(text: str) -> list[timedelta]:
    """Return the durations of a list, or raise ``ValueError`` with what is allowed."""
    return [parse_duration(each) for each in text.split()]


class BrokerClusterSection(JoinSection):
    """Which cluster the broker belongs to."""

    meta: Listed = Field(
        default=(),
        description="The meta servers, as `host:port` (the usual port is 7440); the broker "
        "registers at each of them. Without any it stands alone.",
    )
    group: str = Field(
        default="",
        description="The broker group that it belongs to, as routes and positions name it. If "
        "it is empty, the broker is a group by itself, with its own name.",
    )
    advertise: str = Field(
        default="",
        description="Where clients reach the broker, as `host:port` or `host`, if that is not "
        "where it listens: behind a port mapping, or in a container.",
    )

    @field_validator("group")
    @classmethod
    def _is_a_group(cls, group: str) -> str:
        return checked_name(group) if group else group


class BrokerReplicationSection(Section):
    """How many brokers of its group have the same messages."""

    copies: Annotated[Number, Field(ge=1, le=9)] = Field(
        default=1,
        description="How many brokers `cluster.group` has, each with all messages of the group: "
        "one leads, the others follow it. All of them are told the same. With 1, the broker "
        "stands alone.",
    )
    min_in_sync: Annotated[Number, Field(ge=1, le=9)] | None = Field(
        default=None,
        description="Messages are taken only while so many brokers of the group, the leader "
        "among them, have all that was confirmed. If it is not given: 2. That of the broker "
        "which leads holds: give all of a group the same.",
    )
    lag: Annotated[Duration, Field(ge=100 * MILLISECOND, le=HOUR)] = Field(
        default=5 * SECOND,
        description="A follower that has not caught up for so long is not in sync any more, and "
        "nobody waits for it.",
    )

    @property
    def is_on(self) -> bool:
        """Whether there are followers."""
        return self.copies > 1

    @property
    def least_in_sync(self) -> int:
        """How many have to be in sync for messages to be taken."""
        return self.min_in_sync or min(self.copies, 2)

    @model_validator(mode="after")
    def _fits(self) -> "BrokerReplicationSection":
        if (self.min_in_sync or 1) > self.copies:
            raise ValueError(
                f"min_in_sync ({self.min_in_sync}) is over copies ({self.copies}): messages could "
                "never be taken"
            )
        return self


class BrokerSettings(ServerSettings):
    """All that a broker can be told."""

    server = "broker"

    name: OwnName = Field(
        default="broker",
        description="The broker's own name, which no other one of its cluster has; it is "
        "spelled like a subject.",
    )
    listen: ListenSection = Field(
        default=ListenSection(), description="Where the broker can be reached."
    )
    storage: StorageSection = Field(description="Where messages rest and for how long.")
    limits: LimitsSection = Field(
        default=LimitsSection(),
        description="How much one client, and all of them, may ask of the broker.",
    )
    consumption: ConsumptionSection = Field(
        default=ConsumptionSection(),
        description="How long a silent consumer keeps what it holds, and what comes first.",
    )
    retry: RetrySection = Field(
        default=RetrySection(),
        description="What becomes of messages that a consumer could not process.",
    )
    cluster: BrokerClusterSection = Field(
        default=BrokerClusterSection(), description="Which cluster the broker belongs to."
    )
    replication: BrokerReplicationSection = Field(
        default=BrokerReplicationSection(),
        description="How many brokers of its group have the same messages.",
    )
    log: LogSection = Field(
        default=LogSection(), description="What the broker says about itself, on stderr."
    )

    def check_replication(self) -> None:
        """See that a broker that is to have followers can have them.

        Raises:
            ConfigError: It cannot.
        """
        if self.replication.is_on and not (self.cluster.meta and self.cluster.group):
            raise ConfigError(
                f"replication.copies is {self.replication.copies}: then cluster.meta has to name "
                "the meta servers, which say who leads, and cluster.group the group, whose name "
                "all brokers of it share"
            )

    @property
    def broker_group(self) -> str:
        """The group that routes and positions name."""
        return self.cluster.group or self.name
