"""What the client library itself costs: microseconds of CPU for each message.

The other side is a process that answers at once and stores nothing, so that the figures are the
client's alone. CPU time of this process, threads included: neighbours on the machine disturb it
less than the clock on the wall, but they do disturb it, so that a plain loop is measured beside.

    python -m bench.micro.client [--messages N]
"""

import argparse
import contextlib
import multiprocessing
import socket
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection as Pipe

import pulque
from pulque.errors import ErrorCode
from pulque.model.batch import seed_of
from pulque.model.ids import IdSource
from pulque.model.names import PartitionName
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
from pulque.model.routes import PartitionRoute
from pulque.model.routes import Route as RouteValue
from pulque.wire import requests, responses
from pulque.wire.frame import MAX_PAYLOAD, FrameReader

BODY = b"x" * 100
TENURE = Tenure(Epoch(0), StartCount(1))
BATCH = 1000
REPEATS = 10


class Instant:
    """A broker that has always one more batch, and forgets what it is sent."""

    def __init__(self) -> None:
        packer = BatchPacker()
        packer.bodies.extend([BODY] * BATCH)
        ids = IdSource(1).many(1, BATCH)
        self._settled: dict[tuple[str, int], int] = {}
        self._batch = packer.encode(seed=seed_of("bench"), ids=ids, created_at_ms=1)

    def answer(  # noqa: PLR0911  # one case for each request
        self, request: requests.Request
    ) -> responses.Response:
        """Return what a broker would answer."""
        match request:
            case requests.Hello():
                return responses.Welcome(
                    1, "instant", TENURE, MAX_PAYLOAD, 1 << 24, 30_000, 60_000
                )
            case requests.Route(subject):
                where = PartitionRoute(PartitionName(subject), "instant", "", 0)
                return responses.Routed(RouteValue(subject, 1, (where,)))  # type: ignore[arg-type]
            case requests.Send(batches=batches):
                stored = responses.Outcome(ErrorCode.NONE, False, ConsumeSequence(0), 1)
                return responses.Sent((stored,) * len(batches))
            case requests.Pull():
                return self._pulled(request)
            case requests.Settle(partition=partition, incarnation=incarnation, last=last):
                self._settled[partition, incarnation] = last + 1
                return responses.Settled(PullSequence(last + 1))
            case requests.Subscribe(group=group, mode=mode, filter=wanted, retry=retry):
                return responses.Subscribed(group, mode, wanted, retry)
            case _:
                return responses.Beaten(30_000)

    def _pulled(self, pull: requests.Pull) -> responses.Pulled:
        states, deliveries = [], []
        for index, wanted in enumerate(pull.wanted):
            settled = PullSequence(self._settled.get((wanted.partition, pull.incarnation), 0))
            first = max(wanted.expected, settled)
            count = min(pull.max_messages, BATCH) if wanted.partition == "bench" else 0
            states.append(responses.State(ErrorCode.NONE, settled, PullSequence(first + count)))
            if count:
                deliveries.append(self._delivered(index, first, count))
        return responses.Pulled(tuple(states), tuple(deliveries))

    def _delivered(self, index: int, first: int, count: int) -> responses.Delivered:
        envelope = pack_envelope(
            Envelope(
                RecordType.BATCH,
                ENVELOPE_SIZE + len(self._batch),
                MessageOffset(0),
                MessageOffset(0),
                Epoch(0),
                PartitionId(1),
                ConsumeSequence(first),
                1,
                BATCH,
            )
        )
        return responses.Delivered(
            index,
            TENURE,
            PullSequence(first),
            ConsumeSequence(first),
            count,
            (envelope, self._batch),
        )


def serve(pipe: Pipe) -> None:
    """Answer every connection, one thread each, until the parent is gone."""
    listener = socket.create_server(("127.0.0.1", 0))
    pipe.send(listener.getsockname()[1])
    instant = Instant()
    while True:
        peer, _ = listener.accept()
        peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        threading.Thread(target=_talk, args=(peer, instant), daemon=True).start()


def _talk(peer: socket.socket, instant: Instant) -> None:
    reader = FrameReader()
    with peer, contextlib.suppress(OSError):
        while count := peer.recv_into(reader.buffer()):
            reader.received(count)
            while (frame := reader.next_frame()) is not None:
                request = requests.decode_request(frame)
                answer = instant.answer(request)
                peer.sendall(b"".join(responses.encode_response(answer, frame.request_id, 0)))


def measure(work: Callable[[int], None], messages: int) -> float:
    """Return the least CPU time for each message over a few runs, in microseconds."""
    part = messages // REPEATS
    best = float("inf")
    for _ in range(REPEATS):
        started = time.process_time()
        work(part)
        best = min(best, (time.process_time() - started) / part)
    return best * 1e6


class Work:
    """What is measured; each method handles about so many messages."""

    def __init__(self, client: pulque.Client) -> None:
        self._client = client

    def loop(self, count: int) -> None:
        total = 0
        for number in range(count):
            total += number

    def send(self, count: int) -> None:
        with self._client.producer() as producer:
            for _ in range(count):
                producer.send("bench", BODY)

    def send_keyed(self, count: int) -> None:
        keys = [f"key {number}" for number in range(1000)]
        with self._client.producer() as producer:
            for number in range(count):
                producer.send("bench", BODY, order_key=keys[number % 1000])

    def send_many(self, count: int) -> None:
        bodies = [BODY] * BATCH
        with self._client.producer() as producer:
            for _ in range(count // BATCH):
                producer.send_many("bench", bodies)

    def iterate(self, count: int) -> None:
        with self._client.consumer("bench", "group") as consumer:
            for number, message in enumerate(consumer):
                message.body  # noqa: B018  # decoding it is what is measured
                message.ack()
                if number == count:
                    break

    def pull(self, count: int) -> None:
        with self._client.consumer("bench", "group", prefetch=True) as consumer:
            while count > 0:
                messages = consumer.pull(BATCH)
                for message in messages:
                    message.body  # noqa: B018
                consumer.ack_all(messages)
                count -= len(messages)

    def one(self, count: int) -> None:
        for _ in range(count):
            self._client.send("bench", BODY)


def measures(work: Work, messages: int) -> Iterator[tuple[str, float, float]]:
    """Yield what was measured, the microseconds, and the aim."""
    yield "a plain loop, for comparison", measure(work.loop, 5 * messages), 0.03
    yield "producer.send, one by one", measure(work.send, messages), 1.0
    yield "producer.send with an order key", measure(work.send_keyed, messages), 1.7
    yield "producer.send_many", measure(work.send_many, 3 * messages), 0.35
    yield "for message in consumer: body, ack", measure(work.iterate, messages), 0.9
    yield "consumer.pull, body, ack_all", measure(work.pull, messages), 0.9
    yield "client.send, one at a time", measure(work.one, messages // 100), 45.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--messages", type=int, default=500_000)
    arguments = parser.parse_args()
    pipe, other = multiprocessing.Pipe()
    server = multiprocessing.get_context("spawn").Process(target=serve, args=(other,), daemon=True)
    server.start()
    try:
        url = f"pulque://127.0.0.1:{pipe.recv()}"
        with (
            tempfile.TemporaryDirectory() as state,
            pulque.connect(url, state_dir=state) as client,
        ):
            print(f"{'100 B messages':38s} {'us CPU':>8s} {'aim':>8s}")
            for name, found, aim in measures(Work(client), arguments.messages):
                print(f"{name:38s} {found:8.3f} {aim:8.2f}")
    finally:
        server.terminate()
        server.join()


if __name__ == "__main__":
    main()
