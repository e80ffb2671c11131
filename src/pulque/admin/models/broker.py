"""What the API says and takes about brokers and delay servers."""

from typing import Literal

from pydantic import BaseModel, Field

from pulque.admin.cluster import Standing, StateName
from pulque.admin.models.fields import Body, Flag
from pulque.admin.models.pagination import Page

__all__ = [
    "BrokerDetail",
    "BrokerPage",
    "BrokerRow",
    "Draining",
    "HandOver",
]


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


class BrokerPage(Page[BrokerRow]):
    """Some brokers, in the order of their names."""
