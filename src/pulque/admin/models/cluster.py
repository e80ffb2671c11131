"""What the API takes and gives: every field typed and explained; the OpenAPI is made from it."""

from collections.abc import Mapping
from datetime import datetime
from typing import Annotated, Literal

from pydantic import BaseModel, Field

from pulque.admin.cluster import Creation, Standing, StateName
from pulque.admin.models.fields import MAX_PARTITIONS, Body, Flag, Switchable
from pulque.admin.models.group import FilterShown, RetryShown
from pulque.admin.models.names import GroupName, PatternName, ServerName, SubjectName
from pulque.admin.models.pagination import Page
from pulque.model.ordered import OrderStrategy

__all__ = [
    "ORDERS",
    "ORDER_NAMES",
    "BrokerDetail",
    "BrokerPage",
    "BrokerRow",
    "ClientPage",
    "ClientRow",
    "ClientSubscription",
    "ClusterShown",
    "ConfigChange",
    "ConfigRow",
    "ConfigShown",
    "Definitions",
    "Draining",
    "Extension",
    "GroupDefinition",
    "HandOver",
    "Health",
    "ImportDone",
    "Marks",
    "NewSubject",
    "Order",
    "OrderName",
    "PartitionPage",
    "PartitionRow",
    "PositionPage",
    "PositionRow",
    "ReadOnly",
    "SubjectDefinition",
    "SubjectPage",
    "SubjectRow",
]


OrderName = Literal["best-effort", "strict"]
ORDERS: Mapping[OrderName, OrderStrategy] = {
    "best-effort": OrderStrategy.BEST_EFFORT,
    "strict": OrderStrategy.STRICT,
}
ORDER_NAMES = {order: name for name, order in ORDERS.items()}


# ── subjects and partitions ────────────────────────────────────────────────────────────────────


class PartitionRow(BaseModel):
    """A partition of a subject, and who holds it."""

    subject: str
    partition: str
    broker_group: str
    slots: tuple[int, int] = Field(
        description="Which order keys belong there: those with crc32c(key) % 1024 from the first "
        "number on, before the second."
    )
    closed: bool = Field(
        default=False,
        description="It was split or merged: it takes no more messages, and is consumed until it "
        "is empty.",
    )
    parents: list[str] = Field(
        default=[],
        description="The partitions that had its order keys before, as `partition@broker_group`: "
        "in order it is consumed after them.",
    )


class SubjectRow(BaseModel):
    """A subject, and where it lies."""

    subject: str
    read_only: bool = Field(description="It takes no sends, by command.")
    order: OrderName = Field(description="What a failure may do to the order of messages.")
    taking: int = Field(description="How many partitions take messages.")
    partitions: list[PartitionRow]


class NewSubject(Body):
    """A subject to be placed ahead of its first send."""

    subject: SubjectName
    broker_groups: list[ServerName] = Field(
        default=[],
        max_length=MAX_PARTITIONS,
        description="Where each of its partitions goes; one that is named twice gets two. Left "
        "out, it is placed like at a first send.",
    )


class Extension(Body):
    """How many partitions a subject is to have."""

    partitions: Annotated[int, Field(strict=True, ge=1, le=MAX_PARTITIONS)]


class Growth(Extension):
    """How many partitions a subject is to have, and where those that are added go."""

    broker_groups: list[ServerName] = Field(
        default=[],
        max_length=MAX_PARTITIONS,
        description="Where each partition that is added goes. Left out, they stay on the broker "
        "groups that the subject is on.",
    )


class Order(Body):
    """What a failure may do to the order of a subject's messages."""

    order: OrderName


class ReadOnly(Body):
    """Whether sends are refused."""

    read_only: Flag


class PositionRow(BaseModel):
    """A partition as its broker has it."""

    broker_group: str
    partition: str
    start: int = Field(description="The sequence of the oldest message that is stored.")
    end: int = Field(description="The sequence of the next message to come.")


class Marks(BaseModel):
    """Subjects and patterns that take no sends."""

    read_only: list[str]


# ── brokers and clients ────────────────────────────────────────────────────────────────────────


class BrokerRow(BaseModel):
    """A broker or a delay server."""

    name: str
    broker_group: str
    role: Literal["broker", "meta", "delay"]
    address: str
    state: StateName
    silent_seconds: float | None = Field(description="Null if it is gone.")
    read_only: bool
    draining: bool
    partitions: int = Field(description="How many were placed on its broker group.")
    standing: Standing = Field(
        default="alone",
        description="Whether it leads its broker group, follows, or has no others beside it.",
    )
    epoch: int = Field(
        default=0, description="Counts the leaderships of its broker group; 0 if there is none."
    )
    in_sync: bool | None = Field(
        default=None,
        description="Whether it has all that was confirmed; null if its group is not led.",
    )


class BrokerDetail(BrokerRow):
    """A broker, and what it says of itself."""

    incarnation: int
    lag: int | None = Field(
        description="Messages that groups have not settled there, those that wait for a retry "
        "too; null if it does not answer."
    )
    status: dict[str, int | float | str | bool | None] = Field(
        description="Counters of the broker; empty if it does not answer."
    )


class Draining(Body):
    """Whether a broker is to be emptied."""

    draining: Flag


class HandOver(Body):
    """An empty object: who is to lead is in the path."""


class ClientSubscription(BaseModel):
    """A consumer that uses a connection."""

    consumer: str
    group: str
    subject: str
    held: int


class ClientRow(BaseModel):
    """A client that is online now, as one server sees it."""

    server: str = Field(description="The broker it is connected to; `meta` for a meta server.")
    client: str
    application: str
    address: str
    since: datetime
    silent_seconds: float
    holds: int = Field(description="Deliveries that it has not settled.")
    consumers: list[ClientSubscription]
    routes: int = Field(description="How many it follows, at a meta server.")


# ── the cluster ────────────────────────────────────────────────────────────────────────────────


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


class SubjectPage(Page[SubjectRow]):
    """Some subjects, in the order of their names."""


class PartitionPage(Page[PartitionRow]):
    """Some partitions, in the order of their subjects."""


class PositionPage(Page[PositionRow]):
    """Some partitions of a subject as their brokers have them."""


class BrokerPage(Page[BrokerRow]):
    """Some brokers, in the order of their names."""


class ClientPage(Page[ClientRow]):
    """Some clients, server by server."""
