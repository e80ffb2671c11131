"""What the API says about clients that are online."""

from datetime import datetime

from pydantic import BaseModel, Field

from pulque.admin.models.pagination import Page

__all__ = [
    "ClientPage",
    "ClientRow",
    "ClientSubscription",
]


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


class ClientPage(Page[ClientRow]):
    """Some clients, server by server."""
