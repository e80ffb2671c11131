"""What the API says and takes about subjects and their partitions."""

from collections.abc import Mapping
from typing import Annotated, Literal

from pydantic import BaseModel, Field

from pulque.admin.models.fields import MAX_PARTITIONS, Body, Flag
from pulque.admin.models.names import ServerName, SubjectName
from pulque.admin.models.pagination import Page
from pulque.model.ordered import OrderStrategy

__all__ = [
    "ORDERS",
    "ORDER_NAMES",
    "Extension",
    "Growth",
    "Marks",
    "NewSubject",
    "Order",
    "OrderName",
    "PartitionPage",
    "PartitionRow",
    "PositionPage",
    "PositionRow",
    "ReadOnly",
    "SubjectPage",
    "SubjectRow",
]


OrderName = Literal["best-effort", "strict"]
ORDERS: Mapping[OrderName, OrderStrategy] = {
    "best-effort": OrderStrategy.BEST_EFFORT,
    "strict": OrderStrategy.STRICT,
}
ORDER_NAMES = {order: name for name, order in ORDERS.items()}


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


class SubjectPage(Page[SubjectRow]):
    """Some subjects, in the order of their names."""


class PartitionPage(Page[PartitionRow]):
    """Some partitions, in the order of their subjects."""


class PositionPage(Page[PositionRow]):
    """Some partitions of a subject as their brokers have them."""
