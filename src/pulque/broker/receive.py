"""Send → message log → confirmed → answer.

Each batch of a send is checked, deduplicated and appended on its own, and has an outcome of its
own. The work per batch does not grow with the messages in it: the header and the size column
are read as a whole, the records are never opened.
"""

from collections.abc import Callable

from pulque.broker.columns import total_and_largest
from pulque.broker.commit import Committer
from pulque.broker.newcomers import Newcomers
from pulque.broker.state import BrokerState, SendLimits, Surroundings
from pulque.errors import (
    ErrorCode,
    InvalidBatchError,
    InvalidRequestError,
    MessageTooLargeError,
    NotAllowedError,
    OverloadedError,
    PulqueError,
    UnsupportedError,
)
from pulque.model.batch import BatchHeader, Flag, layout_of, read_header, seed_of
from pulque.model.checksum import crc_after_crc
from pulque.model.names import DEFAULT_LEVEL, PartitionName, level_of, owner_of, parse_partition
from pulque.model.positions import ConsumeSequence
from pulque.storage.message_log import Appended
from pulque.storage.partitions import Partition
from pulque.wire.requests import Acks, Send
from pulque.wire.responses import Outcome, Sent

__all__ = ["Receiver", "check_batch"]

_MOST_BATCHES = 1024
_NO_SEQUENCE = ConsumeSequence(0)
_DUE = int(Flag.DUE)  # an operation on the enum itself costs more than all else in the check


def check_batch(batch: bytes, seed: int, limits: SendLimits) -> BatchHeader:
    """Return the header of a batch that may be stored.

    Raises:
        RejectedError: It may not.
    """
    if len(batch) > limits.max_batch:
        raise MessageTooLargeError(
            f"a batch of {len(batch)} bytes; at most {limits.max_batch} are allowed"
        )
    header = read_header(batch)
    if crc_after_crc(batch, seed) != header.crc:
        raise InvalidBatchError("the batch's crc does not match its bytes and its partition")
    if header.flags & _DUE:
        raise UnsupportedError("this broker holds no delayed messages: a due time is not allowed")
    total, largest = total_and_largest(batch, header.count)
    if largest > limits.max_message:
        raise MessageTooLargeError(
            f"a message of {largest} bytes; at most {limits.max_message} are allowed"
        )
    columns = header.count * layout_of(header.flags).record_width
    if columns + total != header.records_size:
        raise InvalidBatchError(
            f"messages of {total} bytes and columns of {columns} do not make records of "
            f"{header.records_size} bytes"
        )
    return header


class _PendingSend:
    """One send whose outcomes come in."""

    __slots__ = ("_answer", "_missing", "_outcomes")

    def __init__(self, count: int, answer: Callable[[Sent], None]) -> None:
        self._outcomes: list[Outcome | None] = [None] * count
        self._missing = count
        self._answer = answer

    def put(self, index: int, outcome: Outcome) -> None:
        self._outcomes[index] = outcome
        self._missing -= 1
        if not self._missing:
            self._answer(Sent(tuple([o for o in self._outcomes if o is not None])))


_Waiting = list[tuple[_PendingSend, int]]
"""Who waits for one batch: sends, and which of their batches it is."""


