"""A delay server in memory on a real socket: it keeps what is due later, and delivers nothing."""

import socket

from pulque.errors import ErrorCode
from pulque.model.batch import Flag, read_header
from pulque.model.message import Message, StoredBatch
from pulque.model.names import PartitionName, Pattern, subject_of
from pulque.model.positions import ConsumeSequence
from pulque.model.routes import PartitionRoute, Role, Route
from pulque.wire import requests, responses
from pulque.wire.delay import (
    Cancel,
    Cancelled,
    Fate,
    HourCount,
    Listing,
    Reschedule,
    Rescheduled,
    Scheduled,
    ScheduledListed,
    ScheduledMessage,
)
from pulque.wire.stuck import StuckListed, StuckMessage, StuckMessages
from tests.unit.client.fake_broker import FakeBroker

HOUR = 3_600_000
TWO_YEARS = 2 * 366 * 24 * HOUR


class FakeDelay(FakeBroker):
    """Remembers due times; what is not cancelled stays scheduled for ever."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name
        self.role = Role.DELAY
        self.max_delay_ms = TWO_YEARS
        self.scheduled: dict[bytes, tuple[int, Message]] = {}
        self.cancelled: set[bytes] = set()
        self.gone: set[bytes] = set()
        """Delivered."""
        self.refused: dict[bytes, str] = {}
        """Stuck, and why."""
        self.refuses: dict[bytes, ErrorCode] = {}
        """Bodies that are not stored now, and the code that says why."""
        self.refusals = 0

    def store(self, name: str, data: bytes) -> responses.Outcome:
        assert read_header(data).flags & Flag.DUE, "a send without due times"
        for body, code in self.refuses.items():
            if body in data:
                self.refusals += 1
                return responses.Outcome(code, False, ConsumeSequence(0), 0, "not now")
        outcome = super().store(name, data)
        batch = StoredBatch(
            data,
            partition=PartitionName(name),
            first_sequence=ConsumeSequence(0),
            stored_at_ms=0,
        )
        for index, due_ms in enumerate(batch.column("due_at_ms")):
            assert due_ms > 0
            self.scheduled[batch.id_of(index)] = due_ms, Message(batch, index)
        return outcome

    def _handle(self, request: requests.Request, peer: socket.socket) -> responses.Response:
        match request:
            case Cancel(tickets):
                return Cancelled(tuple(self._cancel(each.id, each.due_ms) for each in tickets))
            case Reschedule(moves):
                return Rescheduled(tuple(self._move(*each) for each in moves))
            case Scheduled():
                return self._list(request)
            case StuckMessages():
                return self._list_stuck(request)
            case _:
                return super()._handle(request, peer)

    def _find(self, message_id: bytes, due_ms: int) -> Fate | None:
        if message_id in self.gone:
            return Fate.TOO_LATE
        if message_id in self.cancelled:
            return Fate.ALREADY_CANCELLED
        found = self.scheduled.get(message_id)
        return Fate.UNKNOWN if found is None or due_ms not in {0, found[0]} else None

    def _cancel(self, message_id: bytes, due_ms: int) -> Fate:
        fate = self._find(message_id, due_ms)
        if fate is None:
            self.cancelled.add(message_id)
            del self.scheduled[message_id]
        return Fate.CANCELLED if fate is None else fate

    def _move(self, message_id: bytes, due_ms: int, new_due_ms: int) -> Fate:
        fate = self._find(message_id, due_ms)
        if fate is None:
            self.scheduled[message_id] = new_due_ms, self.scheduled[message_id][1]
        return Fate.MOVED if fate is None else fate

    def _list(self, asked: Scheduled) -> ScheduledListed:
        found = sorted(
            (due_ms, message_id)
            for message_id, (due_ms, message) in self.scheduled.items()
            if asked.subject in {"", message.subject}
            and asked.from_ms <= due_ms
            and (not asked.until_ms or due_ms < asked.until_ms)
        )
        if asked.listing is Listing.COUNTS:
            counts: dict[tuple[int, str], int] = {}
            for due_ms, message_id in found:
                key = due_ms // HOUR * HOUR, self.scheduled[message_id][1].subject
                counts[key] = counts.get(key, 0) + 1
            rows = [HourCount(*key, count) for key, count in sorted(counts.items())]
            at = int(asked.after or b"0")
            # Pages of two, so that a test sees more than one.
            following = b"%d" % (at + 2) if at + 2 < len(rows) else b""
            return ScheduledListed(tuple(rows[at : at + 2]), (), following)
        if asked.listing is Listing.ONE:
            if self._find(asked.id, asked.from_ms) is not None:
                return ScheduledListed((), (), b"")
            return ScheduledListed((), (self._row(asked.id, is_whole=True),), b"")
        at = int(asked.after or b"0")
        end = min(at + asked.max_rows, at + 2)
        messages = tuple(self._row(message_id) for _, message_id in found[at:end])
        return ScheduledListed((), messages, b"%d" % end if end < len(found) else b"")

    def _list_stuck(self, asked: StuckMessages) -> StuckListed:
        found = sorted(
            (self.scheduled[message_id][0], message_id)
            for message_id in self.refused
            if asked.subject in {"", self.scheduled[message_id][1].subject}
        )
        at = int(asked.after or b"0")
        end = min(at + asked.max_rows, at + 2)
        messages = [
            StuckMessage(
                message_id,
                due_ms,
                self.scheduled[message_id][1].partition,
                100,
                due_ms + 1,
                self.refused[message_id],
            )
            for due_ms, message_id in found[at:end]
        ]
        return StuckListed(tuple(messages), b"%d" % end if end < len(found) else b"")

    def _row(self, message_id: bytes, *, is_whole: bool = False) -> ScheduledMessage:
        due_ms, message = self.scheduled[message_id]
        data = b""
        if is_whole:
            batch, _ = message.source()
            data = batch.data
        return ScheduledMessage(message_id, due_ms, message.partition, 100, data)


def delayed_routes(delays: list[FakeDelay], version: int = 1):  # type: ignore[no-untyped-def]
    """Return what a meta server answers who is asked for the delay servers."""

    def route(subject: str) -> Route:
        assert "#" not in subject
        return Route(
            Pattern(subject),
            version,
            tuple(
                PartitionRoute(PartitionName(subject), each.name, "127.0.0.1", each.port)
                for each in delays
            ),
        )

    return route


__all__ = ["FakeDelay", "delayed_routes", "subject_of"]
