"""Calls that wait for one answer: each has a connection of its own while it lasts."""

import secrets
import time
from collections.abc import Callable, Sequence
from typing import TypeVar

from pulque.client.backoff import Retries
from pulque.client.connection import Connection, connect_any
from pulque.client.lanes import Lane
from pulque.client.url import Address
from pulque.errors import DisconnectedError, PulqueError, UsageError
from pulque.model.ids import IdSource
from pulque.wire.requests import Request
from pulque.wire.responses import Response

__all__ = ["Calls"]

T = TypeVar("T")
_MAX_IDLE = 64


class Calls:
    """The connections of a client that wait for the next call. Thread-safe.

    Args:
        addresses: Where brokers listen.
        client: What this client calls itself.
        draw: Returns a random number in ``0.0..1.0``.
    """

    def __init__(
        self, addresses: Sequence[Address], *, client: str, draw: Callable[[], float]
    ) -> None:
        self.max_message = 0
        """The largest message that the broker takes."""
        self.is_closed = False
        self._addresses = tuple(addresses)
        self._client = client
        self._draw = draw
        self._idle: list[Lane] = []

    def warm_up(self, timeout: float) -> None:
        """Connect now, so that a wrong address is known at once."""
        lane = self.take_lane()
        lane.connection = self.open(timeout)
        self._give_back(lane)

    def open(self, timeout: float) -> Connection:
        """Open a connection for whoever needs one."""
        self.check_open()
        connection = connect_any(self._addresses, client=self._client, timeout=timeout)
        self.max_message = connection.welcome.max_message
        return connection

    def ask(self, request: Request, timeout: float, convert: Callable[[Response], T]) -> T:
        """Ask what is safe to ask again, and return the answer after ``convert``."""

        def call(connection: Connection, left: float) -> T:
            return convert(connection.request(request, left))

        return self.repeat(self.take_lane(), call, timeout)

    def repeat(self, lane: Lane, call: Callable[[Connection, float], T], timeout: float) -> T:
        """Make a call that is safe to repeat, again and again until it succeeds in time.

        Raises:
            PulqueError: It did not, and this is why.
        """
        deadline = time.monotonic() + timeout
        try:
            result = self._try(lane, call, timeout, deadline)
        except PulqueError:
            self._give_back(lane)
            raise
        except BaseException:
            # Interrupted in the middle of a frame: nobody can go on with that connection.
            lane.drop_connection()
            raise
        self._give_back(lane)
        return result

    def _try(
        self,
        lane: Lane,
        call: Callable[[Connection, float], T],
        left: float,
        deadline: float,
    ) -> T:
        retries: Retries | None = None
        while True:
            was_used = lane.connection is not None
            try:
                if lane.connection is None:
                    lane.connection = self.open(left)
                    left = deadline - time.monotonic()
                return call(lane.connection, left)
            except PulqueError as error:
                if lane.connection is not None and not lane.connection.is_open:
                    lane.drop_connection()
                retries = retries or Retries(self._draw, deadline - left, deadline)
                # Brokers close connections that were idle for long: that is no trouble.
                if not (was_used and isinstance(error, DisconnectedError)):
                    time.sleep(retries.next_wait(error, time.monotonic()))
                left = max(0.001, deadline - time.monotonic())

    def take_lane(self) -> Lane:
        """Return a lane that nobody else uses, for ``repeat``."""
        # Taking from and adding to a list is atomic: threads need no lock here.
        try:
            return self._idle.pop()
        except IndexError:
            return Lane(secrets.randbits(64) | 1, IdSource(secrets.randbits(38)))

    def _give_back(self, lane: Lane) -> None:
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
