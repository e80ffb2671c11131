"""A meta server that says what a test wants, on a loopback port of the test's own loop."""

import asyncio
from collections.abc import Callable

from pulque.clock import SystemClock
from pulque.errors import PulqueError, UnavailableError
from pulque.model.names import PartitionName, Pattern
from pulque.model.positions import Epoch, StartCount, Tenure
from pulque.model.routes import PartitionRoute, Role
from pulque.model.routes import Route as RouteOf
from pulque.net.server import AcceptedConnection, ConnectionLimits, FrameServer
from pulque.wire.frame import MAX_PAYLOAD, Frame
from pulque.wire.leadership import Lead, Led
from pulque.wire.registration import Register, Registered, ServerState
from pulque.wire.requests import Hello, Route, Watch, decode_request
from pulque.wire.responses import (
    Response,
    Routed,
    Watched,
    Welcome,
    encode_error,
    encode_response,
)

__all__ = ["FakeMeta", "registered"]

_LIMITS = ConnectionLimits(1000, MAX_PAYLOAD, 2**24, 5000, 10_000, 120_000)


def registered(  # one for each field that a test sets
    *,
    cluster: str = "blue",
    heartbeat_ms: int = 20,
    is_read_only: bool = False,
    is_draining: bool = False,
    may_create: bool = True,
    read_only: tuple[str, ...] = (),
) -> Registered:
    """Return an answer to a registration."""
    return Registered(
        cluster, heartbeat_ms, is_read_only, is_draining, may_create, 0, read_only, ""
    )


class FakeMeta:
    """Counts who registers, and answers as it is told."""

    def __init__(self) -> None:
        self.standing: Registered | PulqueError = registered()
        """The answer to registrations."""
        self.routes: Callable[[Route], RouteOf | PulqueError] = lambda request: RouteOf(
            Pattern(request.subject),
            1,
            (PartitionRoute(PartitionName(request.subject), "broker", "h", 1),),
        )
        """The answer to questions for routes."""
        self.lead: Callable[[Lead], Led | PulqueError] = lambda _: UnavailableError("nobody knows")
        """The answer to brokers that ask who leads."""
        self.heard: list[Register] = []
        self.asked: list[Route | Watch] = []
        self._server = FrameServer(self, _LIMITS, SystemClock(), lambda *_, **__: None)
        self.port = 0

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    @property
    def states(self) -> list[ServerState]:
        """What brokers said of themselves."""
        return [each.state for each in self.heard]

    async def start(self) -> None:
        _, self.port = await self._server.listen("127.0.0.1", self.port)

    async def stop(self) -> None:
        await self._server.close()
        self._server = FrameServer(self, _LIMITS, SystemClock(), lambda *_, **__: None)
        await asyncio.sleep(0)

    def handle(self, connection: AcceptedConnection, frame: Frame) -> None:
        request = decode_request(frame)
        found: Response | PulqueError
        match request:
            case Hello():
                connection.welcome()
                tenure = Tenure(Epoch(0), StartCount(0))
                found = Welcome(1, "meta", tenure, MAX_PAYLOAD, 0, 0, 0, Role.META, "blue")
            case Register():
                self.heard.append(request)
                found = self.standing
            case Route():
                self.asked.append(request)
                answer = self.routes(request)
                found = answer if isinstance(answer, PulqueError) else Routed(answer)
            case Watch():
                self.asked.append(request)
                found = Watched(())
            case Lead():
                found = self.lead(request)
            case _:
                raise AssertionError(request)
        if isinstance(found, PulqueError):
            connection.send([encode_error(found, frame.request_id, 0)])
        else:
            connection.send(encode_response(found, frame.request_id, 0))

    def pause(self, connection: AcceptedConnection) -> None:
        """Every request is answered on its own: there is nothing to be done together."""

    def closed(self, connection: AcceptedConnection) -> None:
        """Nothing waits here."""
