"""What the API says about stored messages."""

from datetime import datetime

from pydantic import BaseModel, Field

from pulque.admin.models.pagination import Unreachable

__all__ = ["FoundPage", "StoredMessage"]


class StoredMessage(BaseModel):
    """A message that a broker has."""

    id: str
    subject: str
    broker_group: str
    partition: str
    sequence: int
    key: str | None
    order_key: str | None
    tags: list[str]
    headers: dict[str, str]
    attempt: int
    priority: int
    created_at: datetime
    stored_at: datetime
    size: int
    body: str | None = Field(description="The body, if it is text; null in lists.")
    body_base64: str | None = Field(description="The body, if it is no text; null in lists.")


class FoundPage(BaseModel):
    """Messages that were found, the newest first."""

    items: list[StoredMessage]
    unreachable: list[Unreachable] = Field(
        default=[], description="Brokers whose messages may be missing."
    )
