"""Sending one batch where several brokers would take it; by hand, and for ``direct_send`` only.

A batch goes to one partition, and on to another if that does not work out. The same bytes, but
for number and seed, go to each; a broker that is asked twice knows the batch again. Other brokers
do not: when nobody knows whether the first one stored it, the receipt says so.
"""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from pulque.client.blocking.connection import Connection
from pulque.client.blocking.connection_pool import Calls, DirectProducer
from pulque.client.connection.backoff import Retries
from pulque.client.routing.failover_rules import (
    ANSWER_LIMIT,
    awaits_leader,
    leaves_unknown,
    may_go_elsewhere,
)
from pulque.client.routing.targets import Target, Targets, Way
from pulque.client.sending.direct_batches import NumberedBatch
from pulque.errors import PulqueError, UnavailableError
from pulque.wire.single import SingleStored

__all__ = ["Spread", "Stored"]

_Key = tuple[str, str]


@dataclass(slots=True)
class _Try:
    """What was tried with one partition."""

    calls: Calls
    lane: DirectProducer
    packed: NumberedBatch
    is_unanswered: bool = False

    def stays(self, started: float, timeout: float) -> bool:
        """Say whether only this broker group can tell for now whether the batch is stored."""
        if not self.is_unanswered or not self.calls.is_led:
            return False
        return awaits_leader(time.monotonic() - started, timeout)


class Stored(NamedTuple):
    """Where a batch is in the end."""

    packed: NumberedBatch
    outcome: SingleStored
    may_be_doubled: bool


class Spread:
    """Sends batches to any of several brokers. Thread-safe.

    Args:
        calls_at: Returns the connections to a place.
        targets_for: Returns where messages go by now that are confirmed so.
        stale: Told when the route may be wrong.
        draw: Returns a random number in ``0.0..1.0``.
    """

    def __init__(
        self,
        calls_at: Callable[[str], Calls],
        targets_for: Callable[[int], Mapping[Way, Targets]],
        stale: Callable[[], None],
        draw: Callable[[], float],
    ) -> None:
        self._calls_at = calls_at
        self._targets_for = targets_for
        self._stale = stale
        self._draw = draw

    def send(
        self,
        way: Way,
        order_key: str | None,
        first: Target,
        pack: Callable[[DirectProducer], NumberedBatch],
        *,
        acks: int,
        timeout: float,
    ) -> Stored:
        """Send a batch; go on until it is stored, or the time is up.

        Args:
            way: Of what it is: a subject, due at once or later.
            order_key: Its order key: it stays where that belongs while somebody answers there.
            first: Where to try first.
            pack: Makes the batch for that.
            acks: When it counts as confirmed.
            timeout: How long to try, in seconds.

        Raises:
            PulqueError: It is not confirmed.
        """
        started = time.monotonic()
        deadline = started + timeout
        retries: Retries | None = None
        tries: dict[_Key, _Try] = {}
        failed: set[_Key] = set()
        target = first
        try:
            while True:
                attempt = tries.get(target.key) or self._new_try(target, tries, pack)
                try:
                    return self._attempt(target, attempt, tries, acks, deadline)
                except PulqueError as error:
                    retries = retries or Retries(self._draw, started, deadline)
                    retries.failed(error)
                    if not may_go_elsewhere(error):
                        raise retries.final(error) from None
                    failed.add(target.key)
                    if not attempt.stays(started, timeout):
                        target = self._next_target(way, acks, order_key, target, failed)
                    if target.key in failed:
                        # It was everywhere, or has to stay: after a while it may go anywhere.
                        attempt.calls.rest(retries.next_wait(error, time.monotonic()))
                        failed.clear()
        finally:
            for each in tries.values():
                each.calls.give_back(each.lane)

    def _next_target(
        self, way: Way, acks: int, order_key: str | None, last: Target, failed: set[_Key]
    ) -> Target:
        targets = self._targets_for(acks).get(way)
        if targets is None:
            return last
        avoid = [each for each in targets.of_level(last.level) if each.key in failed]
        try:
            return targets.pick(order_key, last.level, time.monotonic(), avoid)
        except UnavailableError:
            return last  # the only broker that may have it; it may come back in time

    def _new_try(
        self,
        target: Target,
        tries: dict[_Key, _Try],
        pack: Callable[[DirectProducer], NumberedBatch],
    ) -> _Try:
        calls = self._calls_at(target.place)
        lane = calls.take_lane()
        before = next(iter(tries.values()), None)
        packed = lane.pack_again(target, before.packed) if before is not None else pack(lane)
        tries[target.key] = found = _Try(calls, lane, packed)
        return found

    def _attempt(
        self, target: Target, attempt: _Try, tries: dict[_Key, _Try], acks: int, deadline: float
    ) -> Stored:
        packed = attempt.packed

        def call(connection: Connection, left: float) -> SingleStored:
            stored = connection.send_single(target.partition, packed.data, acks=acks, timeout=left)
            if isinstance(stored, PulqueError):
                raise _RefusedError(stored)
            return stored

        started = time.monotonic()
        left = max(0.001, min(deadline - started, ANSWER_LIMIT))
        try:
            outcome = attempt.calls.attempt(attempt.lane, call, left)
        except _RefusedError as refused:
            self._refused(target, attempt, refused.error, started)
            raise refused.error from None
        except UnavailableError as error:
            self._unanswered(target, attempt, error, started)
            raise
        except BaseException:
            # Interrupted in the middle of a frame: nobody can go on with that connection.
            attempt.lane.drop_connection()
            raise
        now = time.monotonic()
        target.health.answered(now, now - started)
        others = (each for each in tries.values() if each is not attempt)
        doubled = len(tries) > 1 and any(each.is_unanswered for each in others)
        return Stored(packed, outcome, doubled)

    def _refused(self, target: Target, attempt: _Try, error: PulqueError, started: float) -> None:
        now = time.monotonic()
        target.health.answered(now, now - started)
        target.refused(now)
        if leaves_unknown(error):
            attempt.is_unanswered = True
        self._stale()

    def _unanswered(
        self, target: Target, attempt: _Try, error: PulqueError, started: float
    ) -> None:
        now = time.monotonic()
        target.health.failed(now, now - started)
        if not error.outcome_known:
            attempt.is_unanswered = True
        self._stale()


class _RefusedError(Exception):
    """The broker answered, and said no."""

    def __init__(self, error: PulqueError) -> None:
        super().__init__(str(error))
        self.error = error
