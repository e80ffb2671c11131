"""A nack whose broker is away goes to another one, with the whole message; for asyncio."""

import logging
from collections.abc import Callable, Sequence
from typing import Protocol

from pulque.client.aio.concurrency import Bridge
from pulque.client.aio.connection import AsyncConnection
from pulque.client.connection.session import as_it_is
from pulque.client.persistence.nack_spool import SpooledNack
from pulque.client.receiving.pull_options import PullOptions
from pulque.client.routing.route_table import RouteKey
from pulque.errors import PulqueError, RemoteProtocolError
from pulque.model.message import Message
from pulque.model.positions import ConsumeSequence
from pulque.wire.adopt import Adopt, Adopted, Origin

__all__ = ["Adopting"]

log = logging.getLogger("pulque.client")

_CONNECT_LIMIT = 2.0
_ANSWER_LIMIT = 5.0


class Others(Protocol):
    """Who else serves a subject."""

    def known_places(self, key: RouteKey) -> list[str]:
        """Return who serves it, as was heard last."""

    async def open_at(self, place: str, timeout: float) -> AsyncConnection:
        """Open a connection to a place."""


class Adopting:
    """Where the nacks of one broker go while it is away. Blocks; used by one thread at a time.

    Args:
        place: The broker that they are for.
        key: What is consumed.
        options: By whom.
        others: Who else serves it.
    """

    takes_over = True

    def __init__(self, place: str, key: RouteKey, options: PullOptions, others: Others) -> None:
        self.is_away: Callable[[], bool] = lambda: False
        """Whether the broker cannot be told itself."""
        self._place = place
        self._key = key
        self._options = options
        self._others = others
        self._bridge = Bridge()
        self._adopted = 0
        """How many of the nacks that are being handed over others have by now."""

    def put(self, nacks: Sequence[SpooledNack]) -> int:
        """Have nacks retried by others, in order; return how many of them are.

        The thread that keeps the consumer's files calls it, and waits.
        """
        if not self.is_away():
            return 0
        self._adopted = 0
        self._bridge.wait_for(self._put(nacks))
        return self._adopted

    async def _put(self, nacks: Sequence[SpooledNack]) -> int:
        for place in self._others.known_places(self._key):
            if place != self._place and self._adopted < len(nacks):
                await self._put_at(place, nacks[self._adopted :])
        return self._adopted

    async def _put_at(self, place: str, nacks: Sequence[SpooledNack]) -> None:
        try:
            connection = await self._others.open_at(place, _CONNECT_LIMIT)
            try:
                for nack in nacks:
                    request = self._adopt(nack)
                    answer = await connection.request(request, _ANSWER_LIMIT, as_it_is)
                    if not isinstance(answer, Adopted):
                        raise RemoteProtocolError(f"an adoption got {answer!r}")
                    self._adopted += 1
            finally:
                await connection.close()
        except PulqueError as error:
            log.info("a nack was not adopted: broker=%s error=%s", place, error)

    def _adopt(self, nack: SpooledNack) -> Adopt:
        return Adopt(
            self._options.group,
            self._options.consumer,
            nack.reason,
            nack.delay_ms,
            Message(nack.read_message(), 0).attempt,
            Origin(self._place, nack.partition, ConsumeSequence(nack.sequence)),
            nack.message,
        )
