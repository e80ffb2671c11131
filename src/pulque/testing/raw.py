"""Speaks frames directly; for tests of the protocol.

No retries, no routes, no state: a test says every number itself, so that it can also say wrong
ones, and sees every answer as it comes.

::

    async with await RawConnection.open(broker.url) as raw:
        await raw.send("orders", [b"a", b"b"])
        got = await raw.pull("orders", group="g", consumer="c")
        await raw.settle(got.runs[0], group="g", consumer="c")
"""

import asyncio
import itertools
import json
import secrets
import socket
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self, TypeVar

from pulque.client.connection.url import parse_url
from pulque.client.receiving.log_records import read_gathered_record, read_record
from pulque.errors import DisconnectedError, PulqueError
from pulque.model.batch import Codec, seed_of
from pulque.model.gathered import GATHERED_MAGIC
from pulque.model.ids import RANDOM_BITS, IdSource
from pulque.model.message import Message, StoredBatch
from pulque.model.names import PartitionName, level_of
from pulque.model.pack import NOBODY, BatchPacker, ProducedBy
from pulque.model.positions import Tenure
from pulque.wire.frame import FrameReader
from pulque.wire.requests import (
    EARLIEST,
    FROM_SETTLED,
    Acks,
    Heartbeat,
    Hello,
    Nacked,
    Pull,
    Read,
    Request,
    Send,
    Settle,
    Status,
    Wanted,
    encode_request,
)
from pulque.wire.responses import (
    Beaten,
    Outcome,
    Pulled,
    ReadBack,
    Response,
    Sent,
    Settled,
    State,
    StatusReport,
    Welcome,
    decode_response,
)

__all__ = ["Handed", "RawConnection", "RawRun", "expect", "messages_in", "pack_batch"]

T = TypeVar("T", bound=Response)
_QUESTIONS = 5


def pack_batch(
    partition: str,
    bodies: Iterable[bytes],
    *,
    produced_by: ProducedBy = NOBODY,
    headers: Mapping[str, str] | None = None,
    codec: Codec = Codec.NONE,
    priority: int | None = None,
) -> bytes:
    """Return a batch for a partition, as a producer packs it; its priority is the partition's."""
    packer = BatchPacker()
    for body in bodies:
        packer.add(body, headers=headers)
    now_ms = time.time_ns() // 1_000_000
    return packer.encode(
        seed=seed_of(partition),
        ids=IdSource(secrets.randbits(RANDOM_BITS)).many(now_ms, len(packer)),
        created_at_ms=now_ms,
        produced_by=produced_by,
        priority=level_of(PartitionName(partition)) if priority is None else priority,
        codec=codec,
    )


def messages_in(
    partition: str, first: int, length: int, records: bytes | memoryview
) -> Iterator[Message]:
    """Yield the messages of a served run; those that are not stored any more are left out."""
    name, data = PartitionName(partition), bytes(records)
    expected, last, at = first, first + length, 0
    while at < len(data) and expected < last:
        if data.startswith(GATHERED_MAGIC, at):
            gathered = read_gathered_record(data, at, name, expected, last)
            batch = StoredBatch.gathered(gathered, name)
            start, end, size = 0, len(batch), gathered.size
        else:
            served = read_record(data, at, name, expected, last)
            batch = StoredBatch(
                served.data,
                partition=name,
                first_sequence=served.envelope.first_sequence,
                stored_at_ms=served.envelope.stored_at_ms,
            )
            start, end, size = served.start, served.end, served.envelope.size
        for index in range(start, end):
            yield Message(batch, index)
        at += size
        expected = batch.sequence_of(end - 1) + 1


@dataclass(frozen=True, slots=True)
class RawRun:
    """Deliveries that follow each other, with their messages."""

    partition: str
    tenure: Tenure
    first_pull: int
    first_sequence: int
    length: int
    messages: tuple[Message, ...]

    @property
    def last_pull(self) -> int:
        """The pull sequence of the last delivery."""
        return self.first_pull + self.length - 1

    @property
    def bodies(self) -> list[bytes]:
        """What the producers sent."""
        return [message.body for message in self.messages]


