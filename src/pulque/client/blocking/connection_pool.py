"""Calls that wait for an answer; by hand, as each has a connection of its own while it lasts."""

import secrets
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from typing import TypeVar

from pulque.client.blocking.connection import Connection, connect_any
from pulque.client.connection.backoff import Retries
from pulque.client.connection.call_outcomes import NotReachedError
from pulque.client.connection.fork_safety import on_fork
from pulque.client.connection.url import Address
from pulque.client.routing.targets import Target
from pulque.client.sending.direct_batches import NumberedBatch
from pulque.clock import wall_ms
from pulque.errors import (
    DisconnectedError,
    OverloadedError,
    PulqueError,
    UnavailableError,
    UsageError,
)
from pulque.model.batch import renumber
from pulque.model.ids import IdSource
from pulque.model.names import PartitionName
from pulque.model.pack import BatchPacker, ProducedBy
from pulque.model.single import pack_single
from pulque.wire.requests import Request
from pulque.wire.responses import Response

__all__ = ["Calls", "DirectProducer", "NotReachedError"]

T = TypeVar("T")
_MAX_IDLE = 64


class DirectProducer:
    """What one call needs to send. One user at a time."""

    __slots__ = ("__weakref__", "_ids", "_numbers", "_producer_id", "connection")

    def __init__(self) -> None:
        self.after_fork()
        on_fork(self, DirectProducer.after_fork)

    def after_fork(self) -> None:
        """Draw an identity: a broker takes equal numbers of one producer for repeats."""
        self.connection: Connection | None = None
        self._producer_id = secrets.randbits(64) | 1
        self._ids = IdSource(secrets.randbits(38))
        self._numbers: dict[str, int] = {}

    def pack_body(self, target: Target, body: bytes) -> NumberedBatch:
        """Make a batch of one plain message and give it its number."""
        now_ms = wall_ms()
        message_id = self._ids.one(now_ms)
        data = pack_single(
            body,
            seed=target.seed,
            message_id=message_id,
            created_at_ms=now_ms,
            producer_id=self._producer_id,
            producer_sequence=self._next_number(target.partition),
        )
        return NumberedBatch(target, data, message_id, 1)

    def pack(self, target: Target, packer: BatchPacker, dues: Sequence[int] = ()) -> NumberedBatch:
        """Make a batch and give it its number."""
        number = self._next_number(target.partition)
        now_ms = wall_ms()
        length = len(packer.bodies)
        ids = self._ids.many(now_ms, length)
        data = packer.encode(
            seed=target.seed,
            ids=ids,
            created_at_ms=now_ms,
            produced_by=ProducedBy(self._producer_id, 0, number),
            priority=target.level,
        )
        return NumberedBatch(target, data, ids, length, dues)

    def pack_again(self, target: Target, packed: NumberedBatch) -> NumberedBatch:
        """Return a batch for another partition, with a number of this lane; its ids stay."""
        number = self._next_number(target.partition)
        data = renumber(packed.data, target.seed, self._producer_id, number)
        return NumberedBatch(target, data, packed.ids, packed.length, packed.dues)

    def drop_connection(self) -> None:
        """Close the connection; the next call opens another."""
        if self.connection is not None:
            self.connection.close()
            self.connection = None

    def _next_number(self, partition: PartitionName) -> int:
        number = self._numbers.get(partition, 0)
        self._numbers[partition] = number + 1
        return number


