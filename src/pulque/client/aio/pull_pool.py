"""All brokers that a consumer pulls from; by hand, as in asyncio one event wakes the caller."""

import asyncio
import contextlib
import functools
import logging
import secrets
import time
from collections.abc import Callable, Iterable
from typing import Protocol

from pulque.client.aio.broker_puller import UNREACHABLE, Inlet
from pulque.client.aio.connection import AsyncConnection
from pulque.client.aio.deferral import BackgroundDeferrals, Deferrals, NoDeferrals
from pulque.client.aio.follower_heartbeats import Followers, FollowersOf
from pulque.client.aio.guard import Guard
from pulque.client.aio.nack_handover import Adopting
from pulque.client.connection.url import Address
from pulque.client.options.consumer_plan import ConsumerPart, ConsumerPlan
from pulque.client.receiving.consumer_core import IncomingCore
from pulque.client.receiving.deferral_core import Deferring
from pulque.client.receiving.error_policy import Trouble
from pulque.client.receiving.fair_scheduling import Shares
from pulque.client.receiving.received_message import ReceivedBatch
from pulque.client.routing.route_table import RouteKey
from pulque.client.routing.targets import HOME
from pulque.errors import DisconnectedError, ProtocolError, UnavailableError
from pulque.model.groups import Mode

__all__ = ["ConsumerBrokers", "Inlets"]

log = logging.getLogger("pulque.client")

_NO_ROOM_WAIT = 0.02
_LONGEST_NAP = 0.5
"""Even if nothing wakes it, it looks after so many seconds whether brokers are to be called."""


class ConsumerBrokers(FollowersOf, Protocol):
    """What a consumer needs to know of the brokers behind its client."""

    guard: Guard

    @property
    def is_known(self) -> bool:
        """Whether anybody was connected to, so that it is known who they are."""

    async def open_at(self, place: str, timeout: float) -> AsyncConnection:
        """Open a connection to a place."""

    async def places(self, subject: str, group: str, timeout: float) -> list[str]:
        """Ask who serves a subject or a pattern."""

    async def delay_places(self, timeout: float) -> list[str]:
        """Return all delay servers."""

    def known_places(self, key: RouteKey) -> list[str]:
        """Return who serves it, as was heard last."""

    def stale(self) -> None:
        """Take in that a route seems to be wrong."""

    def learn(self, place: str, address: Address) -> None:
        """Take in where a broker group listens."""


