"""The tree of an ordered consumer, for asyncio: a pull client for each partition that is its own.

A task asks the meta server which partitions these are, starts and stops pull clients
accordingly, and so keeps the consumer's right to go on while its caller is busy.
"""

import functools
import logging
import time
from collections.abc import Callable, Iterable

from pulque.client.aio.broker_puller import Inlet
from pulque.client.aio.concurrency import Crew, Lock, Worker, for_each, sleep
from pulque.client.aio.connection import AsyncConnection
from pulque.client.aio.deferral import NoDeferrals
from pulque.client.aio.pull_pool import ConsumerBrokers, Inlets
from pulque.client.connection.backoff import Backoff
from pulque.client.connection.session import as_it_is
from pulque.client.connection.url import Address
from pulque.client.options.consumer_plan import ConsumerPart, ConsumerPlan
from pulque.client.ordered.allotment import (
    HAND_OVER,
    ROUTE_LIMIT,
    TURN,
    AllottedPartitions,
    Leaf,
    difference,
)
from pulque.client.ordered.partition_core import OrderedCore, Permit, RetryCore
from pulque.client.ordered.window import OrderedMessage
from pulque.client.routing.targets import HOME
from pulque.errors import PulqueError
from pulque.model.names import owner_of
from pulque.model.ordered import Allotted

__all__ = ["OrderedInlets"]

log = logging.getLogger("pulque.client")

_LOOK = 0.01
_CONNECT_LIMIT = 5.0


