"""Send → message log → confirmed → answer.

Each batch of a send is checked, deduplicated and appended on its own, and has an outcome of its
own. The work per batch does not grow with the messages in it: the header and the size column
are read as a whole, and records are not opened (``check_headers`` has the exception).
"""

from pulque.broker.receiving.new_subjects import Newcomers
from pulque.broker.state import BrokerState, SendLimits, Surroundings
from pulque.errors import (
    ErrorCode,
    InvalidBatchError,
    NotAllowedError,
    OverloadedError,
    PulqueError,
    StaleRouteError,
)
from pulque.model.batch import read_header, seed_of
from pulque.model.names import DEFAULT_LEVEL, PartitionName, level_of, owner_of, parse_partition
from pulque.model.positions import ConsumeSequence
from pulque.serving.batches import check_batch, check_headers
from pulque.serving.commit import Committer, Synced
from pulque.serving.outcomes import Waiter, outcome_of, put_again, tell
from pulque.serving.receiver import BatchReceiver
from pulque.storage.logs.message_log import Appended
from pulque.storage.logs.partitions import Partition
from pulque.wire.responses import Outcome

__all__ = ["BrokerReceiver"]

_BATCHES_PER_STEP = 64
"""A batch for a new partition takes fifty microseconds."""


class BrokerReceiver(BatchReceiver):
    """Stores what producers send, in the partitions of this broker."""

    def __init__(
        self,
        state: BrokerState,
        around: Surroundings,
        committer: Committer,
        limits: SendLimits,
        newcomers: Newcomers,
    ) -> None:
        super().__init__(committer, _BATCHES_PER_STEP)
        self._engine = state.engine
        self._state = state
        self._gate = newcomers.gate
        self._newcomers = newcomers
        self._asked_bytes = 0
        """Of batches that wait until it is known whether their subject belongs here."""
        self._dedup = state.dedup
        self._closed = state.consumption.locks.closed
        """Partitions that were split or merged."""
        self._clock = around.clock
        self._limits = limits
        self._repeated: dict[Synced, None] = {}
        """Sends that came again and wait until what they repeat is synced everywhere."""
        self._when_done = self._done

    def _take_in(
        self, name: str, batch: bytes, waiter: Waiter, index: int, *, wants_disk: bool
    ) -> None:
        """Store one batch, or say why not."""
        try:
            partition = self._engine.partition(name)
            if partition is None and self._must_ask(name):
                self._ask(name, batch, waiter, index, wants_disk=wants_disk)
            else:
                self._store(name, partition, batch, waiter, index, wants_disk=wants_disk)
        except PulqueError as error:
            self._refuse(waiter, index, error)

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
        self, name: str, batch: bytes, waiter: Waiter, index: int, *, wants_disk: bool
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
                self._store(name, partition, batch, waiter, index, wants_disk=wants_disk)
                self._committer.schedule()
            except PulqueError as error:
                self._refuse(waiter, index, error)

        self._newcomers.decide(PartitionName(name), decided)

    def _store(
        self,
        name: str,
        partition: Partition | None,
        batch: bytes,
        waiter: Waiter,
        index: int,
        *,
        wants_disk: bool,
    ) -> None:
        committer, dedup = self._committer, self._dedup
        if committer.waiting_bytes > self._limits.max_waiting:
            raise OverloadedError(
                f"{committer.waiting_bytes} bytes wait for the disk; "
                f"at most {self._limits.max_waiting} are allowed"
            )
        if partition is None or name[0] == "%":
            _sendable(name)
        if not self._gate.is_open:
            self._gate.check(PartitionName(name))
        seed = seed_of(name) if partition is None else partition.seed
        header = check_batch(batch, seed, self._limits)
        check_headers(batch, header, self._limits)
        if header.priority != DEFAULT_LEVEL or "#" in name:
            _check_level(header.priority, PartitionName(name))
        now_ms = self._clock.now_ms()
        if partition is None:
            partition = self._state.make_partition(parse_partition(name), now_ms)
        stored = dedup.find(partition.id, header)
        if stored is not None:
            self._answer_again(partition, stored, waiter, index, wants_disk=wants_disk)
            return
        if partition.id in self._closed:
            raise StaleRouteError(
                f"partition {name} was split or merged and takes no more messages; ask for the "
                "route of the subject again"
            )
        appended = self._engine.append(
            partition, batch, header, now_ms=now_ms, wants_disk=wants_disk
        )
        first = appended.entry.first_sequence
        dedup.stored(partition.id, header, first, now_ms)
        self._unconfirmed[partition.id, first] = appended
        appended.waiting.append((waiter, index))
        committer.submit(appended, self._when_done)

    def _done(self, appended: Appended, error: PulqueError | None) -> None:
        entry = appended.entry
        key = (entry.partition, entry.first_sequence)
        # A batch that could not be written leaves its place to the next one, maybe at once.
        if self._unconfirmed.get(key) is appended:
            del self._unconfirmed[key]
        if error is None:
            self.messages += entry.count
            self.batches += 1
        else:
            self.refused += 1
            self._dedup.take_back(entry.partition, read_header(appended.batch))
        tell(appended.waiting, outcome_of(appended, error))

    def forsake(self, error: PulqueError) -> None:
        """Tell all who wait that nobody knows whether their batches will be kept.

        They are in the log all the same, and numbered: whoever sends one again asks about it.
        """
        for appended in self._unconfirmed.values():
            waiting, appended.waiting = appended.waiting, []
            tell(waiting, outcome_of(appended, error))
        repeated, self._repeated = self._repeated, {}
        for done in repeated:
            done(error)

    def _sync_repeated(self, done: Synced) -> None:
        """Call ``done`` when all that is stored is synced, unless it is forsaken before."""
        self._repeated[done] = None

        def synced(error: PulqueError | None) -> None:
            if done in self._repeated:
                del self._repeated[done]
                done(error)

        self._committer.sync_facts(synced)

    def _answer_again(
        self,
        partition: Partition,
        first: ConsumeSequence,
        waiter: Waiter,
        index: int,
        *,
        wants_disk: bool,
    ) -> None:
        """Answer a batch that is stored, once it is as durable as this send wants it."""
        if self._joins(partition.id, first, waiter, index, wants_disk=wants_disk):
            return
        span = self._engine.span(partition, first, max_messages=1, max_bytes=1)
        stored_at_ms = span.pieces[0].entry.stored_at_ms if span.pieces else 0
        put_again(
            waiter,
            index,
            Outcome(
                ErrorCode.NONE, is_duplicate=True, first_sequence=first, stored_at_ms=stored_at_ms
            ),
            self._sync_repeated if wants_disk else None,
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
