"""A broker in memory on a real socket, with faults at will.

It keeps the promises that clients rely on (deduplication, pull logs, settles in order), stores
nothing, and misbehaves exactly when a test says so.
"""

import contextlib
import json
import socket
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from types import TracebackType
from typing import Self

from pulque.errors import (
    ErrorCode,
    PulqueError,
    StaleSettleError,
    UnsupportedError,
)
from pulque.model.batch import read_header, seed_of, verify_crc
from pulque.model.groups import StartKind
from pulque.model.ids import IdSource
from pulque.model.message import StoredBatch
from pulque.model.names import PartitionName, Pattern
from pulque.model.pack import BatchPacker
from pulque.model.positions import (
    ConsumeSequence,
    Epoch,
    MessageOffset,
    PartitionId,
    PullSequence,
    StartCount,
    Tenure,
)
from pulque.model.record import ENVELOPE_SIZE, Envelope, RecordType, pack_envelope
from pulque.model.routes import PartitionRoute, Role, RouteKind
from pulque.model.routes import Route as RouteValue
from pulque.wire import requests, responses
from pulque.wire.frame import MAX_PAYLOAD, FrameReader
from pulque.wire.routes import ChangedRoute

LIMIT = 10.0
"""No wait in a test is longer, in seconds."""


class Drop(Exception):  # noqa: N818  # an order, not an error
    """Close the connection without a word: before the request is handled, or after."""

    def __init__(self, *, handled: bool) -> None:
        self.handled = handled


class Silence(Exception):  # noqa: N818  # an order, not an error
    """Never answer this request."""


Fault = Callable[[requests.Request], None]
"""Raises ``Drop``, ``Silence`` or an error to answer with; returns to go on as usual."""


@dataclass
class Delivery:
    """One message that a consumer holds, by its consume sequence."""

    sequence: int
    tenure: Tenure


@dataclass
class PullLog:
    """What one consumer holds of one partition."""

    incarnation: int = 0
    settled: int = 0
    held: list[Delivery] = field(default_factory=list)
    past: list[Delivery] = field(default_factory=list)
    """What was settled, the last at the end."""
    lost_start: int = 0
    lost_end: int = 0

    @property
    def next_pull(self) -> int:
        return self.settled + len(self.held)


@dataclass
class Partition:
    """One partition: stored batches, and the next sequence of each group."""

    name: str
    records: list[tuple[Envelope, bytes]] = field(default_factory=list)
    end: int = 0
    stored: dict[tuple[int, int, int], int] = field(default_factory=dict)
    nexts: dict[str, int] = field(default_factory=dict)


