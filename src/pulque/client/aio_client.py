"""The client for asyncio: the blocking one's twin, with the same names."""

import asyncio
import functools
import os
import secrets
import time
import weakref
from collections.abc import AsyncIterator, Callable, Generator, Iterable, Sequence
from datetime import datetime
from types import TracebackType
from typing import Self, TypeVar, Unpack

from pulque.client.aio_administration import Administration
from pulque.client.aio_connection import AsyncConnection, connect_any
from pulque.client.aio_consumer import Consumer
from pulque.client.aio_producer import Producer
from pulque.client.backoff import Retries
from pulque.client.identity import application_name
from pulque.client.looking import (
    PartitionPositions,
    first_sequence,
    messages_of,
    positions_of,
    positions_request,
)
from pulque.client.options import (
    DEFAULT_TIMEOUT,
    AcksName,
    CompressionName,
    acks_of,
    check_timeout,
    consumer_core,
    send_options,
)
from pulque.client.receipt import Outgoing, Parts, Receipt
from pulque.client.routes import Targets, targets_of
from pulque.client.url import Address, addresses_of
from pulque.client.wishes import (
    ModeName,
    RetryPolicy,
    StartAt,
    start_of,
)
from pulque.errors import PulqueError, UnknownSubjectError, UsageError
from pulque.model.ids import IdSource
from pulque.model.message import Message
from pulque.model.names import PartitionName, parse_subject
from pulque.model.positions import ConsumeSequence
from pulque.wire.requests import Read, Request, Route
from pulque.wire.responses import Response

__all__ = ["Client", "connect"]

T = TypeVar("T")
_MAX_BYTES = 1024 * 1024
_LONG_POLL = 10.0
_draw = secrets.SystemRandom().random


def connect(
    url: str | None = None,
    *,
    name: str | None = None,
    timeout: float = DEFAULT_TIMEOUT,
    acks: AcksName = "disk",
    state_dir: str | os.PathLike[str] | None = None,
) -> "Client":
    """Return a client, to be used with ``async with``, which connects it; or ``await`` it.

    Args:
        url: ``pulque://host:port``, or several hosts with commas; else ``$PULQUE_URL``, else
            this machine.
        name: What this application is called; else the name of its script. It is part of
            consumer ids and stands in the broker's log.
        timeout: The limit of every call that is given no other, in seconds.
        acks: When a send counts as confirmed: ``"disk"`` (it survives a power cut) or
            ``"memory"`` (it survives the end of the broker's process, and is on disk within
            half a second).
        state_dir: Where consumers keep their ids; else ``$PULQUE_STATE_DIR``, else
            ``~/.local/state/pulque``.

    Raises:
        ConfigError: The URL is not one.
    """
    return Client(
        addresses_of(url, os.environ), name=name, timeout=timeout, acks=acks, state_dir=state_dir
    )