class Receiver:
    """Takes in what producers send."""

    def __init__(
        self,
        state: BrokerState,
        around: Surroundings,
        committer: Committer,
        limits: SendLimits,
        newcomers: Newcomers,
    ) -> None:
        self._engine = state.engine
        self._state = state
        self._gate = newcomers.gate
        self._newcomers = newcomers
        self._asked_bytes = 0
        """Of batches that wait until it is known whether their subject belongs here."""
        self._dedup = state.dedup
        self._clock = around.clock
        self._committer = committer
        self._limits = limits
        self.messages = 0
        self.batches = 0
        self.refused = 0
        self._unconfirmed: dict[tuple[int, int], _Waiting] = {}
        """Who waits for an append that is not confirmed: also the same batch, sent again."""

    def send(self, request: Send, answer: Callable[[Sent], None]) -> None:
        """Store the batches of a send, and answer once each has its outcome."""
        if not 1 <= len(request.batches) <= _MOST_BATCHES:
            raise InvalidRequestError(
                f"a send of {len(request.batches)} batches; 1 to {_MOST_BATCHES} are allowed"
            )
        pending = _PendingSend(len(request.batches), answer)
        wants_disk = request.acks is Acks.DISK
        for index, (name, batch) in enumerate(request.batches):
            try:
                partition = self._engine.partition(name)
                if partition is None and self._must_ask(name):
                    self._ask(name, bytes(batch), pending, index, wants_disk=wants_disk)
                else:
                    self._store(
                        name, partition, bytes(batch), pending, index, wants_disk=wants_disk
                    )
            except PulqueError as error:
                self.refused += 1
                pending.put(index, _failed(error))

    def _must_ask(self, name: str) -> bool:
        """Whether a partition that is not here may only be made if a meta server says so."""
        if not self._newcomers.must_ask:
            return False
        _sendable(name)
        if not self._gate.is_open:
            self._gate.check(PartitionName(name))
        plain = name.partition("#p")[0]
        return plain == name or self._engine.partition(plain) is None

    def _ask(
        self, name: str, batch: bytes, pending: _PendingSend, index: int, *, wants_disk: bool
    ) -> None:
        """Store a batch once it is known that its subject belongs here."""
        if self._asked_bytes > self._limits.max_waiting:
            raise OverloadedError(
                f"{self._asked_bytes} bytes wait for a meta server's answer; "
                f"at most {self._limits.max_waiting} are allowed"
            )
        self._asked_bytes += len(batch)

        def decided(refusal: PulqueError | None) -> None:
            self._asked_bytes -= len(batch)
            try:
                if refusal is not None:
                    raise refusal
                partition = self._engine.partition(name)
                self._store(name, partition, batch, pending, index, wants_disk=wants_disk)
            except PulqueError as error:
                self.refused += 1
                pending.put(index, _failed(error))

        self._newcomers.decide(PartitionName(name), decided)

    def _store(
        self,
        name: str,
        partition: Partition | None,
        batch: bytes,
        pending: _PendingSend,
        index: int,
        *,
        wants_disk: bool,
    ) -> None:
        if self._committer.waiting_bytes > self._limits.max_waiting:
            raise OverloadedError(
                f"{self._committer.waiting_bytes} bytes wait for the disk; "
                f"at most {self._limits.max_waiting} are allowed"
            )
        if partition is None or name[0] == "%":
            _sendable(name)
        if not self._gate.is_open:
            self._gate.check(PartitionName(name))
        seed = seed_of(name) if partition is None else partition.seed
        header = check_batch(batch, seed, self._limits)
        if header.priority != DEFAULT_LEVEL or "#" in name:
            _check_level(header.priority, PartitionName(name))
        now_ms = self._clock.now_ms()
        if partition is None:
            partition = self._state.make_partition(parse_partition(name), now_ms)
        stored = self._dedup.find(partition.id, header)
        if stored is not None:
            self._answer_again(partition, stored, pending, index)
            return
        appended = self._engine.append(
            partition, batch, header, now_ms=now_ms, wants_disk=wants_disk
        )
        entry = appended.entry
        self._dedup.stored(partition.id, header, entry.first_sequence, now_ms)
        waiting = self._unconfirmed[partition.id, entry.first_sequence] = [(pending, index)]
        self._committer.submit(appended, lambda a, e: self._done(waiting, a, e))

    def _done(self, waiting: _Waiting, appended: Appended, error: PulqueError | None) -> None:
        entry = appended.entry
        key = (entry.partition, entry.first_sequence)
        # A batch that could not be written leaves its place to the next one, maybe at once.
        if self._unconfirmed.get(key) is waiting:
            del self._unconfirmed[key]
        if error is None:
            self.messages += entry.count
            self.batches += 1
            outcome = Outcome(
                ErrorCode.NONE,
                is_duplicate=False,
                first_sequence=entry.first_sequence,
                stored_at_ms=entry.stored_at_ms,
            )
        else:
            self.refused += 1
            self._dedup.take_back(entry.partition, read_header(appended.batch))
            outcome = _failed(error)
        for pending, index in waiting:
            pending.put(index, outcome)

    def _answer_again(
        self, partition: Partition, first: ConsumeSequence, pending: _PendingSend, index: int
    ) -> None:
        """Answer a batch that is stored, once it is confirmed."""
        waiting = self._unconfirmed.get((partition.id, first))
        if waiting is not None:
            waiting.append((pending, index))
            return
        span = self._engine.span(partition, first, max_messages=1, max_bytes=1)
        stored_at_ms = span.pieces[0].entry.stored_at_ms if span.pieces else 0
        pending.put(
            index,
            Outcome(
                ErrorCode.NONE, is_duplicate=True, first_sequence=first, stored_at_ms=stored_at_ms
            ),
        )


def _sendable(name: str) -> None:
    if owner_of(parse_partition(name)) is not None:
        raise NotAllowedError(f"partition {name} belongs to a group: only the broker sends to it")


def _check_level(priority: int, partition: PartitionName) -> None:
    if priority != level_of(partition):
        raise InvalidBatchError(
            f"a batch of priority {priority} for {partition}, whose messages have priority "
            f"{level_of(partition)}: other priorities have partitions of their own"
        )


def _failed(error: PulqueError) -> Outcome:
    return Outcome(
        error.code,
        is_duplicate=False,
        first_sequence=_NO_SEQUENCE,
        stored_at_ms=0,
        text=str(error)[:2000],
    )
