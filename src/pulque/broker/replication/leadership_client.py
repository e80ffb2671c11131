"""What the meta servers say about who leads a broker group; and how to have them change it."""

import asyncio
from collections.abc import Callable, Sequence
from itertools import chain
from typing import TypeVar

from pulque.client.aio.connection import AsyncConnection
from pulque.clock import Clock
from pulque.errors import PulqueError, RemoteProtocolError, UnavailableError
from pulque.model.leadership import Leadership
from pulque.serving.metalink import MetaLink
from pulque.wire.leadership import ChangeInSync, InSyncChanged, Lead, Led
from pulque.wire.requests import Request
from pulque.wire.responses import Response

__all__ = ["Authority"]

T = TypeVar("T")
_PAUSE_S = 0.2
_PATIENCE_S = 1.0
_FIRST_WAIT_MS = 200
_LONGEST_WAIT_MS = 1000
_BEATS_PER_LEASE = 5


class Authority:
    """Asks who leads, again and again. Lives in one event loop.

    Args:
        links: The meta servers that this broker registers at.
        question: Makes the question, from the version that is known and how long to wait.
        clock: The broker's.
        warn: Logs an event with its fields.
        newest: The highest version of the leadership that was heard of before this start.
        on_newer: Called with every leadership whose version is higher.
    """

    def __init__(
        self,
        links: Sequence[MetaLink],
        question: Callable[[int, int], Lead],
        clock: Clock,
        warn: Callable[..., None],
        newest: int = 0,
        on_newer: Callable[[Leadership], None] = lambda _: None,
    ) -> None:
        self._links = links
        self._question = question
        self._clock = clock
        self._warn = warn
        self._told = ""
        self._turn = 0
        self._on_newer = on_newer
        self._newest = newest
        """The highest version of the leadership that anybody told of."""
        self.led: Led | None = None
        """Who leads, as was heard last; None if nobody said so yet."""
        self.heard_ms = 0
        """When that was asked, on the monotonic clock."""
        self.on_led: Callable[[Led], None] = lambda _: None
        """Called with every answer, whether it differs or not."""

    async def run(self) -> None:
        """Ask until cancelled."""
        while True:
            known, wait_ms = self._known()
            sent_ms = self._clock.monotonic_ms()
            try:
                led = await self._ask(self._question(known, wait_ms), wait_ms, _led)
            except PulqueError as error:
                self._tell(str(error))
                await asyncio.sleep(_PAUSE_S)
            else:
                self._tell("")
                self._take_in(led, sent_ms)

    async def change(self, change: ChangeInSync) -> InSyncChanged:
        """Have the set of those that are in sync changed.

        Raises:
            PulqueError: It is not, or nobody knows whether it is.
        """
        answer = await self._ask(change, 0, _changed)
        self._hear_of(answer.leadership)
        return answer

    def forget(self) -> None:
        """Take in that what was heard last is over: who leads has to be asked."""
        self.led = None

    def _known(self) -> tuple[int, int]:
        """Return the version that is known, and for how long to wait for another one."""
        if self.led is None:
            # Not 0: a database that was restored from an older backup is known by it.
            return self._newest, _FIRST_WAIT_MS
        wait_ms = min(self.led.lease_ms // _BEATS_PER_LEASE, _LONGEST_WAIT_MS)
        return self.led.leadership.version, wait_ms

    def _take_in(self, led: Led, sent_ms: int) -> None:
        # A meta server that is behind the others must not bring back what is over.
        if led.leadership.version >= self._newest:
            self._hear_of(led.leadership)
            self.led, self.heard_ms = led, sent_ms
            self.on_led(led)

    def _hear_of(self, leadership: Leadership) -> None:
        if leadership.version > self._newest:
            self._newest = leadership.version
            self._on_newer(leadership)

    async def _ask(self, request: Request, wait_ms: int, convert: Callable[[Response], T]) -> T:
        """Ask one meta server that is connected; each has its turn.

        One that is cut off from the database goes on telling what it knew: nobody may rely on it.
        """
        connections = self._connections()
        if not connections:
            raise UnavailableError("no meta server can be reached")
        self._turn += 1
        return await connections[0].request(request, wait_ms / 1000 + _PATIENCE_S, convert)

    def _connections(self) -> list[AsyncConnection]:
        at = self._turn % len(self._links)
        found = [each.connection for each in chain(self._links[at:], self._links[:at])]
        return [each for each in found if each is not None and each.is_open]

    def _tell(self, text: str) -> None:
        """Log why nobody says who leads; the same thing once."""
        if text and text != self._told:
            self._warn("leader_not_known", reason=text)
        self._told = text


def _led(response: Response) -> Led:
    if not isinstance(response, Led):
        raise RemoteProtocolError(f"{type(response).__name__} came instead of Led")
    return response


def _changed(response: Response) -> InSyncChanged:
    if not isinstance(response, InSyncChanged):
        raise RemoteProtocolError(f"{type(response).__name__} came instead of InSyncChanged")
    return response
