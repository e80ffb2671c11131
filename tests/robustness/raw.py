"""A client of plain frames, for what a proper client would never do."""

import json
import socket
import time
from collections.abc import Iterable
from types import TracebackType
from typing import Any, Self, TypeVar
from urllib.parse import urlsplit

from pulque.errors import PulqueError
from pulque.model.batch import Codec, seed_of
from pulque.model.ids import IdSource
from pulque.model.message import Message, StoredBatch
from pulque.model.names import PartitionName
from pulque.model.pack import BatchPacker, ProducedBy
from pulque.model.record import ENVELOPE_SIZE, Envelope, read_envelope
from pulque.wire.frame import FrameReader
from pulque.wire.requests import (
    EARLIEST,
    FROM_SETTLED,
    Acks,
    Hello,
    Nacked,
    Pull,
    Read,
    Request,
    Send,
    Settle,
    Status,
    Wanted,
    encode_request,
)
from pulque.wire.responses import (
    Delivered,
    Outcome,
    Pulled,
    ReadBack,
    Response,
    Sent,
    Settled,
    StatusReport,
    decode_response,
)

__all__ = ["Closed", "RawClient", "address_of", "bodies_of", "make_batch", "messages_in"]

_LARGEST_ANSWER = 64 * 1024 * 1024
_ids = IdSource(int(time.time() * 1000) & (2**38 - 1))
R = TypeVar("R")


class Closed(Exception):  # noqa: N818  # it is often what a test wants
    """The broker closed the connection."""


def address_of(url: str) -> tuple[str, int]:
    """Return host and port."""
    parts = urlsplit(url)
    assert parts.hostname is not None
    assert parts.port is not None
    return parts.hostname, parts.port


def make_batch(
    partition: str,
    bodies: Iterable[bytes],
    *,
    producer: int = 0,
    sequence: int = 0,
    incarnation: int = 1,
    codec: Codec = Codec.NONE,
) -> bytes:
    """Pack plain bodies."""
    packer = BatchPacker()
    for body in bodies:
        packer.add(body)
    now_ms = time.time_ns() // 1_000_000
    return packer.encode(
        seed=seed_of(partition),
        ids=_ids.many(now_ms, len(packer)),
        created_at_ms=now_ms,
        produced_by=ProducedBy(producer, incarnation, sequence),
        codec=codec,
    )


def messages_in(partition: str, records: bytes | memoryview) -> list[Message]:
    """Return all messages of records as they are served."""
    data = bytes(records)
    messages = []
    at = 0
    while at < len(data):
        envelope = read_envelope(data, at)
        assert isinstance(envelope, Envelope), envelope
        batch = StoredBatch(
            data[at + ENVELOPE_SIZE : at + envelope.size],
            partition=PartitionName(partition),
            first_sequence=envelope.first_sequence,
            stored_at_ms=envelope.stored_at_ms,
        )
        messages += [Message(batch, i) for i in range(len(batch))]
        at += envelope.size
    return messages


def bodies_of(partition: str, delivered: Delivered) -> list[bytes]:
    """Return the bodies of the messages that a delivery is about."""
    assert not isinstance(delivered.records, tuple)
    first, end = delivered.first_sequence, delivered.first_sequence + delivered.count
    found = messages_in(partition, delivered.records)
    return [message.body for message in found if first <= message.sequence < end]


