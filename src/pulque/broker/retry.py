"""Redeliver → the group's retry partition.

Single messages are taken out of their batches in a worker thread, packed anew with their next
attempt, and appended like any other batch. Until that is in the log the redelivery is pending
and part of every checkpoint; each retry names its origin, so that a replay performs only those
that the log does not have yet.
"""

import asyncio
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import replace
from itertools import groupby

from pulque.broker.commit import Committer
from pulque.broker.state import BrokerState, Surroundings
from pulque.errors import InvalidBatchError, PulqueError, StorageError, StorageFullError
from pulque.model.batch import Codec, Flag, read_header, seed_of
from pulque.model.message import Message, StoredBatch
from pulque.model.names import (
    Group,
    PartitionName,
    level_of,
    owner_of,
    retry_partition,
    subject_of,
)
from pulque.model.pack import BatchPacker, encode_headers
from pulque.model.positions import ConsumeSequence, PartitionId
from pulque.model.record import ENVELOPE_SIZE, Envelope, read_envelope
from pulque.rules.consumption import Redeliver, Redelivery
from pulque.rules.retry import ORIGIN_HEADER, REASON_HEADER, decide
from pulque.storage.files import Buffer
from pulque.storage.message_log import Appended
from pulque.storage.partitions import Partition

__all__ = ["Redeliverer", "origins_of"]

_MOST_MESSAGES = 500
_MOST_BYTES = 1024 * 1024
_TRY_AGAIN_S = 1.0


class _Decoder:
    """Reads messages out of served records; those that cannot be read are left out.

    A compressed batch is served whole for any of its messages, so the last one is kept.
    """

    def __init__(self, partition: PartitionName) -> None:
        self._partition = partition
        self._last: tuple[int, StoredBatch | None] = (-1, None)

    def messages(self, records: Iterable[Buffer], first: int, end: int) -> Iterator[Message]:
        """Yield the messages of sequences ``first..end``."""
        data = b"".join(records)
        at = 0
        while at < len(data):
            envelope = read_envelope(data, at)
            if not isinstance(envelope, Envelope):
                return
            batch = self._batch(envelope, data[at + ENVELOPE_SIZE : at + envelope.size])
            at += envelope.size
            if batch is not None:
                start = max(first - batch.first_sequence, 0)
                for i in range(start, min(end - batch.first_sequence, len(batch))):
                    yield Message(batch, i)

    def _batch(self, envelope: Envelope, content: bytes) -> StoredBatch | None:
        is_compressed = read_header(content).codec != Codec.NONE
        if is_compressed and self._last[0] == envelope.offset:
            return self._last[1]
        batch: StoredBatch | None = None
        with suppress(InvalidBatchError):
            batch = StoredBatch(
                content,
                partition=self._partition,
                first_sequence=envelope.first_sequence,
                stored_at_ms=envelope.stored_at_ms,
            )
        if is_compressed:
            self._last = envelope.offset, batch
        return batch


def origins_of(
    partition: PartitionName, batch: bytes
) -> Iterator[tuple[PartitionName, Group, ConsumeSequence]]:
    """Yield which deliveries the messages of a stored retry batch stem from."""
    group = owner_of(partition)
    if group is None:
        return
    stored = StoredBatch(
        batch, partition=partition, first_sequence=ConsumeSequence(0), stored_at_ms=0
    )
    for i in range(len(stored)):
        name, _, sequence = Message(stored, i).headers.get(ORIGIN_HEADER, "").rpartition("/")
        if name:
            yield PartitionName(name), group, ConsumeSequence(int(sequence))


