"""Send → message log → confirmed → answer.

Each batch of a send is checked, deduplicated and appended on its own, and has an outcome of its
own. The work per batch does not grow with the messages in it: the header and the size column
are read as a whole, and records are not opened (``check_headers`` has the exception).
"""

from collections.abc import Callable
from functools import partial

from pulque.broker.receiving.new_subjects import Newcomers
from pulque.broker.state import BrokerState, SendLimits, Surroundings
from pulque.errors import (
    ErrorCode,
    InvalidBatchError,
    InvalidRequestError,
    NotAllowedError,
    OverloadedError,
    PulqueError,
    StaleRouteError,
)
from pulque.model.batch import read_header, seed_of
from pulque.model.names import DEFAULT_LEVEL, PartitionName, level_of, owner_of, parse_partition
from pulque.model.positions import ConsumeSequence
from pulque.net.server import Work
from pulque.serving.batches import check_batch, check_headers
from pulque.serving.commit import Committer, Synced
from pulque.serving.outcomes import (
    PendingSend,
    Waiter,
    outcome_of,
    put_again,
    refused,
    take_in_steps,
    tell,
    wants_disk,
)
from pulque.storage.logs.message_log import Appended
from pulque.storage.logs.partitions import Partition
from pulque.wire.requests import MAX_BATCHES, Send
from pulque.wire.responses import Outcome, Sent
from pulque.wire.single import SingleSend

__all__ = ["BATCHES_PER_STEP", "Receiver"]

BATCHES_PER_STEP = 64
"""A batch for a new partition takes fifty microseconds."""


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
        self._closed = state.consumption.locks.closed
        """Partitions that were split or merged."""
        self._clock = around.clock
        self._committer = committer
        self._limits = limits
        self.messages = 0
        self.batches = 0
        self.refused = 0
        self._unconfirmed: dict[tuple[int, int], Appended] = {}
        """Appends that are not confirmed, by their place: the same batch may be sent again."""
        self._repeated: dict[Synced, None] = {}
        """Sends that came again and wait until what they repeat is synced everywhere."""
        self._when_done = self._done

    def send(
        self, request: Send, answer: Callable[[Sent], None], owner: object | None = None
    ) -> None:
        """Store the batches of a send, and answer once each has its outcome.

        Args:
            request: What to store.
            answer: Called once, now or later.
            owner: Who has more to send at once and says ``pause`` after that; None for nobody.
        """
        batches = request.batches
        if not batches:
            raise InvalidRequestError(f"a send of 0 batches; 1 to {MAX_BATCHES} are allowed")
        pending = PendingSend(len(batches), answer)
        to_disk = wants_disk(request.acks, has_followers=self._committer.has_followers)
        for index, (name, batch) in enumerate(batches):
            self._take_in(name, bytes(batch), pending, index, wants_disk=to_disk)
        if owner is None:
            self._committer.schedule()

    def send_in_steps(
        self,
        request: Send,
        answer: Callable[[Sent], None],
        refusal: Callable[[], PulqueError | None],
    ) -> Work:
        """Store the batches of a send, a few at a time, and answer once each has its outcome.

        Args:
            request: What to store.
            answer: Called once, after the last step or later.
            refusal: Says why nothing may be stored any more, if that is so.
        """
        to_disk = wants_disk(request.acks, has_followers=self._committer.has_followers)
        take_in = partial(self._take_in, wants_disk=to_disk)
        return take_in_steps(request.batches, take_in, answer, refusal, BATCHES_PER_STEP)

    def send_single(self, request: SingleSend, waiter: Waiter) -> None:
        """Store the only batch of a send; who sent it says ``pause`` when there are no more."""
        acks, _, name, batch = request
        to_disk = wants_disk(acks, has_followers=self._committer.has_followers)
        self._take_in(name, batch, waiter, 0, wants_disk=to_disk)

    def pause(self, owner: object) -> None:
        """Take note that a connection has sent all that it had."""
        self._committer.hurry(owner)

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
            self.refused += 1
            waiter.put(index, refused(error))

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
                self.refused += 1
                waiter.put(index, refused(error))

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
        unconfirmed = self._unconfirmed.get((partition.id, first))
        if unconfirmed is not None:
            unconfirmed.wants_disk |= wants_disk
            unconfirmed.waiting.append((waiter, index))
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
