"""Lock → LockGranted, Unlock → LockReleased: one consumer of an ordered group at a time.

A grant is on disk before it is answered, so that no token is ever granted twice. Who has to wait
stands in line: when the lock is given up, or its time is over, the first in line gets it.
"""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

from pulque.broker.state import BrokerState
from pulque.clock import Clock
from pulque.errors import FencedError, InvalidRequestError, NotAllowedError, PulqueError
from pulque.model.actions import LockGranted, LockReleased
from pulque.model.names import (
    ConsumerId,
    Group,
    PartitionName,
    parse_consumer_id,
    parse_group,
    parse_partition,
    subject_of,
)
from pulque.model.ordered import OrderStrategy
from pulque.rules.consumption import check_incarnation
from pulque.rules.locks import NOBODY, LockKey, can_be_locked
from pulque.serving.commit import Synced
from pulque.wire.ordered import NO_TOKEN, Lock, Locked, Unlock, Unlocked

__all__ = ["Locker"]

_LONGEST_WAIT_MS = 60_000


@dataclass(eq=False, slots=True)
class _LockWaiter:
    """Somebody who wants a lock that another has."""

    key: LockKey
    request: Lock
    consumer: ConsumerId
    answer: Callable[[Locked], None]
    refuse: Callable[[PulqueError], None]
    owner: object
    until_ms: int
    timer: asyncio.TimerHandle | None = None


