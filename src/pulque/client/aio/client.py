"""The client for asyncio: the blocking one's twin, with the same names."""

import asyncio
import os
import secrets
import time
import weakref
from collections.abc import Callable, Generator, Iterable, Sequence
from dataclasses import replace
from types import TracebackType
from typing import Self, TypeVar, Unpack

from pulque.client.aio.administration import Administration
from pulque.client.aio.brokers import Brokers, Calls
from pulque.client.aio.consumer import Consumer
from pulque.client.aio.dead_letters import Asker
from pulque.client.aio.delayed_messages import Delaying
from pulque.client.aio.ordered_consumer import OrderedConsumer
from pulque.client.aio.producer import Producer
from pulque.client.aio.reader import Reading
from pulque.client.arguments.checks import check_flag, check_path, check_timeout, check_wait
from pulque.client.blocking.brokers import LOOKING
from pulque.client.connection.backoff import Backoff
from pulque.client.connection.call_outcomes import UNREACHED, not_reached
from pulque.client.connection.url import Address, addresses_of
from pulque.client.options.client_options import (
    DEFAULT_TIMEOUT,
    AcksName,
    CompressionName,
    acks_of,
    consumer_plan,
    latency_table,
    open_spool,
    send_options,
)
from pulque.client.options.group_options import (
    ModeName,
    RetryPolicy,
    StartAt,
)
from pulque.client.ordered.window import BlocksName
from pulque.client.persistence.consumer_identity import application_name
from pulque.client.routing.broker_health import LATENCY_TABLE, LatencyRow
from pulque.client.routing.route_table import RouteKey
from pulque.client.routing.targets import HOME, Targets, Way
from pulque.client.sending.outgoing_message import Outgoing, Parts, Receipt
from pulque.client.sending.spooled_producer_core import SPOOL_LIMIT
from pulque.model.ids import IdSource
from pulque.model.names import parse_subject
from pulque.wire.requests import Request
from pulque.wire.responses import ReadBack, Response

__all__ = ["Client", "connect"]

T = TypeVar("T")
_MAX_BYTES = 1024 * 1024
_draw = secrets.SystemRandom().random


def connect(  # noqa: PLR0913  # choices by keyword, each with a default
    url: str | None = None,
    *,
    name: str | None = None,
    timeout: float = DEFAULT_TIMEOUT,
    acks: AcksName = "disk",
    state_dir: str | os.PathLike[str] | None = None,
    latency: Sequence[tuple[float, float]] | None = None,
    wait: float = 0.0,
) -> "Client":
    """Return a client, to be used with ``async with``, which connects it; or ``await`` it.

    Args:
        url: ``pulque://host:port``, or several hosts with commas, of which one at random is
            tried first: meta servers, or brokers of one cluster. Else ``$PULQUE_URL``, else this
            machine.
        name: What this application is called; else the name of its script. It is part of
            consumer ids and stands in the broker's log.
        timeout: The limit of every call that is given no other, in seconds.
        acks: When a send counts as confirmed: ``"disk"`` (it survives a power cut),
            ``"replica"`` (it is on the disk of every broker in sync of its group; one that
            stands alone refuses it) or ``"memory"`` (it survives the end of the broker's
            process, and is on disk within half a second). In a group with followers
            ``"disk"`` means the same as ``"replica"``.
        state_dir: Where consumers keep their ids; else ``$PULQUE_STATE_DIR``, else
            ``~/.local/state/pulque``.
        latency: Pairs of seconds: after an answer to a send that took longer than the first, the
            broker is sent nothing for the second, where others take the messages; else
            ``[(0.55, 3), (1, 60)]``.
        wait: How long to wait for a broker that does not answer yet, in seconds: for programs
            that start together with it. By default nobody waits, so that a wrong URL is known at
            once.

    Raises:
        ConfigError: The URL is not one.
    """
    return Client(
        addresses_of(url, os.environ),
        name=name,
        timeout=timeout,
        acks=acks,
        state_dir=state_dir,
        latency=latency_table(latency),
        wait=wait,
    )


