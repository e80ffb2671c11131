"""What the API says and takes about dead letters."""

from datetime import datetime

from pydantic import BaseModel, Field, model_validator

from pulque.admin.models.fields import Body, Flag, Sequence
from pulque.admin.models.names import ServerName
from pulque.admin.models.pagination import Page

__all__ = [
    "DeadPage",
    "DeadSource",
    "DeadSourcePage",
    "Letter",
    "LetterName",
    "Purge",
    "Purged",
    "Resend",
    "ResendDone",
]


class DeadSource(BaseModel):
    """How many dead letters a group has of a subject."""

    subject: str
    group: str
    count: int


class Letter(BaseModel):
    """A dead letter."""

    broker_group: str
    sequence: int
    id: str
    died_at: datetime
    attempts: int
    why: str
    reason: str
    key: str | None
    tags: list[str]
    headers: dict[str, str]
    size: int
    body: str | None = Field(description="The body, if it is text; null in lists.")
    body_base64: str | None = Field(description="The body, if it is no text; null in lists.")


class LetterName(Body):
    """Which dead letter."""

    broker_group: ServerName
    sequence: Sequence


class Resend(Body):
    """Dead letters to be delivered to their group again: some, or all."""

    letters: list[LetterName] = Field(default=[], max_length=1000)
    all: Flag = False

    @model_validator(mode="after")
    def _is_one(self) -> "Resend":
        if self.all == bool(self.letters):
            raise ValueError("give letters, or all")
        return self


class ResendDone(BaseModel):
    """What became of them."""

    resent: int
    done: list[LetterName] = Field(default=[], description="Resent or purged before.")
    missing: list[LetterName] = Field(default=[], description="Not stored any more.")


class Purge(Body):
    """Dead letters to be given up: all, or those of one broker group up to a sequence."""

    all: Flag = False
    until: LetterName | None = None

    @model_validator(mode="after")
    def _is_one(self) -> "Purge":
        if self.all == (self.until is not None):
            raise ValueError("give until, or all")
        return self


class Purged(BaseModel):
    """How many are gone."""

    purged: int


class DeadSourcePage(Page[DeadSource]):
    """Subjects and groups that may have dead letters."""


class DeadPage(Page[Letter]):
    """Some dead letters, by broker group, oldest first."""
