"""What the API says and takes about groups that consume in order."""

from pydantic import AwareDatetime, BaseModel, Field

from pulque.admin.models.fields import Body, Sequence
from pulque.admin.models.names import PartitionField, ServerName
from pulque.admin.models.pagination import Page

__all__ = ["OrderedPage", "OrderedPartition", "SkipDone", "SkipOne"]


class OrderedPartition(BaseModel):
    """An ordered group in one partition."""

    broker_group: str
    partition: str
    group: str
    closed: bool = Field(description="The partition was split or merged, and takes no sends.")
    settled: int = Field(description="The sequence of the first message that is not settled.")
    end: int = Field(description="The sequence of the next message to come.")
    lag: int = Field(description="Messages that are stored and not settled.")
    held: int = Field(description="Deliveries that the holder has not settled.")
    holder: str | None = Field(description="The consumer that has the lock; null if nobody.")
    token: int = Field(description="Of the newest lock; 0 if there never was one.")
    lock_seconds: float = Field(description="How long the holder has it without another word.")
    stuck_since: AwareDatetime | None = Field(
        description="Since when the first unsettled message is that; null if none was handed out."
    )


class OrderedPage(Page[OrderedPartition]):
    """Where ordered groups are, by broker group, partition and group."""


class SkipOne(Body):
    """The message that a group waits for, and is to wait for no longer."""

    broker_group: ServerName
    partition: PartitionField
    sequence: Sequence = Field(description="As `settled` says.")
    reason: str = Field(default="", max_length=1000, description="Why, for people.")


class SkipDone(BaseModel):
    """What a group goes on with."""

    next_sequence: int