class Client(Administration, Reading, Delaying):
    """One application's way to a broker, or to all brokers of a cluster. Made by ``connect``.

    All methods may be called from any number of tasks of one event loop.
    """

    def __init__(  # noqa: PLR0913  # as of connect
        self,
        addresses: Sequence[Address],
        *,
        name: str | None,
        timeout: float,
        acks: AcksName,
        state_dir: str | os.PathLike[str] | None,
        latency: tuple[LatencyRow, ...] = LATENCY_TABLE,
        wait: float = 0.0,
    ) -> None:
        self._wait = check_wait(wait, "wait")
        self._name = application_name(name)
        self._brokers = Brokers(
            addresses, client=self._name, latency=latency, tell=self._routes_changed, draw=_draw
        )
        self._timeout = check_timeout(timeout)
        self._acks_name: AcksName = acks
        self._acks = acks_of(acks)
        if state_dir is not None:
            check_path("state_dir", state_dir)
        self._state_dir = state_dir
        self._targets = self._brokers.table.targets_for(self._acks)
        self._sends: Producer | None = None
        self._open_ends: weakref.WeakSet[Producer | Consumer] = weakref.WeakSet()

    async def warm_up(self) -> Self:
        """Connect now, so that a wrong address is known at once; ``async with`` does it.

        Raises:
            DisconnectedError: Nobody answers there, and nobody did while it waited.
        """
        backoff = Backoff(_draw)
        deadline = time.monotonic() + self._wait
        while True:
            try:
                await self._brokers.home.warm_up(self._timeout)
                return self
            except UNREACHED as error:
                left = deadline - time.monotonic()
                if left <= 0:
                    raise not_reached(error) from None
                await asyncio.sleep(min(left, backoff.next_wait()))

    # ── sending ────────────────────────────────────────────────────────────────────────────

    async def send(
        self,
        subject: str,
        body: object,
        *,
        timeout: float | None = None,
        **parts: Unpack[Parts],
    ) -> Receipt:
        """Send one message, and return its receipt once it is confirmed.

        What is safe to repeat is tried again until the timeout; the message is stored once,
        however often it had to be sent. Sends of many tasks travel together.

        Args:
            subject: Where to.
            body: Bytes or a text as they are; all else as JSON, with the header
                ``content-type: application/json``.
            timeout: How long to wait, in seconds; else the client's.
            **parts: What the message has beside: ``key``, ``order_key``, ``tags``, ``headers``,
                ``expires_at``, ``priority``, ``reliable``; and when it is to be delivered, if
                later: ``delay``, ``at`` or ``level``.

        Raises:
            UsageError: It is no message, or cannot be due then.
            PulqueError: It is not confirmed; after an ``UnavailableError`` it may be stored
                all the same.
        """
        self._brokers.guard.check()
        if type(subject) is not str:
            parse_subject(subject)
        if timeout is not None and check_timeout(timeout) != self._timeout:
            message = Outgoing(body, **parts)
            return await self._sending()._send_within(subject, message, timeout)  # noqa: SLF001
        if not parts:
            await self._find_targets(subject)
        return await (await self._sending().send(subject, body, **parts))

    async def send_many(
        self,
        subject: str,
        messages: Iterable[object],
        *,
        timeout: float | None = None,
    ) -> list[Receipt]:
        """Send messages in as few requests as possible; return their receipts in order.

        What can be refused at once is refused before the first message goes.

        Raises:
            PulqueError: Not all are confirmed; a note says how many are. Whether the outcome is
                known is said of the others. To learn the outcome of each, use ``producer``.
        """
        self._brokers.guard.check()
        if type(subject) is not str:
            parse_subject(subject)
        if timeout is not None:
            check_timeout(timeout)
        own = timeout if timeout != self._timeout else None
        return await self._sending()._send_many(subject, messages, own)  # noqa: SLF001

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
        spool: str | os.PathLike[str] | None = None,
        spool_limit: int = SPOOL_LIMIT,
        spool_sync: bool = True,
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
            timeout: How long until a message has an outcome, in seconds. With a spool that is
                as long as it takes, and this the limit of one request.
            spool: A folder, of this producer alone, that keeps each message until it has an
                outcome. What is left there when the process ends is sent first by the next
                producer that is given it, in order and once.
            spool_limit: How many bytes may be kept there; beyond that ``send`` waits, and then
                raises ``SpoolFullError``.
            spool_sync: Whether what ``send`` took in must survive a power cut, too, and not only
                the end of the process.

        Raises:
            DataDirectoryError: Another producer has the spool, or it is damaged.
            StorageError: The spool cannot be read or written.

        What became of the last run's messages is found out before the first ``send``, ``flush``
        or ``recovered`` returns; these raise ``UnavailableError`` if nobody can say.
        """
        options = send_options(
            acks=self._acks_name if acks is None else acks,
            linger=linger,
            max_batch=max_batch,
            max_batch_bytes=max_batch_bytes,
            max_in_flight=max_in_flight,
            max_buffered_bytes=max_buffered_bytes,
            timeout=self._timeout if timeout is None else timeout,
            compression=compression,
        )
        self._brokers.home.check_open()
        self._brokers.guard.check()
        producer = Producer(
            options,
            connect=self._brokers.open_at,
            find_targets=lambda way, limit: self._brokers.find_targets(
                way, limit or self._timeout, options.acks
            ),
            stale=self._brokers.stale,
            first_place=None if self._brokers.is_cluster else HOME,
            producer_id=secrets.randbits(64) | 1,
            ids=IdSource(secrets.randbits(38)),
            draw=_draw,
            spool=open_spool(spool, spool_limit, is_synced=spool_sync),
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
        ordered: bool = False,
        blocks: BlocksName = "key",
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
            ordered: Messages of one order key come in the order in which they are stored, each
                after the one before is acked; each partition belongs to one consumer of the
                group at a time. The group keeps it. See the guide on ordered messages.
            blocks: What waits while a failed message is tried again in its place, where the
                subject's order is strict: the messages of its ``"key"``, or its ``"partition"``.
            tags: Only messages that have one of these tags. The group keeps it.
            all_tags: Only messages that have all of these tags.
            retry: How failed messages come again; the group keeps what was said last.
            max_messages: The most to ask for at once; each of several brokers is asked for
                twice as many by who is fast. It asks for less while it is slow.
            max_bytes: About the most bytes to ask for at once.
            max_held: How many messages may be held that are neither acked nor nacked; else four
                times ``max_messages`` (of each of several brokers twice), or if ordered 10,000
                of each partition, those included that are done but stand behind one that is
                not. With so many held, it waits for acks.
            prefetch: Whether to ask for the next messages while the caller handles these; by
                default when iterating, and not for ``pull``.
        """
        self._brokers.home.check_open()
        check_flag("prefetch", prefetch, may_be_none=True)
        plan = consumer_plan(
            subject,
            group,
            consumer_id=consumer_id,
            application=self._name,
            state_dir=self._state_dir,
            start=start,
            mode=mode,
            broadcast=broadcast,
            ordered=ordered,
            blocks=blocks,
            tags=tags,
            all_tags=all_tags,
            retry=retry,
            max_messages=max_messages,
            max_bytes=max_bytes,
            max_held=max_held,
        )
        kind = Consumer if plan.ordered is None else OrderedConsumer
        consumer = kind(
            plan,
            brokers=self._brokers,
            timeout=self._timeout,
            prefetch=prefetch,
            draw=_draw,
        )
        self._open_ends.add(consumer)
        return consumer

    # ── the end ────────────────────────────────────────────────────────────────────────────

    async def close(self) -> None:
        """Close everything that was made from this client, and its connections."""
        if self._brokers.guard.forked is None:
            self._brokers.guard.check()
        for end in list(self._open_ends):
            await end.close()
        await self._brokers.close()

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

    async def _askers(self, subject: str) -> dict[str, Asker]:
        """Return whom to ask about a subject or a pattern, by broker group."""
        return {
            place: self._asker(self._brokers.calls_at(place))
            for place in await self._brokers.places(subject, LOOKING, self._timeout)
        }

    async def _delay_askers(self) -> dict[str, Asker]:
        found = await self._brokers.delay_servers(self._timeout)
        return {name: self._asker(calls) for name, calls in found.items()}

    def _asker(self, calls: Calls) -> Asker:
        return lambda request: calls.ask(request, self._timeout, _kept)

    async def _find_targets(self, way: Way) -> Targets:
        targets = self._targets.get(way)
        if targets is None:
            targets = await self._brokers.find_targets(way, self._timeout, self._acks)
        return targets

    async def _routes_changed(self, keys: list[RouteKey]) -> None:
        """Tell producers and consumers; called by the task that watches."""
        for end in list(self._open_ends):
            await end._routes_changed(keys)  # noqa: SLF001

    async def _ask(self, request: Request, timeout: float, convert: Callable[[Response], T]) -> T:
        return await self._brokers.home.ask(request, timeout, convert)


def _kept(response: Response) -> Response:
    """Return an answer that stays what it is when the connection goes on reading."""
    if isinstance(response, ReadBack) and isinstance(response.records, memoryview):
        return replace(response, records=bytes(response.records))
    return response
