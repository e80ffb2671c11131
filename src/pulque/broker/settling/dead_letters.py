"""The dead letter office: what nobody could process, shown, delivered again, or given up.

A letter that is resent goes to the group's retry partition as a first attempt and names the
letter as its origin: that record says that the letter is done with. What was given up is a fact.
Both are on disk before they are answered.
"""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from itertools import islice

from pulque.broker.receiving.internal_appends import Appender
from pulque.broker.settling.message_extraction import Extractor, Packing, RepackedBatch
from pulque.broker.state import BrokerState, Surroundings
from pulque.errors import (
    InvalidBatchError,
    InvalidRequestError,
    MessageTooLargeError,
    PulqueError,
    UsageError,
)
from pulque.model.actions import DeadPurged
from pulque.model.message import Message
from pulque.model.names import (
    Group,
    PartitionName,
    Subject,
    dead_partition,
    parse_partition,
    parse_subject,
    retry_partition,
)
from pulque.model.pack import encode_headers
from pulque.model.positions import ConsumeSequence
from pulque.rules.retry import FIRST_HEADER, ORIGIN_HEADER, UNREADABLE_HEADER
from pulque.serving.commit import Committer
from pulque.serving.request_tasks import RequestTasks
from pulque.storage.logs.message_log import Appended
from pulque.storage.logs.partitions import Partition
from pulque.wire.dead import MAX_RESENT
from pulque.wire.requests import Dead, Resend
from pulque.wire.responses import DeadListed, Resent

__all__ = ["DeadLetterOffice"]

_MOST_RANGES = 10_000
_OURS = "pulque."
_START = ConsumeSequence(0)


