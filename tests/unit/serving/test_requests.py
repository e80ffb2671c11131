"""What every server does with a request, whatever it answers."""

from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import cast

import pytest

from pulque.clock import SystemClock
from pulque.errors import (
    DisconnectedError,
    NotAllowedError,
    NotLeaderError,
    OverloadedError,
    PulqueError,
    RemoteProtocolError,
    RequestTimeoutError,
    UnsupportedError,
)
from pulque.model.positions import Epoch, StartCount, Tenure
from pulque.net.server import AcceptedConnection, ConnectionLimits, FrameServer, Work
from pulque.serving.requests import RequestHandler, RequestRow, returns, row
from pulque.serving.responses import Responder
from pulque.testing.raw import RawConnection
from pulque.wire.frame import FRAME_HEADER_SIZE, Frame, pack_frame_header
from pulque.wire.ordered import Unlock, Unlocked
from pulque.wire.requests import (
    Acks,
    Clients,
    Heartbeat,
    Hello,
    Read,
    Request,
    Seal,
    Send,
    Status,
    encode_request,
)
from pulque.wire.responses import (
    Beaten,
    ClientsListed,
    ReadBack,
    Sealed,
    Sent,
    StatusReport,
    Welcome,
)
from pulque.wire.versions import NEWEST

MOST_HELD = 3
STEPS = 5
WELCOME = Welcome(NEWEST, "here", Tenure(Epoch(1), StartCount(1)), 1024, 1024, 1000, 1000)
SEND = Send(Acks.MEMORY, 1000, ())
READ = Read("orders", 0, 1, 1, 1000)


@dataclass
class Server:
    """A server that answers a few types of request."""

    held: list[Responder] = field(default_factory=list)
    connections: list[AcceptedConnection] = field(default_factory=list)
    steps: int = 0
    error: PulqueError | None = None
    refusal: PulqueError | None = None

    def rows(self) -> tuple[RequestRow, ...]:
        return (
            row(Heartbeat, returns(lambda _: Beaten(1))),
            row(Status, returns(lambda _: StatusReport(b"{}")), needs_leadership=False),
            row(Send, self._send, has_deadline=True),
            row(Read, self._read, is_held=True),
            row(Seal, self._in_steps, outlives_client=True),
            row(Clients, self._in_steps),
        )

    def _send(self, _: AcceptedConnection, request: Send, responder: Responder) -> None:
        del request
        responder.answer(Sent(()))

    def _read(self, connection: AcceptedConnection, request: Read, responder: Responder) -> None:
        del request
        self.connections.append(connection)
        if self.error is not None:
            raise self.error
        self.held.append(responder)

    def _in_steps(
        self, _: AcceptedConnection, request: Seal | Clients, responder: Responder
    ) -> Work:
        for self.steps in range(1, STEPS + 1):
            if self.steps == STEPS and self.error is not None:
                raise self.error
            yield
        responder.answer(
            Sealed(1) if isinstance(request, Seal) else ClientsListed((), 0, has_more=False)
        )


class Serving:
    """The server at work, and its clients."""

    def __init__(self, server: Server) -> None:
        self.handler = RequestHandler(
            server.rows(),
            server="server",
            welcome=lambda: WELCOME,
            unknown=lambda request: UnsupportedError(f"{type(request).__name__} is for others"),
            most_held=MOST_HELD,
            refusal=lambda: server.refusal,
            lateness=", alas",
        )
        limits = ConnectionLimits(100, 2**20, 2**20, 10_000, 10_000, 60_000)
        self._server = FrameServer(self.handler, limits, SystemClock(), lambda *_, **__: None)
        self._url = ""
        self._clients: list[RawConnection] = []

    async def start(self) -> None:
        host, port = await self._server.listen("127.0.0.1", 0)
        self._url = f"pulque://{host}:{port}"

    async def connect(self, *, is_greeting: bool = True) -> RawConnection:
        raw = await RawConnection.open(self._url, is_greeting=is_greeting)
        self._clients.append(raw)
        return raw

    async def close(self) -> None:
        for raw in self._clients:
            raw.close()
        await self._server.close()


@pytest.fixture
def server() -> Server:
    return Server()


@pytest.fixture
async def serving(server: Server) -> AsyncIterator[Serving]:
    running = Serving(server)
    await running.start()
    yield running
    await running.close()


async def test_the_handshake_comes_first(serving: Serving) -> None:
    raw = await serving.connect(is_greeting=False)

    with pytest.raises(RemoteProtocolError, match="the first frame on a connection must be a"):
        await raw.ask(Heartbeat("g", "c", 1), Beaten)
    with pytest.raises(DisconnectedError):
        await raw.get()