class Redeliverer:
    """Performs redeliveries, one group after the other."""

    def __init__(
        self,
        state: BrokerState,
        around: Surroundings,
        committer: Committer,
    ) -> None:
        self._engine = state.engine
        self._consumption = state.consumption
        self._committer = committer
        self._clock = around.clock
        self._executor = around.executor
        self._warn = around.warn
        self._effects: asyncio.Queue[Redeliver] = asyncio.Queue()
        self.redelivered = 0

    def perform(self, effect: Redeliver) -> None:
        """Begin a redelivery."""
        self._effects.put_nowait(effect)

    async def run(self) -> None:
        """Perform redeliveries until cancelled."""
        while True:
            for effect in self._together(await self._effects.get()):
                wanted = sorted(effect.redeliveries, key=lambda r: r.sequence)
                for at in range(0, len(wanted), _MOST_MESSAGES):
                    await self._redeliver(effect, wanted[at : at + _MOST_MESSAGES])

    def _together(self, first: Redeliver) -> list[Redeliver]:
        """Take what has come meanwhile, so that many small effects become a few large ones."""
        effects = [first]
        while len(effects) < _MOST_MESSAGES and not self._effects.empty():
            effects.append(self._effects.get_nowait())
        merged: dict[tuple[PartitionId, Group], dict[ConsumeSequence, Redelivery]] = {}
        for effect in effects:
            redeliveries = merged.setdefault((effect.partition, effect.group), {})
            redeliveries.update((each.sequence, each) for each in effect.redeliveries)
        return [Redeliver(*key, tuple(found.values())) for key, found in merged.items()]

    async def _redeliver(self, effect: Redeliver, wanted: list[Redelivery]) -> None:
        partition = self._engine.partitions.by_id[effect.partition]
        loop = asyncio.get_running_loop()
        level = level_of(partition.name)
        target = retry_partition(subject_of(partition.name), effect.group, level)
        try:
            batches, missing = await loop.run_in_executor(
                self._executor, self._pack, partition, target, wanted
            )
        except StorageError as error:
            self._warn("redelivery_delayed", partition=partition.name, reason=str(error))
            await asyncio.sleep(_TRY_AGAIN_S)
            self.perform(replace(effect, redeliveries=tuple(wanted)))
            return
        for batch, sequences in batches:
            await self._append(effect, target, batch, sequences)
        if missing:
            self._warn("redelivery_impossible", partition=partition.name, sequences=missing[:10])
            self._consumption.redelivered(effect.partition, effect.group, missing)

    async def _append(
        self,
        effect: Redeliver,
        target: PartitionName,
        batch: bytes,
        sequences: list[ConsumeSequence],
    ) -> None:
        """Append a retry batch; without room it waits until there is."""
        while True:
            try:
                await self._append_once(effect, target, batch, sequences)
            except StorageFullError as error:
                self._warn("redelivery_delayed", partition=target, reason=str(error))
                await asyncio.sleep(_TRY_AGAIN_S)
            else:
                return

    async def _append_once(
        self,
        effect: Redeliver,
        target: PartitionName,
        batch: bytes,
        sequences: list[ConsumeSequence],
    ) -> None:
        now_ms = self._clock.now_ms()
        partition = self._engine.create_partition(target, now_ms, from_reserve=True)
        appended = self._engine.append(
            partition,
            batch,
            read_header(batch),
            now_ms=now_ms,
            wants_disk=False,
            from_reserve=True,
        )
        written: asyncio.Future[None] = asyncio.get_running_loop().create_future()

        def done(_: Appended, error: PulqueError | None) -> None:
            if error is None:
                # At once, not when this task has its turn: no checkpoint may come between, or
                # the messages would be redelivered once more after a restart.
                self._consumption.redelivered(effect.partition, effect.group, sequences)
                self.redelivered += len(sequences)
            if written.done():
                return
            if error is None:
                written.set_result(None)
            else:
                written.set_exception(error)

        self._committer.submit(appended, done)
        await written

    def _pack(
        self, partition: Partition, target: PartitionName, wanted: list[Redelivery]
    ) -> tuple[list[tuple[bytes, list[ConsumeSequence]]], list[ConsumeSequence]]:
        """Return retry batches with what they hold, and what is not stored any more."""
        batches = []
        missing = {r.sequence for r in wanted}
        reasons = {r.sequence: r for r in wanted}
        packer, packed = BatchPacker(), list[ConsumeSequence]()
        bodies = 0
        for message in self._read(partition, wanted):
            try:
                _add(packer, message, partition.name, reasons[message.sequence])
            except InvalidBatchError:
                continue  # its producer packed nonsense, which no consumer could read either
            missing.discard(message.sequence)
            packed.append(message.sequence)
            bodies += len(message.body)
            if bodies + packer.extra_size >= _MOST_BYTES:
                batches.append((_encode(packer, target), packed))
                packer, packed, bodies = BatchPacker(), [], 0
        if packed:
            batches.append((_encode(packer, target), packed))
        return batches, sorted(missing)

    def _read(self, partition: Partition, wanted: list[Redelivery]) -> Iterator[Message]:
        """Yield the messages of ascending sequences, run by run."""
        decoder = _Decoder(partition.name)
        numbered = enumerate(r.sequence for r in wanted)
        for _, run in groupby(numbered, key=lambda pair: pair[1] - pair[0]):
            sequences = [sequence for _, sequence in run]
            at, end = sequences[0], ConsumeSequence(sequences[-1] + 1)
            while at < end:
                span = self._engine.span(
                    partition, at, max_messages=end - at, max_bytes=_MOST_BYTES, end=end
                )
                if not span.pieces:
                    break
                records = self._engine.read(partition, span)
                yield from decoder.messages(records, span.first_sequence, span.end)
                at = span.end


def _add(
    packer: BatchPacker, message: Message, source: PartitionName, redelivery: Redelivery
) -> None:
    headers = message.headers
    headers[ORIGIN_HEADER] = f"{source}/{message.sequence}"
    headers[REASON_HEADER] = redelivery.reason.replace("\0", " ")
    batch, index = message.source()
    packer.add_encoded(
        message.body,
        key=batch.part(index, Flag.KEYS),
        order_key=batch.part(index, Flag.ORDER_KEYS),
        tags=batch.part(index, Flag.TAGS),
        headers=encode_headers(headers, is_system=True),
        expires_at_ms=message.expires_at_ms,
        created_at_ms=message.created_at_ms,
        attempt=decide(redelivery, message.attempt).attempt,
        message_id=batch.id_of(index),
    )


def _encode(packer: BatchPacker, target: PartitionName) -> bytes:
    return packer.encode(
        seed=seed_of(target),
        ids=b"\0" * (16 * len(packer)),
        created_at_ms=0,
        priority=level_of(target),
    )
