"""All brokers that a consumer pulls from, for asyncio, merged into one stream of batches.

The brokers that serve the subject are those of its route. One that comes is pulled from, too; one
that leaves the route is pulled from as long as it answers, and is dropped when it has been away
for its lease: by then what it had delivered is no longer this consumer's.
"""

import functools
import logging
import secrets
import time
from collections.abc import Callable, Iterable
from typing import Protocol

from pulque.client.aio.arrivals import Arrivals
from pulque.client.aio.broker_puller import UNREACHABLE, Inlet
from pulque.client.aio.concurrency import Crew, for_each, sleep
from pulque.client.aio.connection import AsyncConnection
from pulque.client.aio.deferral import BackgroundDeferrals, Deferrals, NoDeferrals
from pulque.client.aio.follower_heartbeats import Followers, FollowersOf
from pulque.client.aio.guard import Guard  # asyncio only
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

    guard: Guard  # asyncio only

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
    """The brokers of one consumer. Used by one task at a time, but for ``close``.

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
        self._is_closed = self._is_forgotten = False
        self._dropped = 0
        self._closers = Crew("pulque-closer")
        # It lives as long as the inlets, and is closed with its client:  # asyncio only
        self.owner: object = None  # asyncio only
        self._on_abandoned: Callable[[], None] | None = None
        is_lone = brokers.is_known and not brokers.is_cluster and plan.ordered is None
        self._arrivals = Arrivals(is_needed=not is_lone)
        if is_lone:
            self._only = self._add(HOME, is_late=False)

    # ── what the consumer shows ────────────────────────────────────────────────────────────

    @property
    def held(self) -> int:
        """How many deliveries are held."""
        return sum(each.core.held for each in self._all())

    @property
    def abandoned(self) -> int:
        """How many deliveries brokers gave to others so far."""
        return self._dropped + sum(each.core.abandoned for each in self._all())

    @property
    def is_connected(self) -> bool:
        """Whether there is a connection to any broker, or none has had the subject yet."""
        if self._is_answered and not self._is_served:
            return True
        return any(each.connection is not None for each in self._all())

    @property
    def _is_answered(self) -> bool:
        """Whether it was ever said who serves the subject."""
        return self._is_routed

    @property
    def has_waiting(self) -> bool:
        """Whether a batch waits to be handed out."""
        return any(each.core.has_waiting for each in self._all())

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
        for inlet in self._all():
            inlet.core.on_abandoned = callback

    def is_told(self) -> bool:
        """Say whether all brokers have all that may be settled; raise why they never will."""
        for inlet in self._all():
            inlet.check()
        return all(each.is_told() for each in self._all())

    async def settle_soon(self, deadline: float) -> None:
        """Have brokers told what they have not been told."""
        for inlet in self._all():
            if inlet is self._only:
                try:
                    await inlet.open_again(deadline)
                except DisconnectedError as error:
                    await inlet.recover(error, deadline)
            elif not inlet.is_told():
                inlet.keep_going(0)
            inlet.hurry()

    async def close(self) -> None:
        """Settle what is done everywhere, and hand the rest back. Any task may."""
        self._is_closed = True
        self._arrivals.set()
        await for_each(self._all(), Inlet.close)
        await self._closers.join(self._timeout)
        await self._followers.stop()
        if not self._is_forgotten:
            self._is_forgotten = True  # once, although ``close`` may be repeated
            self._brokers.forget_route(self._key)
        self._arrivals.close()

    def routes_changed(self, keys: Iterable[RouteKey]) -> None:
        """Take in that other brokers may serve the subject. Any task may."""
        self._followers.routes_changed(keys)
        if self._key in keys:
            for inlet in self._all():
                inlet.retry_now()
            self._arrivals.set()

    # ── one batch after the other ──────────────────────────────────────────────────────────

    def next_batch(self) -> tuple[Inlet, ReceivedBatch] | None:
        """Return a batch that is here and whose it is; brokers that have some take turns."""
        only = self._only
        if only is not None:
            with only.lock:
                batch = only.core.next_batch()
            return None if batch is None else (only, batch)
        ready = [place for place, each in self._inlets.items() if each.core.has_waiting]
        while ready:
            place = self._shares.next_of(ready)
            inlet = self._inlets[place]
            with inlet.lock:
                batch = inlet.core.next_batch()
            if batch is not None:
                self._shares.took(place, batch.end - batch.start)
                return inlet, batch
            ready.remove(place)
        return None

    def ask_ahead(self, want: int) -> None:
        """Have pulls on their way while the caller handles what it was handed."""
        for inlet in self._all():
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
            inlet.check()
            await inlet.recover(error, deadline)
        except ProtocolError:
            await inlet.drop_broken()
            raise

    async def _exchange_many(self, deadline: float, want: int) -> None:
        await self._follow_route(deadline)
        if self._only is not None:
            return
        self._followers.start()
        inlets = self._all()
        self._arrivals.clear()
        has_room = [each.keep_going(want, deadline) for each in inlets]
        for inlet in inlets:
            inlet.check()
        self._check_trouble(inlets, deadline)
        nap = _LONGEST_NAP if any(has_room) or not inlets else _NO_ROOM_WAIT
        until = self._next_wake(min(deadline, time.monotonic() + nap))
        await self._arrivals.wait_for_any(inlets, until, self._may_wait)
        for inlet in inlets:
            try:
                inlet.take_in_all()
            except ProtocolError:
                await inlet.drop_broken()
                raise

    def _may_wait(self) -> bool:
        return not self.has_waiting and not self._is_closed

    def _wake(self) -> None:
        """Have the caller look again. Any thread may."""
        self._arrivals.set_from_anywhere()

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

    def _all(self) -> list[Inlet]:
        return list(self._inlets.values())

    async def _follow_route(self, deadline: float) -> None:
        """Have an inlet for every broker of the route, and drop those that are gone."""
        if not self._is_routed:
            await self._ask_route(deadline)
            return
        places = self._brokers.known_places(self._key)
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
            await sleep(self._trouble.next_wait(error, time.monotonic(), deadline))
            return
        for place in places:
            if place not in self._inlets:  # else an interrupt came after it was added
                inlet = self._add(place, is_late=False)
                if not self._brokers.is_cluster:
                    self._only = inlet
        self._is_routed = True

    def _add(self, place: str, *, is_late: bool) -> Inlet:
        adopting = Adopting(place, self._key, self._plan.options, self._brokers)
        part = self._plan.part(place, is_late=is_late, refuge=None if place == HOME else adopting)
        inlet = self._make_inlet(place, part, self._deferrals(part.core))
        adopting.is_away = lambda: inlet.connection is None
        inlet.core.on_abandoned = self._on_abandoned
        self._inlets = {**self._inlets, place: inlet}
        self._is_served = True
        self._share_room()
        return inlet

    def _make_inlet(self, place: str, part: ConsumerPart, deferrals: Deferrals) -> Inlet:
        inlet = Inlet(
            part,
            connect=functools.partial(self._brokers.open_at, place),
            timeout=self._timeout,
            draw=self._draw,
            arrived=self._arrivals,
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
        inlets = dict(self._inlets)
        inlet = inlets.pop(place)
        with inlet.lock:
            inlet.core.lose_contact()
        self._dropped += inlet.core.abandoned
        self._inlets = inlets
        self._shares.forget(place)
        self._share_room()
        # The caller may be cancelled, and nobody would close it any more.  # asyncio only
        await self._closers.run(inlet.close)

    def _share_room(self) -> None:
        """Divide what may be held: a busy broker does not take it all."""
        share = self._plan.options.share_of(len(self._inlets))
        for inlet in self._all():
            inlet.core.max_held = share
