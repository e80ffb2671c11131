"""Carries conversations without I/O to their end, for asyncio: asks what they want to know.

A conversation is a generator that yields requests and is sent the answers to them.
"""

from collections.abc import Awaitable, Callable, Mapping
from typing import TypeVar

from pulque.client.inspecting.dead_letters import Talk
from pulque.client.inspecting.delayed_messages import DelayTalk
from pulque.errors import PulqueError
from pulque.wire.requests import Request
from pulque.wire.responses import Response

__all__ = ["Asker", "FindAskers", "talk_to", "talk_to_many"]

T = TypeVar("T")
Asker = Callable[[Request], Awaitable[Response]]
"""Asks one server."""
FindAskers = Callable[[], Awaitable[Mapping[str, Asker]]]
"""Finds whom to ask, by name."""


async def talk_to(talk: Talk[T], ask: Asker) -> T:
    """Carry a conversation with one broker to its end."""
    try:
        request = next(talk)
        while True:
            request = talk.send(await ask(request))
    except StopIteration as end:
        found: T = end.value
        return found


async def talk_to_many(find_askers: FindAskers, begin: Callable[[list[str]], DelayTalk[T]]) -> T:
    """Carry a conversation with several servers, known by name, to its end."""
    askers = await find_askers()
    talk = begin(list(askers))
    try:
        server, request = next(talk)
        while True:
            try:
                answer = await askers[server](request)
            except PulqueError as error:
                server, request = talk.send(error)
            else:
                server, request = talk.send(answer)
    except StopIteration as end:
        found: T = end.value
        return found
