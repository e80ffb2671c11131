"""A delay server in the test's own event loop, with brokers that are only a list."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from pulque.clock import Clock
from pulque.delay.config import DelaySettings
from pulque.delay.server import DelayServer
from pulque.errors import PulqueError
from pulque.model.batch import read_header, seed_of, verify_crc
from pulque.model.message import Message, StoredBatch
from pulque.model.names import PartitionName, Pattern, Subject, level_of
from pulque.model.pack import NOBODY, BatchPacker, ProducedBy
from pulque.model.positions import ConsumeSequence, PartitionId
from pulque.model.routes import PartitionRoute, Route
from pulque.rules.dedup import Dedup
from pulque.storage.files import DataDirectory
from pulque.testing.raw import RawConnection
from pulque.wire.adopt import Adopt
from pulque.wire.delay import (
    Cancel,
    Cancelled,
    Fate,
    Move,
    Reschedule,
    Rescheduled,
    Scheduled,
    ScheduledListed,
    Ticket,
)
from pulque.wire.requests import Acks, Send
from pulque.wire.responses import Outcome, Sent
from pulque.wire.stuck import StuckListed, StuckMessages

__all__ = ["Accepted", "FakeBrokers", "RunningDelay", "StartDelay", "delayed_batch", "eventually"]


class Accepted(NamedTuple):
    """A message that a broker took."""

    body: bytes
    id: str
    partition: str
    at_ms: int
    """What the clock said."""


class FakeBrokers:
    """Brokers that store each numbered batch once, as real ones do, and can be told to fail."""

    def __init__(self, clock: Clock, groups: Sequence[str] = ("group-a",)) -> None:
        self.clock = clock
        self.groups = groups
        self.accepted: list[Accepted] = []
        self.adopted: list[Adopt] = []
        self.batches: list[tuple[str, str, bytes]] = []
        """All that came: broker group, partition, batch."""
        self.failures: list[PulqueError] = []
        """Raised by the next sends, before anything is stored."""
        self.lost_answers: list[PulqueError] = []
        """Raised by the next sends, after they are stored."""
        self.refuses: Callable[[str, bytes], PulqueError | None] = lambda _, __: None
        """Says why a batch for a partition is refused, always."""
        self.on_accept: Callable[[Accepted], None] = lambda _: None
        self._dedups: dict[str, Dedup] = {}
        self._partitions: dict[str, PartitionId] = {}

    async def route(self, subject: Subject) -> Route:
        partitions = [
            PartitionRoute(PartitionName(subject), group, "127.0.0.1", 1) for group in self.groups
        ]
        return Route(Pattern(subject), 1, tuple(partitions))

    def forget(self, subject: Subject) -> None: ...

    async def reach(self, target: PartitionRoute) -> None:
        await asyncio.sleep(0)

    async def close(self) -> None: ...

    async def send(self, target: PartitionRoute, partition: str, batch: bytes) -> None:
        self.batches.append((target.broker_group, partition, batch))
        await asyncio.sleep(0)
        if self.failures:
            raise self.failures.pop(0)
        refusal = self.refuses(partition, batch)
        if refusal is not None:
            raise refusal
        self.store(target.broker_group, partition, batch)
        await asyncio.sleep(0)
        if self.lost_answers:
            raise self.lost_answers.pop(0)

    async def adopt(self, target: PartitionRoute, request: Adopt) -> None:
        del target
        if self.failures:
            raise self.failures.pop(0)
        self.adopted.append(request)

    def store(self, group: str, partition: str, batch: bytes) -> None:
        assert verify_crc(batch, seed_of(partition))
        header = read_header(batch)
        dedup = self._dedups.setdefault(group, Dedup())
        number = self._partitions.setdefault(partition, PartitionId(len(self._partitions)))
        if dedup.find(number, header) is not None:
            return
        dedup.stored(number, header, ConsumeSequence(0), 0)
        stored = StoredBatch(
            batch,
            partition=PartitionName(partition),
            first_sequence=ConsumeSequence(0),
            stored_at_ms=0,
        )
        for index in range(len(stored)):
            message = Message(stored, index)
            found = Accepted(message.body, message.id, partition, self.clock.now_ms())
            self.accepted.append(found)
            self.on_accept(found)

    @property
    def bodies(self) -> list[bytes]:
        return [each.body for each in self.accepted]


def delayed_batch(
    messages: Sequence[tuple[bytes, int]],
    partition: str = "orders",
    *,
    first_id: int = 0,
    produced_by: ProducedBy = NOBODY,
    has_due: bool = True,
) -> tuple[bytes, list[bytes]]:
    """Return a batch of bodies with due times, and the ids of its messages."""
    packer = BatchPacker()
    for body, due_ms in messages:
        packer.add_encoded(body, due_at_ms=due_ms if has_due else 0)
    ids = [(first_id + i + 1).to_bytes(16, "big") for i in range(len(messages))]
    batch = packer.encode(
        seed=seed_of(partition),
        ids=b"".join(ids),
        created_at_ms=1_700_000_000_000,
        produced_by=produced_by,
        priority=level_of(PartitionName(partition)),
    )
    return batch, ids


async def eventually(check: Callable[[], bool], limit_s: float = 20.0) -> None:
    """Wait until something holds."""
    async with asyncio.timeout(limit_s):
        while not check():  # noqa: ASYNC110  # there is nobody to set an event
            await asyncio.sleep(0.005)


class RunningDelay:
    """A delay server that serves, and one connection to it."""

    def __init__(
        self,
        directory: Path | None,
        clock: Clock,
        brokers: FakeBrokers,
        files: DataDirectory | None,
        sections: dict[str, dict[str, Any]],
    ) -> None:
        storage = {
            "directory": str(directory or "unused"),
            "reserve": "1MiB",
            **sections.get("storage", {}),
        }
        self.settings = DelaySettings.model_validate(
            {"listen": {"port": 0}, **sections, "storage": storage}
        )
        self.clock = clock
        self.brokers = brokers
        self.server = DelayServer(self.settings, clock, files, brokers)
        self.raw: RawConnection
        self.is_closed = True
        self._next_id = 0

    async def start(self) -> None:
        await self.server.start()
        self.is_closed = False
        self.raw = await RawConnection.open(self.server.url)

    async def close(self) -> None:
        if not self.is_closed:
            self.is_closed = True
            self.raw.close()
            await self.server.close()

    async def send(
        self,
        messages: Sequence[tuple[bytes, int]],
        partition: str = "orders",
        *,
        acks: Acks = Acks.DISK,
        produced_by: ProducedBy = NOBODY,
    ) -> list[bytes]:
        """Send bodies with due times; return their ids."""
        batch, ids = delayed_batch(
            messages, partition, first_id=self._next_id, produced_by=produced_by
        )
        self._next_id += len(ids)
        outcome = await self.send_batch(batch, partition, acks=acks)
        assert not outcome.code, outcome.text
        return ids

    async def send_batch(
        self, batch: bytes, partition: str = "orders", *, acks: Acks = Acks.DISK
    ) -> Outcome:
        request = Send(acks, 10_000, ((partition, batch),))
        (outcome,) = (await self.raw.ask(request, Sent)).outcomes
        return outcome

    async def cancel(self, *tickets: tuple[bytes, int]) -> list[Fate]:
        request = Cancel(tuple(Ticket(*each) for each in tickets))
        return list((await self.raw.ask(request, Cancelled)).fates)

    async def move(self, *moves: tuple[bytes, int, int]) -> list[Fate]:
        request = Reschedule(tuple(Move(*each) for each in moves))
        return list((await self.raw.ask(request, Rescheduled)).fates)

    async def listed(self, request: Scheduled) -> ScheduledListed:
        return await self.raw.ask(request, ScheduledListed)

    async def stuck(self, request: StuckMessages) -> StuckListed:
        return await self.raw.ask(request, StuckListed)

    async def caught_up(self) -> None:
        """Wait until all that was sent is in the schedule."""
        await eventually(lambda: not self.server.status()["schedule"]["lag_bytes"])

    def schedule(self, pattern: str) -> list[Path]:
        """Return the files of the schedule."""
        return sorted(Path(self.settings.storage.directory, "schedule").glob(pattern))

    async def checkpointed(self) -> None:
        """Write a checkpoint once all that was sent is in the schedule."""
        await self.caught_up()
        await self.server.checkpoint()


StartDelay = Callable[..., Awaitable[RunningDelay]]
"""The fixture ``start_delay``."""
