"""What the API says and takes about groups."""

from typing import Annotated, Literal

from pydantic import AwareDatetime, BaseModel, Field, model_validator

from pulque.admin.models.fields import Body, Flag, Mode, Sequence, Switchable, Tag
from pulque.admin.models.names import PartitionField, PatternName, ServerName
from pulque.admin.models.pagination import Page, Unreachable

__all__ = [
    "ConsumerRow",
    "FilterShown",
    "GroupChange",
    "GroupDetail",
    "GroupPage",
    "GroupRow",
    "LagPage",
    "LagRow",
    "Reset",
    "ResetDone",
    "ResetRow",
    "RetryShown",
    "SettingsOfGroup",
    "ToPlace",
]


class GroupRow(BaseModel):
    """A group, all its partitions added up."""

    group: str
    mode: Mode
    partitions: int
    lag: int = Field(description="Messages that are stored and not settled.")
    held: int = Field(description="Deliveries that consumers have not settled.")
    consumers: int = Field(description="How many were heard of lately.")


class ConsumerRow(BaseModel):
    """What one consumer holds of one partition."""

    consumer: str
    held: int
    silent_seconds: float | None = Field(description="Null if it is gone.")


class LagRow(BaseModel):
    """Where a group is in one partition, and how it gets on."""

    broker_group: str
    partition: str
    group: str
    mode: Mode
    next_sequence: int
    end: int
    lag: int
    damaged: int = Field(
        description="Messages of the partition that its broker has passed over, as it cannot read "
        "them and nobody has a copy."
    )
    held: int
    oldest_age_seconds: float | None = Field(
        description="For how long the oldest message that nobody was handed has been stored."
    )
    sent_per_second: float | None = Field(description="In the last minutes; null if unknown.")
    settled_per_second: float | None
    drain_seconds: float | None = Field(
        description="When all will be settled at this rate; null if unknown, or never."
    )
    consumers: list[ConsumerRow]


class FilterShown(Body):
    """Which messages a group wants, by their tags."""

    any_of: list[Tag] = Field(default=[], max_length=64)
    all_of: list[Tag] = Field(default=[], max_length=64)


class RetryShown(Body):
    """How failed messages come again; what is null or empty is the broker's choice."""

    delays_seconds: list[Annotated[float, Field(ge=0, le=31_536_000, allow_inf_nan=False)]] = (
        Field(default=[], max_length=100)
    )
    jitter: Annotated[float, Field(ge=0, le=1, allow_inf_nan=False)] | None = None
    max_attempts: Annotated[int, Field(strict=True, ge=1, le=65535)] | None = None


class SettingsOfGroup(BaseModel):
    """What a group said about a subject or pattern."""

    subject: str
    mode: Mode
    filter: FilterShown
    retry: RetryShown
    broker_groups: list[str] = Field(description="Which of them were told so.")


class GroupDetail(GroupRow):
    """A group and its settings."""

    settings: list[SettingsOfGroup]
    unreachable: list[Unreachable] = []


class GroupChange(Body):
    """What is to be different for a group; what is left out stays as it is."""

    subject: PatternName = Field(description="What the group subscribed to.")
    mode: Switchable | None = None
    filter: FilterShown | None = Field(default=None, description="An empty one for everything.")
    retry: RetryShown | None = None

    @model_validator(mode="after")
    def _says_something(self) -> "GroupChange":
        if self.mode is None and self.filter is None and self.retry is None:
            raise ValueError("say what to change: mode, filter or retry")
        return self


class ToPlace(Body):
    """A place in the stored messages: exactly one of these."""

    at: Literal["earliest", "latest"] | None = None
    sequence: Sequence | None = None
    time: AwareDatetime | None = Field(
        default=None, description="The first message stored at or after it; with a time zone."
    )

    @model_validator(mode="after")
    def _is_one(self) -> "ToPlace":
        if sum(each is not None for each in (self.at, self.sequence, self.time)) != 1:
            raise ValueError("give exactly one of at, sequence and time")
        return self


class Reset(Body):
    """Have a group go on from another place."""

    subject: PatternName
    to: ToPlace
    broker_group: ServerName | None = Field(default=None, description="Only there.")
    partition: PartitionField | None = Field(default=None, description="Only this partition.")
    dry_run: Flag = Field(
        default=True, description="Only say what would happen; say false to do it."
    )


class ResetRow(BaseModel):
    """What a reset did, or would do, in one partition."""

    broker_group: str
    partition: str
    position: int = Field(description="The next message of the group, before.")
    target: int = Field(description="The next message of the group, after.")
    held: int = Field(description="Deliveries taken from consumers that had not settled them.")
    reread: int
    skipped: int


class ResetDone(BaseModel):
    """What a reset did, or would do."""

    dry_run: bool
    rows: list[ResetRow]


class GroupPage(Page[GroupRow]):
    """Some groups, in the order of their names."""


class LagPage(Page[LagRow]):
    """Where a group is, by broker group and partition."""