class Locker:
    """Gives partitions to consumers of ordered groups.

    Args:
        state: What the broker knows.
        clock: For how long locks last.
        sync_facts: Tells when the facts that are recorded by now are on disk.
        lost: Told who had a lock that another has now.
    """

    def __init__(
        self,
        state: BrokerState,
        clock: Clock,
        sync_facts: Callable[[Synced], None],
        lost: Callable[[Group, ConsumerId], None],
    ) -> None:
        self._state = state
        self._locks = state.consumption.locks
        self._times = state.lock_times
        self._clock = clock
        self._sync_facts = sync_facts
        self._lost = lost
        self._loop = asyncio.get_running_loop()
        self._waiting: dict[LockKey, dict[_LockWaiter, None]] = {}
        """In the order in which they came."""
        self.granted = 0

    def lock(
        self,
        request: Lock,
        owner: object,
        answer: Callable[[Locked], None],
        refuse: Callable[[PulqueError], None],
    ) -> None:
        """Give a partition to a consumer, as soon as nobody else has it.

        Raises:
            RejectedError: It cannot be: a wrong name, a group that is no ordered one, or a newer
                incarnation of the consumer was here.
        """
        consumer, group = parse_consumer_id(request.consumer), parse_group(request.group)
        name = parse_partition(request.partition)
        self._check(name, group)
        for subscription in self._state.consumption.subscriptions_of(group, consumer):
            check_incarnation(subscription, request.incarnation)
        partition = self._state.make_partition(name, self._clock.now_ms())
        key = (partition.id, group)
        self._check_twin(key, request, consumer)
        until_ms = self._clock.monotonic_ms() + min(request.wait_ms, _LONGEST_WAIT_MS)
        waiter = _LockWaiter(key, request, consumer, answer, refuse, owner, until_ms)
        if not self._try(waiter):
            self._waiting.setdefault(key, {})[waiter] = None
            self._wait(waiter)

    def unlock(self, request: Unlock) -> Unlocked:
        """Take a partition back that a consumer gives up.

        Raises:
            InvalidNameError: It names what cannot be.
        """
        consumer, group = parse_consumer_id(request.consumer), parse_group(request.group)
        partition = self._state.engine.partition(request.partition)
        if partition is None:
            return Unlocked(was_held=False)
        key = (partition.id, group)
        if not self._locks.is_held_by(key, consumer, request.token):
            return Unlocked(was_held=False)
        self.release(key)
        return Unlocked(was_held=True)

    def release(self, key: LockKey, *, is_end: bool = False) -> None:
        """Take a lock from whoever has it, and give it to the next in line.

        Args:
            key: The group and the partition.
            is_end: The group is no ordered one any more.
        """
        found = self._locks.by_key[key]
        holder = found.holder
        fact = LockReleased(*key, found.token, self._clock.now_ms(), is_end)
        self._state.record(fact)
        self.vacated(key, holder)

    def vacated(self, key: LockKey, holder: ConsumerId) -> None:
        """Take note that a fact took a lock from somebody."""
        if holder:
            self._lost(key[1], holder)
        self._next_in_line(key)

    def left(self, group: Group, consumer: ConsumerId) -> None:
        """Take back all that a consumer has, as it leaves."""
        mine = [
            key
            for key, lock in self._locks.by_key.items()
            if key[1] == group and lock.holder == consumer
        ]
        for key in mine:
            self.release(key)

    def closed(self, owner: object) -> None:
        """Forget who waited over a connection that is gone."""
        for waiters in list(self._waiting.values()):
            for waiter in [each for each in waiters if each.owner is owner]:
                self._leave(waiter)

    # -- granting ----------------------------------------------------------------------------

    def _try(self, waiter: _LockWaiter) -> bool:
        """Answer if there is something to say; say whether there was."""
        key, request, now_ms = waiter.key, waiter.request, self._clock.monotonic_ms()
        found = self._locks.by_key.get(key)
        left_ms = self._times.left_ms(key, now_ms)
        is_mine = found is not None and found.holder == waiter.consumer
        if is_mine and request.token and self._is_same(waiter):
            self._times.renew(key, now_ms)
            waiter.answer(Locked(request.token, self._times.lock_ms))
        elif found is None or found.holder == NOBODY or is_mine or not left_ms:
            self._grant(waiter)
        elif now_ms >= waiter.until_ms:
            waiter.answer(Locked(NO_TOKEN, left_ms, found.holder))
        else:
            return False
        return True

    def _is_same(self, waiter: _LockWaiter) -> bool:
        """Whether somebody who has the lock only wants to keep it."""
        lock, request = self._locks.by_key[waiter.key], waiter.request
        return (lock.token, lock.incarnation) == (request.token, request.incarnation)

    def _grant(self, waiter: _LockWaiter) -> None:
        key, request = waiter.key, waiter.request
        before = self._locks.by_key.get(key)
        token = self._locks.next_token(key)
        is_strict = request.order is OrderStrategy.STRICT
        fact = LockGranted(
            *key, waiter.consumer, request.incarnation, token, is_strict, self._clock.now_ms()
        )
        try:
            self._state.record(fact)
        except PulqueError as error:
            waiter.refuse(error)
            return
        self._times.renew(key, self._clock.monotonic_ms())
        self.granted += 1
        if before is not None and before.holder:
            self._lost(key[1], before.holder)

        def synced(error: PulqueError | None) -> None:
            if error is None:
                waiter.answer(Locked(token, self._times.lock_ms))
            else:
                waiter.refuse(error)

        self._sync_facts(synced)

    # -- waiting -----------------------------------------------------------------------------

    def _wait(self, waiter: _LockWaiter) -> None:
        now_ms = self._clock.monotonic_ms()
        wait_ms = min(waiter.until_ms - now_ms, self._times.left_ms(waiter.key, now_ms))
        # A little later, so that the time is surely over then.
        waiter.timer = self._loop.call_later(max(wait_ms, 0) / 1000 + 0.002, self._again, waiter)

    def _again(self, waiter: _LockWaiter) -> None:
        if waiter not in self._waiting.get(waiter.key, ()):
            return
        if self._try(waiter):
            self._leave(waiter)
        else:
            self._wait(waiter)

    def _next_in_line(self, key: LockKey) -> None:
        for waiter in list(self._waiting.get(key, ())):
            if not self._try(waiter):
                return
            self._leave(waiter)

    def _leave(self, waiter: _LockWaiter) -> None:
        if waiter.timer is not None:
            waiter.timer.cancel()
        waiters = self._waiting.get(waiter.key, {})
        waiters.pop(waiter, None)
        if not waiters:
            self._waiting.pop(waiter.key, None)

    # -- checking ----------------------------------------------------------------------------

    def _check(self, name: PartitionName, group: Group) -> None:
        if not can_be_locked(name):
            raise InvalidRequestError(
                f"partition {name} cannot be locked: retries, and messages with a priority of "
                "their own, are shared by all consumers of an ordered group"
            )
        if not self._state.must_lock(name, group):
            mode = self._state.groups_settings.of(group, subject_of(name)).mode
            raise NotAllowedError(
                f"group {group} consumes {subject_of(name)} in mode {mode.name.lower()}, and only "
                "a group in mode ordered has locks: subscribe in that mode, with another group, "
                f"or switch this one with: pulque group change {subject_of(name)} "
                f"--group {group} --mode ordered"
            )

    def _check_twin(self, key: LockKey, request: Lock, consumer: ConsumerId) -> None:
        found = self._locks.by_key.get(key)
        if (
            found is not None
            and found.holder == consumer
            and request.incarnation < found.incarnation
        ):
            raise FencedError(
                f"consumer {consumer} was started again (incarnation {found.incarnation}); this "
                f"is incarnation {request.incarnation} and must stop"
            )
