"""What the API says and takes about messages that are due later."""

from datetime import datetime
from typing import Annotated

from pydantic import AwareDatetime, BaseModel, Field, StringConstraints, model_validator

from pulque.admin.models.fields import Body
from pulque.admin.models.pagination import Page
from pulque.client.inspecting.delayed_messages import OutcomeName

__all__ = [
    "Cancel",
    "CancelDone",
    "DelayedMessage",
    "DelayedPage",
    "DueCount",
    "DueCountPage",
    "MessageId",
    "Outcome",
    "Reschedule",
    "RescheduleDone",
]

_LONGEST_SECONDS = 10 * 366 * 24 * 3600
MessageId = Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{32}$")]


class DueCount(BaseModel):
    """How many messages of a subject are due in an hour."""

    hour: datetime = Field(description="When the hour begins, in UTC.")
    subject: str
    messages: int


class DelayedMessage(BaseModel):
    """A message that waits for its time."""

    id: str
    due_at: datetime
    subject: str
    group: str | None = Field(description="The only group that gets it, if it is a retry.")
    priority: int
    size: int = Field(description="Bytes that it takes at the delay server.")
    delay_server: str
    reason: str | None = Field(
        default=None, description="Why brokers refuse it; null but in the list of those."
    )
    key: str | None = Field(default=None, description="Null in lists.")
    tags: list[str] = Field(default=[], description="Empty in lists.")
    headers: dict[str, str] = Field(default={}, description="Empty in lists.")
    body: str | None = Field(default=None, description="If it is text; null in lists.")
    body_base64: str | None = Field(default=None, description="If it is no text; null in lists.")


class Cancel(Body):
    """Messages that are never to be delivered."""

    ids: list[MessageId] = Field(min_length=1, max_length=1000)


class Outcome(BaseModel):
    """What became of one message."""

    id: str
    outcome: OutcomeName


class CancelDone(BaseModel):
    """What became of each, in the order of the request."""

    outcomes: list[Outcome]


class Reschedule(Body):
    """When a message is to be delivered instead: at an instant, or after a while."""

    at: AwareDatetime | None = None
    delay_seconds: Annotated[
        float | None, Field(ge=0, le=_LONGEST_SECONDS, allow_inf_nan=False, strict=True)
    ] = None

    @model_validator(mode="after")
    def _is_one(self) -> "Reschedule":
        if (self.at is None) == (self.delay_seconds is None):
            raise ValueError("give at, or delay_seconds")
        return self


class RescheduleDone(Outcome):
    """What became of it."""

    due_at: datetime = Field(description="The time that was asked for.")


class DueCountPage(Page[DueCount]):
    """Some hours and subjects, in the order of time."""


class DelayedPage(Page[DelayedMessage]):
    """Some messages, in the order in which they are due."""
