"""Reading without a group: messages from a sequence on, and where a partition begins and ends."""

import asyncio
from collections.abc import Callable
from concurrent.futures import Executor
from dataclasses import dataclass
from typing import TypeVar

from pulque.broker.state import PullLimits
from pulque.errors import (
    InvalidRequestError,
    PulqueError,
    StorageError,
    UnavailableError,
    UnknownSubjectError,
)
from pulque.model.names import parse_partition
from pulque.model.positions import ConsumeSequence
from pulque.storage.engine import Engine
from pulque.storage.files import WouldBlockError
from pulque.storage.logs.partitions import Partition
from pulque.wire.requests import NO_TIME, Positions, Read
from pulque.wire.responses import Located, ReadBack

__all__ = ["Browser"]

_LONGEST_WAIT_MS = 60_000
_MOST_DAMAGED = 16
"""So many damaged spans are skipped for one request; the client asks again behind them."""
K = TypeVar("K")
T = TypeVar("T")


@dataclass(eq=False, slots=True)
class _WaitingRead:
    request: Read
    answer: Callable[[ReadBack], None]
    refuse: Callable[[PulqueError], None]
    owner: object
    timer: asyncio.TimerHandle | None = None


class Browser:
    """Shows what is stored, without effect."""

    def __init__(self, engine: Engine, executor: Executor, limits: PullLimits) -> None:
        self._engine = engine
        self._executor = executor
        self._limits = limits
        self._loop = asyncio.get_running_loop()
        self._waiting: dict[str, dict[_WaitingRead, None]] = {}
        """By partition, in order of arrival."""
        self._by_owner: dict[object, dict[_WaitingRead, None]] = {}

    def read(
        self,
        request: Read,
        owner: object,
        answer: Callable[[ReadBack], None],
        refuse: Callable[[PulqueError], None],
    ) -> None:
        """Answer a read as soon as there is something, at the latest when its time is up."""
        parse_partition(request.partition)
        if not request.max_messages or not request.max_bytes:
            raise InvalidRequestError("a read must ask for at least one message and one byte")
        waiting = _WaitingRead(request, answer, refuse, owner)
        if not self._try(waiting):
            wait_ms = min(request.timeout_ms, _LONGEST_WAIT_MS)
            self._waiting.setdefault(request.partition, {})[waiting] = None
            self._by_owner.setdefault(owner, {})[waiting] = None
            waiting.timer = self._loop.call_later(wait_ms / 1000, self._time_is_up, waiting)

    def positions(
        self,
        request: Positions,
        answer: Callable[[Located], None],
        refuse: Callable[[PulqueError], None],
    ) -> None:
        """Say where a partition begins and ends, and what was first at an instant."""
        partition = self._engine.partition(parse_partition(request.partition))
        if partition is None:
            raise UnknownSubjectError(f"no message was ever sent to {request.partition} here")
        if request.at_ms == NO_TIME:
            answer(Located(partition.start, partition.confirmed, partition.confirmed))
            return
        at_ms = request.at_ms

        def found(at: ConsumeSequence) -> None:
            answer(Located(partition.start, partition.confirmed, at))

        self._ask_disk(lambda: self._engine.at_time(partition, at_ms), found, refuse)

    def wake(self, partitions: list[Partition]) -> None:
        """Serve reads that wait for messages of these partitions."""
        for partition in partitions:
            for waiting in list(self._waiting.get(partition.name, ())):
                if self._try(waiting):
                    self._stop_waiting(waiting)

    def closed(self, owner: object) -> None:
        """Forget the reads of a connection that is gone."""
        for waiting in list(self._by_owner.get(owner, ())):
            self._stop_waiting(waiting)

    def _try(self, waiting: _WaitingRead, *, may_block: bool = False) -> bool:
        partition = self._engine.partition(waiting.request.partition)
        sequence = ConsumeSequence(waiting.request.sequence)
        if partition is None or sequence >= partition.confirmed:
            return False
        try:
            waiting.answer(self._read(partition, waiting.request, may_block=may_block))
        except WouldBlockError:
            request = waiting.request
            self._ask_disk(
                lambda: self._read(partition, request, may_block=True),
                waiting.answer,
                waiting.refuse,
            )
        except PulqueError as error:
            waiting.refuse(error)
        return True

    def _read(self, partition: Partition, request: Read, *, may_block: bool) -> ReadBack:
        found = self._read_from(
            partition, ConsumeSequence(request.sequence), request, may_block=may_block
        )
        for _ in range(_MOST_DAMAGED):
            after = ConsumeSequence(found.first_sequence + found.count)
            if found.records or not found.count or after >= partition.confirmed:
                break
            found = self._read_from(partition, after, request, may_block=may_block)
        return found

    def _read_from(
        self,
        partition: Partition,
        sequence: ConsumeSequence,
        request: Read,
        *,
        may_block: bool,
    ) -> ReadBack:
        span = self._engine.span(
            partition,
            sequence,
            max_messages=min(request.max_messages, self._limits.max_messages),
            max_bytes=min(request.max_bytes, self._limits.max_bytes),
            may_block=may_block,
        )
        records = tuple(self._engine.read(partition, span, may_block=may_block))
        return ReadBack(
            span.first_sequence, span.length, partition.start, partition.confirmed, records
        )

    def _ask_disk(
        self,
        work: Callable[[], T],
        answer: Callable[[T], None],
        refuse: Callable[[PulqueError], None],
    ) -> None:
        """Do work that may wait for the disk in a thread, and answer with what comes of it."""

        def done(future: "asyncio.Future[T]") -> None:
            try:
                found = future.result()
            except PulqueError as error:
                refuse(error)
            except OSError as error:
                refuse(StorageError(f"the messages cannot be read: {error}"))
            except RuntimeError:  # from a table that the event loop changed meanwhile
                refuse(UnavailableError("the broker was writing what was to be read; try again"))
            else:
                answer(found)

        self._loop.run_in_executor(self._executor, work).add_done_callback(done)

    def _time_is_up(self, waiting: _WaitingRead) -> None:
        self._stop_waiting(waiting)
        partition = self._engine.partition(waiting.request.partition)
        nothing = ConsumeSequence(0)
        start, end = (
            (nothing, nothing) if partition is None else (partition.start, partition.confirmed)
        )
        sequence = ConsumeSequence(min(max(waiting.request.sequence, start), end))
        waiting.answer(ReadBack(sequence, 0, start, end, b""))

    def _stop_waiting(self, waiting: _WaitingRead) -> None:
        if waiting.timer is not None:
            waiting.timer.cancel()
        _take_out(self._waiting, waiting.request.partition, waiting)
        _take_out(self._by_owner, waiting.owner, waiting)


def _take_out(places: dict[K, dict[_WaitingRead, None]], key: K, waiting: _WaitingRead) -> None:
    found = places.get(key, {})
    found.pop(waiting, None)
    if not found:
        places.pop(key, None)
