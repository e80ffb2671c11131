"""A client in memory: what commands asked of it, and what it answers."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Self

from pulque import Message, PulqueError, Receipt
from pulque.model.batch import seed_of
from pulque.model.ids import IdSource
from pulque.model.message import StoredBatch
from pulque.model.names import PartitionName
from pulque.model.pack import BatchPacker
from pulque.model.positions import ConsumeSequence

__all__ = ["AT_MS", "FakeClient", "FakeMessage", "stored"]

AT_MS = 1_700_000_000_007
_PARTITION = PartitionName("orders")


class FakeMessage(Message):
    """A message that remembers how it was settled."""

    __slots__ = ("outcome",)

    def __init__(self, batch: StoredBatch, index: int) -> None:
        super().__init__(batch, index)
        self.outcome: str | None = None

    def ack(self) -> None:
        self.outcome = "acked"

    def nack(self, reason: str = "", *, delay: float | None = None) -> None:
        self.outcome = f"nacked: {reason}" if delay is None else f"nacked for {delay}: {reason}"


def stored(*bodies: bytes, **parts: Any) -> list[FakeMessage]:
    """Return messages as a broker serves them."""
    packer = BatchPacker()
    for body in bodies:
        packer.add(body, **parts)
    ids = IdSource(7).many(AT_MS, len(bodies))
    data = packer.encode(seed=seed_of(_PARTITION), ids=ids, created_at_ms=AT_MS)
    batch = StoredBatch(
        data, partition=_PARTITION, first_sequence=ConsumeSequence(3), stored_at_ms=AT_MS
    )
    return [FakeMessage(batch, index) for index in range(len(bodies))]


class _Closing:
    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        return


@dataclass
class _Pending:
    receipt: Receipt | PulqueError

    def done(self) -> bool:
        return True

    def result(self) -> Receipt:
        if isinstance(self.receipt, PulqueError):
            raise self.receipt
        return self.receipt


@dataclass
class FakeClient(_Closing):
    """Stands in for ``pulque.Client`` and everything made from it."""

    messages: list[FakeMessage] = field(default_factory=list)
    error: PulqueError | None = None
    sent: list[tuple[str, bytes, dict[str, Any]]] = field(default_factory=list)
    asked: dict[str, Any] = field(default_factory=dict)

    def connect(self, url: str | None, *, timeout: float) -> Self:
        self.asked |= {"url": url, "timeout": timeout}
        return self

    def producer(self, **options: Any) -> Self:
        self.asked |= options
        return self

    def consumer(self, subject: str, group: str, **options: Any) -> Self:
        self.asked |= {"subject": subject, "group": group, **options}
        return self

    def send(self, subject: str, body: bytes, **parts: Any) -> _Pending:
        self.sent.append((subject, body, parts))
        sequence = ConsumeSequence(len(self.sent) - 1)
        receipt = Receipt("0" * 32, PartitionName(subject), sequence, AT_MS, "broker", False)
        return _Pending(self.error or receipt)

    def flush(self) -> None:
        return

    def pull(self, max_messages: int, *, timeout: float) -> list[FakeMessage]:
        if self.error is not None:
            raise self.error
        waiting = [message for message in self.messages if message.outcome is None]
        some, self.messages = waiting[:max_messages], waiting[max_messages:]
        return some if timeout >= 0 else []

    def tail(self, subject: str, *, start: object) -> Iterator[FakeMessage]:
        self.asked |= {"subject": subject, "start": start}
        yield from self.messages

    def status(self) -> dict[str, Any]:
        groups = [{"group": "g", "lag": 2}, {"group": "h", "lag": 0}]
        return {"pid": 7, "groups": groups, "message_log": {"end": 5}, "subscriptions": []}

    def seal(self) -> dict[str, int]:
        return {"b1": 99}
