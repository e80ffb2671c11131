"""Plain sockets and frames made beforehand: load that costs its own process next to nothing.

What is measured with it is the broker. Batches are made without a producer's number, so that one
batch may be sent any number of times and is stored each time.
"""

from __future__ import annotations

import socket
import struct
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from types import TracebackType
from typing import NamedTuple, Self

from bench.peers.peer import batches
from pulque.errors import ErrorCode, PulqueError
from pulque.model.batch import seed_of
from pulque.model.ids import IdSource
from pulque.model.pack import BatchPacker
from pulque.net.sockets import prepare_socket
from pulque.wire.frame import MAX_PAYLOAD, FrameReader
from pulque.wire.requests import (
    EARLIEST,
    Acks,
    Hello,
    Nacked,
    Pull,
    Request,
    Send,
    Settle,
    Wanted,
    encode_request,
)
from pulque.wire.responses import Delivered, Pulled, Response, Sent, Settled, decode_response

__all__ = [
    "PullPlan",
    "RawClient",
    "UnexpectedAnswerError",
    "joined",
    "packed",
    "send_frame",
    "send_frames",
]

_LIMIT_S = 60
_SEND_TIMEOUT_MS = 30_000
_PULL_TIMEOUT_MS = 10_000
_MIB = 2**20


class UnexpectedAnswerError(Exception):
    """A broker answered something else than asked for."""


class PullPlan(NamedTuple):
    """How to pull: with so many pulls under way, each for exactly so many messages.

    More than one may be under way because the sequence after a pull is known beforehand, as long
    as there are enough messages.
    """

    partition: str
    group: str
    messages: int = 1000
    window: int = 2
    max_bytes: int = 8 * _MIB


def packed(partition: str, bodies: list[bytes]) -> bytes:
    """Return a batch of these bodies."""
    packer = BatchPacker()
    packer.bodies.extend(bodies)
    now_ms = time.time_ns() // 1_000_000
    ids = IdSource(hash(partition)).many(now_ms, len(bodies))
    return packer.encode(seed=seed_of(partition), ids=ids, created_at_ms=now_ms)


def send_frame(partition: str, bodies: list[bytes], *, acks: Acks = Acks.MEMORY) -> bytes:
    """Return the frame of a send of these bodies."""
    batch = packed(partition, bodies)
    return joined(Send(acks, _SEND_TIMEOUT_MS, ((partition, batch),)))