async def test_nobody_is_authenticated_yet(serving: Serving) -> None:
    raw = await serving.connect(is_greeting=False)

    with pytest.raises(UnsupportedError, match="'plain' is not known; this server knows none"):
        await raw.ask(Hello(1, NEWEST, "me", "plain"), Welcome)
    assert (await raw.ask(Hello(1, NEWEST, "me"), Welcome)).broker == "here"


async def test_a_second_handshake_ends_the_connection(serving: Serving) -> None:
    raw = await serving.connect()

    with pytest.raises(RemoteProtocolError, match="a second Hello"):
        await raw.ask(Hello(1, NEWEST, "me"), Welcome)
    with pytest.raises(DisconnectedError):
        await raw.get()


async def test_a_type_of_request_without_a_row_is_refused(serving: Serving) -> None:
    raw = await serving.connect()

    with pytest.raises(UnsupportedError, match="Unlock is for others"):
        await raw.ask(Unlock("orders", "g", "c", 1, 1), Unlocked)
    assert await raw.ask(Heartbeat("g", "c", 1), Beaten) == Beaten(1)


async def test_only_so_many_requests_of_a_connection_wait(
    server: Server, serving: Serving
) -> None:
    raw, other = await serving.connect(), await serving.connect()
    asked = [await raw.put(READ) for _ in range(MOST_HELD)]

    with pytest.raises(OverloadedError, match=f"{MOST_HELD} requests of this connection wait"):
        await raw.ask(READ, ReadBack)
    first = await other.put(READ)
    assert not await other.is_answered(first)

    connection = server.connections[0]
    assert connection.waiting == MOST_HELD
    server.held[0].answer(Beaten(7))
    server.held[1].refuse(NotAllowedError("no"))
    server.held[1].refuse(NotAllowedError("once more"))
    assert connection.waiting == MOST_HELD - 2
    assert await raw.answer_to(asked[0]) == Beaten(7)
    assert isinstance(await raw.answer_to(asked[1]), NotAllowedError)
    assert not await raw.is_answered(await raw.put(READ))


async def test_a_request_that_is_refused_at_once_does_not_wait(
    server: Server, serving: Serving
) -> None:
    raw = await serving.connect()
    server.error = NotAllowedError("not here")

    for _ in range(MOST_HELD + 1):
        with pytest.raises(NotAllowedError, match="not here"):
            await raw.ask(READ, ReadBack)
    assert server.connections[0].waiting == 0


async def test_a_request_that_waited_for_too_long_is_refused(
    serving: Serving, monkeypatch: pytest.MonkeyPatch
) -> None:
    raw = await serving.connect()
    monkeypatch.setattr(AcceptedConnection, "waited_ms", 1001)

    with pytest.raises(
        RequestTimeoutError, match="limit of 1000 ms waited 1001 ms for its turn, alas; nothing"
    ):
        await raw.ask(SEND, Sent)
    assert await raw.ask(Heartbeat("g", "c", 1), Beaten) == Beaten(1)
    monkeypatch.setattr(AcceptedConnection, "waited_ms", 1000)
    assert await raw.ask(SEND, Sent) == Sent(())


async def test_a_server_that_does_not_lead_answers_only_what_needs_no_leader(
    server: Server, serving: Serving
) -> None:
    raw = await serving.connect()
    server.refusal = NotLeaderError("another one leads")

    with pytest.raises(NotLeaderError, match="another one leads"):
        await raw.ask(SEND, Sent)
    # Not even whether there is such a request is told then.
    await raw.put_bytes(pack_frame_header(99, 1, 0, 77, 0))
    assert isinstance(await raw.answer_to(77), NotLeaderError)
    assert await raw.ask(Status(), StatusReport) == StatusReport(b"{}")


async def test_an_error_in_a_step_is_the_answer(server: Server, serving: Serving) -> None:
    raw = await serving.connect()

    assert await raw.ask(Seal(), Sealed) == Sealed(1)
    server.error = NotAllowedError("at last")
    with pytest.raises(NotAllowedError, match="at last"):
        await raw.ask(Seal(), Sealed)


@pytest.mark.parametrize(("request_", "taken"), [(Seal(), STEPS), (Clients(0, 1), 2)])
async def test_steps_end_with_the_client_unless_all_have_to_be_taken(
    server: Server, serving: Serving, request_: Request, taken: int
) -> None:
    client = SimpleNamespace(is_welcome=True, is_gone=False, version=1, send=lambda _: None)
    payload = memoryview(b"".join(encode_request(request_, 1, 0)))[FRAME_HEADER_SIZE:]
    frame = Frame(request_.opcode, 1, 1, 0, payload)

    work = serving.handler.handle(cast("AcceptedConnection", client), frame)
    assert work is not None
    next(work)
    client.is_gone = True
    list(work)

    assert server.steps == taken