class DeadLetterOffice:
    """Answers requests about dead letters."""

    def __init__(
        self,
        state: BrokerState,
        around: Surroundings,
        committer: Committer,
        appender: Appender,
        max_message: int,
    ) -> None:
        self._state = state
        self._engine = state.engine
        self._dead = state.dead
        self._extractor = Extractor(state.engine)
        self._committer = committer
        self._appender = appender
        self._clock = around.clock
        self._executor = around.executor
        self._max_message = max_message
        self._at_work = asyncio.Lock()
        """One after the other: nobody resends what another is about to resend."""
        self._tasks = RequestTasks("broker")
        self.resent = 0

    # -- requests ----------------------------------------------------------------------------

    def dead(
        self,
        request: Dead,
        answer: Callable[[DeadListed], None],
        refuse: Callable[[PulqueError], None],
    ) -> None:
        """Name dead letters, or forget them.

        Raises:
            RejectedError: The request makes no sense.
        """
        _, _, partition = self._find(request.subject, request.group)
        if request.first > request.last:
            raise InvalidRequestError(
                f"dead letters {request.first}..{request.last}: the first is after the last"
            )
        if request.is_purge:
            self._tasks.begin(self._purge(request, partition), answer, refuse)
        else:
            answer(self._list(request, partition))

    def resend(
        self,
        request: Resend,
        answer: Callable[[Resent], None],
        refuse: Callable[[PulqueError], None],
    ) -> None:
        """Deliver dead letters to their group again.

        Raises:
            RejectedError: The request makes no sense.
        """
        subject, group, partition = self._find(request.subject, request.group)
        self._check_resend(request)
        self._tasks.begin(self._resend(request, subject, group, partition), answer, refuse)

    async def close(self) -> None:
        """Give up what is under way."""
        await self._tasks.close()

    # -- listing -----------------------------------------------------------------------------

    def _list(self, request: Dead, partition: Partition | None) -> DeadListed:
        if partition is None:
            return DeadListed(_START, _START, 0, ())
        ranges = self._open(request, partition)
        named = []
        room = request.max_letters
        for start, end in islice(ranges, _MOST_RANGES):
            if room <= 0:
                break
            length = min(end - start, room)
            named.append((start, length))
            room -= length
        count = sum(end - start for start, end in ranges)
        return DeadListed(partition.start, partition.confirmed, count, tuple(named))

    def _open(
        self, request: Dead, partition: Partition
    ) -> list[tuple[ConsumeSequence, ConsumeSequence]]:
        """Return the letters asked for that nobody has dealt with."""
        start = ConsumeSequence(max(request.first, partition.start))
        end = ConsumeSequence(min(request.last + 1, partition.confirmed))
        return [(r.start, r.end) for r in self._dead.open_ranges(partition.id, start, end)]

    # -- giving up ---------------------------------------------------------------------------

    async def _purge(self, request: Dead, partition: Partition | None) -> DeadListed:
        if partition is None:
            return DeadListed(_START, _START, 0, ())
        async with self._at_work:
            ranges = self._open(request, partition)
            count = sum(end - start for start, end in ranges)
            if count:
                last = ConsumeSequence(ranges[-1][1] - 1)
                now_ms = self._clock.now_ms()
                self._state.record(DeadPurged(partition.id, ranges[0][0], last, now_ms))
                await self._committer.synced()
        return DeadListed(partition.start, partition.confirmed, count, ())

    # -- delivering again --------------------------------------------------------------------

    def _check_resend(self, request: Resend) -> None:
        if not request.sequences:
            raise InvalidRequestError(f"0 dead letters to resend; 1 to {MAX_RESENT} are allowed")
        is_edited = request.replaces_body or request.replaces_headers
        if is_edited and len(request.sequences) > 1:
            raise InvalidRequestError(
                f"a new body or new headers for {len(request.sequences)} dead letters; "
                "they can be edited one at a time"
            )
        size = len(request.body) + len(_checked_headers(request.headers))
        if size > self._max_message:
            raise MessageTooLargeError(
                f"a message of {size} bytes; at most {self._max_message} are allowed"
            )

    async def _resend(
        self, request: Resend, subject: Subject, group: Group, partition: Partition | None
    ) -> Resent:
        wanted = sorted({ConsumeSequence(sequence) for sequence in request.sequences})
        if partition is None:
            return Resent((), (), tuple(wanted))
        async with self._at_work:
            done = [s for s in wanted if self._dead.is_resolved(partition.id, s)]
            todo = [s for s in wanted if s not in set(done)]
            packed = await asyncio.get_running_loop().run_in_executor(
                self._executor, self._pack, partition, todo, request, subject, group
            )
            resent: list[ConsumeSequence] = []
            for each in packed:
                await self._append(partition, each)
                resent += each.sequences
            if resent:
                await self._committer.synced()
        self.resent += len(resent)
        missing = set(todo).difference(resent)
        return Resent(tuple(sorted(resent)), tuple(done), tuple(sorted(missing)))

    async def _append(self, partition: Partition, packed: RepackedBatch) -> None:
        def written(_: Appended) -> None:
            for sequence in packed.sequences:
                self._dead.resolve(partition.id, sequence, ConsumeSequence(sequence + 1))

        await self._appender.append(packed.target, packed.batch, written, is_patient=False)

    def _pack(
        self,
        partition: Partition,
        sequences: Sequence[ConsumeSequence],
        request: Resend,
        subject: Subject,
        group: Group,
    ) -> list[RepackedBatch]:
        packing = Packing()
        for message in self._extractor.messages(partition, sequences):
            target = retry_partition(subject, group, message.priority)
            try:
                if UNREADABLE_HEADER in message.headers and not request.replaces_body:
                    continue  # no handler could make anything of the bytes of a batch
                edited = request.headers if request.replaces_headers else None
                headers = _first_headers(message, edited)
                body = request.body if request.replaces_body else None
                packing.add(target, message, headers=headers, attempt=1, body=body)
            except InvalidBatchError:
                continue  # nobody could read it
        return packing.batches()

    # -- inside ------------------------------------------------------------------------------

    def _find(self, subject: str, group: str) -> tuple[Subject, Group, Partition | None]:
        """Return whose letters a request is about, and their partition if there is one."""
        parsed = parse_subject(subject)
        name = parse_partition(dead_partition(parsed, Group(group)))
        return parsed, Group(group), self._engine.partition(PartitionName(name))


def _checked_headers(headers: Sequence[tuple[str, str]]) -> bytes:
    """Return new headers encoded; refuse what no producer could have sent."""
    for name, _ in headers:
        if name.startswith(_OURS):
            raise InvalidRequestError(f"header {name!r}: names that begin with {_OURS} are ours")
    try:
        return encode_headers(dict(headers))
    except UsageError as error:
        raise InvalidRequestError(f"the new headers are not allowed: {error}") from None


def _first_headers(
    message: Message, edited: Sequence[tuple[str, str]] | None
) -> Mapping[str, str]:
    """Return the headers of a letter as of a message that was never tried."""
    before = message.headers
    headers = {name: text for name, text in before.items() if not name.startswith(_OURS)}
    if edited is not None:
        headers = dict(edited)
    here = f"{message.partition}/{message.sequence}"
    return {**headers, ORIGIN_HEADER: here, FIRST_HEADER: before.get(FIRST_HEADER, here)}