class OrderedInlets(Inlets):
    """The partitions of one ordered consumer. Used by one task at a time, but for ``close``.

    Args:
        plan: Who consumes, and what.
        brokers: Who serves it.
        timeout: The client's.
        draw: Returns a random number in ``0.0..1.0``.
    """

    def __init__(
        self,
        plan: ConsumerPlan,
        brokers: ConsumerBrokers,
        *,
        timeout: float,
        draw: Callable[[], float],
    ) -> None:
        super().__init__(plan, brokers, timeout=timeout, draw=draw)
        self._permit = Permit()
        self._attendance = AllottedPartitions(plan.options, self._permit, time.monotonic)
        self._tree = Lock()
        """Guards what is started and stopped."""
        self._leaves: dict[Leaf, tuple[Inlet, OrderedCore]] = {}
        self._leaving: set[Leaf] = set()
        self._cores: tuple[tuple[Inlet, OrderedCore], ...] = ()
        self._at = 0
        self._last: OrderedCore | None = None
        """Whose message was taken last."""
        self._attendant = Worker(self._attend, "pulque-attendant")
        self._crew = Crew("pulque-hand-over")
        self._meta: AsyncConnection | None = None
        self._fatal: PulqueError | None = None
        self._problem: PulqueError | None = None

    # ── one message after the other ────────────────────────────────────────────────────────

    def take(self, most: int, want: int) -> list[OrderedMessage]:
        """Return messages that may be handed out now; partitions that have some take turns.

        Args:
            most: How many, at most.
            want: How many to have on their way, where there is room.
        """
        messages: list[OrderedMessage] = []
        cores = self._cores
        for step in range(len(cores)):
            at = (self._at + step) % len(cores)
            inlet, core = cores[at]
            with inlet.lock:
                some = core.take_many(most - len(messages))
                is_thirsty = bool(some) and not core.is_pulling and core.room > 0
            if is_thirsty:
                inlet.ask_ahead(want)
            messages += some
            if len(messages) >= most:
                self._at = at + 1
                self._last = core
                break
        return messages

    def follow(self, message: OrderedMessage) -> Iterable[OrderedMessage]:
        """Yield what comes behind the only message that ``take`` returned, until others' turn."""
        return () if self._last is None else self._last.follow(message, TURN)

    @property
    def _is_answered(self) -> bool:
        return self._attendance.is_known

    def _next_wake(self, until: float) -> float:
        for _, core in self._cores:
            due = core.next_due()
            if due is not None:
                until = min(until, due)
        return until

    def _check_trouble(self, inlets: list[Inlet], deadline: float) -> None:
        problem = self._problem
        if problem is not None and not self._attendance.is_known:
            self._trouble.next_wait(problem, time.monotonic(), deadline)
        else:
            super()._check_trouble(inlets, deadline)

    # ── what the meta server says ──────────────────────────────────────────────────────────

    async def _follow_route(self, deadline: float) -> None:
        """Begin to ask, or raise why there is no way to go on."""
        del deadline
        if self._fatal is not None:
            raise self._fatal.with_traceback(None)
        if not self._is_closed:
            self._attendant.start()

    async def _attend(self) -> None:
        backoff = Backoff(self._draw)
        while not self._attendant.is_stopped:
            try:
                is_new = await self._ask_once()
            except PulqueError as error:
                await self._disconnect()
                if not error.retryable:
                    self._fatal = error
                    self._wake()
                    return
                log.info("the meta server cannot be asked: %s", error)
                self._problem = error
                await self._attendant.pause(backoff.next_wait())
                continue
            backoff.reset()
            self._problem = None
            if is_new:
                self._follow()
            await self._watch_route()
            self._wake()
        await self._disconnect()

    async def _ask_once(self) -> bool:
        if self._meta is None or not self._meta.is_open:
            self._meta = await self._brokers.open_at(HOME, _CONNECT_LIMIT)
        attendance = self._attendance
        request = attendance.next_request()
        return await self._meta.request(request, attendance.patience, attendance.attended)

    async def _watch_route(self) -> None:
        """Have the route watched: it says at once who leads a broker group."""
        if self._is_routed or not self._brokers.is_cluster:
            return
        try:
            await self._brokers.places(self._key.subject, self._key.group, ROUTE_LIMIT)
            self._is_routed = True
        except PulqueError as error:
            log.info("the route cannot be watched: %s", error)

    async def _disconnect(self) -> None:
        connection, self._meta = self._meta, None
        if connection is not None:
            await connection.close()

    # ── pull clients come and go ───────────────────────────────────────────────────────────

    def _follow(self) -> None:
        """Start and stop pull clients, so that there is one for each partition of ours."""
        with self._tree:
            if self._is_closed:
                return
            wanted = self._attendance.leaves()
            self._learn(wanted.values())
            started, stopped = difference(self._leaves, wanted, self._leaving)
            # All of them before the first hand-over begins: the pull client for retries takes
            # leave for all, so it has to know for whom to wait.
            self._leaving.update(stopped)
            for leaf in stopped:
                self._stop(leaf)
            for leaf in started:
                self._start(leaf, wanted[leaf])
            self._changed()

    def _learn(self, allotted: Iterable[Allotted]) -> None:
        """Take in who leads by now: a partition may stay ours while its broker changes."""
        for each in allotted:
            if each.host:
                self._brokers.learn(each.broker_group, Address(each.host, each.port))
        for inlet, _ in self._leaves.values():
            inlet.retry_now()

    def _start(self, leaf: Leaf, allotted: Allotted) -> None:
        log.info("allotted: %s at %s", allotted.partition, allotted.broker_group)
        core = self._plan.ordered_core(
            allotted.partition,
            self._attendance.order,
            self._permit,
            is_late=bool(self._leaves or self._leaving),
        )
        core.broker_group = allotted.broker_group
        core.on_ended = self._wake
        core.on_abandoned = self._on_abandoned
        # Without deferrals: what waits for long loses its place.
        inlet = self._make_inlet(leaf.place, ConsumerPart(core, None), NoDeferrals())
        self._leaves[leaf] = inlet, core

    def _stop(self, leaf: Leaf) -> None:
        log.info("handed over: %s", leaf.partition)
        inlet, core = self._leaves.pop(leaf)
        with inlet.lock:
            core.is_leaving = True
        self._crew.start(functools.partial(self._hand_over, leaf, inlet, core))

    async def _hand_over(self, leaf: Leaf, inlet: Inlet, core: OrderedCore) -> None:
        """Let what runs end, settle it, and release the lock."""
        deadline = time.monotonic() + HAND_OVER
        while time.monotonic() < deadline and not self._is_closed:
            with inlet.lock:
                is_drained = core.is_drained
            if is_drained and not self._waits(leaf):
                break
            inlet.hurry()
            await sleep(_LOOK)
        await inlet.close()
        with self._tree:
            self._dropped += core.abandoned
            self._leaving.discard(leaf)
        self._follow()  # it may be ours again by now
        self._wake()

    def _waits(self, leaf: Leaf) -> bool:
        """Return whether a pull client for retries has to be the last one at its broker."""
        if owner_of(leaf.partition) is None:
            return False
        with self._tree:
            return any(each.place == leaf.place and each != leaf for each in self._leaving)

    def _changed(self) -> None:
        self._cores = tuple(self._leaves.values())
        self._inlets = {"\0".join(leaf): inlet for leaf, (inlet, _) in self._leaves.items()}

    async def close(self) -> None:
        """Settle what is done everywhere, release all locks, and say so. Any task may."""
        with self._tree:
            self._is_closed = True
            leaves = list(self._leaves.values())
        self._attendant.end(self._hang_up)
        for inlet, core in leaves:
            with inlet.lock:
                core.is_leaving = True
        await self._crew.join(self._timeout)
        # What is there for retries takes leave for all of us: it is the last one.
        for is_last in (False, True):
            some = [each for each, core in leaves if isinstance(core, RetryCore) is is_last]
            await for_each(some, Inlet.close)
        self._inlets = {}
        await super().close()
        await self._attendant.join(self._timeout)
        await self._say_goodbye()

    def _hang_up(self) -> None:
        connection = self._meta
        if connection is not None:
            connection.abort()

    async def _say_goodbye(self) -> None:
        # Not on the old connection: its last question may still have no answer.
        await self._disconnect()
        if not self._attendance.is_known:
            return
        try:
            connection = await self._brokers.open_at(HOME, _CONNECT_LIMIT)
            try:
                request = self._attendance.farewell()
                await connection.request(request, _CONNECT_LIMIT, as_it_is)
            finally:
                await connection.close()
        except PulqueError as error:
            log.warning("left the meta server without a word: %s", error)
