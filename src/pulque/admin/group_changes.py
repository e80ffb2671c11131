"""Changing groups on all brokers that know them: asked first, so that all can, or none is told."""

from collections.abc import Awaitable, Callable, Sequence
from typing import TypeVar

from pulque.admin.broker_requests import Brokers
from pulque.admin.cluster import KnownServer
from pulque.errors import (
    PulqueError,
    UnavailableError,
    UnknownGroupError,
    UnknownSubjectError,
)

__all__ = ["ask_those_concerned"]

T = TypeVar("T")


async def ask_those_concerned(
    brokers: Brokers,
    servers: Sequence[KnownServer],
    question: Callable[[KnownServer], Awaitable[T]],
) -> list[tuple[KnownServer, T]]:
    """Ask brokers something that only some of them know about.

    Raises:
        UnavailableError: One of them does not answer, so that nobody knows.
        RejectedError: None of them knows about it, or one said no.
    """
    unknown: list[PulqueError] = []

    async def ask(server: KnownServer) -> T | None:
        try:
            return await question(server)
        except (UnknownGroupError, UnknownSubjectError) as error:
            unknown.append(error)
            return None

    answers, silent = await brokers.ask_all(servers, ask)
    if silent:
        names = ", ".join(each.broker for each in silent)
        raise UnavailableError(
            f"no answer of {names}, so nothing was changed: {silent[0].message}"
        )
    found = [(server, answer) for server, answer in answers if answer is not None]
    if found:
        return found
    if unknown:
        raise unknown[0]
    raise UnavailableError("there is no broker yet")
