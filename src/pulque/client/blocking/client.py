# Generated from aio/client.py by `make blocking`: edit that file, not this one.
"""The client: everything an application does goes through it."""

import os
import secrets
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Self, TypeVar

from pulque.client.arguments.checks import check_flag, check_path, check_timeout, check_wait
from pulque.client.blocking.administration import AdministrationMethods
from pulque.client.blocking.brokers import ClientConnections
from pulque.client.blocking.client_life import ClientLife, opened
from pulque.client.blocking.concurrency import sleep
from pulque.client.blocking.connection_pool import Calls
from pulque.client.blocking.consumer import Consumer
from pulque.client.blocking.conversation import Asker
from pulque.client.blocking.delayed_messages import Delaying
from pulque.client.blocking.direct_send import Sends
from pulque.client.blocking.ordered_consumer import OrderedConsumer
from pulque.client.blocking.producer import Producer
from pulque.client.blocking.reader import Reading
from pulque.client.connection.backoff import Backoff
from pulque.client.connection.call_outcomes import UNREACHED, not_reached
from pulque.client.connection.session import kept_answer
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
from pulque.client.routing.lookup import LOOKING
from pulque.client.routing.targets import HOME
from pulque.client.sending.spooled_producer_core import SPOOL_LIMIT
from pulque.model.ids import IdSource
from pulque.wire.requests import Request
from pulque.wire.responses import Response

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
    """Connect to a broker, or to a cluster of them.

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
        DisconnectedError: Nobody answers there.
    """
    client = Client(
        addresses_of(url, os.environ),
        name=name,
        timeout=timeout,
        acks=acks,
        state_dir=state_dir,
        latency=latency_table(latency),
        wait=wait,
    )
    return opened(client)


class Client(ClientLife, AdministrationMethods, Reading, Delaying, Sends):
    """One application's way to a broker, or to all brokers of a cluster. Made by ``connect``.

    All methods may be called from any number of threads.
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
        self._brokers = ClientConnections(
            addresses, client=self._name, latency=latency, tell=self._teller(), draw=_draw
        )
        self._timeout = check_timeout(timeout)
        self._acks_name: AcksName = acks
        self._acks = acks_of(acks)
        if state_dir is not None:
            check_path("state_dir", state_dir)
        self._state_dir = state_dir
        self._targets = self._brokers.table.targets_for(self._acks)
        self._begin(_draw)

    def warm_up(self) -> Self:
        """Connect now, so that a wrong address is known at once; ``connect`` does.

        Raises:
            DisconnectedError: Nobody answers there, and nobody did while it waited.
        """
        backoff = Backoff(_draw)
        deadline = time.monotonic() + self._wait
        while True:
            try:
                self._brokers.home.warm_up(self._timeout)
                return self
            except UNREACHED as error:
                left = deadline - time.monotonic()
                if left <= 0:
                    raise not_reached(error) from None
                sleep(min(left, backoff.next_wait()))

    # ── sending ────────────────────────────────────────────────────────────────────────────

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
            UnavailableError: What became of the last run's messages could not be found out.
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
        brokers, patience = self._brokers, self._timeout
        brokers.home.check_open()
        producer = Producer(
            options,
            connect=brokers.open_at,
            find_targets=lambda way, limit: brokers.find_targets(
                way, limit or patience, options.acks
            ),
            stale=brokers.stale,
            first_place=None if brokers.is_cluster else HOME,
            producer_id=secrets.randbits(64) | 1,
            ids=IdSource(secrets.randbits(38)),
            draw=_draw,
            spool=open_spool(spool, spool_limit, is_synced=spool_sync),
        )
        self._hold(producer)
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
        self._hold(consumer)
        return consumer

    # ── underneath ─────────────────────────────────────────────────────────────────────────

    def _askers(self, subject: str) -> dict[str, Asker]:
        """Return whom to ask about a subject or a pattern, by broker group."""
        return {
            place: self._asker(self._brokers.calls_at(place))
            for place in self._brokers.places(subject, LOOKING, self._timeout)
        }

    def _delay_askers(self) -> dict[str, Asker]:
        found = self._brokers.delay_servers(self._timeout)
        return {name: self._asker(calls) for name, calls in found.items()}

    def _asker(self, calls: Calls) -> Asker:
        return lambda request: calls.ask(request, self._timeout, kept_answer)

    def _ask(self, request: Request, timeout: float, convert: Callable[[Response], T]) -> T:
        return self._brokers.home.ask(request, timeout, convert)
