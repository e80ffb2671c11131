"""One meta server, as a server sees it: a connection that is made again whenever it is lost.

Over it the broker says again and again that it is there, and hears how it stands in its cluster.
That the meta server is away is no reason to stop anything.
"""

import asyncio
import contextlib
from collections.abc import Callable

from pulque.client.aio.connection import AsyncConnection
from pulque.client.connection.url import Address
from pulque.errors import FencedError, PulqueError, RejectedError, RemoteProtocolError
from pulque.wire.registration import Register, Registered, ServerState
from pulque.wire.responses import Response

__all__ = ["MOST_HELD", "Describe", "MetaLink"]

Describe = Callable[[ServerState], Register]
"""Says what the broker is and how it is doing."""
MOST_HELD = 100
"""Requests that a meta server holds for one connection; it refuses one more."""

_PATIENCE_S = 3.0
_LEAVE_S = 1.0
_SHORTEST_S = 0.2
_LONGEST_S = 5.0


class MetaLink:
    """Registers at one meta server, over and over.

    Args:
        address: Where it listens.
        name: What the broker calls itself.
        describe: What to say.
        heard: Called with every answer; raises ``RejectedError`` for one that cannot be.
        warn: Logs what is wrong, each time that it is something else.
        role: What the server is, for the meta server's logs.
    """

    def __init__(
        self,
        address: Address,
        *,
        name: str,
        describe: Describe,
        heard: Callable[[Registered], None],
        warn: Callable[..., None],
        role: str = "broker",
    ) -> None:
        self.address = address
        self.connection: AsyncConnection | None = None
        """Open, or None while it is not."""
        self.refusal: RejectedError | None = None
        """What the meta server has against this broker."""
        self.is_registered = False
        """Whether it ever accepted this broker."""
        self.on_fenced: Callable[[FencedError], None] = lambda _: None
        """Called when another process has the data directory, or a copy of it."""
        self.tried = asyncio.Event()
        """Set when the first attempt is over, well or badly."""
        self._client = f"{role} {name}"
        self._describe = describe
        self._heard = heard
        self._warn = warn
        self._told = ""
        self._wake = asyncio.Event()
        """Set when there is a reason not to be silent for as long as agreed."""
        self._wait_s = _SHORTEST_S

    async def run(self) -> None:
        """Register until cancelled."""
        while True:
            pause_s = await self._beat()
            self.tried.set()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(pause_s):
                    await self._wake.wait()
                self._wake.clear()
                if self.connection is None:
                    await asyncio.sleep(_SHORTEST_S)

    def hurry(self) -> None:
        """Say at once how the server is doing, as that has just changed."""
        self._wake.set()

    async def leave(self) -> None:
        """Say that the broker stops, if anybody listens, and close.

        One that was refused says nothing: what it calls itself is another's.
        """
        connection, self.connection = self.connection, None
        if connection is None:
            return
        if self.is_registered and self.refusal is None:
            with contextlib.suppress(PulqueError):
                leaving = self._describe(ServerState.LEAVING)
                await connection.request(leaving, _LEAVE_S, _registered)
        await connection.close()

    async def _beat(self) -> float:
        """Say that the broker is there; return for how long to be silent then."""
        said: Register | None = None
        try:
            connection = self.connection or await self._connect()
            said = self._describe(ServerState.READY)
            answer = await connection.request(said, _PATIENCE_S, _registered)
            self._heard(answer)
        except RejectedError as error:
            self.refusal = error
            self._tell("registration_refused", str(error))
            if isinstance(error, FencedError) and said is not None:
                self._fenced(error, said)
            return _LONGEST_S
        except PulqueError as error:
            await self._drop()
            self._tell("meta_server_away", str(error))
            self._wait_s = min(self._wait_s * 2, _LONGEST_S)
            return self._wait_s
        self.refusal = None
        self.is_registered = True
        self._wait_s = _SHORTEST_S
        self._tell("cluster_warning", answer.warning)
        return answer.heartbeat_ms / 1000

    def _fenced(self, error: FencedError, said: Register) -> None:
        """Tell that another process has the directory, unless it is this one, started anew."""
        if self._describe(ServerState.READY).incarnation == said.incarnation:
            self.on_fenced(error)

    async def _connect(self) -> AsyncConnection:
        connection = await AsyncConnection.open(
            self.address, client=self._client, timeout=_PATIENCE_S
        )

        def on_lost(_: PulqueError) -> None:
            # Noticed at once: the meta server was restarted.
            if self.connection is connection:
                self.connection = None
                self._wake.set()

        connection.on_lost = on_lost
        self.connection = connection
        return connection

    async def _drop(self) -> None:
        connection, self.connection = self.connection, None
        if connection is not None:
            await connection.close()

    def _tell(self, event: str, text: str) -> None:
        """Log what is wrong; the same thing once."""
        told = f"{event}: {text}" if text else ""
        if told and told != self._told:
            self._warn(event, meta=str(self.address), reason=text)
        self._told = told


def _registered(response: Response) -> Registered:
    if not isinstance(response, Registered):
        raise RemoteProtocolError(f"{type(response).__name__} came instead of Registered")
    return response