@dataclass(frozen=True, slots=True)
class Handed:
    """The answer to a pull."""

    states: tuple[State, ...]
    runs: tuple[RawRun, ...]
    routes_changed: bool = False

    @property
    def bodies(self) -> list[bytes]:
        """All bodies, in order."""
        return [body for run in self.runs for body in run.bodies]

    @property
    def length(self) -> int:
        """How many deliveries there are."""
        return sum(run.length for run in self.runs)

    @classmethod
    def of(cls, answer: Pulled, partitions: Sequence[str]) -> Self:
        """Decode an answer to a pull from ``partitions``."""
        runs = []
        for each in answer.deliveries:
            partition = partitions[each.index]
            records = each.records if not isinstance(each.records, tuple) else b""
            found = messages_in(partition, each.first_sequence, each.count, records)
            runs.append(
                RawRun(
                    partition,
                    each.tenure,
                    each.first_pull,
                    each.first_sequence,
                    each.count,
                    tuple(found),
                )
            )
        return cls(answer.states, tuple(runs), answer.routes_changed)


class RawConnection:
    """One connection. Used by one task at a time; requests may be pipelined.

    Every wait is limited: what does not come within ``patience_s`` raises ``TimeoutError``.
    """

    def __init__(self, connected: socket.socket, patience_s: float = 10.0) -> None:
        self._socket = connected
        self._reader = FrameReader()
        self._ids = itertools.count(1)
        self._early: dict[int, Response | PulqueError] = {}
        self.patience_s = patience_s
        self.welcome: Welcome | None = None
        """What the broker said to the hello."""

    @classmethod
    async def open(
        cls, url: str, *, is_greeting: bool = True, patience_s: float = 10.0
    ) -> "RawConnection":
        """Connect to a broker, and say hello unless told otherwise."""
        address = parse_url(url)[0]
        connected = socket.socket()
        connected.setblocking(False)
        connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        async with asyncio.timeout(patience_s):
            await asyncio.get_running_loop().sock_connect(connected, address)
        raw = cls(connected, patience_s)
        if is_greeting:
            raw.welcome = await raw.ask(Hello(1, 1, "raw"), Welcome)
        return raw

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close the connection."""
        self._socket.close()

    # -- frames ------------------------------------------------------------------------------

    async def put(self, request: Request, *, epoch: int = 0) -> int:
        """Send a request and return its id; the answer is left to ``answer_to``."""
        request_id = next(self._ids)
        await self.put_bytes(b"".join(encode_request(request, request_id, epoch)))
        return request_id

    async def put_bytes(self, data: bytes) -> None:
        """Send anything."""
        async with asyncio.timeout(self.patience_s):
            await asyncio.get_running_loop().sock_sendall(self._socket, data)

    async def get(self) -> tuple[int, Response | PulqueError]:
        """Return the next answer and the id of its request.

        Raises:
            DisconnectedError: The broker closed the connection.
        """
        async with asyncio.timeout(self.patience_s):
            while (frame := self._reader.next_frame()) is None:
                loop = asyncio.get_running_loop()
                received = await loop.sock_recv_into(self._socket, self._reader.buffer())
                if not received:
                    raise DisconnectedError("the broker closed the connection")
                self._reader.received(received)
        kept = frame._replace(payload=memoryview(bytes(frame.payload)))
        return frame.request_id, decode_response(kept)

    async def answer_to(self, request_id: int) -> Response | PulqueError:
        """Return the answer to a request; those to others are kept for later."""
        while request_id not in self._early:
            found, answer = await self.get()
            self._early[found] = answer
        return self._early.pop(request_id)

    async def is_answered(self, request_id: int) -> bool:
        """Return whether an answer came before those to questions that are asked now.

        Answers come in the order in which the broker gives them, so nobody has to wait for
        nothing: after some questions, what could be answered before them has been.
        """
        for _ in range(_QUESTIONS):
            await self.ask(Status(), StatusReport)
        return request_id in self._early

    async def ask(self, request: Request, kind: type[T]) -> T:
        """Send a request and return its answer.

        Raises:
            PulqueError: The broker said no.
        """
        return expect(await self.answer_to(await self.put(request)), kind)

    # -- requests ----------------------------------------------------------------------------

    async def send(
        self,
        partition: str,
        bodies: Iterable[bytes],
        *,
        acks: Acks = Acks.MEMORY,
        produced_by: ProducedBy = NOBODY,
    ) -> Outcome:
        """Send one batch and return what became of it."""
        batch = pack_batch(partition, bodies, produced_by=produced_by)
        answer = await self.ask(Send(acks, 10_000, ((partition, batch),)), Sent)
        return answer.outcomes[0]

    async def pull(  # noqa: PLR0913  # one for each field
        self,
        *partitions: str,
        group: str = "g",
        consumer: str = "c",
        incarnation: int = 1,
        expected: int | Sequence[int] = FROM_SETTLED,
        max_messages: int = 1000,
        max_bytes: int = 1024 * 1024,
        timeout_ms: int = 0,
        start_at: int = EARLIEST,
        covers: Sequence[str] = (),
        routes_version: int = 0,
        token: int = 0,
    ) -> Handed:
        """Pull from partitions; ``expected`` is for all of them, or one for each."""
        each = [expected] * len(partitions) if isinstance(expected, int) else expected
        request = Pull(
            group,
            consumer,
            incarnation,
            max_messages,
            max_bytes,
            timeout_ms,
            start_at,
            tuple(Wanted(*pair, token) for pair in zip(partitions, each, strict=True)),
            tuple(covers),
            routes_version,
        )
        return Handed.of(await self.ask(request, Pulled), partitions)

    async def settle(  # noqa: PLR0913  # one for each field
        self,
        run: RawRun,
        *,
        group: str = "g",
        consumer: str = "c",
        incarnation: int = 1,
        first: int | None = None,
        last: int | None = None,
        nacked: Mapping[int, str] | None = None,
        delay_ms: int = 0,
        tenure: Tenure | None = None,
        token: int = 0,
    ) -> Settled:
        """Settle a run, or the part ``first..last`` of it; ``nacked`` gives reasons.

        What is nacked comes again at once, unless ``delay_ms`` says otherwise.
        """
        request = Settle(
            run.partition,
            group,
            consumer,
            incarnation,
            run.tenure if tenure is None else tenure,
            run.first_pull if first is None else first,
            run.last_pull if last is None else last,
            tuple(Nacked(pull, delay_ms, reason) for pull, reason in (nacked or {}).items()),
            token,
        )
        return await self.ask(request, Settled)

    async def heartbeat(
        self,
        *,
        group: str = "g",
        consumer: str = "c",
        incarnation: int = 1,
        is_leaving: bool = False,
    ) -> Beaten:
        """Say that a consumer lives, or leaves."""
        request = Heartbeat(group, consumer, incarnation, is_leaving)
        return await self.ask(request, Beaten)

    async def read(
        self,
        partition: str,
        sequence: int = 0,
        *,
        max_messages: int = 1000,
        max_bytes: int = 1024 * 1024,
        timeout_ms: int = 0,
    ) -> tuple[ReadBack, list[Message]]:
        """Read without a group; return the answer and its messages."""
        request = Read(partition, sequence, max_messages, max_bytes, timeout_ms)
        answer = await self.ask(request, ReadBack)
        records = answer.records if not isinstance(answer.records, tuple) else b""
        found = messages_in(partition, answer.first_sequence, answer.count, records)
        return answer, list(found)

    async def status(self) -> dict[str, Any]:
        """Return the broker's report."""
        report: dict[str, Any] = json.loads((await self.ask(Status(), StatusReport)).report)
        return report


def expect(answer: Response | PulqueError, kind: type[T]) -> T:
    """Return an answer if it is of a kind; raise it if it is an error."""
    if isinstance(answer, PulqueError):
        raise answer
    if not isinstance(answer, kind):
        raise TypeError(f"{kind.__name__} was expected, and {answer!r} came")
    return answer