def send_frames(
    partition: str, *, count: int, size: int, batch: int, acks: Acks = Acks.MEMORY
) -> Iterator[bytes]:
    """Frames of ``count`` messages in all; a few distinct ones, over and over."""
    distinct = [
        send_frame(partition, bodies, acks=acks)
        for bodies in batches(count=min(count, 8 * batch), size=size, batch=batch)
    ]
    for at in range(count // batch):
        yield distinct[at % len(distinct)]


class RawClient:
    """One connection. Answers come in the order of the requests that do not wait."""

    def __init__(self, port: int) -> None:
        self._socket = socket.create_connection(("127.0.0.1", port), timeout=_LIMIT_S)
        prepare_socket(self._socket)  # as the client's own connections
        # With a limit of Python's own, each call polls first; the client has none either.
        self._socket.settimeout(None)
        for option in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
            self._socket.setsockopt(socket.SOL_SOCKET, option, struct.pack("ll", _LIMIT_S, 0))
        self._reader = FrameReader(largest_kept=2 * MAX_PAYLOAD)
        self.ask(Hello(1, 1, "bench"))

    def ask(self, request: Request) -> Response:
        """Send a request, and return its answer."""
        self._socket.sendall(joined(request))
        return self.answer()

    def ask_later(self, request: Request) -> None:
        """Send a request whose answer is for later, or for nobody."""
        self._socket.sendall(joined(request))

    def answer(self) -> Response:
        """Return the next answer.

        Raises:
            PulqueError: It is an error.
        """
        reader = self._reader
        while (frame := reader.next_frame()) is None:
            received = self._socket.recv_into(reader.buffer())
            if not received:
                raise ConnectionError("the broker closed the connection")
            reader.received(received)
        response = decode_response(frame)
        if isinstance(response, PulqueError):
            raise response
        return response

    def send_all(self, frames: Iterable[bytes], window: int) -> None:
        """Send frames with so many under way; return when each one is confirmed."""
        in_flight = 0
        for frame in frames:
            if in_flight == window:
                self._confirmed()
                in_flight -= 1
            self._socket.sendall(frame)
            in_flight += 1
        for _ in range(in_flight):
            self._confirmed()

    def pull_all(self, plan: PullPlan, count: int) -> int:
        """Pull and settle ``count`` messages for a new group; return the bytes of the records."""
        asked = taken = total_bytes = pulls = settles = 0
        was_lost = False
        while taken < count or settles:
            if was_lost and not pulls:
                asked, was_lost = taken, False
            while pulls < plan.window and asked < count and not was_lost:
                self._socket.sendall(joined(_pull(plan, asked)))
                asked += plan.messages
                pulls += 1
            answer = self.answer()
            if isinstance(answer, Settled):
                settles -= 1
                continue
            pulls -= 1
            delivered = _delivery(answer)
            if delivered is None:
                was_lost = True
                continue
            taken += delivered.count
            total_bytes += len(delivered.records)
            self._socket.sendall(joined(_settle(plan, delivered)))
            settles += 1
        return total_bytes

    def nack_all(self, plan: PullPlan, count: int, *, delay_ms: int) -> None:
        """Pull messages, and nack each of them."""
        for at in range(0, count, plan.messages):
            delivered = _delivery(self.ask(_pull(plan, at)))
            if delivered is None or delivered.count != plan.messages:
                raise UnexpectedAnswerError(f"not all messages of {plan.partition} came")
            settle = _settle(plan, delivered)
            nacked = tuple(
                Nacked(sequence, delay_ms, "bench")
                for sequence in range(settle.first, settle.last + 1)
            )
            self.ask(replace(settle, nacked=nacked))

    def pull_some(self, plan: PullPlan, count: int) -> int:
        """Pull and settle what comes, up to ``count``; return how many came in time."""
        taken = 0
        while taken < count:
            answer = self.ask(_pull(plan, taken))
            if not isinstance(answer, Pulled) or not answer.deliveries:
                break
            delivered = answer.deliveries[0]
            taken += delivered.count
            self.ask(_settle(plan, delivered))
        return taken

    def pull_in_turn(self, plans: Sequence[PullPlan], rounds: range) -> None:
        """Pull and settle once from each plan's partition, and again; each has had earlier rounds.

        Args:
            plans: Where to pull, and how many messages each time.
            rounds: Which rounds these are: a group's first one is 0.
        """
        for at in rounds:
            for plan in plans:
                delivered = _delivery(self.ask(_pull(plan, at * plan.messages)))
                if delivered is None or delivered.count != plan.messages:
                    raise UnexpectedAnswerError(f"not all messages of {plan.partition} came")
                self.ask(_settle(plan, delivered))

    def close(self) -> None:
        """Close the connection."""
        self._socket.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _confirmed(self) -> None:
        answer = self.answer()
        if not isinstance(answer, Sent):
            raise UnexpectedAnswerError(f"a send got {answer!r}")
        for outcome in answer.outcomes:
            if outcome.code is not ErrorCode.NONE:
                raise UnexpectedAnswerError(f"a send got {outcome}")


def joined(request: Request) -> bytes:
    return b"".join(encode_request(request, 1, 0))


def _pull(plan: PullPlan, expected: int) -> Pull:
    return Pull(
        plan.group,
        "bench",
        1,
        plan.messages,
        plan.max_bytes,
        _PULL_TIMEOUT_MS,
        EARLIEST,
        (Wanted(plan.partition, expected),),
    )


def _settle(plan: PullPlan, delivered: Delivered) -> Settle:
    first = delivered.first_pull
    last = first + delivered.count - 1
    return Settle(plan.partition, plan.group, "bench", 1, delivered.tenure, first, last)


def _delivery(answer: Response) -> Delivered | None:
    """The one delivery of an answer; None if the pull before it has not been answered.

    That happens when the broker had to ask the disk for the one before.
    """
    if not isinstance(answer, Pulled):
        raise UnexpectedAnswerError(f"a pull got {answer!r:.300}")
    if answer.states[0].code is ErrorCode.POSITION_LOST:
        return None
    if len(answer.deliveries) != 1:
        raise UnexpectedAnswerError(f"a pull got {len(answer.deliveries)} deliveries")
    return answer.deliveries[0]