class Client(Administration):
    """One application's way to a broker. Made by ``connect``.

    All methods may be called from any number of tasks of one event loop.
    """

    def __init__(
        self,
        addresses: Sequence[Address],
        *,
        name: str | None,
        timeout: float,
        acks: AcksName,
        state_dir: str | os.PathLike[str] | None,
    ) -> None:
        self._addresses = tuple(addresses)
        self._name = application_name(name)
        self._timeout = check_timeout(timeout)
        self._acks_name: AcksName = acks
        acks_of(acks)
        self._state_dir = state_dir
        self._connection: AsyncConnection | None = None
        self._connecting = asyncio.Lock()
        self._targets: dict[str, Targets] = {}
        self._sends: Producer | None = None
        self._is_closed = False
        self._open_ends: weakref.WeakSet[Producer | Consumer] = weakref.WeakSet()

    async def warm_up(self) -> Self:
        """Connect now, so that a wrong address is known at once; ``async with`` does it.

        Raises:
            DisconnectedError: Nobody answers there.
        """
        await self._connected(self._timeout)
        return self

    # ── sending ────────────────────────────────────────────────────────────────────────────

    async def send(
        self,
        subject: str,
        body: bytes,
        *,
        timeout: float | None = None,
        **parts: Unpack[Parts],
    ) -> Receipt:
        """Send one message, and return its receipt once it is confirmed.

        What is safe to repeat is tried again until the timeout; the message is stored once,
        however often it had to be sent. Sends of many tasks travel together.

        Args:
            subject: Where to.
            body: What.
            timeout: How long to wait, in seconds; else the client's.
            **parts: What the message has beside: ``key``, ``order_key``, ``tags``, ``headers``,
                ``expires_at``, ``priority``, ``reliable``.

        Raises:
            PulqueError: It is not confirmed; after an ``UnavailableError`` it may be stored
                all the same.
        """
        await self._find_targets(subject, timeout)
        pending = await self._sending().send(subject, body, **parts)
        return await pending.result(timeout)

    async def send_many(
        self,
        subject: str,
        messages: Iterable[bytes | Outgoing],
        *,
        timeout: float | None = None,
    ) -> list[Receipt]:
        """Send messages in as few requests as possible; return their receipts in order.

        Raises:
            PulqueError: Not all are confirmed; a note says how many are. To learn the outcome
                of each, use ``producer``.
        """
        await self._find_targets(subject, timeout)
        pending = await self._sending().send_many(subject, messages)
        return await pending.result(timeout)

    def producer(  # noqa: PLR0913  # choices by keyword, each with a default
        self,
        *,
        acks: AcksName | None = None,
        linger: float = 0.005,
        max_batch: int = 1000,
        max_batch_bytes: int = _MAX_BYTES,
        max_in_flight: int = 8,
        max_buffered_bytes: int = 32 * 1024 * 1024,
        compression: CompressionName | None = None,
        timeout: float | None = None,
    ) -> Producer:
        """Return a producer that batches underneath.

        Args:
            acks: When a send counts as confirmed; else as the client was told.
            linger: How long a batch waits for more messages, in seconds; with 0 a batch goes
                as soon as one may go, and takes along what has come until then.
            max_batch: A batch of this many messages goes at once.
            max_batch_bytes: So does one of this many bytes.
            max_in_flight: How many batches of a partition may wait for their answer.
            max_buffered_bytes: How much may wait altogether before ``send`` waits.
            compression: How to compress batches; needs the extra of that name.
            timeout: How long until a message has an outcome, in seconds.
        """
        options = send_options(
            acks=acks or self._acks_name,
            linger=linger,
            max_batch=max_batch,
            max_batch_bytes=max_batch_bytes,
            max_in_flight=max_in_flight,
            max_buffered_bytes=max_buffered_bytes,
            timeout=timeout or self._timeout,
            compression=compression,
        )
        self._check_open()
        producer = Producer(
            options,
            connect=self._open,
            find_targets=self._find_targets,
            producer_id=secrets.randbits(64) | 1,
            ids=IdSource(secrets.randbits(38)),
            draw=_draw,
        )
        self._open_ends.add(producer)
        return producer

    # ── receiving ──────────────────────────────────────────────────────────────────────────

    def consumer(  # noqa: PLR0913  # choices by keyword, each with a default
        self,
        subject: str,
        group: str | None = None,
        *,
        consumer_id: str | None = None,
        start: StartAt = "earliest",
        mode: ModeName | None = None,
        broadcast: bool | None = None,
        tags: Iterable[str] = (),
        all_tags: Iterable[str] = (),
        retry: RetryPolicy | None = None,
        max_messages: int = 1000,
        max_bytes: int = _MAX_BYTES,
        max_held: int | None = None,
        prefetch: bool | None = None,
    ) -> Consumer:
        """Return a consumer of a subject; all consumers of a group share its messages.

        Args:
            subject: Whose messages.
            group: For whom.
            consumer_id: Who this is; else host, application and a free slot, the same after a
                restart. Two that run with one id fence each other.
            start: Where a group starts that was never here: ``"earliest"``, ``"latest"``, the
                first message stored at or after a ``datetime`` with a time zone, or a sequence.
            mode: ``"shared"`` (each message is for one consumer of the group, until it is
                acked), ``"once"`` (for one of them, one time only) or ``"broadcast"`` (each
                consumer gets everything, and the group does not matter). The group keeps it.
            broadcast: Another way to say it; a consumer without a group is a broadcast one.
            tags: Only messages that have one of these tags. The group keeps it.
            all_tags: Only messages that have all of these tags.
            retry: How failed messages come again; the group keeps what was said last.
            max_messages: The most to ask for at once. It asks for less while it is slow.
            max_bytes: About the most bytes to ask for at once.
            max_held: How many messages may be held unsettled; else four times
                ``max_messages``. With so many held, it waits for acks.
            prefetch: Whether to ask for the next messages while the caller handles these; by
                default when iterating, and not for ``pull``.
        """
        self._check_open()
        core, identity = consumer_core(
            subject,
            group,
            consumer_id=consumer_id,
            application=self._name,
            state_dir=self._state_dir,
            start=start,
            mode=mode,
            broadcast=broadcast,
            tags=tags,
            all_tags=all_tags,
            retry=retry,
            max_messages=max_messages,
            max_bytes=max_bytes,
            max_held=max_held,
        )
        consumer = Consumer(
            core,
            identity,
            connect=self._open,
            timeout=self._timeout,
            prefetch=prefetch,
            draw=_draw,
        )
        self._open_ends.add(consumer)
        return consumer

    # ── looking ────────────────────────────────────────────────────────────────────────────

    async def read(
        self,
        subject: str,
        sequence: int = 0,
        *,
        partition: str | None = None,
        max_messages: int = 1000,
        timeout: float = 0.0,
    ) -> list[Message]:
        """Return stored messages from a sequence on, without a group and without effect.

        Args:
            subject: Whose messages.
            sequence: Where to start; if that is no longer stored, at the oldest that is.
            partition: Which partition, if the subject has several.
            max_messages: At most so many.
            timeout: How long to wait for a first message, in seconds.
        """
        first = (await self._find_targets(subject)).all[0].partition
        name = PartitionName(partition) if partition else first
        request = Read(name, sequence, max_messages, _MAX_BYTES, int(timeout * 1000))
        convert = functools.partial(messages_of, name)
        return await self._ask(request, timeout + self._timeout, convert)

    async def tail(self, subject: str, *, start: StartAt = "latest") -> AsyncIterator[Message]:
        """Yield messages as they are stored, without a group, until the caller stops."""
        instant = start if isinstance(start, datetime) else None
        nexts = {
            found.partition: first_sequence(start_of(start), found)
            for found in await self.positions(subject, at=instant)
        }
        while not self._is_closed:
            is_quiet = True
            wait = _LONG_POLL / len(nexts) ** 2
            for name, sequence in nexts.items():
                messages = await self.read(subject, sequence, partition=name, timeout=wait)
                if messages:
                    is_quiet = False
                    nexts[name] = ConsumeSequence(messages[-1].sequence + 1)
                for message in messages:
                    yield message
            if is_quiet:
                # Another priority may have come into use meanwhile.
                for target in await self._ask_targets(subject, None):
                    nexts.setdefault(target.partition, ConsumeSequence(0))

    async def positions(
        self, subject: str, *, at: datetime | None = None
    ) -> list[PartitionPositions]:
        """Return where each partition of a subject begins and ends.

        Args:
            subject: Whose partitions.
            at: Look for the first message stored at or after this instant, too.
        """
        targets = await self._ask_targets(subject, None)
        found: list[PartitionPositions] = []
        for target in targets:
            name = target.partition
            request = positions_request(name, at)
            convert = functools.partial(positions_of, name, at)
            try:
                found.append(await self._ask(request, self._timeout, convert))
            except UnknownSubjectError:
                if len(targets.all) == 1:
                    raise  # else it has messages of other priorities
        return found

    # ── the end ────────────────────────────────────────────────────────────────────────────

    async def close(self) -> None:
        """Close everything that was made from this client, and its connection."""
        for end in list(self._open_ends):
            await end.close()
        self._is_closed = True
        if self._connection is not None:
            await self._connection.close()

    def __await__(self) -> Generator[object, None, Self]:
        return self.warm_up().__await__()

    async def __aenter__(self) -> Self:
        return await self.warm_up()

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.close()

    # ── underneath ─────────────────────────────────────────────────────────────────────────

    def _sending(self) -> Producer:
        """Return the producer of ``send``: what many tasks send at once goes together."""
        if self._sends is None:
            self._sends = self.producer(linger=0, max_in_flight=16)
        return self._sends

    async def _find_targets(self, subject: str, timeout: float | None = None) -> Targets:
        targets = self._targets.get(subject)
        if targets is None:
            targets = self._targets[subject] = await self._ask_targets(subject, timeout)
        return targets

    async def _ask_targets(self, subject: str, timeout: float | None) -> Targets:
        request = Route(parse_subject(subject))
        return await self._ask(request, timeout or self._timeout, targets_of)

    async def _ask(self, request: Request, timeout: float, convert: Callable[[Response], T]) -> T:
        """Ask what is safe to ask again, until there is an answer or the time is up."""
        started = time.monotonic()
        deadline = started + timeout
        retries = Retries(_draw, started, deadline)
        left = timeout
        while True:
            try:
                connection = await self._connected(left)
                left = max(0.001, deadline - time.monotonic())
                return await connection.request(request, left, convert)
            except PulqueError as error:
                await asyncio.sleep(retries.next_wait(error, time.monotonic()))
                left = max(0.001, deadline - time.monotonic())

    async def _connected(self, timeout: float) -> AsyncConnection:
        async with self._connecting:
            if self._connection is None or not self._connection.is_open:
                self._connection = await self._open(timeout)
            return self._connection

    async def _open(self, timeout: float) -> AsyncConnection:
        self._check_open()
        return await connect_any(self._addresses, client=self._name, timeout=timeout)

    def _check_open(self) -> None:
        if self._is_closed:
            raise UsageError("this client is closed")