class BrokerModel:
    """What a broker knows: partitions, and who holds what of them. Takes no time."""

    def __init__(self) -> None:
        self.partitions: dict[str, Partition] = {}
        self.pull_logs: dict[tuple[str, str, str], PullLog] = {}
        self.acked: list[tuple[str, int]] = []
        self.nacked: list[tuple[str, int, str, int]] = []
        self.settled: list[tuple[str, int, Delivery, str]] = []
        """Partition, pull sequence, delivery, and "ack" or "nack"."""
        self.left: list[str] = []
        self.epoch = 0
        self.start = 1
        self.lease_ms = 30_000
        self.corrupt: Callable[[bytes], bytes] = lambda data: data
        self._changed = threading.Condition()

    @property
    def tenure(self) -> Tenure:
        return Tenure(Epoch(self.epoch), StartCount(self.start))

    def partition(self, name: str) -> Partition:
        with self._changed:
            return self.partitions.setdefault(name, Partition(name))

    def store(self, name: str, data: bytes) -> responses.Outcome:
        """Store a batch once."""
        assert verify_crc(data, seed_of(name)), "a batch came damaged, or to the wrong partition"
        header = read_header(data)
        with self._changed:
            partition = self.partition(name)
            key = (header.producer_id, header.incarnation, header.producer_sequence)
            is_known = key in partition.stored
            if not is_known:
                envelope = Envelope(
                    RecordType.BATCH,
                    ENVELOPE_SIZE + len(data),
                    MessageOffset(0),
                    MessageOffset(0),
                    Epoch(0),
                    PartitionId(1),
                    ConsumeSequence(partition.end),
                    1000 + partition.end,
                    header.count,
                )
                partition.stored[key] = partition.end
                partition.records.append((envelope, data))
                partition.end += header.count
                self._changed.notify_all()
            first = ConsumeSequence(partition.stored[key])
        return responses.Outcome(ErrorCode.NONE, is_known, first, 1000 + first)

    def store_bodies(self, name: str, bodies: list[bytes]) -> None:
        """Store messages that nobody sent."""
        packer = BatchPacker()
        packer.bodies.extend(bodies)
        ids = IdSource(1).many(1, len(bodies))
        self.store(name, packer.encode(seed=seed_of(name), ids=ids, created_at_ms=1))
        with self._changed:
            self._changed.notify_all()

    def _log_of(self, partition: str, request: requests.Pull | requests.Settle) -> PullLog:
        log = self.pull_logs.setdefault((partition, request.group, request.consumer), PullLog())
        log.incarnation = max(log.incarnation, request.incarnation)
        return log

    def messages(self, partition: str) -> list[bytes]:
        """Return the bodies that are stored."""
        found: list[bytes] = []
        for envelope, data in self.partitions[partition].records:
            batch = StoredBatch(
                data,
                partition=PartitionName(partition),
                first_sequence=envelope.first_sequence,
                stored_at_ms=0,
            )
            ends = batch.starts[1:]
            found += [
                data[start:end] for start, end in zip(batch.body_starts(), ends, strict=False)
            ]
        return found

    def lose_consumers(self) -> None:
        """Let every lease run out: what is held goes to nobody, as in a test nobody else asks."""
        with self._changed:
            for log in self.pull_logs.values():
                log.past.clear()
                if log.held:
                    log.lost_start, log.lost_end = log.settled, log.next_pull
                log.settled = log.next_pull
                log.held.clear()

    def forget_settles(self, count: int) -> None:
        """Lose the last settles of every consumer, as with the power, and start again."""
        with self._changed:
            self.start += 1
            for log in self.pull_logs.values():
                back = log.past[len(log.past) - min(count, len(log.past)) :]
                del log.past[len(log.past) - len(back) :]
                log.held[:0] = back
                log.settled -= len(back)

    def forget_deliveries(self, count: int) -> None:
        """Lose the last deliveries to every consumer, as with the power, and start again."""
        with self._changed:
            self.start += 1
            for (partition, group, _), log in self.pull_logs.items():
                lost = log.held[len(log.held) - min(count, len(log.held)) :]
                del log.held[len(log.held) - len(lost) :]
                if lost:
                    self.partitions[partition].nexts[group] = lost[0].sequence

    def has_new(self, pull: requests.Pull) -> bool:
        for wanted in pull.wanted:
            partition = self.partition(wanted.partition)
            if partition.nexts.get(pull.group, 0) < partition.end:
                return True
        return False

    def try_pull(self, pull: requests.Pull) -> responses.Pulled:
        states, deliveries = [], []
        room = pull.max_messages
        for index, wanted in enumerate(pull.wanted):
            log = self._log_of(wanted.partition, pull)
            first = log.settled if wanted.expected < 0 else max(wanted.expected, log.settled)
            if wanted.expected > log.next_pull:
                states.append(self._state(log, ErrorCode.POSITION_LOST))
                continue
            self._hand_out(pull, wanted.partition, log, room - (log.next_pull - first))
            runs = list(self._runs(log, first, min(log.next_pull, first + room)))
            room -= sum(count for _, _, count, _ in runs)
            deliveries += [self._delivered(index, wanted.partition, *run) for run in runs]
            states.append(self._state(log, ErrorCode.NONE))
        return responses.Pulled(tuple(states), tuple(deliveries))

    def _state(self, log: PullLog, code: ErrorCode) -> responses.State:
        return responses.State(code, PullSequence(log.settled), PullSequence(log.next_pull))

    def _hand_out(self, pull: requests.Pull, name: str, log: PullLog, room: int) -> None:
        partition = self.partition(name)
        start = 0 if pull.start_at == requests.EARLIEST else pull.start_at
        start = partition.end if start == requests.LATEST else start
        following = partition.nexts.setdefault(pull.group, start)
        for sequence in range(following, min(partition.end, following + room)):
            log.held.append(Delivery(sequence, self.tenure))
            partition.nexts[pull.group] = sequence + 1

    def _runs(self, log: PullLog, start: int, end: int) -> Iterator[tuple[int, int, int, Tenure]]:
        """Yield first pull, first sequence, count and tenure of deliveries in a row."""
        while start < end:
            first = log.held[start - log.settled]
            count = 1
            while start + count < end:
                other = log.held[start + count - log.settled]
                if (other.sequence, other.tenure) != (first.sequence + count, first.tenure):
                    break
                count += 1
            yield start, first.sequence, count, first.tenure
            start += count

    def _delivered(
        self, index: int, name: str, first_pull: int, first: int, count: int, tenure: Tenure
    ) -> responses.Delivered:
        return responses.Delivered(
            index,
            tenure,
            PullSequence(first_pull),
            ConsumeSequence(first),
            count,
            self.records(name, first, first + count),
        )

    def records(self, name: str, start: int, end: int) -> tuple[bytes, ...]:
        buffers: list[bytes] = []
        for envelope, data in self.partition(name).records:
            if envelope.first_sequence < end and start < envelope.first_sequence + envelope.count:
                buffers += (pack_envelope(envelope), self.corrupt(data))
        return tuple(buffers)

    def settle(self, settle: requests.Settle) -> responses.Settled:
        with self._changed:
            log = self._log_of(settle.partition, settle)
            if settle.first < log.lost_end and settle.last >= log.lost_start:
                raise StaleSettleError(f"{settle.first}..{settle.last} were given to others")
            if settle.last >= log.settled:
                if settle.first > log.settled or settle.last >= log.next_pull:
                    raise StaleSettleError(f"{settle.first}..{settle.last} is not held")
                done = log.held[: settle.last + 1 - log.settled]
                if any(delivery.tenure != settle.tenure for delivery in done):
                    raise StaleSettleError("another tenure")
                reasons = {each.sequence: each for each in settle.nacked}
                for pull, delivery in enumerate(done, log.settled):
                    how = "nack" if pull in reasons else "ack"
                    self.settled.append((settle.partition, pull, delivery, how))
                    if pull in reasons:
                        nack = reasons[pull]
                        self.nacked.append(
                            (settle.partition, delivery.sequence, nack.reason, nack.delay_ms)
                        )
                    else:
                        self.acked.append((settle.partition, delivery.sequence))
                log.past += done
                del log.held[: len(done)]
                log.settled = settle.last + 1
                self._changed.notify_all()
            return responses.Settled(PullSequence(log.settled))

    def beat(self, beat: requests.Heartbeat) -> responses.Beaten:
        with self._changed:
            if beat.is_leaving:
                self.left.append(beat.consumer)
                for (partition, group, consumer), log in self.pull_logs.items():
                    if (group, consumer) == (beat.group, beat.consumer) and log.held:
                        following = self.partitions[partition].nexts
                        following[group] = min(following[group], log.held[0].sequence)
                        log.settled = log.next_pull
                        log.held.clear()
                self._changed.notify_all()
        return responses.Beaten(self.lease_ms)


