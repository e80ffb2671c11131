"""The settings of a delay server: read once, never changed, every one explained."""

from datetime import timedelta
from pathlib import Path
from typing import Annotated

from pydantic import ByteSize, Field, field_validator

from pulque.settings.joining import JoinSection
from pulque.settings.names import OwnName
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
    Size,
    show_duration,
)

__all__ = [
    "DELAY_PORT",
    "DelayClusterSection",
    "DelayLimitsSection",
    "DelaySettings",
    "DelayStorageSection",
    "DeliverySection",
    "ScheduleSection",
]

DELAY_PORT = 7460
_TWO_YEARS = 2 * 366 * DAY


class DelayListenSection(ListenSection):
    """The address of a delay server."""

    port: Annotated[Number, Field(ge=0, le=65535)] = Field(
        default=DELAY_PORT,
        description="The TCP port. 0 takes any free one; the ready line tells which.",
    )


class DelayStorageSection(Section):
    """Where delayed messages are stored."""

    directory: Path = Field(
        description="Holds all logs; made if it is not there. One delay server owns it."
    )
    segment_size: Annotated[Size, Field(ge=64 * KIB, le=16 * GIB)] = Field(
        default=ByteSize(64 * MIB),
        description="A segment of the message log is sealed at this size. It goes once all of it "
        "is in the schedule logs.",
    )
    reserve: Annotated[Size, Field(ge=MIB, le=TIB)] = Field(
        default=ByteSize(64 * MIB),
        description="Sends are refused while the disk has less room than this, so that what is "
        "there can be dispatched.",
    )
    sync_interval: Annotated[Duration, Field(ge=MILLISECOND, le=MINUTE)] = Field(
        default=500 * MILLISECOND,
        description="What was confirmed from memory is synced to disk this often.",
    )
    checkpoint_interval: Annotated[Duration, Field(ge=SECOND, le=DAY)] = Field(
        default=MINUTE,
        description="A checkpoint is written this often, if anything happened. Recovery replays "
        "the message log from there.",
    )


class ScheduleSection(Section):
    """How delayed messages are scheduled."""

    tick: Annotated[Duration, Field(ge=5 * MINUTE, le=HOUR)] = Field(
        default=HOUR,
        description="Messages are kept in one file for each span of this length. It has to be a "
        "whole part of an hour.",
    )
    longest_delay: Annotated[Duration, Field(ge=SECOND, le=10 * 366 * DAY)] = Field(
        default=_TWO_YEARS,
        description="A message may be due at most this far ahead; one that is later is refused.",
    )

    @field_validator("tick")
    @classmethod
    def _divides_an_hour(cls, tick: timedelta) -> timedelta:
        if HOUR % tick or tick % MINUTE:
            raise ValueError(
                f"{show_duration(tick)} is no part of an hour in whole minutes: 5 m, 6 m, 10 m, "
                "12 m, 15 m, 20 m, 30 m and 1 h are"
            )
        return tick


class DeliverySection(Section):
    """How due messages are sent to brokers."""

    batch_messages: Annotated[Number, Field(ge=1, le=10_000)] = Field(
        default=10_000, description="The most messages that go to a broker in one batch."
    )
    batch_size: Annotated[Size, Field(ge=KIB, le=16 * MIB)] = Field(
        default=ByteSize(4 * MIB),
        description="The most bytes that go to a broker in one batch; a single larger message "
        "goes alone.",
    )
    timeout: Annotated[Duration, Field(ge=100 * MILLISECOND, le=HOUR)] = Field(
        default=10 * SECOND, description="A broker has to answer within this time."
    )
    patience: Annotated[Duration, Field(ge=SECOND, le=365 * DAY)] = Field(
        default=5 * MINUTE,
        description="A batch whose outcome is not known, as its broker went away, is sent to the "
        "same broker again for this long, which stores it once. After that it goes to another "
        "one, and may be there twice.",
    )


class DelayLimitsSection(BatchLimitsSection):
    """How much clients may ask of the delay server."""

    max_message: Annotated[Size, Field(ge=KIB, le=16 * MIB)] = Field(
        default=ByteSize(4 * MIB),
        description="The largest message: key, tags, headers and body together. Brokers have to "
        "take as large ones.",
    )
    open_records: bool = Field(
        default=False,
        description="Whether every message is decoded before it is stored; needed where a broker "
        "has this setting on, as it would refuse what cannot be decoded when it is due.",
    )
    max_partitions: Annotated[Number, Field(ge=1, le=10_000_000)] = Field(
        default=100_000,
        description="The most subjects that messages may be delayed for (1 KiB of memory each).",
    )
    max_in_flight: Annotated[Size, Field(ge=MIB, le=64 * GIB)] = Field(
        default=ByteSize(64 * MIB),
        description="Bytes of batches that wait to be written, synced or put into the schedule; "
        "beyond it, sends are refused as overloaded until some are done.",
    )
    index_memory: Annotated[Size, Field(ge=MIB, le=64 * GIB)] = Field(
        default=ByteSize(64 * MIB),
        description="Memory for the indexes of ticks that somebody asked about, besides those "
        "that are due.",
    )


class DelayClusterSection(JoinSection):
    """The cluster of the delay server."""

    meta: Listed = Field(
        default=(),
        description="The meta servers, as `host:port` (the usual port is 7440). The delay server "
        "registers at each of them, and asks them where messages go that are due.",
    )
    advertise: str = Field(
        default="",
        description="Where clients reach the delay server, as `host:port` or `host`, if that is "
        "not where it listens.",
    )


class DelaySettings(ServerSettings):
    """The settings of a delay server."""

    server = "delay"

    name: OwnName = Field(
        default="delay",
        description="The delay server's own name, which no other server of its cluster has; it "
        "is spelled like a subject.",
    )
    listen: DelayListenSection = Field(
        default=DelayListenSection(), description="Where the delay server can be reached."
    )
    storage: DelayStorageSection = Field(description="Where delayed messages rest.")
    schedule: ScheduleSection = Field(
        default=ScheduleSection(),
        description="How delayed messages are kept until they are due.",
    )
    delivery: DeliverySection = Field(
        default=DeliverySection(), description="How messages that are due get to brokers."
    )
    limits: DelayLimitsSection = Field(
        default=DelayLimitsSection(),
        description="How much clients may ask of the delay server.",
    )
    cluster: DelayClusterSection = Field(
        default=DelayClusterSection(), description="Which cluster the delay server belongs to."
    )
    log: LogSection = Field(
        default=LogSection(), description="What the delay server says about itself, on stderr."
    )