class Calls:
    """The connections of a client to one place that wait for the next call. Thread-safe.

    Args:
        addresses: Where to connect to: any of these will do. Or what says so, each time.
        client: What this client calls itself.
        draw: Returns a random number in ``0.0..1.0``.
        stale: Told when nobody answers there, or who does not lead: it may be elsewhere by now.
    """

    def __init__(
        self,
        addresses: Sequence[Address] | Callable[[], Address],
        *,
        client: str,
        draw: Callable[[], float],
        stale: Callable[[], None] | None = None,
    ) -> None:
        self.max_message = 0
        """The largest message that the broker takes."""
        self.cluster = ""
        """The id of the cluster that the server belongs to; empty for a lone broker."""
        self.server = ""
        """What the server calls itself."""
        self.is_led = False
        """Whether it is the leader of its broker group: if it fails, another one may follow."""
        self.is_closed = False
        self._addresses = addresses if callable(addresses) else tuple(addresses)
        self._client = client
        self._draw = draw
        self._stale = stale
        self._idle: list[DirectProducer] = []
        self._opened: weakref.WeakSet[Connection] = weakref.WeakSet()
        self._has_moved = threading.Condition()
        on_fork(self, Calls.after_fork)

    def after_fork(self) -> None:
        """Free what other threads may hold; the lanes look after themselves."""
        self._has_moved = threading.Condition()

    def warm_up(self, timeout: float) -> None:
        """Connect now, so that a wrong address is known at once."""
        lane = self.take_lane()
        if lane.connection is None or not lane.connection.is_open:
            lane.drop_connection()
            lane.connection = self.open(timeout)
        self.give_back(lane)

    def open(self, timeout: float) -> Connection:
        """Open a connection for whoever needs one."""
        self.check_open()
        found = self._addresses
        addresses = (found(),) if callable(found) else found
        if len(addresses) > 1:
            # Clients spread over servers that are all the same.
            addresses = tuple(sorted(addresses, key=lambda _: self._draw()))
        try:
            connection = connect_any(addresses, client=self._client, timeout=timeout)
        except PulqueError as error:
            self._look_elsewhere(error)
            raise
        self.max_message = connection.welcome.max_message
        self.cluster = connection.welcome.cluster
        self.server = connection.welcome.broker
        self.is_led = connection.welcome.tenure.epoch > 0
        connection.on_deposed = self._stale
        with self._has_moved:
            self._opened.add(connection)
        return connection

    def moved(self) -> None:
        """Take in that the place is elsewhere: nobody has to wait for who was there before."""
        found = self._addresses
        addresses = (found(),) if callable(found) else found
        with self._has_moved:
            old = [each for each in self._opened if each.address not in addresses]
            self._has_moved.notify_all()
        for connection in old:
            connection.abort()

    def rest(self, seconds: float) -> None:
        """Wait before another try, but not when the place turns out to be elsewhere."""
        with self._has_moved:
            self._has_moved.wait(seconds)

    def ask(self, request: Request, timeout: float, convert: Callable[[Response], T]) -> T:
        """Ask what is safe to ask again, and return the answer after ``convert``."""

        def call(connection: Connection, left: float) -> T:
            return connection.request(request, left, convert)

        return self.repeat(self.take_lane(), call, timeout)

    def repeat(
        self, lane: DirectProducer, call: Callable[[Connection, float], T], timeout: float
    ) -> T:
        """Make a call that is safe to repeat, again and again until it succeeds in time.

        Raises:
            PulqueError: It did not, and this is why.
        """
        deadline = time.monotonic() + timeout
        try:
            result = self._try(lane, call, timeout, deadline)
        except PulqueError:
            self.give_back(lane)
            raise
        except BaseException:
            # Interrupted in the middle of a frame: nobody can go on with that connection.
            lane.drop_connection()
            raise
        self.give_back(lane)
        return result

    def _try(
        self,
        lane: DirectProducer,
        call: Callable[[Connection, float], T],
        left: float,
        deadline: float,
    ) -> T:
        retries: Retries | None = None
        while True:
            was_used = was_asked = lane.connection is not None
            try:
                if lane.connection is None:
                    lane.connection = self.open(left)
                    left = deadline - time.monotonic()
                was_asked = True
                return call(lane.connection, left)
            except PulqueError as error:
                if lane.connection is not None and not lane.connection.is_open:
                    lane.drop_connection()
                retries = retries or Retries(self._draw, deadline - left, deadline)
                retries.failed(error, was_asked=was_asked)
                # Brokers close connections that were idle for long: that is no trouble. But one
                # that answers that somebody behind it is away has to be given time.
                was_idle = was_used and lane.connection is None
                if not (was_idle and isinstance(error, DisconnectedError)):
                    self._look_elsewhere(error)
                    self.rest(retries.next_wait(error, time.monotonic()))
                left = max(0.001, deadline - time.monotonic())

    def _look_elsewhere(self, error: PulqueError) -> None:
        if self._stale is not None and isinstance(error, UnavailableError):
            self._stale()

    def attempt(
        self, lane: DirectProducer, call: Callable[[Connection, float], T], timeout: float
    ) -> T:
        """Make a call once; the lane stays with the caller.

        A connection that was idle may have been closed: only then another one is tried.

        Raises:
            NotReachedError: Nobody was reached, so that nothing was asked.
            PulqueError: What else went wrong.
        """
        left = timeout
        deadline = time.monotonic() + timeout
        was_used = lane.connection is not None
        was_asked = False
        while True:
            if lane.connection is None:
                try:
                    lane.connection = self.open(left)
                except UnavailableError as error:
                    if was_asked or isinstance(error, OverloadedError):
                        raise
                    raise NotReachedError(str(error)) from None
            try:
                was_asked = True
                return call(lane.connection, left)
            except DisconnectedError:
                if not was_used:
                    raise
                was_used = False
                left = max(0.001, deadline - time.monotonic())
            finally:
                if not lane.connection.is_open:
                    lane.drop_connection()

    def take_lane(self) -> DirectProducer:
        """Return a lane that nobody else uses, for ``repeat``."""
        # Taking from and adding to a list is atomic: threads need no lock here.
        try:
            return self._idle.pop()
        except IndexError:
            return DirectProducer()

    def give_back(self, lane: DirectProducer) -> None:
        """Have a lane used by others again."""
        if self.is_closed or len(self._idle) >= _MAX_IDLE:
            lane.drop_connection()
        else:
            self._idle.append(lane)

    def check_open(self) -> None:
        """Raise ``UsageError`` if the client is closed."""
        if self.is_closed:
            raise UsageError("this client is closed")

    def close(self) -> None:
        """Close the connections that wait; those in use are closed after their call."""
        self.is_closed = True
        while self._idle:
            self._idle.pop().drop_connection()