class FakeBroker(BrokerModel):
    """Serves until it is closed. ``with FakeBroker() as broker: connect(broker.url)``."""

    def __init__(self, *, max_message: int = 1 << 20, lease_ms: int = 30_000) -> None:
        super().__init__()
        self.requests: list[requests.Request] = []
        self.fault: Fault | None = None
        self.max_message = max_message
        self.lease_ms = lease_ms
        self.max_delay_ms = 3_600_000
        self.adopted: list[requests.Adopt] = []
        self.name = "fake"
        self.cluster = ""
        self.routes: Callable[[str], RouteValue] | None = None
        """Who serves a subject, if it is not this broker alone."""
        self.delayed_routes: Callable[[str], RouteValue] | None = None
        """Who takes what is due later, if anybody does."""
        self.follower_routes: Callable[[str], RouteValue] | None = None
        """Who copies what serves a subject, if anybody does; else such questions are refused."""
        self.role = Role.BROKER
        self._peers: set[socket.socket] = set()
        self._is_closed = False
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self._threads = [threading.Thread(target=self._accept, daemon=True)]
        self._threads[0].start()

    @property
    def url(self) -> str:
        return f"pulque://127.0.0.1:{self.port}"

    @property
    def connections(self) -> int:
        """How many clients are connected."""
        return len(self._peers)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
        self.stop_listening()
        self.drop_all()
        for thread in self._threads:
            thread.join(LIMIT)

    def stop_listening(self) -> None:
        """Refuse new connections."""
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()

    def listen_again(self) -> None:
        """Take connections on the same port as before."""
        self._listener = socket.create_server(("127.0.0.1", self.port))
        thread = threading.Thread(target=self._accept, daemon=True)
        self._threads.append(thread)
        thread.start()

    def drop_all(self) -> None:
        """Cut every connection."""
        for peer in list(self._peers):
            with contextlib.suppress(OSError):
                peer.shutdown(socket.SHUT_RDWR)

    def change_routes(self, routes: Callable[[str], RouteValue]) -> None:
        """Answer whoever watches them."""
        with self._changed:
            self.routes = routes
            self._changed.notify_all()

    def _watch(self, watch: requests.Watch) -> responses.Watched:
        def changed() -> tuple[ChangedRoute, ...]:
            return tuple(
                ChangedRoute(known.kind, known.group, route)
                for known in watch.known
                if (route := self._route(known.subject, known.kind)).version != known.version
            )

        with self._changed:
            self._changed.wait_for(
                lambda: changed() or self._is_closed, min(watch.wait_ms / 1000, LIMIT)
            )
            return responses.Watched(changed())

    def _route(self, subject: str, kind: RouteKind) -> RouteValue:
        if kind is RouteKind.DELAYED:
            found = self.delayed_routes
            return RouteValue(Pattern(subject), 0, ()) if found is None else found(subject)
        if kind is RouteKind.FOLLOWERS:
            if self.follower_routes is None:
                raise UnsupportedError("route kind 3 is unknown")
            return self.follower_routes(subject)
        if self.routes is not None and kind is not RouteKind.LOCAL:
            return self.routes(subject)
        where = PartitionRoute(PartitionName(subject), self.name, "", 0)
        return RouteValue(Pattern(subject), 1, (where,))

    def wait_until(self, condition: Callable[[], bool]) -> None:
        """Wait for a condition on this broker; fail after the limit."""
        with self._changed:
            assert self._changed.wait_for(condition, LIMIT), "it did not come true in time"

    def seen(self, kind: type[requests.Request]) -> list[requests.Request]:
        """Return the requests of one kind so far."""
        return [request for request in self.requests if isinstance(request, kind)]

    # ── connections ────────────────────────────────────────────────────────────────────────

    def _accept(self) -> None:
        while True:
            try:
                peer, _ = self._listener.accept()
            except OSError:
                return
            peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            thread = threading.Thread(target=self._talk, args=(peer,), daemon=True)
            self._threads.append(thread)
            self._peers.add(peer)
            thread.start()

    def _talk(self, peer: socket.socket) -> None:
        reader = FrameReader()
        writing = threading.Lock()
        with contextlib.suppress(OSError, Drop), peer:
            while count := peer.recv_into(reader.buffer()):
                reader.received(count)
                while (frame := reader.next_frame()) is not None:
                    request = requests.decode_request(frame)
                    is_pull = isinstance(request, requests.Pull) and request.timeout_ms > 0
                    if is_pull or isinstance(request, requests.Watch):
                        self._serve_long(peer, writing, frame.request_id, request)
                    else:
                        self._serve(peer, writing, frame.request_id, request)
        with self._changed:
            self._peers.discard(peer)
            self._changed.notify_all()

    def _serve_long(
        self,
        peer: socket.socket,
        writing: threading.Lock,
        request_id: int,
        request: requests.Request,
    ) -> None:
        """A pull may wait for long; other requests on its connection must not."""
        thread = threading.Thread(
            target=self._serve, args=(peer, writing, request_id, request), daemon=True
        )
        self._threads.append(thread)
        thread.start()

    def _serve(
        self,
        peer: socket.socket,
        writing: threading.Lock,
        request_id: int,
        request: requests.Request,
    ) -> None:
        try:
            answer = b"".join(self._answer(request_id, request, peer))
        except Silence:
            return
        except Drop:
            with contextlib.suppress(OSError):
                peer.shutdown(socket.SHUT_RDWR)
            return
        with writing, contextlib.suppress(OSError):
            peer.sendall(answer)

    def _answer(
        self, request_id: int, request: requests.Request, peer: socket.socket
    ) -> Iterator[bytes | memoryview]:
        drop: Drop | None = None
        try:
            with self._changed:
                self.requests.append(request)
                self._changed.notify_all()
            try:
                if self.fault is not None:
                    self.fault(request)
            except Drop as order:
                if not order.handled:
                    raise
                drop = order
            response = self._handle(request, peer)
        except PulqueError as error:
            yield responses.encode_error(error, request_id, 0)
            return
        if drop is not None:
            raise drop
        yield from responses.encode_response(response, request_id, 0)

    # ── requests ───────────────────────────────────────────────────────────────────────────

    def _handle(  # noqa: C901, PLR0911, PLR0912  # one case for each request
        self, request: requests.Request, peer: socket.socket
    ) -> responses.Response:
        match request:
            case requests.Hello():
                return responses.Welcome(
                    1,
                    self.name,
                    self.tenure,
                    MAX_PAYLOAD,
                    self.max_message,
                    self.lease_ms,
                    self.max_delay_ms,
                    self.role,
                    cluster=self.cluster,
                )
            case requests.Route(subject, _, kind):
                return responses.Routed(self._route(subject, kind))
            case requests.Watch():
                return self._watch(request)
            case requests.Adopt():
                self.adopted.append(request)
                return responses.Adopted(PartitionName("%wait%"), ConsumeSequence(0), False)
            case requests.Send(batches=batches):
                return responses.Sent(
                    tuple(self.store(name, bytes(data)) for name, data in batches)
                )
            case requests.Pull():
                return self._pull(request, peer)
            case requests.Settle():
                return self.settle(request)
            case requests.Heartbeat():
                return self.beat(request)
            case requests.Read():
                return self._read(request)
            case requests.Positions(partition):
                end = ConsumeSequence(self.partition(partition).end)
                return responses.Located(ConsumeSequence(0), end, end)
            case requests.Subscribe():
                return self._subscribe(request)
            case requests.Status():
                return responses.StatusReport(json.dumps({"broker": "fake"}).encode())
            case requests.Seal():
                return responses.Sealed(17)
            case _:
                raise UnsupportedError(f"{request!r}")

    def _subscribe(self, request: requests.Subscribe) -> responses.Subscribed:
        """Let a new group start in its partition where it wants to."""
        group = request.group or f"#{request.consumer}"
        partition = self.partition(request.subject)
        starts = {StartKind.LATEST: partition.end, StartKind.SEQUENCE: request.start.value}
        with self._changed:
            partition.nexts.setdefault(group, starts.get(request.start.kind, 0))
        return responses.Subscribed(group, request.mode, request.filter, request.retry)

    def _pull(self, pull: requests.Pull, peer: socket.socket) -> responses.Pulled:
        with self._changed:
            found = self.try_pull(pull)
            if not found.deliveries and all(s.code is ErrorCode.NONE for s in found.states):
                self._changed.wait_for(
                    lambda: self._is_closed or peer not in self._peers or self.has_new(pull),
                    pull.timeout_ms / 1000,
                )
                if peer not in self._peers:
                    raise Drop(handled=True)
                found = self.try_pull(pull)
        return found

    def _read(self, read: requests.Read) -> responses.ReadBack:
        with self._changed:
            partition = self.partition(read.partition)
            self._changed.wait_for(
                lambda: self._is_closed or partition.end > read.sequence, read.timeout_ms / 1000
            )
            end = min(partition.end, read.sequence + read.max_messages)
            count = max(end - read.sequence, 0)
            return responses.ReadBack(
                ConsumeSequence(read.sequence),
                count,
                ConsumeSequence(0),
                ConsumeSequence(partition.end),
                self.records(read.partition, read.sequence, end) if count else (),
            )