class RawClient:
    """One connection. Used by one thread."""

    def __init__(self, url: str, *, timeout: float = 10.0, hello: bool = True) -> None:
        self.socket = socket.create_connection(address_of(url), timeout)
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._reader = FrameReader(_LARGEST_ANSWER)
        self._request_id = 0
        self.answer_size = 0
        """Bytes in the payload of the last answer."""
        if hello:
            self.ask(Hello(1, 1, "robustness"))

    def frame(self, request: Request) -> bytes:
        """Return the bytes of a request, with the next id."""
        self._request_id += 1
        return b"".join(encode_request(request, self._request_id, 0))

    def put(self, request: Request) -> int:
        """Send a request and return its id."""
        self.socket.sendall(self.frame(request))
        return self._request_id

    def get(self) -> Response | PulqueError:
        """Return the next answer; an error is returned, not raised.

        Raises:
            Closed: The broker closed the connection.
        """
        while (frame := self._reader.next_frame()) is None:
            try:
                count = self.socket.recv_into(self._reader.buffer())
            except ConnectionError as error:
                raise Closed(str(error)) from None
            if not count:
                raise Closed("end of stream")
            self._reader.received(count)
        self.answer_size = len(frame.payload)
        return decode_response(frame)

    def ask(self, request: Request) -> Response | PulqueError:
        """Send a request and return its answer."""
        self.put(request)
        return self.get()

    def expect(self, kind: type[R], request: Request) -> R:
        """Send a request and return its answer, which must be of this kind."""
        answer = self.ask(request)
        assert isinstance(answer, kind), answer
        return answer

    def is_closed(self, within: float) -> bool:
        """Say whether the broker closes the connection in time; answers are passed over."""
        deadline = time.monotonic() + within
        while (left := deadline - time.monotonic()) > 0:
            self.socket.settimeout(left)
            try:
                if not self.socket.recv(65536):
                    return True
            except TimeoutError:
                return False
            except ConnectionError:
                return True
        return False

    def close(self) -> None:
        self.socket.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    # -- what tests do again and again -------------------------------------------------------

    def send(
        self, partition: str, bodies: Iterable[bytes], *, acks: Acks = Acks.DISK, **packing: Any
    ) -> Outcome:
        """Send one batch and return its outcome."""
        return self.send_batch(partition, make_batch(partition, bodies, **packing), acks=acks)

    def send_batch(self, partition: str, batch: bytes, *, acks: Acks = Acks.DISK) -> Outcome:
        """Send a batch as it is and return its outcome."""
        (outcome,) = self.expect(Sent, Send(acks, 10_000, ((partition, batch),))).outcomes
        return outcome

    def pull(
        self,
        partition: str,
        *,
        group: str = "g",
        consumer: str = "c",
        expected: int = FROM_SETTLED,
        max_messages: int = 1000,
        timeout_ms: int = 0,
        with_retries: bool = False,
    ) -> Pulled:
        """Pull from one partition, and from the group's retries if asked."""
        wanted = [Wanted(partition, expected)]
        if with_retries:
            wanted.append(Wanted(f"%retry%{partition}%{group}", FROM_SETTLED))
        return self.expect(
            Pulled,
            Pull(group, consumer, 1, max_messages, 2**20, timeout_ms, EARLIEST, tuple(wanted)),
        )

    def settle(
        self,
        partition: str,
        delivered: Delivered,
        *,
        group: str = "g",
        consumer: str = "c",
        nacked: Iterable[int] = (),
    ) -> Settled:
        """Settle all of a delivery; ``nacked`` are pull sequences."""
        last = delivered.first_pull + delivered.count - 1
        refused = tuple(Nacked(sequence, 0, "no") for sequence in nacked)
        return self.expect(
            Settled,
            Settle(
                partition,
                group,
                consumer,
                1,
                delivered.tenure,
                delivered.first_pull,
                last,
                refused,
            ),
        )

    def stored(self, partition: str) -> list[Message]:
        """Return all messages of a partition, without a group."""
        messages: list[Message] = []
        at = 0
        while True:
            found = self.expect(ReadBack, Read(partition, at, 10_000, 2**22, 0))
            if not found.count:
                return messages
            assert not isinstance(found.records, tuple)
            end = found.first_sequence + found.count
            messages += [
                message
                for message in messages_in(partition, found.records)
                if found.first_sequence <= message.sequence < end
            ]
            at = end

    def status(self) -> dict[str, Any]:
        """Return what the broker says about itself."""
        report: dict[str, Any] = json.loads(self.expect(StatusReport, Status()).report)
        return report