class Inlets:
    """The brokers of one consumer.

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
        self._plan = plan
        self._brokers = brokers
        self._timeout = timeout
        self._draw = draw
        self._key = RouteKey(plan.options.subject, plan.options.group)
        self._inlets: dict[str, Inlet] = {}
        self._only: Inlet | None = None
        """The lone broker: nobody else is waited for."""
        self._shares: Shares[str] = Shares()
        self._trouble = Trouble(draw, timeout)
        self._followers = Followers(plan.options, brokers, draw)
        self._is_routed = False
        self._is_served = False
        """Whether any broker ever served the subject."""
        self._has_news = False
        self._is_closed = False
        self._dropped = 0
        self._closing: set[asyncio.Task[None]] = set()
        """The ends of inlets whose brokers are gone."""
        self.owner: object = None
        """Lives as long as the inlets: a consumer that nobody holds is closed with its client."""
        self._on_abandoned: Callable[[], None] | None = None
        self._arrived = asyncio.Event()
        self._loop = asyncio.get_running_loop()
        if brokers.is_known and not brokers.is_cluster and plan.ordered is None:
            self._only = self._add(HOME, is_late=False)

    # ── what the consumer shows ────────────────────────────────────────────────────────────

    @property
    def held(self) -> int:
        """How many deliveries are held."""
        return sum(each.core.held for each in self._inlets.values())

    @property
    def abandoned(self) -> int:
        """How many deliveries brokers gave to others so far."""
        return self._dropped + sum(each.core.abandoned for each in self._inlets.values())

    @property
    def is_connected(self) -> bool:
        """Whether there is a connection to any broker, or none has had the subject yet."""
        if self._is_answered and not self._is_served:
            return True
        return any(each.connection is not None for each in self._inlets.values())

    @property
    def _is_answered(self) -> bool:
        """Whether it was ever said who serves the subject."""
        return self._is_routed

    @property
    def has_waiting(self) -> bool:
        """Whether a batch waits to be handed out."""
        return any(each.core.has_waiting for each in self._inlets.values())

    @property
    def may_hold_more(self) -> bool:
        """Whether each broker may be asked for more messages than are wanted.

        Several are asked for all of them anyway, and to look for those that a filter wants has
        its price for each request. What was delivered once only must not wait here: it is lost
        with this consumer.
        """
        options = self._plan.options
        is_worth_it = len(self._inlets) > 1 or bool(options.filter.kind)
        return is_worth_it and options.mode is not Mode.ONCE

    def on_abandoned(self, callback: Callable[[], None]) -> None:
        """Have ``callback`` called when deliveries went to others."""
        self._on_abandoned = callback
        for inlet in self._inlets.values():
            inlet.core.on_abandoned = callback

    def is_told(self) -> bool:
        """Say whether all brokers have all that may be settled; raise why they never will."""
        is_told = all(each.is_told() for each in self._inlets.values())
        if not is_told:
            for inlet in self._inlets.values():
                inlet.check()
        return is_told

    async def settle_soon(self, deadline: float) -> None:
        """Have brokers told what they have not been told."""
        for inlet in list(self._inlets.values()):
            if inlet is self._only:
                try:
                    await inlet.settle_now(deadline)
                except DisconnectedError as error:
                    await inlet.recover(error, deadline)
            elif not inlet.is_told():
                inlet.keep_going(0)

    async def close(self) -> None:
        """Settle what is done everywhere, and hand the rest back."""
        self._is_closed = True
        self._arrived.set()
        await asyncio.gather(*(each.close() for each in self._inlets.values()), *self._closing)
        await self._followers.stop()
        self._brokers.forget_route(self._key)

    def routes_changed(self, keys: Iterable[RouteKey]) -> None:
        """Take in that other brokers may serve the subject."""
        self._followers.routes_changed(keys)
        if self._key in keys:
            self._has_news = True
            for inlet in self._inlets.values():
                inlet.retry_now()
            self._arrived.set()

    # ── one batch after the other ──────────────────────────────────────────────────────────

    def next_batch(self) -> tuple[Inlet, ReceivedBatch] | None:
        """Return a batch that is here and whose it is; brokers that have some take turns."""
        only = self._only
        if only is not None:
            batch = only.core.next_batch()
            return None if batch is None else (only, batch)
        ready = [place for place, each in self._inlets.items() if each.core.has_waiting]
        while ready:
            place = self._shares.next_of(ready)
            inlet = self._inlets[place]
            batch = inlet.core.next_batch()
            if batch is not None:
                self._shares.took(place, batch.end - batch.start)
                return inlet, batch
            ready.remove(place)
        return None

    def ask_ahead(self, want: int) -> None:
        """Have pulls on their way while the caller handles what it was handed."""
        for inlet in self._inlets.values():
            inlet.ask_ahead(want)

    async def exchange(self, deadline: float, want: int) -> None:
        """Have pulls on their way, and take in answers that come before the deadline.

        Raises:
            DisconnectedError: No broker could be reached for the client's timeout.
            PulqueError: There is no way to go on.
        """
        if self._only is None:
            await self._exchange_many(deadline, want)
            return
        inlet = self._only
        inlet.check()
        try:
            await inlet.exchange(deadline, want)
        except UNREACHABLE as error:
            await inlet.recover(error, deadline)
        except ProtocolError:
            await inlet.drop_broken()
            raise

    async def _exchange_many(self, deadline: float, want: int) -> None:
        await self._follow_route(deadline)
        if self._only is not None:
            return
        self._followers.start()
        inlets = list(self._inlets.values())
        self._arrived.clear()
        has_room = [each.keep_going(want, deadline) for each in inlets]
        for inlet in inlets:
            inlet.check()
        self._check_trouble(inlets, deadline)
        nap = _LONGEST_NAP if any(has_room) or not inlets else _NO_ROOM_WAIT
        until = self._next_wake(min(deadline, time.monotonic() + nap))
        if not self.has_waiting and not self._is_closed:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(max(0.0, until - time.monotonic())):
                    await self._arrived.wait()
        for inlet in inlets:
            problem = inlet.problem
            if problem is not None and inlet.connection is not None:
                inlet.problem = None
                if isinstance(problem, ProtocolError):
                    await inlet.drop_broken()
                if not isinstance(problem, UNREACHABLE):
                    raise problem
                inlet.lose(problem)

    def _wake(self) -> None:
        """Have the caller look again. Any thread may."""
        with contextlib.suppress(RuntimeError):  # the loop is closed, and with it the consumer
            self._loop.call_soon_threadsafe(self._arrived.set)

    def _next_wake(self, until: float) -> float:
        """Return when there is something to do, if nothing comes until then."""
        return until

    def _check_trouble(self, inlets: list[Inlet], deadline: float) -> None:
        """Raise what is wrong if no broker has been reached for too long."""
        if not inlets or any(each.connection is not None for each in inlets):
            self._trouble.over()
            return
        problem = next((each.problem for each in inlets if each.problem is not None), None)
        if problem is not None:
            self._brokers.stale()
            self._trouble.next_wait(problem, time.monotonic(), deadline)

    # ── brokers come and go ────────────────────────────────────────────────────────────────

    async def _follow_route(self, deadline: float) -> None:
        """Have an inlet for every broker of the route, and drop those that are gone."""
        if not self._is_routed:
            await self._ask_route(deadline)
            return
        places = self._brokers.known_places(self._key)
        if self._has_news:
            self._has_news = False
            for place in places:
                if place not in self._inlets:
                    log.info("a broker appeared: %s", place)
                    self._add(place, is_late=True)
        for place in [each for each in self._inlets if each not in places]:
            if self._inlets[place].is_gone():
                await self._drop(place)

    async def _ask_route(self, deadline: float) -> None:
        limit = min(self._timeout, max(0.1, deadline - time.monotonic()))
        try:
            places = await self._brokers.places(self._key.subject, self._key.group, limit)
        except UnavailableError as error:
            await asyncio.sleep(self._trouble.next_wait(error, time.monotonic(), deadline))
            return
        self._is_routed = True
        for place in places:
            inlet = self._add(place, is_late=False)
            if not self._brokers.is_cluster:
                self._only = inlet

    def _add(self, place: str, *, is_late: bool) -> Inlet:
        adopting = Adopting(place, self._key, self._plan.options, self._brokers)
        part = self._plan.part(place, is_late=is_late, refuge=None if place == HOME else adopting)
        inlet = self._make_inlet(place, part, self._deferrals(part.core))
        adopting.is_away = lambda: inlet.connection is None
        inlet.core.on_abandoned = self._on_abandoned
        self._inlets[place] = inlet
        self._is_served = True
        self._share_room()
        return inlet

    def _make_inlet(self, place: str, part: ConsumerPart, deferrals: Deferrals) -> Inlet:
        inlet = Inlet(
            part,
            connect=functools.partial(self._brokers.open_at, place),
            timeout=self._timeout,
            draw=self._draw,
            arrived=self._arrived,
            deferrals=deferrals,
        )
        inlet.owner = self
        return inlet

    def _deferrals(self, core: IncomingCore) -> Deferrals:
        """Return what takes messages of one broker to delay servers."""
        if not self._brokers.is_cluster:
            return NoDeferrals()
        deferring = Deferring(core, producer_id=secrets.randbits(64) | 1, draw=self._draw)
        return BackgroundDeferrals(deferring, self._brokers.delay_places, self._brokers.open_at)

    async def _drop(self, place: str) -> None:
        log.info("a broker is gone: %s", place)
        inlet = self._inlets.pop(place)
        inlet.core.lose_contact()
        self._dropped += inlet.core.abandoned
        self._shares.forget(place)
        self._share_room()
        # In a task, as the caller may be cancelled, and nobody would close it any more.
        closing = asyncio.create_task(inlet.close(), name="pulque-closer")
        self._closing.add(closing)
        closing.add_done_callback(self._closing.discard)
        await asyncio.shield(closing)

    def _share_room(self) -> None:
        """Divide what may be held: a busy broker does not take it all."""
        share = self._plan.options.share_of(len(self._inlets))
        for inlet in self._inlets.values():
            inlet.core.max_held = share
