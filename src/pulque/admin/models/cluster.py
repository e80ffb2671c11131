"""What the API says and takes about a whole cluster, and its definitions as one file."""

from typing import Annotated, Literal

from pydantic import BaseModel, Field

from pulque.admin.cluster import Creation
from pulque.admin.models.fields import MAX_PARTITIONS, Body, Switchable
from pulque.admin.models.group import FilterShown, RetryShown
from pulque.admin.models.names import GroupName, PatternName, SubjectName
from pulque.admin.models.subject import OrderName

__all__ = [
    "ClusterShown",
    "ConfigChange",
    "ConfigRow",
    "ConfigShown",
    "Definitions",
    "GroupDefinition",
    "Health",
    "ImportDone",
    "SubjectDefinition",
]


class ClusterShown(BaseModel):
    """The cluster at a glance."""

    cluster: str
    version: str
    brokers: dict[str, int] = Field(description="How many are in each state.")
    broker_groups: list[str]
    read_only: list[str] = Field(description="Subjects and patterns that take no sends.")
    short_of_copies: int = Field(
        default=0,
        description="How many broker groups have a broker that is not in sync, or fewer in sync "
        "than it takes for messages to be taken.",
    )


class ConfigRow(BaseModel):
    """A setting that may change while the cluster runs."""

    key: str
    value: str | int | list[str]
    allowed: str
    description: str


class ConfigShown(BaseModel):
    """All settings that may change while the cluster runs."""

    items: list[ConfigRow]


class ConfigChange(Body):
    """New values; what is left out stays as it is."""

    create: Creation | None = Field(
        default=None,
        description="When a subject is created: by its first send, or beforehand by command.",
    )
    allowed: Annotated[list[PatternName], Field(max_length=1000)] | None = Field(
        default=None,
        description="Only these subjects, and those of patterns, may be created; empty for all.",
    )
    spread: Annotated[int, Field(strict=True, ge=1, le=64)] | None = Field(
        default=None,
        description="On how many broker groups a new subject is placed; all, if there are fewer.",
    )


class SubjectDefinition(Body):
    """A subject, as it is written to a file."""

    subject: SubjectName
    partitions: Annotated[int, Field(strict=True, ge=1, le=MAX_PARTITIONS)] | None = None
    order: OrderName | None = Field(
        default=None,
        description="What a failure may do to the order of messages; without it, as it is.",
    )


class GroupDefinition(Body):
    """What a group said about a subject or pattern, as it is written to a file."""

    group: GroupName
    subject: PatternName
    mode: Switchable = "shared"
    filter: FilterShown = FilterShown()
    retry: RetryShown = RetryShown()


class Definitions(Body):
    """A cluster's definitions: all that a new one needs to be like it, but for its messages."""

    version: Literal[1] = 1
    policies: ConfigChange = ConfigChange()
    subjects: list[SubjectDefinition] = Field(default=[], max_length=20_000)
    read_only: list[PatternName] = Field(default=[], max_length=20_000)
    groups: list[GroupDefinition] = Field(default=[], max_length=20_000)


class ImportDone(BaseModel):
    """What an import did, or would do."""

    dry_run: bool
    created: list[str] = Field(description="Subjects that were not there.")
    extended: list[str] = Field(description="Subjects that got more partitions.")
    ordered: list[str] = Field(description="Subjects with another strategy of order than before.")
    marked: list[str] = Field(description="Subjects and patterns that take no sends from now on.")
    groups: int = Field(description="Groups that were told their settings.")
    policies: bool = Field(description="Whether settings of the cluster changed.")


class Health(BaseModel):
    """Whether the server lives, or may be asked."""

    status: Literal["ok"] = "ok"
